"""Tidy effects for plots and tables, means of arms, and one named comparison for notebooks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats as distributions

from opt_deus.stats.contrasts import Contrast, arms_of
from opt_deus.stats.estimates import CONFIDENCE, NAN
from opt_deus.stats.matching import PERPLEXITY_TASK, complete, likelihoods, scores, shared_seeds
from opt_deus.stats.significance import BASE_STAGE, MACRO, MARGIN, SPLITS, contrast_rows, stages_of, tabulate

EFFECT_COLUMNS = (
    "kind factor contrast stage task metric split level n num_seeds estimate ci_low ci_high p p_adjusted verdict "
    "seed_sd document_sd"
).split()


def effects(table: pd.DataFrame) -> pd.DataFrame:
    """Simple effects, main effects and interactions of the averages and of perplexity, at all levels and stages."""
    averages = table["task"].isin([MACRO, PERPLEXITY_TASK]) & (table["split"] == SPLITS[0])
    return table.loc[averages, EFFECT_COLUMNS].sort_values(["kind", "factor"], kind="stable", ignore_index=True)


def arm_means(samples: pd.DataFrame, *, metric: str = "acc") -> pd.DataFrame:
    """Every arm at every stage, the base itself first (stage "base"): mean over documents of seed means with an item-level 95% interval.

    Columns: arm, align, zero_init, position, context, stage, task, metric, n (documents), num_seeds, mean, ci_low,
    ci_high, seed_sd (standard deviation of the seeds' own means). Accuracy in points; task "heldout": token perplexity.
    """
    arms = arms_of(samples).drop(columns="rank") if len(samples) else pd.DataFrame()
    rows = []
    for stage in [BASE_STAGE, *stages_of(samples)]:
        by_task = scores(samples, stage, "all", metric)
        losses = likelihoods(samples, stage, "all")
        for arm in arms.to_dict("records"):
            shared = {**arm, "stage": stage}
            values = {task: _answers(frame, arm["arm"], task) for task, frame in by_task.items()}
            values = {task: answers for task, answers in values.items() if answers is not None}
            rows += [{**shared, "task": task, "metric": metric, **_mean([each])} for task, each in values.items()]
            if values and len({len(each) for each in values.values()}) == 1:
                rows.append({**shared, "task": MACRO, "metric": metric, **_mean(list(values.values()))})
            if losses is not None and shared_seeds(losses[0], [arm["arm"]]):
                rows.append(
                    {**shared, "task": PERPLEXITY_TASK, "metric": "perplexity", **_perplexity(losses, arm["arm"])}
                )
    return pd.DataFrame(rows)


def seed_means(samples: pd.DataFrame, *, metric: str = "acc") -> pd.DataFrame:
    """Macro average (points) of every single run: arm, align, zero_init, position, context, stage, seed, mean."""
    arms = arms_of(samples).drop(columns="rank") if len(samples) else pd.DataFrame()
    rows = []
    for stage in stages_of(samples):
        by_task = scores(samples, stage, "all", metric)
        for arm in arms.to_dict("records"):
            answers = [_answers(frame, arm["arm"], task) for task, frame in by_task.items()]
            if answers and all(each is not None and len(each) == len(answers[0]) for each in answers):
                seeds = shared_seeds(next(iter(by_task.values())), [arm["arm"]])
                means = np.mean([each.mean(axis=1) for each in answers], axis=0)
                rows += [{**arm, "stage": stage, "seed": seed, "mean": mean} for seed, mean in zip(seeds, means, strict=True)]
    return pd.DataFrame(rows)


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
    stage = stage or stages_of(samples)[-1]
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


def _answers(frame: pd.DataFrame, arm: str, task: str) -> np.ndarray | None:
    """Shape (S, n); only documents that this arm answered, for here arms are not compared."""
    seeds = shared_seeds(frame, [arm])
    if not seeds:
        return None
    own = frame.dropna(subset=[(arm, seed) for seed in seeds], how="all")
    try:
        return complete(own, arm, seeds, task)
    except ValueError:
        return None  # seeds answered different documents: no common mean


def _mean(tasks: list[np.ndarray]) -> dict[str, float]:
    seed_means = np.mean([values.mean(axis=1) for values in tasks], axis=0)
    documents = [values.mean(axis=0) for values in tasks]
    counts = [len(values) for values in documents]
    mean = float(seed_means.mean())
    se = NAN
    if min(counts) > 1:
        parts = zip(documents, counts, strict=True)
        se = math.sqrt(sum(values.var(ddof=1) / count for values, count in parts)) / len(tasks)
    half = _quantile(sum(counts) - len(counts)) * se
    spread = float(seed_means.std(ddof=1)) if len(seed_means) > 1 else NAN
    return {
        "n": sum(counts),
        "num_seeds": len(seed_means),
        "mean": mean,
        "ci_low": mean - half,
        "ci_high": mean + half,
        "seed_sd": spread,
    }


def _perplexity(frames: tuple[pd.DataFrame, pd.DataFrame], arm: str) -> dict[str, float]:
    """Token perplexity: the interval is that of its logarithm (ratio of sums over documents, linearised)."""
    seeds = shared_seeds(frames[0], [arm])
    columns = [(arm, seed) for seed in seeds]
    losses = -frames[0][columns].dropna().to_numpy(dtype=float).T
    tokens = frames[1][columns].dropna().to_numpy(dtype=float).T
    ratios = losses.sum(axis=1) / tokens.sum(axis=1)
    linear = ratios.mean() + (losses - ratios[:, None] * tokens).mean(axis=0) / tokens.mean()
    n = len(linear)
    half = _quantile(n - 1) * float(linear.std(ddof=1)) / math.sqrt(n) if n > 1 else NAN
    mean = float(ratios.mean())
    return {
        "n": n,
        "num_seeds": len(seeds),
        "mean": math.exp(mean),
        "ci_low": math.exp(mean - half),
        "ci_high": math.exp(mean + half),
        "seed_sd": float(np.exp(ratios).std(ddof=1)) if len(seeds) > 1 else NAN,
    }


def _quantile(df: int) -> float:
    return float(distributions.t.ppf((1 + CONFIDENCE) / 2, df)) if df > 0 else NAN
