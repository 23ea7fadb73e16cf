"""Published aggregates: only counts of right answers per task, so two models can be compared unpaired only.

Definitions as in the golden file beside the published results: points of accuracy, first minus second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from opt_deus.stats.estimates import ALPHA, CONFIDENCE, Estimate, t_estimate

MOST_EXACT = 16  # tasks up to which all 2^n sign assignments are counted
_EXACT = stats.PermutationMethod(n_resamples=2**MOST_EXACT)
_Z = float(stats.norm.ppf((1 + CONFIDENCE) / 2))


@dataclass(frozen=True)
class Count:
    """`right` of `n` answers. stderr: the published standard error of the rate, for groups of subtasks (pooled)."""

    right: int
    n: int
    stderr: float | None = None

    @property
    def rate(self) -> float:
        return self.right / self.n

    @property
    def se(self) -> float:
        """Standard error of the proportion, with n - 1 as lm-eval has it, unless one is published."""
        if self.stderr is not None:
            return self.stderr
        return math.sqrt(self.rate * (1 - self.rate) / (self.n - 1))


def unpaired(first: Count, second: Count) -> Estimate:
    """z test of two proportions as if the documents were different ones, which overstates the uncertainty."""
    se = 100 * math.hypot(first.se, second.se)
    return _normal("item", "unpaired z", first.n, 100 * (first.rate - second.rate), se)


def macro_unpaired(first: Mapping[str, Count], second: Mapping[str, Count]) -> Estimate:
    """Difference of the unweighted averages over the same tasks, errors of independent tasks propagated."""
    tasks = list(first)
    difference = 100 * float(np.mean([first[task].rate - second[task].rate for task in tasks]))
    se = math.hypot(macro_se(first), macro_se(second))
    return _normal("item", "unpaired z", sum(count.n for count in first.values()), difference, se)


def macro_average(counts: Mapping[str, Count]) -> float:
    """Unweighted mean over tasks, in points."""
    return 100 * float(np.mean([count.rate for count in counts.values()]))


def macro_se(counts: Mapping[str, Count]) -> float:
    """Standard error of the average, in points."""
    return 100 * math.sqrt(sum(count.se**2 for count in counts.values())) / len(counts)


def _normal(level: str, test: str, n: int, difference: float, se: float) -> Estimate:
    if not se > 0:
        return Estimate(level, test, n, difference)
    z = difference / se
    p = float(2 * stats.norm.sf(abs(z)))
    return Estimate(level, test, n, difference, difference - _Z * se, difference + _Z * se, z, p, se)


def most_discordant(first: Count, second: Count) -> int | None:
    """The largest number of discordant documents, up to n, at which an exact McNemar test with this net difference has
    p < 0.05; None where no number does. With more, the unpublished answers cannot make a paired test significant.
    """
    net = abs(first.right - second.right)
    discordant = np.arange(max(net, 1) + (net == 0), first.n + 1, 2)  # net = won - lost, so the parity is fixed
    p = 2 * stats.binom.cdf((discordant - net) // 2, discordant, 0.5)
    significant = discordant[p < ALPHA]
    return int(significant.max()) if len(significant) else None


def over_tasks(differences: Sequence[float]) -> list[Estimate]:
    """Level task: do the differences generalise to new benchmarks? Paired t, Wilcoxon (two ways), sign, sign-flip."""
    values = np.asarray(differences, dtype=float)
    n, mean = len(values), float(np.mean(values))
    sd = float(np.std(values, ddof=1))
    found = [
        t_estimate("task", "paired t", n, mean, sd / math.sqrt(n), n - 1, components={"task_sd": sd}),
    ]
    for name, zeros in (("Wilcoxon, zeros dropped", "wilcox"), ("Wilcoxon, Pratt", "pratt")):
        method = _EXACT if n <= MOST_EXACT else "approx"
        result = stats.wilcoxon(values, zero_method=zeros, method=method) if values.any() else None
        found.append(Estimate("task", name, n, mean, **_outcome(result)))
    positive, negative = int(np.sum(values > 0)), int(np.sum(values < 0))
    p = float(stats.binomtest(positive, positive + negative).pvalue) if positive + negative else 1.0
    found.append(Estimate("task", "sign", n, mean, statistic=positive, p=p))
    if n <= MOST_EXACT:
        result = stats.permutation_test((values,), np.mean, permutation_type="samples", n_resamples=2**MOST_EXACT)
        found.append(Estimate("task", "sign-flip permutation", n, mean, **_outcome(result)))
    return found


def _outcome(result: Any) -> dict[str, float]:
    return {"statistic": float(result.statistic), "p": float(result.pvalue)} if result else {"statistic": 0.0, "p": 1.0}


def heterogeneity(differences: Sequence[float], errors: Sequence[float]) -> tuple[float, float]:
    """Cochran's Q of differences with their standard errors, and its chi-squared p: do the tasks disagree?"""
    weights = 1 / np.square(np.asarray(errors, dtype=float))
    values = np.asarray(differences, dtype=float)
    q = float(np.sum(weights * (values - np.average(values, weights=weights)) ** 2))
    return q, float(stats.chi2.sf(q, len(values) - 1))


def wins(
    first: Mapping[str, Count], second: Mapping[str, Count], perplexities: tuple[float, float] | None = None
) -> tuple:
    """Numbers of benchmarks won, tied and lost; a perplexity counts as one more, lower being better."""
    signs = [np.sign(first[task].right - second[task].right) for task in first]
    signs += [np.sign(perplexities[1] - perplexities[0])] if perplexities else []
    return tuple(int(sum(sign == wanted for sign in signs)) for wanted in (1, 0, -1))
