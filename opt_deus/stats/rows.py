"""Rows of significance.csv (contract): columns, families, corrections, verdicts."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
from statsmodels.stats.multitest import multipletests

from opt_deus.stats.estimates import Estimate, verdict

COLUMNS = [
    "family",
    "contrast",
    "level",
    "task",
    "split",
    "metric",
    "n",
    "estimate",
    "ci_low",
    "ci_high",
    "test",
    "statistic",
    "p",
    "p_adjusted",
    "correction",
    "mde",
    "equivalence_margin",
    "p_equivalence",
    "verdict",
]
_FROM_ESTIMATE = ["level", "n", "estimate", "ci_low", "ci_high", "test", "statistic", "p", "mde"]
MACRO = "macro"
MARGIN = 0.5  # points of accuracy; half a percent of perplexity
HEADLINE, EXPLORATORY = "headline", "exploratory"
_CORRECTIONS = {HEADLINE: ("holm", "holm"), EXPLORATORY: ("fdr_bh", "benjamini-hochberg")}


def described(estimate: Estimate, margin: float) -> dict[str, Any]:
    """The columns that follow from an estimate and the margin of equivalence."""
    return {
        **{key: getattr(estimate, key) for key in _FROM_ESTIMATE},
        "equivalence_margin": margin,
        "p_equivalence": estimate.p_equivalence(margin),
        "seed_sd": estimate.components.get("seed_sd", math.nan),
        "document_sd": estimate.components.get("document_sd", math.nan),
    }


def finished(records: list[dict[str, Any]], extra: list[str]) -> pd.DataFrame:
    """Records as a frame with p_adjusted, correction and verdict; rows without a p take no part in a correction."""
    columns = [*COLUMNS, *extra]
    if not records:
        return pd.DataFrame(columns=columns)
    table = pd.DataFrame(records).assign(p_adjusted=math.nan)
    test = table["test"].str.replace(r", seed \d+$", "", regex=True)
    for (family, _, _), group in table[table["p"].notna()].groupby(["family", "level", test]):
        table.loc[group.index, "p_adjusted"] = multipletests(group["p"], method=_CORRECTIONS[family][0])[1]
    table["correction"] = [_CORRECTIONS[family][1] for family in table["family"]]
    pairs = zip(table["p_adjusted"], table["p_equivalence"], strict=True)
    table["verdict"] = [verdict(p, equivalence) for p, equivalence in pairs]
    return table[columns]
