"""Transport that need not move every neuron: unbalanced (marginals are only asked for) and partial (a share of mass).

Both are POT's solvers, in float64. Their plans miss the marginals by design, so they have their own check.
"""

from __future__ import annotations

import math
import warnings

import numpy as np
import torch
from torch import Tensor

from opt_deus.transport.plans import DensePlan, PlanError


def solve_unbalanced(cost: Tensor, epsilon: float, penalty: float, max_iterations: int = 50_000) -> DensePlan:
    """Entropic plan of cost (n, m) whose marginals are drawn to uniform by penalty times their KL divergence.

    epsilon and penalty in the cost's units (Chizat et al. 2018, POT's stabilised iterations). PlanError where POT
    warns, e.g. that it did not converge.
    """
    import ot  # a second to import: only where it is used

    return _solved(
        "unbalanced",
        cost,
        lambda a, b, costs: ot.unbalanced.sinkhorn_unbalanced(
            a, b, costs, epsilon, penalty, method="sinkhorn_stabilized", numItermax=max_iterations, stopThr=1e-8
        ),
    )


def solve_partial(cost: Tensor, mass: float) -> DensePlan:
    """Exact plan of cost (n, m) that moves the given share of the mass, 0 < mass <= 1, where that is cheapest.

    ValueError for another share.
    """
    if not 0 < mass <= 1:
        raise ValueError(f"align.mass={mass}: a share of the mass, 0 < mass <= 1, e.g. 0.8.")
    import ot

    if mass == 1:
        return _solved("partial", cost, lambda a, b, costs: ot.emd(a, b, costs, numItermax=10_000_000))
    return _solved(
        "partial", cost, lambda a, b, costs: ot.partial.partial_wasserstein(a, b, costs, m=mass, numItermax=10_000_000)
    )


def _solved(name: str, cost: Tensor, solve) -> DensePlan:
    costs = cost.to("cpu", torch.float64).numpy()
    uniform = [np.full(size, 1 / size) for size in costs.shape]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        matrix = solve(*uniform, costs)
    if caught:
        raise PlanError(f"{name} transport: {caught[0].message} Raise align.max_iterations or align.epsilon.")
    return DensePlan(torch.from_numpy(matrix).to(cost.device), solver=name, every_neuron=False)


def check_relaxed_plan(plan: DensePlan, where: str, mass: float | None, tolerance: float = 1e-4) -> dict[str, float]:
    """The plan's mass and marginal error; where names layer and weight.

    PlanError unless the plan is finite, not negative, and moves something; with mass given (partial) also unless it
    moves that share and no neuron more than it has.
    """
    found, residual = plan.mass, plan.marginal_error
    if not math.isfinite(found) or not torch.isfinite(plan.matrix).all() or (plan.matrix < 0).any():
        raise PlanError(f"{where}: {plan.solver} returned a plan that is not finite or has negative entries.")
    if found < tolerance:
        raise PlanError(f"{where}: {plan.solver} moved a mass of {found:.3g}; raise align.penalty or align.mass.")
    if mass is not None:
        excess = sum((plan.matrix.sum(axis) * plan.matrix.shape[1 - axis] - 1).clamp(min=0).max() for axis in (0, 1))
        if abs(found - mass) > tolerance or excess > tolerance:
            raise PlanError(f"{where}: {plan.solver} moved a mass of {found:.6g} where {mass:g} was asked for.")
    return {"mass": found, "marginal_error": residual}
