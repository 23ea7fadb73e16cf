"""Entropic transport in float64 that cannot underflow: epsilon scaling and absorption."""

from __future__ import annotations

import torch
from torch import Tensor

from opt_deus.transport.plans import DensePlan

_ABSORB = (
    100.0  # log of a scaling that is moved into the potentials: long before the kernel's underflow at -745 matters
)
_RATIO = 0.5  # of neighbouring epsilons
_COARSE_GOAL = 0.05  # marginal error at which a larger epsilon has served as a start for the next


def solve_sinkhorn(cost: Tensor, epsilon: float, tolerance: float = 1e-4, max_iterations: int = 50_000) -> DensePlan:
    """Entropic plan of cost (n, m) for uniform marginals at regularisation epsilon (in the cost's units).

    Stops when the marginals miss uniform by tolerance / 2 in L1, or after max_iterations: the caller checks the plan
    (check_plan). Potentials are warm-started through falling epsilons, and large scalings are absorbed into them
    (Schmitzer 2019, arXiv 1610.06519), so that no kernel entry that matters underflows. float64 throughout.
    """
    if not epsilon > 0:
        raise ValueError(f"align.epsilon={epsilon}: must be greater than 0, e.g. 0.06.")
    cost = cost.to(torch.float64)
    if not torch.isfinite(cost).all():
        raise ValueError("solve_sinkhorn: the cost holds values that are not finite; check the checkpoint's weights.")
    lower, upper = potentials(cost, epsilon, tolerance / 2, max_iterations)
    return DensePlan((lower + upper).sub_(cost).div_(epsilon).exp_(), solver="sinkhorn")


def potentials(cost: Tensor, epsilon: float, goal: float, max_iterations: int) -> tuple[Tensor, Tensor]:
    """Dual potentials (n, 1) and (1, m) at epsilon, near enough that the plan's marginal error (L1) is below goal.

    cost: float64. The plan is exp((lower + upper - cost) / epsilon); after max_iterations it may miss the goal.
    """
    lower, upper = cost.min().expand(len(cost), 1), cost.new_zeros(1, cost.shape[1])
    current = max(epsilon, (cost.max() - cost.min()).item() / 10)  # a kernel from 1 down to exp(-10) at the start
    left = max_iterations
    while current > epsilon:
        lower, upper, used = _iterate(cost, lower, upper, current, max(goal, _COARSE_GOAL), left)
        left -= used
        current = max(epsilon, current * _RATIO)
    lower, upper, _ = _iterate(cost, lower, upper, epsilon, goal, left)
    return lower, upper


def _iterate(
    cost: Tensor, lower: Tensor, upper: Tensor, epsilon: float, goal: float, limit: int
) -> tuple[Tensor, Tensor, int]:
    """Iterations at one epsilon until the marginal error is below goal: new potentials, and iterations used."""
    used, done = 0, False
    while used < limit and not done:
        kernel = (lower + upper).sub_(cost).div_(epsilon).exp_()
        scale_lower, scale_upper, steps, done = _scale(kernel, goal, limit - used)
        lower = lower + epsilon * scale_lower.log()[:, None]
        upper = upper + epsilon * scale_upper.log()[None, :]
        used += steps
    return lower, upper, used


def _scale(kernel: Tensor, goal: float, limit: int) -> tuple[Tensor, Tensor, int, bool]:
    """Sinkhorn's scalings of a kernel (n, m), the number of iterations, and whether the goal was met.

    Ends early when a scaling grows so large that it must be absorbed into the potentials.
    """
    num_lower, num_upper = kernel.shape
    scale_lower, scale_upper = kernel.new_ones(num_lower), kernel.new_ones(num_upper)
    for step in range(limit):
        sums = kernel @ scale_upper
        # an iteration leaves the columns exact, so that the rows hold all of the error
        if step > 0 and (scale_lower * sums * num_lower - 1).abs().mean().item() < goal:
            return scale_lower, scale_upper, step, True
        scale_lower = 1 / (num_lower * sums)
        scale_upper = 1 / (num_upper * (scale_lower @ kernel))
        if max(scale.log().abs().max().item() for scale in (scale_lower, scale_upper)) > _ABSORB:
            return scale_lower, scale_upper, step + 1, False
    return scale_lower, scale_upper, limit, False
