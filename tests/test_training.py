"""Training on a tiny Llama: what trains and what stays, resume after a kill, guards, examples, prefix states."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback

from opt_deus.config import TrainConfig
from opt_deus.store import Store
from opt_deus.training import (
    PackedBlocks,
    TrainingDiverged,
    batches_of_like_length,
    checkpoints,
    guards,
    packed_blocks,
    pair_examples,
    precision,
    stage,
    token_budget,
    train,
)
from opt_deus.training import examples as examples_room
from opt_deus.training.arithmetic import _cpu_flags
from opt_deus.training.prefix import PrefixStates, frozen_layers, worth_it
from opt_deus.training.run import Run

SENTENCES = ["Return the sum of the array elements.", "Compute the mean along an axis.", "A matrix and its inverse."]
NEW = 1  # the layer that trains


def tiny(seed: int = 0, layers: int = 3, zeroed: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    if zeroed:
        with torch.no_grad():
            model.model.layers[NEW].self_attn.o_proj.weight.zero_()
            model.model.layers[NEW].mlp.down_proj.weight.zero_()
    return model


def new_names(model: LlamaForCausalLM, layer: int = NEW) -> set[str]:
    return {name for name, _ in model.named_parameters() if name.startswith(f"model.layers.{layer}.")}


def blocks(number: int = 12, size: int = 16, seed: int = 0) -> PackedBlocks:
    return PackedBlocks(np.random.default_rng(seed).integers(0, 300, (number, size), dtype=np.int32))


def settings(**changes) -> TrainConfig:
    return TrainConfig(**{"tokens": 192, "block_size": 16, "batch_size": 2, "lr": 1e-2, "weight_decay": 0.1} | changes)


def run(model, folder: Path, examples=None, cfg: TrainConfig | None = None, tokenizer=None, **changes) -> dict:
    arguments = dict(
        trainable=new_names(model), folder=folder, seed=3, precision="fp32", device="cpu", log=None, stage="cpt"
    )
    return train(model, tokenizer, examples or blocks(), cfg or settings(), **(arguments | changes))


def state(model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>", "<|im_end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator(SENTENCES * 5, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>")


class StopAt(TrainerCallback):
    """A crash in the middle of a step."""

    def __init__(self, step: int):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


# What trains, and what stays


@pytest.mark.parametrize("arithmetic", ["fp32", "bf16"])
def test_frozen_tensors_are_bit_identical_and_the_model_is_given_back_as_it_was(tmp_path, arithmetic):
    model = tiny()
    before, forward, config = state(model), model.forward, model.config.to_dict()
    ids = torch.arange(10)[None]
    result = run(model, tmp_path, precision=arithmetic)
    after = state(model)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == new_names(model)
    assert (result["steps"], result["tokens"]) == (6, 192) and result["tokens_per_second"] > 0
    assert model.forward == forward and model.config.to_dict() == config and not model.training
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    twin = tiny()
    twin.load_state_dict(model.state_dict())
    assert torch.equal(model(ids).logits, twin(ids).logits)  # no autocast is left behind
    assert_equal(load_file(tmp_path / "trained.safetensors"), {name: after[name] for name in changed})


@pytest.mark.parametrize("kind", ["cpt", "sft"])
def test_a_second_stage_on_the_same_model_computes_as_the_first_did(tmp_path, tokenizer, kind):
    """accelerate marks a model as prepared and then leaves autocast out; what trl adds must go, too."""
    model, seen = tiny(), []
    attributes = model.__dict__.keys() - {"generation_config"}
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda module, given, made: seen.append(made.dtype))
    pairs_or_blocks = pair_examples(pairs(), tokenizer, 1, 64, num_examples=4) if kind == "sft" else blocks(4)
    results = []
    for name in ("first", "second"):
        model.load_state_dict(weights)
        arguments = dict(cfg=settings(block_size=64), tokenizer=tokenizer, stage=kind, precision="bf16")
        results.append(untimed(run(model, tmp_path / name, pairs_or_blocks, **arguments)) | {"weights": state(model)})
        assert model.__dict__.keys() - {"generation_config"} == attributes
    assert set(seen) == {torch.bfloat16}
    assert_equal(results[0].pop("weights"), results[1].pop("weights"))
    assert results[0] == results[1]


def test_optimizer_and_gradients_hold_only_what_trains_and_nothing_is_kept_below(tmp_path):
    seen = {}

    class Look(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, optimizer=None, **kwargs):
            seen["optimizer"] = {id(p) for group in optimizer.param_groups for p in group["params"]}
            seen["stage"] = args.run_name  # where trackers read it
            seen["gradients"] = {name for name, p in model.named_parameters() if p.grad is not None}

    model, inputs = tiny(), []

    def look(module, arguments, output):
        inputs.append(arguments[0].requires_grad)

    hooks = [layer.register_forward_hook(look) for layer in model.model.layers]
    run(model, tmp_path, cfg=settings(steps=1), callbacks=[Look()])
    for hook in hooks:
        hook.remove()
    names = new_names(model)
    assert seen["gradients"] == names and seen["stage"] == "cpt"
    assert seen["optimizer"] == {id(p) for name, p in model.named_parameters() if name in names}
    assert inputs == [False, False, True]  # autograd starts at the first trainable layer


def test_all_trains_tied_embeddings_once(tmp_path):
    model = tiny()
    before = state(model)
    run(model, tmp_path, trainable="all")
    assert [name for name, value in state(model).items() if torch.equal(before[name], value)] == []
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in load_file(tmp_path / "trained.safetensors")


def test_a_tied_tensor_may_be_named_by_either_name():
    model = tiny()
    assert list(stage.choose(model, {"lm_head.weight"})) == ["model.embed_tokens.weight"]


def test_refusals(tmp_path):
    with pytest.raises(ValueError, match="layers.9"):
        run(tiny(), tmp_path, trainable={"model.layers.9.mlp.up_proj.weight"})
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES"):
        run(tiny(), tmp_path, device="cuda:1")
    with pytest.raises(ValueError, match="float32"):
        run(tiny().to(torch.bfloat16), tmp_path)


def test_job_k_of_a_sweep_equals_job_k_alone(tmp_path, whole):
    second = tiny()
    run(tiny(5), tmp_path / "first", seed=8, precision="bf16", cfg=settings(steps=2))
    torch.rand(7), np.random.rand(7)
    run(second, tmp_path / "second")
    assert_equal(state(second), whole)


# Resume


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, torch.Tensor]:
    """The weights after the default run."""
    return uninterrupted(tmp_path_factory.mktemp("whole"))


def uninterrupted(folder: Path, **changes) -> dict[str, torch.Tensor]:
    model = tiny()
    run(model, folder, **changes)
    return state(model)


def untimed(result: dict) -> dict:
    return {key: value for key, value in result.items() if not key.startswith(("seconds", "tokens_per"))}


def test_resume_after_an_exception_equals_the_uninterrupted_run(tmp_path):
    expected = uninterrupted(tmp_path / "whole", precision="bf16", cfg=settings(checkpoints=[0.34, 1.0]))
    cfg = settings(checkpoints=[0.34, 1.0], save_steps=3)
    log = tmp_path / "log.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run(tiny(), tmp_path / "cut", precision="bf16", cfg=cfg, callbacks=[StopAt(5)], log=log)
    assert len(log.read_text().splitlines()) == 5
    folder = tmp_path / "cut"
    held = {path.name for path in (folder / "checkpoint-3").iterdir()}
    assert "trainable.safetensors" in held and "model.safetensors" not in held
    assert load_file(folder / "checkpoint-3" / "trainable.safetensors").keys() == new_names(tiny())
    model = tiny()
    seconds = run(model, folder, precision="bf16", cfg=cfg, log=log)["seconds"]
    assert_equal(state(model), expected)
    for name in ("curve-0.34.safetensors", "curve-1.safetensors"):
        assert_equal(load_file(folder / name), load_file(tmp_path / "whole" / name))
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    assert [entry["step"] for entry in entries] == [1, 2, 3, 4, 5, 6]  # the repeated steps are logged once
    assert entries[-1].keys() == {"stage", "step", "tokens", "loss", "lr", "grad_norm", "tokens_per_second"}
    assert entries[-1]["tokens"] == 192 and seconds > 0
    assert checkpoints.checkpoints(folder) == []


def test_resume_after_sigkill_equals_the_uninterrupted_run(tmp_path):
    script = textwrap.dedent(f"""
        import os, signal, sys
        sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parent.parent)!r}]
        from pathlib import Path
        from transformers import TrainerCallback
        from test_training import run, settings, tiny

        class Kill(TrainerCallback):
            def on_step_begin(self, args, state, control, **kwargs):
                if state.global_step == 5:
                    os.kill(os.getpid(), signal.SIGKILL)

        run(tiny(zeroed=True), Path({str(tmp_path / "cut")!r}), cfg=settings(save_steps=3), callbacks=[Kill()])
    """)
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert process.returncode == -9, process.stderr
    model, whole = tiny(zeroed=True), tiny(zeroed=True)
    run(model, tmp_path / "cut", cfg=settings(save_steps=3))
    run(whole, tmp_path / "whole")
    assert_equal(state(model), state(whole))


@pytest.mark.parametrize("damage", ["no mark", "truncated", "part"])
def test_a_half_written_checkpoint_is_passed_over(tmp_path, damage, whole):
    cfg, folder = settings(save_steps=2), tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        run(tiny(), folder, cfg=cfg, callbacks=[StopAt(5)])
    newest = folder / "checkpoint-4"
    if damage == "no mark":
        (newest / "complete.json").unlink()
    elif damage == "truncated":
        weights = newest / "trainable.safetensors"
        weights.write_bytes(weights.read_bytes()[:-8])
    else:
        newest.rename(folder / "checkpoint-4.part")
    begun = []

    class Begin(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            begun.append(state.global_step)

    model = tiny()
    run(model, folder, cfg=cfg, callbacks=[Begin()])
    assert begun == [2]
    assert_equal(state(model), whole)


def test_at_most_two_checkpoints_are_kept_and_run_time_knobs_change_nothing(tmp_path, whole):
    counts = []

    class Count(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            counts.append(len(list((tmp_path / "often").glob("checkpoint-*"))))

    model = tiny()
    run(model, tmp_path / "often", cfg=settings(save_minutes=1e-9), callbacks=[Count()])
    assert counts == [1, 2, 2, 2, 2]  # the last step needs none
    assert_equal(state(model), whole)


def test_a_full_disk_costs_the_resume_point_and_not_the_run(tmp_path, whole, monkeypatch, caplog):
    monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    model = tiny()
    run(model, tmp_path / "full", cfg=settings(save_steps=2))
    assert "no resume point" in caplog.text
    assert_equal(state(model), whole)


def test_a_checkpoint_of_another_run_is_not_resumed(tmp_path, whole):
    other_rate, other_weights = (tiny(), settings(save_steps=2, lr=0.5)), (tiny(7), settings(save_steps=2))
    for other, cfg in (other_rate, other_weights):
        with pytest.raises(KeyboardInterrupt):
            run(other, tmp_path / "cut", cfg=cfg, callbacks=[StopAt(4)])
        model = tiny()
        run(model, tmp_path / "cut")
        assert_equal(state(model), whole)
        (tmp_path / "cut" / "trained.safetensors").unlink()


def test_a_finished_folder_is_taken_over_without_training(tmp_path):
    first, second = tiny(), tiny()
    result = run(first, tmp_path)
    assert run(second, tmp_path, callbacks=[StopAt(0)]) == result
    assert_equal(state(first), state(second))


# Guards


def test_zeroed_outputs_pass_the_guard_and_then_everything_moves(tmp_path):
    model = tiny(zeroed=True)
    before = state(model)
    run(model, tmp_path, cfg=settings(steps=2, warmup_ratio=0.0))
    same = {name for name in new_names(model) if torch.equal(before[name], state(model)[name])}
    assert same == set()


def test_a_layer_without_gradient_is_caught(tmp_path):
    model = tiny(zeroed=True)
    with torch.no_grad():
        for weight in (model.model.layers[NEW].self_attn.v_proj.weight, model.model.layers[NEW].mlp.up_proj.weight):
            weight.zero_()
    with pytest.raises(TrainingDiverged, match=r"model\.layers\.1"):
        run(model, tmp_path)


def test_nan_stops_with_step_loss_and_remedy(tmp_path):
    with pytest.raises(TrainingDiverged, match=r"cpt: step [2-9] of 40: .*loss.*Lower cpt\.lr \(now 300"):
        run(tiny(), tmp_path / "high", cfg=settings(steps=40, lr=300.0, warmup_ratio=0.0, max_grad_norm=1e9))
    model = tiny()
    with torch.no_grad():
        model.model.layers[NEW].mlp.up_proj.weight[0, 0] = math.nan
    with pytest.raises(TrainingDiverged, match="step 1 of 6: .*nan"):
        run(model, tmp_path / "nan")


@pytest.mark.parametrize(
    ("losses", "stops"),
    [([2.5, 30.0, 2.5, 2.4], False), ([13.0, 20.0, 15.0, 9.0], False), ([2.5, 11.0, 12.0, 13.0], True)],
)
def test_one_hard_batch_raises_no_alarm_but_an_explosion_does(tmp_path, losses, stops):
    judge = guards.DivergenceGuard(Run("sft", settings(), tmp_path, {}, np.array([16])))
    entries = [{"loss": loss, "grad_norm": 1.0} for loss in losses]
    with pytest.raises(TrainingDiverged, match="sft: step 4 of 9: the last") if stops else contextlib.nullcontext():
        for step in range(1, len(entries) + 1):
            history = SimpleNamespace(log_history=entries[:step], global_step=step, max_steps=9)
            judge.on_log(None, history, None, entries[step - 1])


# States below the first trainable layer


def stored_prefix(folder: Path, filled: list | None = None) -> PrefixStates:
    """PrefixStates in a real store; `filled` takes the identities that had to be computed."""
    store = Store(folder)

    def keep(identity, fill):
        artefact = store.get("prefix", identity, fill)
        if filled is not None and not artefact.reused:
            filled.append(identity)
        return artefact.path

    return PrefixStates(keep, folder)


@pytest.mark.parametrize("arithmetic", ["fp32", "bf16"])
def test_prefix_states_change_no_bit_of_losses_and_weights(tmp_path, arithmetic):
    cfg = settings(cache_prefix="true", steps=5)
    plain, first, second = tiny(), tiny(), tiny(zeroed=True)
    run(plain, tmp_path / "plain", cfg=cfg, precision=arithmetic, log=tmp_path / "plain.jsonl")
    filled: list = []
    prefix = stored_prefix(tmp_path / "prefix", filled)
    run(first, tmp_path / "first", cfg=cfg, precision=arithmetic, log=tmp_path / "first.jsonl", prefix=prefix)
    losses = [[json.loads(line)["loss"] for line in (tmp_path / f"{n}.jsonl").open()] for n in ("plain", "first")]
    assert losses[0] == losses[1]
    assert_equal(state(plain), state(first))
    assert len(first.model.layers) == 3 and isinstance(first.model.norm, type(plain.model.norm))
    run(second, tmp_path / "second", cfg=cfg, precision=arithmetic, prefix=prefix)  # another arm shares them
    assert len(filled) == 1
    whole = tiny(zeroed=True)
    run(whole, tmp_path / "whole", cfg=cfg, precision=arithmetic)
    assert_equal(state(second), state(whole))


def test_prefix_states_of_other_weights_or_precision_are_not_used(tmp_path):
    prefix, cfg = stored_prefix(tmp_path / "prefix"), settings(cache_prefix="true")
    run(tiny(9), tmp_path / "other", cfg=cfg, prefix=prefix)
    for arithmetic in ("fp32", "bf16"):
        model, plain = tiny(), tiny()
        run(model, tmp_path / f"cached-{arithmetic}", cfg=cfg, precision=arithmetic, prefix=prefix)
        run(plain, tmp_path / f"plain-{arithmetic}", cfg=cfg, precision=arithmetic)
        assert_equal(state(model), state(plain))


def test_where_prefix_states_are_used(tmp_path):
    model = tiny(layers=6)
    top, embedding = new_names(model, 5), {"model.embed_tokens.weight"}
    assert frozen_layers(model, top) == 5 and frozen_layers(model, new_names(model, 1) | top) == 1
    assert frozen_layers(model, top | embedding) == 0 and frozen_layers(model, {"model.norm.weight"}) == 0
    model.config.model_type = "gemma3_text"
    assert frozen_layers(model, top) == 0
    model.config.model_type = "llama"
    decisions = [worth_it(model, blocks(), depth, settings(cache_prefix=choice), tmp_path / "not" / "there")
                 for choice, depth in [("auto", 5), ("auto", 1), ("true", 1), ("true", 0), ("false", 5)]]
    assert decisions == [True, False, True, False, False]
    model.config.hidden_size = 10**10
    assert not worth_it(model, blocks(), 5, settings(), tmp_path)


# Examples


def test_packed_blocks_are_exact_deterministic_and_lazy(tokenizer):
    served = []
    documents = (served.append(i) or SENTENCES[i % 3] for i in itertools.count())
    packed = packed_blocks(documents, tokenizer, 1000, 16)
    assert packed.blocks.shape == (62, 16) and packed.blocks.dtype == np.int32
    assert len(served) < 400  # an endless stream is read only as far as needed
    flat = packed.blocks.ravel().tolist()
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")  # not this tokenizer's eos_token, which ends a turn
    texts = tokenizer.decode(flat).split("<|endoftext|>")
    assert texts[:3] == SENTENCES and flat.count(end) == len(texts) - 1
    again = packed_blocks(iter(SENTENCES * 200), tokenizer, 1000, 16)
    assert np.array_equal(packed.blocks, again.blocks)
    with pytest.raises(ValueError, match="tokens=1000.*hold only"):
        packed_blocks(iter(SENTENCES), tokenizer, 1000, 16)
    with pytest.raises(ValueError, match="tokens=8 "):
        packed_blocks(iter(SENTENCES), tokenizer, 8, 16)


def pairs():
    for i in itertools.count():
        long = " x" * (i % 2 * 99)
        yield {"prompt": f"Question {i}: what is {i} plus one?\nAnswer:", "completion": f" It is {i + 1}.{long}"}


def test_pairs_fill_the_budget_and_long_ones_are_passed_over(tokenizer):
    examples = pair_examples(pairs(), tokenizer, 300, max_length=64)
    lengths = examples_room.lengths(examples, tokenizer)
    assert lengths.max() <= 64 and lengths.sum() >= 300 > lengths[:-1].sum()
    assert [prompt.split(":")[0] for prompt in examples["prompt"][:2]] == ["Question 0", "Question 2"]
    assert len(pair_examples(pairs(), tokenizer, 1, 64, num_examples=5)) == 5
    bare = pair_examples(iter([{"prompt": "What?", "completion": "This."}]), tokenizer, 1, 64)
    assert bare["prompt"] == ["What?\n"]  # the answer is a word of its own
    with pytest.raises(ValueError, match="block_size=8"):
        pair_examples(pairs(), tokenizer, 300, max_length=8)


@pytest.mark.parametrize("arithmetic", ["fp32", "bf16"])
def test_sft_loss_is_on_the_answer_only(tmp_path, tokenizer, arithmetic):
    """The first logged loss is the answers' loss, end of text included, computed by hand."""
    examples = pair_examples(pairs(), tokenizer, 1, 64, num_examples=2)
    expected, tokens, total = 0.0, 0, 0
    model, pad = tiny(), tokenizer.pad_token
    for example in examples:
        prompt = tokenizer(example["prompt"])["input_ids"]
        whole = torch.tensor(tokenizer(example["prompt"] + example["completion"] + tokenizer.eos_token)["input_ids"])
        with torch.no_grad():
            scores = model(whole[None]).logits[0, :-1].log_softmax(-1).gather(1, whole[1:, None])[len(prompt) - 1 :]
        expected, tokens, total = expected - scores.sum().item(), tokens + len(scores), total + len(whole)
    log, forward = tmp_path / "log.jsonl", model.forward
    arguments = dict(stage="sft", log=log, precision=arithmetic)
    result = run(model, tmp_path / "sft", examples, settings(block_size=64), tokenizer, **arguments)
    first = json.loads(log.read_text().splitlines()[0])
    assert first["loss"] == pytest.approx(expected / tokens, rel=1e-5 if arithmetic == "fp32" else 2e-3)
    assert first["tokens"] == result["tokens"] == total
    assert model.forward == forward and tokenizer.pad_token == pad


def test_sft_resumes_bit_identically_and_opens_no_connection(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("socket.socket.connect", lambda *a: pytest.fail("a connection was opened"))
    examples = pair_examples(pairs(), tokenizer, 1, 64, num_examples=12)
    whole, model = tiny(zeroed=True), tiny(zeroed=True)
    cfg = settings(block_size=64, save_steps=2)
    arguments = dict(examples=examples, cfg=cfg, tokenizer=tokenizer, stage="sft")
    expected = run(whole, tmp_path / "whole", **arguments)
    with pytest.raises(KeyboardInterrupt):
        run(tiny(zeroed=True), tmp_path / "cut", callbacks=[StopAt(3)], **arguments)
    assert untimed(run(model, tmp_path / "cut", **arguments)) == untimed(expected)
    assert_equal(state(model), state(whole))


def test_budget_and_steps(tmp_path):
    assert token_budget(settings(tokens=100)) == 100 and token_budget(settings(tokens=None)) == 0
    assert token_budget(settings(steps=3, accumulation=2)) == 3 * 2 * 2 * 16
    result = run(tiny(), tmp_path, blocks(7), settings(accumulation=2))  # 4 blocks, then 3
    assert (result["steps"], result["tokens"]) == (2, 112)


def test_precision(tmp_path):
    info = tmp_path / "cpuinfo"
    info.write_text("processor : 0\nflags\t\t: fpu avx512_bf16 amx_bf16\n")
    assert {"avx512_bf16", "amx_bf16"} <= _cpu_flags(info)
    assert _cpu_flags(tmp_path / "absent") == set()
    assert (precision("float32", "cpu"), precision("bfloat16", "cpu")) == ("fp32", "bf16")
    assert precision("auto", "cpu") == ("bf16" if {"amx_bf16", "avx512_bf16"} & _cpu_flags() else "fp32")
    with pytest.raises(ValueError, match="float16"):
        precision("float16", "cpu")


def test_pairs_of_one_batch_are_about_equally_long_and_the_same_pairs(tokenizer):
    words = ["dog", "fox", "lazy", "quick"]
    varied = ({"prompt": f"{words[i % 4]} {i}?", "completion": " the dog" * (1 + 7 * i % 13)} for i in range(100))
    examples = pair_examples(varied, tokenizer, 1, 64, num_examples=23)
    arranged = batches_of_like_length(examples, tokenizer, 4)
    assert sorted(map(str, arranged)) == sorted(map(str, examples))
    assert list(arranged) == list(batches_of_like_length(examples, tokenizer, 4))  # nothing but the examples decides

    def padded(dataset):
        own = examples_room.lengths(dataset, tokenizer)
        return sum(len(own[i : i + 4]) * own[i : i + 4].max() for i in range(0, len(own), 4)) - own.sum()

    assert padded(arranged) < 0.5 * padded(examples)
    firsts = [examples_room.lengths(arranged, tokenizer)[i] for i in range(0, 20, 4)]
    assert firsts != sorted(firsts)  # not from short to long
