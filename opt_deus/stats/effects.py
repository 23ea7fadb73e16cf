"""Tidy effects for plots and tables, and one named comparison for notebooks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from opt_deus.stats.contrasts import Contrast, arms_of
from opt_deus.stats.matching import PERPLEXITY_TASK, likelihoods, scores
from opt_deus.stats.rows import MACRO, MARGIN
from opt_deus.stats.significance import SPLITS, contrast_rows, last_stage_of, tabulate

EFFECT_COLUMNS = [
    "kind",
    "factor",
    "contrast",
    "stage",
    "task",
    "metric",
    "split",
    "level",
    "n",
    "num_seeds",
    "estimate",
    "ci_low",
    "ci_high",
    "p",
    "p_adjusted",
    "verdict",
    "seed_sd",
    "document_sd",
]


def effects(table: pd.DataFrame) -> pd.DataFrame:
    """Simple effects, main effects and interactions of the averages and of perplexity, at all levels and stages."""
    averages = table["task"].isin([MACRO, PERPLEXITY_TASK]) & (table["split"] == SPLITS[0])
    return table.loc[averages, EFFECT_COLUMNS].sort_values(["kind", "factor"], kind="stable", ignore_index=True)


def compare(
    samples: pd.DataFrame,
    first: str | Mapping[str, Any],
    second: str | Mapping[str, Any],
    *,
    stage: str | None = None,
    split: str = "all",
    metric: str = "acc",
    margin: float = MARGIN,
) -> pd.DataFrame:
    """One arm minus another, at all levels, for a notebook.

    >>> samples = pandas.read_parquet("multirun_reports/review/samples.parquet")
    >>> compare(samples, {"align": "ot", "zero_init": True}, {"align": "avg", "zero_init": True})

    first, second: an arm's name or factors that only one arm has. stage: the last one by default. Columns as in
    significance.csv. Raises ValueError for an unknown arm, and naming documents that an arm did not answer.
    """
    arms = arms_of(samples)
    names = [_find(arms, wanted) for wanted in (first, second)]
    stage = stage or last_stage_of(samples, metric)
    contrast = Contrast((f"{names[0]} - {names[1]}",), "simple", "arm", {names[0]: 1.0, names[1]: -1.0})
    answers = scores(samples, stage, split, metric), likelihoods(samples, stage, split)
    return tabulate(contrast_rows(answers, contrast, stage, split, metric), stage, margin)


def _find(arms: pd.DataFrame, wanted: str | Mapping[str, Any]) -> str:
    factors = {"arm": wanted} if isinstance(wanted, str) else dict(wanted)
    unknown = [factor for factor in factors if factor not in arms.columns]
    if unknown:
        raise ValueError(f"{unknown[0]}: no such factor; choose from align, zero_init, position, context, arm.")
    found = arms.loc[np.logical_and.reduce([arms[factor] == value for factor, value in factors.items()]), "arm"]
    if len(found) != 1:
        raise ValueError(f"{wanted}: fits {len(found)} arms; the arms are {', '.join(arms['arm'])}.")
    return found.iloc[0]
