"""States below the first changed layer, remembered and shared: not one bit may change."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from opt_deus.models import lower


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=61, use_cache=False,
    )
    return LlamaForCausalLM(config).eval()


def inputs(kind: str) -> dict:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(61, (3, 9), generator=generator)
    if kind == "plain":
        return {"input_ids": ids}
    mask = torch.ones(9, 9, dtype=torch.bool).tril().expand(3, 1, 9, 9).clone()
    mask[:, :, 6:, 3:6] = False  # two branches after one context
    positions = torch.tensor([0, 1, 2, 3, 4, 5, 3, 4, 5]).expand(3, 9)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "logits_to_keep": 4}


@torch.no_grad()
@pytest.mark.parametrize("kind", ["plain", "branches"])
def test_remembered_states_change_no_bit_and_serve_a_model_with_other_upper_layers(model, tmp_path, kind):
    expected = model(**inputs(kind)).logits
    states = lower.LowerStates(4)
    with states.under(model):
        first = model(**inputs(kind)).logits
        second = model(**inputs(kind)).logits
    assert torch.equal(first, expected) and torch.equal(second, expected)
    assert states.grown and len(states.states) == 1
    assert torch.equal(model(**inputs(kind)).logits, expected) and len(model.model.layers) == 6

    states.save(tmp_path)
    model.model.layers[5].mlp.down_proj.weight.add_(0.1)
    changed = model(**inputs(kind)).logits
    assert not torch.equal(changed, expected)
    reloaded = lower.LowerStates(4, tmp_path)
    with reloaded.under(model):
        assert torch.equal(model(**inputs(kind)).logits, changed)
    assert not reloaded.grown


@torch.no_grad()
def test_other_inputs_are_never_answered_from_memory(model):
    states = lower.LowerStates(4)
    plain, branches = inputs("plain"), inputs("branches")
    expected = [model(**plain).logits, model(**branches).logits]
    with states.under(model):
        found = [model(**plain).logits, model(**branches).logits]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert len(states.states) == 2


@torch.no_grad()
def test_memory_is_bounded_and_an_error_inside_leaves_the_model_whole(model, monkeypatch):
    monkeypatch.setattr(lower, "MAX_BYTES", 10)
    states = lower.LowerStates(4)
    expected = model(**inputs("plain")).logits
    with states.under(model):
        assert torch.equal(model(**inputs("plain")).logits, expected)
    assert not states.states and not states.grown
    with pytest.raises(KeyError), states.under(model):
        raise KeyError
    assert torch.equal(model(**inputs("plain")).logits, expected)


def test_architectures_that_change_their_embeddings_or_mix_layers_are_left_alone(model):
    assert lower.can_start_higher(model.config)
    model.config.layer_types = ["full_attention"] * 5 + ["sliding_attention"]
    assert not lower.can_start_higher(model.config)
    model.config.layer_types, model.config.model_type = None, "gemma3_text"
    assert not lower.can_start_higher(model.config)
