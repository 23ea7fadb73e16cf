"""Means of arms and of single runs, for tables and curves."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from scipy import stats as distributions

from opt_deus.stats.contrasts import arms_of
from opt_deus.stats.estimates import CONFIDENCE, NAN
from opt_deus.stats.matching import PERPLEXITY_TASK, Answers, likelihoods, scores
from opt_deus.stats.rows import MACRO
from opt_deus.stats.significance import BASE_STAGE, stages_of


def arm_means(samples: pd.DataFrame, *, metric: str = "acc") -> pd.DataFrame:
    """Every arm at every stage, the base itself first (stage "base"): means with item-level 95% intervals.

    Columns: arm, align, zero_init, position, context, stage, task, metric, n (documents), num_seeds, mean, ci_low,
    ci_high, seed_sd (standard deviation of the seeds' own means). Accuracy in points; task "heldout": token perplexity.
    """
    arms = arms_of(samples).drop(columns="rank") if len(samples) else pd.DataFrame()
    rows = []
    for stage in [BASE_STAGE, *stages_of(samples)]:
        by_task, held_out = scores(samples, stage, "all", metric), likelihoods(samples, stage, "all")
        for arm in arms.to_dict("records"):
            found = {task: _own(answers, arm["arm"]) for task, answers in by_task.items()}
            found = {task: values for task, values in found.items() if values is not None}
            means = [(task, metric, _mean([values])) for task, values in found.items()]
            if found and len({len(values) for values in found.values()}) == 1:
                means.append((MACRO, metric, _mean(list(found.values()))))
            if held_out is not None:
                means.append((PERPLEXITY_TASK, "perplexity", _perplexity(held_out, arm["arm"])))
            rows += [
                {**arm, "stage": stage, "task": task, "metric": name, **mean} for task, name, mean in means if mean
            ]
    return pd.DataFrame(rows)


def seed_means(samples: pd.DataFrame, *, metric: str = "acc") -> pd.DataFrame:
    """Macro average (points) of every single run: arm, align, zero_init, position, context, stage, seed, mean."""
    arms = arms_of(samples).drop(columns="rank") if len(samples) else pd.DataFrame()
    rows = []
    for stage in stages_of(samples):
        by_task = scores(samples, stage, "all", metric)
        for arm in arms.to_dict("records"):
            found = [_own(answers, arm["arm"]) for answers in by_task.values()]
            if found and all(values is not None and len(values) == len(found[0]) for values in found):
                means = np.mean([values.mean(axis=1) for values in found], axis=0)
                seeds = next(iter(by_task.values())).seeds([arm["arm"]])
                rows += [
                    {**arm, "stage": stage, "seed": seed, "mean": mean} for seed, mean in zip(seeds, means, strict=True)
                ]
    return pd.DataFrame(rows)


def _own(answers: Answers, arm: str) -> np.ndarray | None:
    """Shape (S, n): the documents that this arm answered, for here arms are not compared. None where it has none, or
    where its seeds answered different documents."""
    values = answers.of(arm, answers.seeds([arm]))
    values = values[:, ~np.isnan(values).all(axis=0)]
    return values if values.size and not np.isnan(values).any() else None


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


def _perplexity(answers: tuple[Answers, Answers], arm: str) -> dict[str, float] | None:
    """Token perplexity: the interval is that of its logarithm (ratio of sums over documents, linearised)."""
    likelihood, tokens = (_own(each, arm) for each in answers)
    if likelihood is None or tokens is None:
        return None
    losses = -likelihood
    ratios = losses.sum(axis=1) / tokens.sum(axis=1)
    linear = ratios.mean() + (losses - ratios[:, None] * tokens).mean(axis=0) / tokens.mean()
    n = len(linear)
    half = _quantile(n - 1) * float(linear.std(ddof=1)) / math.sqrt(n) if n > 1 else NAN
    mean = float(ratios.mean())
    return {
        "n": n,
        "num_seeds": len(ratios),
        "mean": math.exp(mean),
        "ci_low": math.exp(mean - half),
        "ci_high": math.exp(mean + half),
        "seed_sd": float(np.exp(ratios).std(ddof=1)) if len(ratios) > 1 else NAN,
    }


def _quantile(df: int) -> float:
    return float(distributions.t.ppf((1 + CONFIDENCE) / 2, df)) if df > 0 else NAN
