"""Exact transport between equally many equally heavy neurons: an assignment."""

from __future__ import annotations

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from opt_deus.transport.plans import Assignment


def solve_exact(cost: Tensor) -> Assignment:
    """The cheapest one-to-one matching of a square cost (lower, upper).

    SciPy's solver: never slower than POT's network simplex on real blocks (benchmarks/solvers.py).

    ValueError if the cost is not square, or not finite.
    """
    if cost.shape[0] != cost.shape[1]:
        raise ValueError(f"solve_exact: a cost of shape {tuple(cost.shape)} is not square, so nothing is one-to-one.")
    if not torch.isfinite(cost).all():
        raise ValueError("solve_exact: the cost holds values that are not finite; check the checkpoint's weights.")
    _, lower = linear_sum_assignment(cost.T.to("cpu", torch.float64).numpy())
    return Assignment(torch.from_numpy(lower).to(cost.device))
