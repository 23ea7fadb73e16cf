"""The solver of the released OpT-DeUS code, faithfully: for comparison, never checked."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from opt_deus.transport.plans import DensePlan


def solve_release(lower: Tensor, upper: Tensor, epsilon: float = 0.06) -> tuple[DensePlan, list[str]]:
    """POT's plain float32 Sinkhorn on the raw Euclidean distance, with its warnings, as the released code calls it.

    lower (n, d), upper (m, d). The kernel exp(-distance / 0.06) underflows on real weights; POT then stops at once and
    returns a plan of mass 0. The plan is to be used as T^T W, unrescaled (DensePlan.rescaled = False).
    """
    import ot  # slow to import, and only this solver needs it

    lower, upper = lower.to(torch.float32), upper.to(torch.float32)
    uniform = [torch.ones(len(rows), device=rows.device) / len(rows) for rows in (lower, upper)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        matrix = ot.sinkhorn(*uniform, torch.cdist(lower, upper), epsilon, numItermax=10000)
    messages = list(dict.fromkeys(str(warning.message) for warning in caught))
    return DensePlan(matrix.double(), solver="sinkhorn_float32", rescaled=False), messages
