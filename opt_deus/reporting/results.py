"""Everything that a report shows, computed once by stats and read from records."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pandas as pd

from opt_deus import stats
from opt_deus.reporting.reading import Sweep

PRIMARY_LEVELS = ["item+seed", "item"]  # the first that can be tested is the one that answers


@dataclass(frozen=True)
class Results:
    sweep: Sweep
    metric: str
    comparison: stats.Comparison
    means: pd.DataFrame  # stats.arm_means, with short names
    seed_means: pd.DataFrame  # stats.seed_means, with short names

    @property
    def table(self) -> pd.DataFrame:
        return self.comparison.table

    def means_of(self, task: str, stage: str | None) -> pd.DataFrame:
        """Rows of arm_means of one task and stage; empty where there are none."""
        if self.means.empty:
            return self.means
        return self.means[(self.means["task"] == task) & (self.means["stage"] == stage)]


def compute(sweep: Sweep) -> Results:
    metric = metric_of(sweep)
    means, seed_means = (each(sweep.samples, metric=metric) for each in (stats.arm_means, stats.seed_means))
    for frame in (means, seed_means):
        if len(frame):
            frame["arm"] = frame["arm"].map(sweep.short)
    return Results(sweep, metric, stats.significance(sweep.samples, metric=metric), means, seed_means)


def primary_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per contrast: the first primary level that can be tested."""
    ranked = rows[rows["level"].isin(PRIMARY_LEVELS)].copy()
    if ranked.empty:
        return ranked
    ranked["rank"] = ranked["level"].map(PRIMARY_LEVELS.index) + len(PRIMARY_LEVELS) * ranked["p"].isna()
    chosen = ranked.loc[ranked.groupby("contrast", sort=False)["rank"].idxmin()]
    return chosen.drop(columns="rank")


def metric_of(sweep: Sweep) -> str:
    """The macro average's metric that most cells name in their evaluation settings."""
    named = [((record.get("config") or {}).get("eval") or {}).get("metric") for record in sweep.records.values()]
    return Counter(metric for metric in named if metric).most_common(1)[0][0] if any(named) else "acc"
