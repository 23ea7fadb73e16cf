"""Intervals of a study's estimates: bootstrap over items (documents, text blocks or units)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

RESAMPLES = 2_000
CONFIDENCE = 0.95


def interval(
    values: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray] = lambda means: means[..., 0], seed: int = 0
) -> dict[str, Any]:
    """{"estimate", "low", "high", "n"} of a statistic of item means, percentile bootstrap over items.

    values: (n,) or (n, k). statistic maps means (..., k) to (...): the mean itself by default; a ratio, an exponential
    or a difference of columns otherwise. With one item low and high are None.
    """
    table = np.asarray(values, dtype=np.float64)
    table = table[:, None] if table.ndim == 1 else table
    n = len(table)
    if n == 0 or not np.isfinite(table).all():
        raise ValueError(f"interval: needs finite values of at least one item, got shape {table.shape}.")
    result = {"estimate": float(statistic(table.mean(axis=0))), "low": None, "high": None, "n": n}
    if n > 1:
        draws = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=RESAMPLES) / n
        tails = [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]
        low, high = np.quantile(statistic(draws @ table), tails)
        result |= {"low": float(low), "high": float(high)}
    return result
