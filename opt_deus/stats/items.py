"""Item level: the same documents answered by two arms. Generalises to new questions, not to new runs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

from opt_deus.stats.estimates import ALPHA, CONFIDENCE, NAN, Estimate

RESAMPLES = 10_000
_DECIMALS = 9  # seed means of 0/100 scores are equal or far apart; rounding removes the order of summation
_CELLS = 4_000_000  # of one block of resampled counts: 32 MB


def macro_difference(strata: Sequence[np.ndarray], resamples: int = RESAMPLES, seed: int = 0) -> Estimate:
    """Unweighted mean over tasks of the mean paired difference.

    strata: per task the documents' differences (averaged over seeds), shape (n_t,), in points. p: sign-flip permutation
    (under the null either arm may have given either answer). Interval: stratified percentile bootstrap over documents,
    deviations widened by sqrt(n / (n - 1)) per task, for a resampled mean spreads that much too little.
    """
    strata = [np.round(np.asarray(values, dtype=float), _DECIMALS) for values in strata]
    n = sum(map(len, strata))
    estimate = float(np.mean([values.mean() for values in strata]))
    if min(map(len, strata)) < 2:
        return Estimate("item", "sign-flip permutation", n, estimate)
    generator = np.random.default_rng(seed)
    means = np.mean([_bootstrap_means(values, resamples, generator) for values in strata], axis=0)
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    flipped = np.mean([_flipped_means(values, resamples, generator) for values in strata], axis=0)
    extreme = np.count_nonzero(np.abs(flipped) >= abs(estimate) - 1e-9)
    p = (extreme + 1) / (resamples + 1)
    se = math.sqrt(sum(values.var(ddof=1) / len(values) for values in strata)) / len(strata)
    if not se > 0:  # no spread, no interval (estimates.t_estimate)
        low = high = NAN
    return Estimate("item", "sign-flip permutation", n, estimate, float(low), float(high), estimate, p, se)


def _bootstrap_means(values: np.ndarray, resamples: int, generator: np.random.Generator) -> np.ndarray:
    """Means of resamples, shape (resamples,). Documents with equal differences are drawn together, as one count."""
    distinct, counts = np.unique(values, return_counts=True)
    n = len(values)
    widened = values.mean() + (distinct - values.mean()) * math.sqrt(n / (n - 1))
    blocks = np.array_split(np.arange(resamples), max(1, resamples * len(distinct) // _CELLS))
    draws = [generator.multinomial(n, counts / n, size=len(block)) @ widened for block in blocks]
    return np.concatenate(draws) / n


def _flipped_means(values: np.ndarray, resamples: int, generator: np.random.Generator) -> np.ndarray:
    """Means after random sign flips, shape (resamples,). m documents of one size: a binomial number keeps its sign."""
    sizes, counts = np.unique(np.abs(values[values != 0]), return_counts=True)
    blocks = np.array_split(np.arange(resamples), max(1, resamples * len(sizes) // _CELLS))
    sums = [(2 * generator.binomial(counts, 0.5, (len(block), len(sizes))) - counts) @ sizes for block in blocks]
    return np.concatenate(sums) / len(values)


def mcnemar(first: np.ndarray, second: np.ndarray) -> Estimate:
    """Exact McNemar test of two arms' right answers, boolean, shape (n,), matched by document.

    Estimate in points. The interval is Clopper-Pearson's on the discordant documents, so that it excludes 0 exactly
    when p < 0.05. Without a discordant document: the 97.5% bound of the discordance rate on both sides.
    """
    first, second = np.asarray(first, dtype=bool), np.asarray(second, dtype=bool)
    n, won, lost = len(first), int(np.sum(first & ~second)), int(np.sum(~first & second))
    return mcnemar_counts(n, won, lost)


def mcnemar_counts(n: int, won: int, lost: int) -> Estimate:
    """Exact McNemar test from the numbers of documents, and of those that only the first or only the second got."""
    discordant = won + lost
    # All discordant documents on one side: p = 2 / 2^m, below 0.05 from m = 6 on.
    floor = 100 * math.ceil(1 - math.log2(ALPHA)) / n if n else NAN
    if n == 0:
        return Estimate("item", "exact McNemar", 0, NAN)
    if discordant == 0:
        bound = 100 * (1 - ((1 - CONFIDENCE) / 2) ** (1 / n))
        return Estimate("item", "exact McNemar", n, 0.0, -bound, bound, 0.0, 1.0, 0.0, mde_floor=floor)
    result = stats.binomtest(won, discordant)
    interval = result.proportion_ci(CONFIDENCE, method="exact")
    low, high = (100 * discordant / n * (2 * share - 1) for share in (interval.low, interval.high))
    rate = (won - lost) / n
    se = 100 * math.sqrt(max(discordant / n - rate**2, 0) / n)
    return Estimate("item", "exact McNemar", n, 100 * rate, low, high, won, float(result.pvalue), se, mde_floor=floor)
