"""Rows -> scores per task and split."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from opt_deus.evaluation.definitions import HELDOUT

UNITS = {"tokens": "perplexity", "words": "word_perplexity", "bytes": "byte_perplexity"}


def summarise(rows: pd.DataFrame) -> dict[str, dict[str, dict[str, Any]]]:
    """{task: {"select" | "confirm" | "all": {metric: mean, "<metric>_stderr", "stderr" of the first metric, "n"}}}.

    Perplexity tasks give exp(-sum of loglikelihoods / sum of units) with a standard error by the delta method.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for task, group in rows.groupby("task", sort=False):
        parts = {"all": group, **dict(iter(group.groupby("split")))}
        found[str(task)] = {name: _scores(parts[name]) for name in ("select", "confirm", "all") if name in parts}
    return found


def _scores(rows: pd.DataFrame) -> dict[str, Any]:
    documents = rows.pivot(index=["doc_hash", "doc_id"], columns="metric", values="value")
    metrics = list(dict.fromkeys(rows["metric"]))
    if "loglikelihood" in metrics:
        values = {UNITS[unit]: _perplexity(documents, unit) for unit in metrics if unit in UNITS}
    else:
        values = {metric: (documents[metric].mean(), documents[metric].sem()) for metric in metrics}
    scores: dict[str, Any] = {}
    for metric, (value, error) in values.items():
        scores[metric] = float(value)
        scores[f"{metric}_stderr"] = None if math.isnan(error) else float(error)
    first = next(iter(values))
    return {**scores, "stderr": scores[f"{first}_stderr"], "n": len(documents)}


def _perplexity(documents: pd.DataFrame, unit: str) -> tuple[float, float]:
    """exp of a ratio of sums over documents, and its standard error."""
    rate = -documents["loglikelihood"].sum() / documents[unit].sum()
    residuals = -documents["loglikelihood"] - rate * documents[unit]
    error = residuals.sem() / documents[unit].mean()
    return math.exp(rate), math.exp(rate) * error


def perplexity(rows: pd.DataFrame) -> float:
    """Token perplexity of the held-out documents: exp(-sum of loglikelihoods / sum of tokens)."""
    own = rows[rows["task"] == HELDOUT]
    sums = own.groupby("metric")["value"].sum()
    return math.exp(-sums["loglikelihood"] / sums["tokens"])
