"""Averages, copies and row-wise transport: against literal formulas, and what they must refuse."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from opt_deus import transport
from opt_deus.methods import Base, Heads, Parents, aligned, average, copy, norm_match
from opt_deus.models.blocks import LLAMA
from opt_deus.transport import DensePlan, PlanError, cost, solve_exact, solve_sinkhorn

HIDDEN, MLP, HEADS = 24, 40, Heads(num_query=6, num_kv=2, head_dim=4)
SIZES = {
    "residual": HIDDEN, "middle": HIDDEN, "attention_output": HIDDEN, "mlp_output": HIDDEN, "mlp": MLP,
    "query": 24, "attention": 24, "key": 8, "value": 8,
}  # fmt: skip
CONF = Path(__file__).parents[1] / "conf" / "align"


def random_layer(seed: int, biases: bool = False, scale: float = 0.5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    layer = {}
    for weight in LLAMA.weights:
        if weight.columns is not None:
            layer[weight.name] = torch.randn(SIZES[weight.rows], SIZES[weight.columns], generator=generator) * scale
        elif weight.norm:
            layer[weight.name] = 1 + 0.1 * torch.randn(SIZES[weight.rows], generator=generator)
        elif biases:
            layer[weight.name] = torch.randn(SIZES[weight.rows], generator=generator) * scale
    return layer


def parents(lower: int = 0, upper: int = 1, **knobs) -> Parents:
    return Parents(random_layer(lower, **knobs), random_layer(upper, **knobs), LLAMA, HEADS, "layer 5")


def in_a_base(inputs: Parents, num_layers: int = 5) -> Parents:
    """The parents as layers 2 and 3 of a base of random layers, whose units do random things."""
    layers = [random_layer(10 + index, biases=True) for index in range(num_layers)]
    layers[2:4] = inputs.lower, inputs.upper

    def activations(index: int, axis: str) -> torch.Tensor:
        return torch.randn(50, SIZES[axis], generator=torch.Generator().manual_seed(index))

    base = Base(num_layers, lambda index, name: layers[index][name], activations)
    return replace(inputs, base=base, layer=2)


def repeated(plan_map: torch.Tensor) -> torch.Tensor:
    """A map of the value axis as a map of o_proj's inputs: for every query head of a group, in that group's place."""
    full = torch.zeros(24, 24, dtype=torch.float64)
    for up in range(24):
        for low in range(24):
            if (up // 4) % 3 == (low // 4) % 3:  # the same repeat of the KV head
                value_up, value_low = (4 * (index // 12) + index % 4 for index in (up, low))
                full[up, low] = plan_map[value_up, value_low]
    return full


def literal_flow(inputs: Parents, solve) -> dict[str, torch.Tensor]:
    """method.md section 2, second column, written out with dense maps (rows sum to 1)."""
    low, up = ({name: tensor.double() for name, tensor in layer.items()} for layer in (inputs.lower, inputs.upper))
    maps, made = {}, {}

    def align(name, pre=None):
        moved = low[name] if pre is None else low[name] @ pre.T
        plan = solve(cost(moved, up[name]))
        maps[name] = plan / plan.sum(0) if plan.ndim == 2 else plan
        maps[name] = maps[name].T
        made[name] = (maps[name] @ moved + up[name]) / 2

    for part in ("q", "k", "v"):
        align(f"self_attn.{part}_proj.weight")
    align("self_attn.o_proj.weight", repeated(maps["self_attn.v_proj.weight"]))
    middle = (torch.eye(HIDDEN, dtype=torch.float64) + maps["self_attn.o_proj.weight"]) / 2
    for part in ("gate", "up"):
        align(f"mlp.{part}_proj.weight", middle)
    align("mlp.down_proj.weight", (maps["mlp.gate_proj.weight"] + maps["mlp.up_proj.weight"]) / 2)
    for name in [name for name in low if name.endswith("bias")]:
        made[name] = (maps[name.replace("bias", "weight")] @ low[name] + up[name]) / 2
    made["input_layernorm.weight"] = (low["input_layernorm.weight"] + up["input_layernorm.weight"]) / 2
    name = "post_attention_layernorm.weight"
    made[name] = (middle @ low[name] + up[name]) / 2
    return made


def permutation(costs: torch.Tensor) -> torch.Tensor:
    matrix = torch.zeros_like(costs)
    matrix[solve_exact(costs).partner, torch.arange(len(costs))] = 1 / len(costs)
    return matrix


def assert_layers_close(made: dict, expected: dict, tolerance: float = 1e-6):
    assert made.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (made[name].double() - tensor).abs().max() < tolerance, name


@pytest.mark.parametrize("biases", [False, True])
def test_ot_is_the_papers_flow(biases):
    inputs = parents(biases=biases)
    made, diagnostics = aligned.ot(inputs)
    assert_layers_close(made, literal_flow(inputs, lambda costs: solve_sinkhorn(costs, 0.06).matrix))
    made_exact, _ = aligned.ot_exact(inputs)
    assert_layers_close(made_exact, literal_flow(inputs, permutation))
    assert set(diagnostics) == {name for name, tensor in inputs.lower.items() if tensor.ndim == 2}
    for numbers in diagnostics.values():
        assert numbers["solver"] == "sinkhorn" and abs(numbers["mass"] - 1) < 1e-9
        assert 0 <= numbers["marginal_error"] <= 1e-4 and numbers["effective_support"] >= 1
        assert 0 < numbers["aligned_norm_ratio"] < 1.5


def test_release_is_the_released_arithmetic(monkeypatch):
    """T^T W with T of mass 1, gate and up read o_proj's T as it is, only the norm takes the mean with the identity."""

    def some_plan(moved, upper, epsilon=0.06):  # the arithmetic around the solver is what is tested here
        matrix = torch.rand(
            len(moved), len(upper), dtype=torch.float64, generator=torch.Generator().manual_seed(len(moved))
        )
        return DensePlan(matrix * (moved.sum() / upper.sum()).abs() / matrix.sum(), "some", rescaled=False), []

    monkeypatch.setattr(transport, "solve_release", some_plan)
    inputs = parents()
    made, _ = aligned.ot_release(inputs)
    low, up = ({name: tensor.double() for name, tensor in layer.items()} for layer in (inputs.lower, inputs.upper))
    plans = {}
    for part in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down"):
        name = f"{part}_proj.weight"
        moved = low[name] @ plans["self_attn.o_proj.weight"] if part in ("mlp.gate", "mlp.up") else low[name]
        plans[name] = some_plan(moved, up[name])[0].matrix
        assert (made[name].double() - (plans[name].T @ moved + up[name]) / 2).abs().max() < 1e-6, name
    norm = "post_attention_layernorm.weight"
    mixed = low[norm] @ (torch.eye(HIDDEN, dtype=torch.float64) + plans["self_attn.o_proj.weight"]) / 2
    assert (made[norm].double() - (mixed + up[norm]) / 2).abs().max() < 1e-6


def test_release_that_underflows_is_half_the_upper_layer_and_recorded():
    inputs = parents(scale=5.0)
    made, diagnostics = aligned.ot_release(inputs)
    for name, numbers in diagnostics.items():
        assert numbers["mass"] == 0 and "numerical" in numbers["warnings"][0]
        assert torch.equal(made[name], inputs.upper[name] / 2)


@pytest.mark.parametrize("method", [average.avg, aligned.ot_exact])
def test_a_layer_fused_with_itself_is_itself(method):
    made, _ = method(parents(3, 3, biases=True))
    assert_layers_close(made, random_layer(3, biases=True), 1e-6)


def test_release_fused_with_itself_is_not_itself():
    """Its maps sum to 1/n, so that even a perfect match leaves W / 2n + W / 2."""
    made, _ = aligned.ot_release(parents(3, 3))
    for name, tensor in random_layer(3).items():
        if tensor.ndim == 2:
            assert made[name].norm() / tensor.norm() < 0.5 + 0.6 / len(tensor), name


def test_exact_recovers_a_row_permuted_copy_of_unrelated_weights():
    inputs = parents()
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    upper = dict(inputs.lower)
    upper["self_attn.q_proj.weight"] = inputs.lower["self_attn.q_proj.weight"][order]
    made, _ = aligned.ot_exact(replace(inputs, upper=upper))
    assert torch.allclose(made["self_attn.q_proj.weight"], upper["self_attn.q_proj.weight"], atol=1e-6)


def test_knobs_change_what_they_name():
    inputs = parents()
    base, _ = aligned.ot(inputs)
    gate, down, q = "mlp.gate_proj.weight", "mlp.down_proj.weight", "self_attn.q_proj.weight"
    none, _ = aligned.ot(inputs, flow="none")
    assert torch.equal(none[q], base[q]) and not torch.allclose(none[gate], base[gate], atol=1e-4)
    release, _ = aligned.ot(inputs, flow="release")
    assert torch.equal(release["self_attn.o_proj.weight"], none["self_attn.o_proj.weight"])
    assert not torch.allclose(release[gate], none[gate], atol=1e-4)
    scaled = Parents(
        *({n: 100 * t for n, t in layer.items()} for layer in (inputs.lower, inputs.upper)), LLAMA, HEADS, "x"
    )
    for scale in ("max", "median", "mean"):
        ours, _ = aligned.ot(inputs, epsilon_scale=scale)
        theirs, _ = aligned.ot(scaled, epsilon_scale=scale)
        assert torch.allclose(100 * ours[down], theirs[down], rtol=1e-3, atol=1e-3)
        assert not torch.allclose(ours[down], base[down], atol=1e-4)
    for kind in ("sqeuclidean", "cosine"):
        assert not torch.allclose(aligned.ot(inputs, cost=kind)[0][q], base[q], atol=1e-4)


def test_a_plan_that_does_not_converge_names_layer_and_weight():
    with pytest.raises(PlanError, match=r"layer 5, self_attn.q_proj.weight: .*residual"):
        aligned.ot(parents(), max_iterations=2)


@pytest.mark.parametrize(
    "knobs", [{"solver": "simplex"}, {"epsilon_scale": "min"}, {"flow": "both"}, {"cost": "l1"}, {"epsilon": 0.0}]
)
def test_unknown_knob_values_are_refused_by_name(knobs):
    key = next(iter(knobs))
    with pytest.raises(ValueError, match=f"align.{key}={knobs[key]}"):
        aligned.ot(parents(), **knobs)


def test_a_bfloat16_checkpoint_is_solved_in_float64_and_rounded_once():
    low, up = ({name: tensor.bfloat16() for name, tensor in random_layer(seed).items()} for seed in (0, 1))
    made, _ = aligned.ot(Parents(low, up, LLAMA, HEADS, "x"))
    wide = [{name: tensor.double() for name, tensor in layer.items()} for layer in (low, up)]
    expected, _ = aligned.ot(Parents(*wide, LLAMA, HEADS, "x"))
    for name in made:
        assert made[name].dtype == torch.bfloat16 and torch.equal(made[name], expected[name].bfloat16()), name


def test_avg_half_and_copies():
    inputs = parents(biases=True)
    low, up = inputs.lower, inputs.upper
    made, diagnostics = average.avg(inputs)
    assert_layers_close(made, {name: (low[name].double() + up[name].double()) / 2 for name in low})
    q = "self_attn.q_proj.weight"
    assert diagnostics[q]["cost_plan"] == pytest.approx((low[q] - up[q]).norm(dim=1).mean().item(), rel=1e-5)
    made, _ = average.half(inputs)
    assert all(torch.equal(made[name], up[name] / 2) for name in up)
    made, _ = average.half(inputs, norms="average")
    norm = "input_layernorm.weight"
    assert torch.allclose(made[norm], (low[norm] + up[norm]) / 2) and torch.equal(made[q], up[q] / 2)
    with pytest.raises(ValueError, match="align.norms=all"):
        average.half(inputs, norms="all")
    for method, layer in ((copy.lower, low), (copy.upper, up)):
        made, _ = method(inputs)
        assert all(torch.equal(made[name], layer[name]) for name in layer)
        made[q].zero_()
        assert layer[q].abs().sum() > 0  # a copy shares nothing with its parent
    made, _ = copy.lower(Parents(low, None, LLAMA, HEADS, "after the last layer"))
    assert torch.equal(made[q], low[q])


def test_norm_match_gives_matrices_the_mean_norm_of_their_parents():
    inputs = parents(biases=True)
    made, _ = average.half(inputs)
    matched = norm_match(inputs, made)
    for name, tensor in matched.items():
        if tensor.ndim == 1:
            assert torch.equal(tensor, made[name])
        else:
            mean = (inputs.lower[name].norm() + inputs.upper[name].norm()) / 2
            assert tensor.norm() == pytest.approx(mean.item(), rel=1e-5)
            assert torch.allclose(tensor / tensor.norm(), made[name] / made[name].norm(), atol=1e-6)
    alone = Parents(inputs.lower, None, LLAMA, HEADS, "after the last layer")
    assert_layers_close(norm_match(alone, copy.lower(alone)[0]), dict(inputs.lower), 1e-6)
    made["self_attn.q_proj.weight"] = torch.zeros_like(made["self_attn.q_proj.weight"])
    with pytest.raises(ValueError, match="layer 5, self_attn.q_proj.weight was made zero"):
        norm_match(inputs, made)


def test_tensors_outside_the_table_are_refused():
    low, up = random_layer(0), random_layer(1)
    with pytest.raises(ValueError, match=r"layer 5: tensor 'mlp.experts.0.weight'.*blocks.py"):
        Parents({**low, "mlp.experts.0.weight": torch.zeros(2, 2)}, up, LLAMA, HEADS, "layer 5")
    with pytest.raises(ValueError, match="no tensor 'mlp.up_proj.weight'"):
        Parents(low, {name: t for name, t in up.items() if name != "mlp.up_proj.weight"}, LLAMA, HEADS, "layer 5")
    with pytest.raises(ValueError, match="mlp.up_proj.weight has shapes"):
        Parents(low, {**up, "mlp.up_proj.weight": torch.zeros(2, 2)}, LLAMA, HEADS, "layer 5")
    with pytest.raises(ValueError, match="self_attn.q_proj.bias has shapes"):
        Parents({**low, "self_attn.q_proj.bias": torch.zeros(24)}, up, LLAMA, HEADS, "layer 5")


@pytest.mark.parametrize("path", sorted(CONF.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_choice_states_its_function_and_all_its_knobs(path):
    choice = yaml.safe_load(path.read_text())
    head = {key: choice.pop(key) for key in ("name", "make", "parents", "seeded")}
    for flag in ("calibrated", "aligns"):
        choice.pop(flag, None)
    assert head["name"] == path.stem
    if head["make"] is None:
        assert head["parents"] == "none" and not choice
        return
    module, function = head["make"].split(":")
    make = getattr(importlib.import_module(module), function)
    _, *knobs = inspect.signature(make).parameters.values()
    assert choice == {knob.name: knob.default for knob in knobs}
    made, diagnostics = make(in_a_base(parents(biases=True, scale=5.0)), **choice)
    assert head["parents"] in ("both", "lower", "upper") and made.keys() == random_layer(0, biases=True).keys()
    keys = {"solver", "mass", "marginal_error", "cost_identity", "cost_plan", "effective_support", "aligned_norm_ratio"}
    assert all(keys <= set(numbers) for numbers in diagnostics.values()) and diagnostics
