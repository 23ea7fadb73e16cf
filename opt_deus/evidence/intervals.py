"""Intervals of a study's estimates over items (documents, text blocks, layers or units)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import stats

RESAMPLES = 2_000
CONFIDENCE = 0.95


def interval(
    values: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray] | None = None, seed: int = 0
) -> dict[str, Any]:
    """{"estimate", "low", "high", "n"} of a statistic of item means, 95%.

    values: (n,) or (n, k). statistic maps means (..., k) to (...), e.g. a ratio or an exponential; None is the mean
    of (n,), with Student's interval. Otherwise a bootstrap over items with expanded percentiles, which cover as t does
    where items are few (Hesterberg 2015, What Teachers Should Know About the Bootstrap, section 3.3). With one item low
    and high are None. ValueError for values that are not finite.
    """
    table = np.asarray(values, dtype=np.float64)
    table = table[:, None] if table.ndim == 1 else table
    n = len(table)
    if n == 0 or not np.isfinite(table).all():
        raise ValueError(f"interval: needs finite values of at least one item, got shape {table.shape}.")
    of = statistic or (lambda means: means[..., 0])
    result = {"estimate": float(of(table.mean(axis=0))), "low": None, "high": None, "n": n}
    if n == 1:
        return result
    quantile = stats.t.ppf((1 + CONFIDENCE) / 2, n - 1)
    if statistic is None:
        half = float(quantile * table[:, 0].std(ddof=1)) / math.sqrt(n)
        return result | {"low": result["estimate"] - half, "high": result["estimate"] + half}
    draws = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=RESAMPLES) / n
    tail = stats.norm.cdf(-math.sqrt(n / (n - 1)) * quantile)
    low, high = np.quantile(of(draws @ table), [tail, 1 - tail])
    return result | {"low": float(low), "high": float(high)}
