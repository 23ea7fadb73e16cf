"""Unbalanced and partial transport, appended biases, and plans on disk."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from test_methods import parents

from opt_deus import transport
from opt_deus.methods import aligned
from opt_deus.transport import (
    Assignment,
    DensePlan,
    LinearMap,
    PlanError,
    check_relaxed_plan,
    load_maps,
    save_maps,
    solve_exact,
    solve_partial,
    solve_sinkhorn,
    solve_unbalanced,
)


def costs(size: int = 12, seed: int = 0) -> torch.Tensor:
    return torch.rand(size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("mass", [0.3, 0.8])
def test_partial_is_the_linear_programme(mass):
    cost = costs(6)
    plan = solve_partial(cost, mass)
    numbers = check_relaxed_plan(plan, "layer 3, up", mass)
    rows, columns = np.kron(np.eye(6), np.ones(6)), np.kron(np.ones(6), np.eye(6))
    best = linprog(
        cost.flatten().numpy(),
        A_ub=np.vstack([rows, columns]),
        b_ub=np.full(12, 1 / 6),
        A_eq=np.ones((1, 36)),
        b_eq=mass,
    )
    assert plan.cost(cost) == pytest.approx(best.fun, abs=1e-9)
    assert numbers["mass"] == pytest.approx(mass)


def test_partial_of_all_mass_is_the_assignment():
    cost = costs()
    assert solve_partial(cost, 1.0).cost(cost) == pytest.approx(solve_exact(cost).cost(cost), abs=1e-12)


def test_unbalanced_with_a_large_penalty_is_the_balanced_plan_and_moves_less_with_a_small_one():
    cost = costs()
    balanced = solve_sinkhorn(cost, 0.1, 1e-8)
    near = solve_unbalanced(cost, 0.1, 20.0)
    assert (near.matrix - balanced.matrix).abs().sum() < 0.05
    assert solve_unbalanced(cost, 0.1, 0.05).mass < 0.9 * near.mass


def test_a_neuron_that_receives_nothing_takes_the_one_of_its_own_index():
    matrix = torch.zeros(3, 3, dtype=torch.float64)
    matrix[1, 0] = matrix[0, 1] = 1 / 3  # upper neuron 2 receives nothing
    plan = DensePlan(matrix, "partial", every_neuron=False)
    assert torch.equal(plan.weights(), torch.tensor([[0, 1, 0], [1, 0, 0], [0, 0, 1.0]], dtype=torch.float64))


def test_relaxed_plans_that_are_none_never_pass():
    good = solve_partial(costs(), 0.5)
    for matrix, mass in (
        (good.matrix * torch.nan, 0.5),
        (-good.matrix, 0.5),
        (good.matrix * 0, None),
        (good.matrix, 0.6),  # another share than asked for
        (torch.eye(12, dtype=torch.float64) / 2 * torch.arange(12)[:, None] / 33, 0.5),  # a neuron beyond its mass
    ):
        with pytest.raises(PlanError, match="layer 3, up"):
            check_relaxed_plan(DensePlan(matrix, "partial", every_neuron=False), "layer 3, up", mass)
    with pytest.raises(PlanError, match="did not converge.*max_iterations"):
        solve_unbalanced(costs(), 0.01, 100.0, max_iterations=10)
    with pytest.raises(ValueError, match="align.mass=1.5"):
        solve_partial(costs(), 1.5)


@pytest.mark.parametrize("knobs", [{"solver": "unbalanced"}, {"solver": "partial"}])
def test_ot_takes_relaxed_solvers(knobs):
    made, diagnostics = aligned.ot(parents(), **knobs)
    plain, _ = aligned.ot(parents())
    gate = "mlp.gate_proj.weight"
    assert diagnostics[gate]["solver"] == knobs["solver"] and 0 < diagnostics[gate]["mass"] < 1
    assert torch.isfinite(made[gate]).all() and not torch.allclose(made[gate], plain[gate])


def test_an_appended_bias_decides_where_rows_do_not():
    """Identical rows, distinct biases in another order: only with the biases is the right partner known."""
    inputs = parents(biases=True)
    up, bias = "mlp.up_proj.weight", "mlp.up_proj.bias"
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    for layer in (inputs.lower, inputs.upper):
        layer[up] = torch.ones_like(layer[up])
    inputs.lower[bias] = torch.arange(40.0)
    inputs.upper[bias] = inputs.lower[bias][order]
    made, _ = aligned.ot(inputs, solver="exact", flow="none", bias=True)
    assert torch.equal(made[bias], inputs.upper[bias])
    assert not torch.equal(aligned.ot(inputs, solver="exact", flow="none")[0][bias], inputs.upper[bias])


def test_maps_survive_the_disk_and_the_file_explains_itself(tmp_path):
    cost = costs()
    maps = {
        "exact": solve_exact(cost),
        "soft": solve_sinkhorn(cost, 0.1),
        "turned": LinearMap(torch.linalg.qr(cost)[0]),
        "part": solve_partial(cost, 0.5),
    }
    save_maps(maps, tmp_path / "maps.safetensors", {"lower": 3})
    again, about = load_maps(tmp_path / "maps.safetensors")
    rows = torch.randn(12, 4, dtype=torch.float64)
    assert about == {"lower": 3} and set(again) == set(maps)
    for name, each in maps.items():
        assert type(again[name]) is type(each)
        assert torch.equal(again[name].on_rows(rows), each.on_rows(rows)), name
    assert again["soft"].solver == "sinkhorn"
    assert isinstance(maps["exact"], Assignment) and transport.PlanError is PlanError
