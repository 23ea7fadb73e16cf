"""One estimate with its uncertainty, and what follows from it: interval, detectable effect, equivalence, verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy import stats

NAN = math.nan
ALPHA = 0.05
POWER = 0.80
CONFIDENCE = 0.95
MINIMUM_SEEDS = 3  # below, a spread over seeds says nothing that could be believed

LEVELS = {
    "item": "these runs, new questions",
    "seed": "these questions, new runs",
    "item+seed": "new questions and new runs",
    "task": "new benchmarks",
}


@dataclass(frozen=True)
class Estimate:
    """A difference in points (or nats) with its standard error `se` on `df` degrees of freedom (inf: normal).

    `n` counts documents (item levels) or seeds (seed level). NaN means that the data cannot say.
    """

    level: str
    test: str
    n: int
    estimate: float
    ci_low: float = NAN
    ci_high: float = NAN
    statistic: float = NAN
    p: float = NAN
    se: float = NAN
    df: float = math.inf
    mde_floor: float = 0.0  # smallest difference that the test could ever call significant
    components: dict[str, float] = field(default_factory=dict)  # standard deviations by source of variation

    @property
    def mde(self) -> float:
        """Smallest true difference that a two-sided 5% test would find in 80% of such experiments."""
        if not self.se > 0:
            return self.mde_floor or NAN
        quantiles = stats.t.ppf(1 - ALPHA / 2, self.df) + stats.t.ppf(POWER, self.df)
        return max(float(quantiles * self.se), self.mde_floor)

    def p_equivalence(self, margin: float) -> float:
        """Two one-sided t tests (Schuirmann 1987) of |difference| >= margin; the larger p.

        Where no document differs at all there is no spread to test with: then it is the chance that a discordance of
        at least `margin` points shows in none of n documents.
        """
        if math.isnan(self.p):
            return NAN
        if not self.se > 0:
            return float((1 - margin / 100) ** self.n) if self.estimate == 0 else NAN
        distances = [(margin + self.estimate) / self.se, (margin - self.estimate) / self.se]
        return float(max(stats.t.sf(distance, self.df) for distance in distances))


def t_estimate(level: str, test: str, n: int, estimate: float, se: float, df: float, **more: object) -> Estimate:
    """An estimate with the t interval and p that its standard error gives."""
    if not se > 0:
        # No spread, so no interval: that nobody differed on n documents does not make the true difference 0. A zero
        # difference has p = 1; any other has nothing to be judged against.
        known = {"statistic": 0.0, "p": 1.0} if estimate == 0 else {}
        return Estimate(level, test, n, estimate, se=se, df=df, **known, **more)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, df)) * se
    statistic = estimate / se
    p = float(2 * stats.t.sf(abs(statistic), df))
    return Estimate(level, test, n, estimate, estimate - half, estimate + half, statistic, p, se, df, **more)


def paired_t(differences: np.ndarray, level: str = "item") -> Estimate:
    """Mean of paired differences, shape (n,), with a t interval on n - 1 degrees of freedom."""
    n = len(differences)
    estimate = float(np.mean(differences)) if n else NAN
    if n < 2:
        return Estimate(level, "paired t", n, estimate)
    se = float(np.std(differences, ddof=1) / math.sqrt(n))
    return t_estimate(level, "paired t", n, estimate, _clean(se, differences), n - 1)


def seed_t(differences: Sequence[float] | np.ndarray) -> Estimate:
    """Seed-level differences, shape (S,): t with S - 1 degrees of freedom; not testable below 3 seeds."""
    differences = np.asarray(differences, dtype=float)
    if len(differences) < MINIMUM_SEEDS:
        mean = float(differences.mean()) if len(differences) else NAN
        return Estimate("seed", "paired t", len(differences), mean)
    estimate = paired_t(differences, "seed")
    return Estimate(**{**estimate.__dict__, "components": {"seed_sd": float(np.std(differences, ddof=1))}})


def _clean(se: float, values: np.ndarray) -> float:
    """Exactly 0 where the spread is only rounding: 100 x (1/3) summed in two orders differs in the last digit."""
    return 0.0 if se < 1e-12 * max(1.0, float(np.max(np.abs(values)))) else se


def verdict(p_adjusted: float, p_equivalence: float, alpha: float = ALPHA) -> str:
    """difference, equivalent, inconclusive or not_testable."""
    if math.isnan(p_adjusted):
        return "not_testable"
    if p_adjusted < alpha:
        return "difference"
    return "equivalent" if p_equivalence < alpha else "inconclusive"
