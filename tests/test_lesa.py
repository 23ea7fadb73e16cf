"""LESA: its factorisation, its networks on layers whose rule is known, and what it leaves at layer 0's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from opt_deus.methods import Base, Heads, Parents
from opt_deus.methods import lesa as module
from opt_deus.methods.lesa import Predictor, Recipe, factorise, fit, generator_for, lesa, moments, right_factors, train
from opt_deus.models.blocks import LLAMA

HIDDEN, MLP, HEADS = 24, 40, Heads(num_query=6, num_kv=2, head_dim=4)
SIZES = {
    "residual": HIDDEN, "middle": HIDDEN, "attention_output": HIDDEN, "mlp_output": HIDDEN, "mlp": MLP,
    "query": 24, "attention": 24, "key": 8, "value": 8,
}  # fmt: skip
MATRICES = [weight.name for weight in LLAMA.weights if weight.columns is not None]
Q = "self_attn.q_proj.weight"


def random_layers(count: int, biases: bool = False, dtype: torch.dtype = torch.float32) -> list[dict]:
    generator = torch.Generator().manual_seed(count)
    layers = []
    for _ in range(count):
        shapes = {
            weight.name: (SIZES[weight.rows],)
            if weight.columns is None
            else (SIZES[weight.rows], SIZES[weight.columns])
            for weight in LLAMA.weights
            if biases or weight.norm or weight.columns is not None
        }
        layers.append({name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()})
    return layers


def base_of(layers: list[dict], seed: int = 0) -> Base:
    def no_activations(layer, axis):
        raise AssertionError("LESA reads weights only")

    return Base(len(layers), lambda layer, name: layers[layer][name], no_activations, seed)


def one_weight(matrices: list[torch.Tensor], seed: int = 0) -> Base:
    return base_of([{Q: matrix} for matrix in matrices], seed)


def parents(layers: list[dict], gap: int = 1, base: Base | None = None, seed: int = 0) -> Parents:
    base = base_of(layers, seed) if base is None else base
    return Parents(layers[gap], layers[gap + 1], LLAMA, HEADS, f"new layer after {gap}", base=base, layer=gap)


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found - wanted).norm() / wanted.norm()).item()


def r2(sums: torch.Tensor) -> float:
    pp, pt, tt = sums.tolist()
    return (2 * pt - pp) / tt


def test_factors_are_the_singular_value_decomposition_of_all_layers_side_by_side():
    layers = random_layers(4)
    base = base_of(layers)
    for name in MATRICES:
        factors = factorise(base, name, "cpu")
        rights = [factors.right(layer[name]) for layer in layers]
        joined, together = torch.cat(rights, 1), torch.cat([layer[name] for layer in layers], 1).double()
        assert relative(factors.values, torch.linalg.svdvals(together)) < 1e-10, name
        assert (joined @ joined.T - torch.eye(len(joined))).abs().max() < 1e-9, name
        for right, layer in zip(rights, layers, strict=True):
            assert relative(factors.matrix(right), layer[name].double()) < 1e-10, name


@pytest.mark.parametrize("out, rank", [(40, 24), (20, 5)], ids=["more rows than columns", "dependent rows"])
def test_directions_of_no_size_are_dropped_and_nothing_is_lost(out, rank):
    generator = torch.Generator().manual_seed(1)
    tall = torch.randn(out, rank, generator=generator, dtype=torch.float64)
    matrices = [tall @ torch.randn(rank, 8, generator=generator, dtype=torch.float64) for _ in range(3)]
    factors = factorise(one_weight(matrices), Q, "cpu")
    assert factors.left.shape == (out, rank)
    for matrix in matrices:
        assert relative(factors.matrix(factors.right(matrix)), matrix) < 1e-10


def test_a_weight_that_is_zero_everywhere_is_refused_by_name():
    with pytest.raises(ValueError, match=f"{Q} is 0 in every layer"):
        factorise(one_weight([torch.zeros(4, 4)] * 3), Q, "cpu")


def test_predicting_zero_costs_what_method_md_says():
    """Section 7: 1 / (L n_in) = 5.8e-5 per entry, and a norm term of 0.0005 x 64 / 30 = 1.07e-3, 18 times as much."""
    generator = torch.Generator().manual_seed(0)
    base = one_weight([torch.randn(12, 576, generator=generator) for _ in range(30)])
    numbers = fit(base, Q, Recipe(epochs=0), "cpu").numbers
    assert numbers["zero_mean_square"] == pytest.approx(1 / (30 * 576), rel=1e-6)
    assert numbers["zero_norm_term"] == pytest.approx(0.0005 * 64 / 30, rel=1e-6)
    # a batch of input columns has the rank for its width
    numbers = fit(base, Q, Recipe(epochs=0, samples="inputs"), "cpu").numbers
    assert numbers["zero_norm_term"] == pytest.approx(0.0005 * 64 / 30 * 12 / 576, rel=1e-6)


def test_the_loss_is_the_released_one():
    generator = torch.Generator().manual_seed(0)
    outputs, targets = torch.randn(2, 64, 24, generator=generator)
    error, norm = module.loss_terms(outputs, targets, 0.0005)
    assert error.item() == pytest.approx(0.9995 * ((outputs - targets) ** 2).mean().item(), rel=1e-5)
    sizes = [batch.square().sum().sqrt().item() for batch in (outputs, targets)]
    assert norm.item() == pytest.approx(0.0005 * (sizes[0] - sizes[1]) ** 2, rel=1e-4)


class Mean(nn.Module):
    def forward(self, pair: torch.Tensor) -> torch.Tensor:
        lower, upper = pair.chunk(2, dim=1)
        return (lower + upper) / 2


@pytest.mark.parametrize("samples", module.SAMPLES)
def test_a_network_that_says_the_mean_makes_the_mean(samples):
    layers = random_layers(4)
    for name in MATRICES:
        learnt = Predictor(factorise(base_of(layers), name, "cpu"), Mean(), Recipe(samples), {})
        made = learnt.between(layers[1][name], layers[2][name])
        assert relative(made, (layers[1][name] + layers[2][name]).double() / 2) < 1e-5, name


@pytest.mark.parametrize("samples", module.SAMPLES)
def test_a_rule_is_learnt_and_noise_is_not(samples):
    """A layer that no network was trained to predict, of W_l = A + l B (V_l is its neighbours' mean) or of noise."""
    generator = torch.Generator().manual_seed(0)
    start, step, *noise = torch.randn(10, 48, 16, generator=generator)
    recipe = Recipe(samples, epochs=150, learning_rate=3e-3)
    found = {}
    for kind, matrices in (("rule", [start + index * step for index in range(8)]), ("noise", noise)):
        base = one_weight(matrices)
        rights = right_factors(base, Q, factorise(base, Q, "cpu"), recipe)
        built = train(rights, recipe, generator_for(0, Q), centres=[1, 2, 3, 5, 6])
        found[kind] = r2(moments(built(torch.cat([rights[3], rights[5]], 1)), rights[4]))
    assert found["rule"] > 0.8 and found["noise"] < 0.05, found


def test_layers_left_out_are_not_learnt_from():
    base = one_weight(list(torch.randn(6, 12, 16, generator=torch.Generator().manual_seed(0))))
    rights = right_factors(base, Q, factorise(base, Q, "cpu"), Recipe())
    changed = rights.clone()
    changed[5] += 1  # a neighbour of layer 4 alone
    for centres, same in (([1, 2, 3], True), ([1, 2, 3, 4], False)):
        built = [train(each, Recipe(epochs=2), generator_for(0, Q), centres) for each in (rights, changed)]
        equal = [torch.equal(*pair) for pair in zip(*(network.parameters() for network in built), strict=True)]
        assert all(equal) is same


def test_the_cells_seed_decides_and_nothing_else():
    layers = random_layers(4)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first, diagnostics = lesa(parents(layers), epochs=2)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    again, _ = lesa(replace(parents(layers), seed=99), epochs=2)  # a slot's seed is not the cell's
    other, _ = lesa(parents(layers, seed=1), epochs=2)
    for name in MATRICES:
        assert torch.equal(first[name], again[name]) and not torch.equal(first[name], other[name]), name
        assert {"training_r2", "training_cosine", "zero_norm_term", "norm_ratio", "rank"} <= set(diagnostics[name])


def test_all_slots_share_the_networks(monkeypatch):
    layers, asked = random_layers(5), []

    def counted(base, name, recipe, device):
        asked.append(name)
        return fit(base, name, recipe, device)

    monkeypatch.setattr(module, "fit", counted)
    base = base_of(layers)
    made = [lesa(parents(layers, gap, base), epochs=1)[0] for gap in (1, 2, 3)]
    assert sorted(asked) == sorted(MATRICES)
    assert not torch.equal(made[0][Q], made[1][Q])
    lesa(parents(layers, 1, base), epochs=2)
    assert len(asked) == 2 * len(MATRICES)  # other knobs, other networks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biases", [False, True])
def test_what_is_no_matrix_comes_from_layer_0_or_from_the_neighbours(biases, dtype):
    layers = random_layers(4, biases, dtype)
    released, _ = lesa(parents(layers), epochs=1)
    mean, _ = lesa(parents(layers), norms="neighbours", epochs=1)
    for name, tensor in layers[0].items():
        assert released[name].shape == mean[name].shape == tensor.shape
        assert released[name].dtype == mean[name].dtype == dtype
        if tensor.ndim == 2:
            assert torch.equal(released[name], mean[name])
            assert not any(torch.equal(released[name], layer[name]) for layer in layers)
        else:
            assert torch.equal(released[name], tensor)
            wanted = (layers[1][name].double() + layers[2][name].double()) / 2
            assert torch.equal(mean[name], wanted.to(dtype))
    assert released.keys() == mean.keys() == layers[0].keys()
    before = layers[0]["input_layernorm.weight"].clone()
    released["input_layernorm.weight"].zero_()
    assert torch.equal(layers[0]["input_layernorm.weight"], before)  # a made layer shares nothing with the base


def test_knobs_change_what_they_name():
    layers = random_layers(4)
    plain, _ = lesa(parents(layers), epochs=2)
    with torch.no_grad():  # a caller may have turned gradients off
        assert torch.equal(lesa(parents(layers), epochs=2)[0][Q], plain[Q])
    for knobs in ({"samples": "inputs"}, {"norm_weight": 0.0}, {"hidden_size": 32}, {"epochs": 3}):
        assert not torch.equal(lesa(parents(layers), **{"epochs": 2, **knobs})[0][Q], plain[Q]), knobs


@pytest.mark.parametrize(
    "knobs, message",
    [
        ({"norms": "average"}, "align.norms=average: .*neighbours"),
        ({"samples": "rows"}, "align.samples=rows: .*directions"),
        ({"norm_weight": 1.5}, "align.norm_weight=1.5"),
    ],
)
def test_bad_knobs_are_refused(knobs, message):
    with pytest.raises(ValueError, match=message):
        lesa(parents(random_layers(3)), **knobs)


def test_too_little_to_learn_from_is_refused():
    layers = random_layers(2)
    for inputs in (parents(layers, 0), replace(parents(layers, 0), base=None)):
        with pytest.raises(ValueError, match="align=lesa: new layer after 0: .*3 layers"):
            lesa(inputs)
