"""Costs, solvers and the check that no bad plan passes (hard_cases.md, row 4)."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import ot as pot
import pytest
import torch
from scipy.optimize import linear_sum_assignment

from opt_deus.transport import (
    Assignment,
    DensePlan,
    PlanError,
    check_plan,
    cost,
    solve_exact,
    solve_release,
    solve_sinkhorn,
)


def rows(seed: int, count: int = 64, width: int = 64, scale: float = 1.0, dtype=torch.float32) -> torch.Tensor:
    return (torch.randn(count, width, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def test_costs_are_the_definitions_in_float64():
    a, b = rows(0, 5, 7), rows(1, 6, 7)
    x, y = a.double().numpy(), b.double().numpy()
    squared = ((x[:, None] - y[None]) ** 2).sum(-1)
    cosine = 1 - (x @ y.T) / np.linalg.norm(x, axis=1)[:, None] / np.linalg.norm(y, axis=1)
    for kind, expected in (("euclidean", np.sqrt(squared)), ("sqeuclidean", squared), ("cosine", cosine)):
        got = cost(a, b, kind)
        assert got.dtype == torch.float64
        np.testing.assert_allclose(got.numpy(), expected, rtol=1e-10, atol=1e-12)


def test_cost_of_a_bfloat16_checkpoint_is_solved_in_float64():
    low, high = rows(0, dtype=torch.bfloat16), rows(1, dtype=torch.bfloat16)
    assert torch.equal(cost(low, high), cost(low.double(), high.double()))


def test_cost_refuses_what_it_cannot_measure():
    with pytest.raises(ValueError, match="align.cost=manhattan.*euclidean"):
        cost(rows(0), rows(1), "manhattan")
    broken = rows(0)
    broken[3, 4] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        cost(broken, rows(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 10.0, 100.0])
def test_sinkhorn_at_every_scale(scale, dtype):
    costs = cost(rows(0, scale=scale, dtype=dtype), rows(1, scale=scale, dtype=dtype))
    plan = solve_sinkhorn(costs, 0.06)
    numbers = check_plan(plan, "layer 1, w")
    assert abs(numbers["mass"] - 1) < 1e-9 and numbers["marginal_error"] <= 1e-4
    exact = solve_exact(costs).cost(costs)
    # the entropic plan costs at most epsilon x log n more than the best one
    assert exact - 1e-3 * exact < plan.cost(costs) <= exact + 0.06 * np.log(64)


def test_sinkhorn_is_the_entropic_optimum():
    """POT's log-domain solver, run to convergence, is the reference."""
    costs = cost(rows(0, 48, 16), rows(1, 48, 16))
    uniform = np.full(48, 1 / 48)
    expected = pot.sinkhorn(
        uniform, uniform, costs.numpy(), 0.06, method="sinkhorn_log", stopThr=1e-9, numItermax=50_000
    )
    got = solve_sinkhorn(costs, 0.06, tolerance=1e-9).matrix.numpy()
    assert np.abs(got - expected).sum() < 1e-6


def test_a_constant_added_to_all_costs_changes_nothing():
    costs = cost(rows(0, 30, 8), rows(1, 30, 8))
    plan = solve_sinkhorn(costs, 0.06).matrix
    for constant in (100.0, -1000.0):
        assert torch.allclose(solve_sinkhorn(costs + constant, 0.06).matrix, plan, atol=1e-9)


def test_sinkhorn_of_unequal_sizes():
    costs = cost(rows(0, 20, 8), rows(1, 30, 8))
    plan = solve_sinkhorn(costs, 0.06)
    check_plan(plan, "layer 1, w")
    assert plan.matrix.shape == (20, 30)


def test_identical_layers_and_a_zero_row():
    same = rows(0)
    plan = solve_sinkhorn(cost(same, same), 0.06)
    assert check_plan(plan, "w")["marginal_error"] <= 1e-4
    assert torch.allclose(plan.weights(), torch.eye(64, dtype=torch.float64), atol=1e-6)
    assert torch.equal(solve_exact(cost(same, same)).partner, torch.arange(64))
    empty = rows(0).index_fill(0, torch.tensor([5]), 0.0)
    for left, right in ((empty, rows(1)), (empty, empty), (torch.zeros(8, 4), torch.zeros(8, 4))):
        check_plan(solve_sinkhorn(cost(left, right), 0.06), "w")


def test_too_few_iterations_stop_naming_the_weight_and_the_residual():
    plan = solve_sinkhorn(cost(rows(0), rows(1)), 0.06, max_iterations=3)
    with pytest.raises(PlanError, match=r"layer 7, q_proj.*residual of [0-9.e-]+ in L1"):
        check_plan(plan, "layer 7, q_proj")


def test_bad_plans_never_pass():
    good = torch.full((4, 4), 1 / 16, dtype=torch.float64)
    assert check_plan(DensePlan(good, "s"), "w")["mass"] == pytest.approx(1)
    negative = good.clone()
    negative[0, 0] -= 0.1
    negative[0, 1] += 0.1
    negative[1, 0] += 0.1
    negative[1, 1] -= 0.1
    for matrix, word in (
        (good * 0.73, "mass 0.73"),
        (good * 0, "mass 0 "),
        (good * float("nan"), "not finite"),
        (good * float("inf"), "not finite"),
        (negative, "negative"),
        (torch.eye(4, dtype=torch.float64)[[0, 0, 1, 2]] / 4, "residual"),
    ):
        with pytest.raises(PlanError, match=word):
            check_plan(DensePlan(matrix, "s"), "layer 2, w")
    for partner in ([0, 1, 1], [0, 1, 3]):
        with pytest.raises(PlanError, match="one-to-one"):
            check_plan(Assignment(torch.tensor(partner)), "w")


def test_solvers_refuse_bad_costs():
    with pytest.raises(ValueError, match="not square"):
        solve_exact(torch.zeros(3, 4))
    for solve in (solve_exact, lambda costs: solve_sinkhorn(costs, 0.06)):
        with pytest.raises(ValueError, match="not finite"):
            solve(torch.full((3, 3), float("nan")))
    with pytest.raises(ValueError, match="align.epsilon=0"):
        solve_sinkhorn(torch.zeros(3, 3), 0)


@pytest.mark.parametrize("kind", ["noise", "signal", "ties", "large offset"])
def test_exact_is_the_optimum_on_costs_large_enough_to_be_reduced(kind):
    left, right = rows(0, 200, 10), rows(1, 200, 10)
    costs = {
        "noise": cost(left, right),
        "signal": cost(left, left[torch.randperm(200, generator=torch.Generator().manual_seed(0))] + 0.1 * right),
        "ties": cost(left.round(), right.round()),
        "large offset": 1e3 * cost(left, right) - 1e6,
    }[kind]
    expected = costs.numpy()[linear_sum_assignment(costs.numpy())].mean()
    plan = solve_exact(costs)
    check_plan(plan, "w")
    assert plan.cost(costs) == pytest.approx(expected, rel=1e-12)


def test_an_assignment_is_its_dense_plan():
    costs = cost(rows(0, 12, 5), rows(1, 12, 5))
    plan = solve_exact(costs)
    matrix = torch.zeros(12, 12, dtype=torch.float64)
    matrix[plan.partner, torch.arange(12)] = 1 / 12
    dense = DensePlan(matrix, "dense")
    weight = rows(2, 12, 12).double()
    assert torch.allclose(plan.on_rows(weight), dense.on_rows(weight))
    assert torch.allclose(plan.on_columns(weight), dense.on_columns(weight))
    assert torch.allclose(plan.on_rows(weight[:, 0]), dense.on_rows(weight[:, 0]))
    assert plan.cost(costs) == pytest.approx(dense.cost(costs))
    assert dense.effective_support == pytest.approx(1) and dense.marginal_error == pytest.approx(0, abs=1e-12)


def test_effective_support_counts_the_neurons_in_a_row():
    spread = torch.block_diag(*[torch.full((3, 3), 1 / 18, dtype=torch.float64)] * 2)
    assert DensePlan(spread, "s").effective_support == pytest.approx(3)
    assert DensePlan(spread * 0, "s").effective_support is None


def test_the_map_is_rescaled_and_the_released_one_is_not():
    matrix = solve_sinkhorn(cost(rows(0, 9, 4), rows(1, 9, 4)), 1.0).matrix
    assert torch.allclose(DensePlan(matrix, "s").weights().sum(1), torch.ones(9, dtype=torch.float64), atol=1e-12)
    assert torch.equal(DensePlan(matrix, "s", rescaled=False).weights(), matrix.T)


def test_release_solver_underflows_as_published_and_says_so():
    plan, messages = solve_release(rows(0), rows(1, scale=10))
    assert plan.mass == 0 and messages and "numerical" in messages[0]
    gentle, messages = solve_release(rows(0, 16, scale=0.1), rows(1, 16, scale=0.1))
    assert gentle.mass == pytest.approx(1, abs=1e-4) and not any("numerical" in message for message in messages)


def test_importing_the_room_does_not_import_pot():
    code = "import sys, opt_deus.transport; sys.exit('ot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
