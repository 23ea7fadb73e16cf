"""A base pre-trained from scratch on a toy language: a checkpoint like any other, and resumable."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from opt_deus.config import ModelConfig
from opt_deus.training import scratch

WORDS = ["matrix", "vector", "array", "sum", "mean", "axis", "shape", "value", "of", "the", "a"]
SIZES = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "tie_word_embeddings": True, "max_position_embeddings": 64,
}


def sentences(seed: int):
    generator = random.Random(seed)
    while True:
        yield " ".join(generator.choice(WORDS) for _ in range(40))


def held_out() -> list[str]:
    generator = sentences(99)
    return [next(generator) for _ in range(6)]


CORPUS = SimpleNamespace(training_documents=sentences, evaluation=held_out())


def config(**changes) -> ModelConfig:
    pretraining = {"tokens": 8200, "block_size": 32, "batch_size": 8, "lr": 5e-3, "checkpoints": [0.5, 1.0], "seed": 4}
    return ModelConfig("scratch_xs", "scratch", sizes=SIZES, pretraining=pretraining | changes)


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(scratch, "TOKENIZER_CHARACTERS", 20_000)


def test_the_folder_is_a_checkpoint_with_its_curve_beside(tmp_path):
    record = scratch.pretrain(config(), CORPUS, tmp_path / "base", tmp_path / "log.jsonl", dtype="float32")
    assert (record["tokens"], record["steps"]) == (8192, 32)  # whole blocks
    assert record["held_out_loss_after"] < record["held_out_loss_before"] - 1
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    assert model.dtype == torch.float32 and model.model.embed_tokens.padding_idx != tokenizer.eos_token_id
    assert tokenizer.decode(tokenizer("a matrix of the mean")["input_ids"]) == "a matrix of the mean"
    folder = tmp_path / "base"
    assert sorted(path.name for path in (folder / "curve").iterdir()) == ["0.5.safetensors", "1.safetensors"]
    final = load_file(folder / "curve" / "1.safetensors")
    assert all(torch.equal(final[name], parameter) for name, parameter in model.named_parameters())
    assert not (folder / "work").exists()
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 32
    assert scratch.pretrain(config(), None, folder) == record  # killed after its end: nothing is done again


def test_an_interrupted_pretraining_resumes_to_the_same_weights(tmp_path, monkeypatch):
    scratch.pretrain(config(tokens=1024), CORPUS, tmp_path / "whole", dtype="float32")

    class Stop(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 3:
                raise KeyboardInterrupt

    train = scratch.train
    cut = config(tokens=1024, save_steps=2)
    monkeypatch.setattr(scratch, "train", lambda *given, **named: train(*given, **named, callbacks=[Stop()]))
    with pytest.raises(KeyboardInterrupt):
        scratch.pretrain(cut, CORPUS, tmp_path / "cut", dtype="float32")
    monkeypatch.setattr(scratch, "train", train)
    scratch.pretrain(cut, CORPUS, tmp_path / "cut", dtype="float32")
    whole, resumed = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "cut"))
    assert whole.keys() == resumed.keys() and all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_a_misspelt_key_is_refused():
    with pytest.raises(ValueError, match="'tokns'"):
        scratch.settings(config(tokns=3))
