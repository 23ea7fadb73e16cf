"""Pairwise distances between neurons."""

from __future__ import annotations

import torch
from torch import Tensor

COSTS = ("euclidean", "sqeuclidean", "cosine")


def cost(lower: Tensor, upper: Tensor, kind: str = "euclidean") -> Tensor:
    """Distances between the rows of lower (n, d) and of upper (m, d): (n, m) in float64, whatever the inputs' dtype.

    A neuron's support point is its weight row. kind: euclidean (the paper's), sqeuclidean, or cosine (1 - cosine; an
    all-zero row has distance 1 from everything). ValueError for an unknown kind or inputs that are not finite.
    """
    lower, upper = lower.to(torch.float64), upper.to(torch.float64)
    if not (torch.isfinite(lower).all() and torch.isfinite(upper).all()):
        raise ValueError("cost: the rows hold values that are not finite; check the checkpoint's weights.")
    if kind == "euclidean":
        return torch.cdist(lower, upper)
    if kind == "sqeuclidean":
        return torch.cdist(lower, upper).square()
    if kind == "cosine":
        return 1 - torch.nn.functional.normalize(lower) @ torch.nn.functional.normalize(upper).T
    raise ValueError(f"align.cost={kind}: unknown; choose one of {', '.join(COSTS)}.")
