"""Alignment by activations: partners are recovered from what units do, on Hugging Face's own decoder layer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_structured import MLP, SHAPES, Layer, copy_by
from transformers import LlamaConfig, LlamaForCausalLM

from opt_deus.methods import Base, activation
from opt_deus.models.activations import entering_states, layer_activations, no_sinks, unit_activations
from opt_deus.models.blocks import LLAMA

FREE = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]


def with_base(heads, lower: dict, upper: dict):
    """Parents in a base whose two layers read the same states, as if nothing lay between them."""
    config = LlamaConfig(
        hidden_size=64, intermediate_size=MLP, num_attention_heads=heads.num_query, num_key_value_heads=heads.num_kv,
        head_dim=heads.head_dim, num_hidden_layers=2, vocab_size=8,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for layer, tensors in zip(model.model.layers, (lower, upper), strict=True):
        layer.load_state_dict(tensors)
    states = torch.randn(4, 40, 64, generator=torch.Generator().manual_seed(3)) * 5

    def activations(index: int, axis: str) -> torch.Tensor:
        return layer_activations(model, LLAMA, states, index, [axis])[axis].flatten(0, 1)

    return replace(Layer(heads, False).parents(lower, upper), base=Base(2, None, activations), layer=0)


@pytest.mark.parametrize("within", ["none", "permutation"])
@pytest.mark.parametrize("heads", SHAPES.values(), ids=SHAPES)
def test_a_relabelled_copy_is_recovered_from_activations(heads, within):
    layer = Layer(heads, False)
    lower = layer.random(1)
    upper = copy_by(layer.parents(lower, lower), 7, within_head=within)
    made, diagnostics = activation.ot_activation(with_base(heads, lower, upper))
    assert layer.error(made, upper) < 1e-5
    assert max(numbers["cost_identity"] for numbers in diagnostics.values()) > 1


def test_channels_off_leaves_them_in_place_and_parts_can_be_left_out():
    heads = SHAPES["gqa"]
    layer = Layer(heads, False)
    lower = layer.random(1)
    upper = copy_by(layer.parents(lower, lower), 7, within_head="permutation")
    assert layer.error(activation.ot_activation(with_base(heads, lower, upper), channels=False)[0], upper) > 0.05
    inputs = with_base(heads, lower, upper)
    activation.ot_activation(inputs, heads=False)
    gate = inputs.maps["mlp.gate_proj.weight"].partner
    assert sorted(gate.tolist()) == list(range(MLP)) and not torch.equal(gate, torch.arange(MLP))
    assert torch.equal(inputs.maps["self_attn.v_proj.weight"].partner, torch.arange(heads.num_kv * heads.head_dim))


def test_correlations_are_numpys_and_a_constant_unit_has_none():
    heads = SHAPES["gqa"]
    layer = Layer(heads, False)
    lower, upper = layer.random(1), layer.random(2)
    lower["mlp.up_proj.weight"][5] = 0
    inputs = with_base(heads, lower, upper)
    found = activation._correlations(inputs, "mlp")
    below, above = (inputs.base.activations(index, "mlp").double().numpy() for index in (0, 1))
    kept = [unit for unit in range(MLP) if unit != 5]
    wanted = np.corrcoef(above.T, below[:, kept].T)[:MLP, MLP:]
    assert np.allclose(found[:, kept], wanted, atol=1e-10)
    assert torch.equal(found[:, 5], torch.zeros(MLP, dtype=found.dtype))


def test_parents_alone_are_refused():
    layer = Layer(SHAPES["gqa"], False)
    with pytest.raises(ValueError, match="needs the whole base"):
        activation.ot_activation(layer.parents(layer.random(1), layer.random(2)))


def test_unit_activations_are_what_the_model_computes():
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        num_hidden_layers=3, vocab_size=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(0, 64, (2, 20), generator=torch.Generator().manual_seed(0))
    seen = {}
    handle = model.model.layers[1].mlp.down_proj.register_forward_hook(
        lambda module, inputs, output: seen.update(mlp=inputs[0], mlp_output=output)
    )
    with torch.no_grad():
        model(input_ids=ids)
    handle.remove()
    found = unit_activations(model, LLAMA, ids, [0, 1], ["mlp", "mlp_output", "attention", "query"])
    for axis in ("mlp", "mlp_output"):
        assert torch.allclose(found.values[1, axis], seen[axis], atol=1e-5)
    assert found.values[0, "attention"].shape == (2, 20, 32) and found.kept.all()


def test_a_position_that_is_a_sink_anywhere_is_left_out_for_every_choice_of_layers():
    states = torch.ones(1, 6, 4)
    states[0, 2] *= 11
    assert no_sinks(states).tolist() == [[True, True, False, True, True, True]]
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_attention_heads=4, num_hidden_layers=3, vocab_size=64
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight[7] *= 1e4  # token 7 is a sink from the first layer on
    ids = torch.tensor([[3, 7, 5, 9]])
    found, kept = entering_states(model, ids, [2])
    assert set(found) == {2} and kept.tolist() == [[True, False, True, True]]
    assert torch.equal(entering_states(model, ids, [0, 1])[1], kept)
