"""All contrasts of a grid at all levels: the rows of significance.csv (contract), unrounded.

Families. "headline": the macro average of both splits after the last stage, for ot - avg within each zero_init and
their interaction; Holm over these, within each level. "exploratory": everything else; Benjamini-Hochberg within each
level and test. p_equivalence and mde are for one comparison and not adjusted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from opt_deus.stats.contrasts import Contrast, arms_of, contrasts_of
from opt_deus.stats.crossed import crossed_difference
from opt_deus.stats.estimates import Estimate, paired_t, seed_t
from opt_deus.stats.items import RESAMPLES, macro_difference, mcnemar
from opt_deus.stats.matching import PERPLEXITY_TASK, Answers, Scores, complete, differences, likelihoods, scores
from opt_deus.stats.rows import EXPLORATORY, HEADLINE, MACRO, MARGIN, described, finished

BASE_STAGE = "base"  # the unexpanded model's own scores: no stage of an arm
LOG_PERPLEXITY = "log_perplexity"
SPLITS = ("all", "select", "confirm")

StageAnswers = tuple[Scores, tuple[Answers, Answers] | None]  # scores and likelihoods of one stage and split


@dataclass(frozen=True)
class Row:
    """One estimate and what it is about."""

    contrast: Contrast
    stage: str
    split: str
    task: str
    metric: str
    estimate: Estimate
    seeds: tuple[int, ...]  # one seed for a test within a single run


@dataclass(frozen=True)
class Comparison:
    """`table`: rows of significance.csv plus stage, kind, factor, num_seeds and the spreads by source of variation.

    `refused`: which contrasts are missing and why.
    """

    table: pd.DataFrame
    refused: tuple[str, ...]
    last_stage: str | None


def significance(
    samples: pd.DataFrame, *, metric: str = "acc", margin: float = MARGIN, resamples: int = RESAMPLES
) -> Comparison:
    """Every contrast at every stage; the splits apart only after the last stage. Raises nothing for a partial grid."""
    stages, last_stage = stages_of(samples), last_stage_of(samples, metric)
    contrasts = contrasts_of(arms_of(samples)) if stages else []
    rows, refused = [], []
    for stage in stages:
        for split in SPLITS if stage == last_stage else SPLITS[:1]:
            answers = scores(samples, stage, split, metric), likelihoods(samples, stage, split)
            for contrast in contrasts:
                try:
                    rows += contrast_rows(answers, contrast, stage, split, metric, resamples)
                except ValueError as error:
                    refused.append(f"{contrast.name}, stage {stage}, split {split}: {error}")
    rows.sort(key=lambda row: contrasts.index(row.contrast))
    return Comparison(tabulate(rows, last_stage, margin), tuple(refused), last_stage)


def stages_of(samples: pd.DataFrame) -> list[str]:
    """Stages in the order of training: initial, cpt-<fraction>, cpt, sft-<fraction>, sft."""
    ranks = {"initial": 0, "cpt": 1, "sft": 2}

    def order(stage: str) -> tuple:
        fraction = re.fullmatch(r"(cpt|sft)-(\d*\.?\d+)", stage)
        return (ranks[fraction[1]], float(fraction[2])) if fraction else (ranks.get(stage, 3), math.inf), stage

    return sorted(set(samples["stage"]) - {BASE_STAGE}, key=order)


def last_stage_of(samples: pd.DataFrame, metric: str) -> str | None:
    """The last stage with benchmarks; where none was scored, the last with held-out perplexity."""
    scored = samples[(samples["task"] != PERPLEXITY_TASK) & (samples["metric"] == metric)]
    return next((stages[-1] for each in (scored, samples) if (stages := stages_of(each))), None)


def contrast_rows(
    answers: StageAnswers, contrast: Contrast, stage: str, split: str, metric: str, resamples: int = RESAMPLES
) -> list[Row]:
    """The estimates of one contrast at one stage. Raises ValueError where arms answered different documents."""
    by_task, losses = answers
    by_task = {task: own for task, each in by_task.items() if (own := each.among(contrast.weights)).documents}
    losses = losses and tuple(each.among(contrast.weights) for each in losses)
    estimates = [*_macro(by_task, contrast, resamples), *_per_task(by_task, contrast)]
    found = [Row(contrast, stage, split, task, metric, estimate, seeds) for task, estimate, seeds in estimates]
    for estimate, seeds in _perplexity(losses, contrast):
        found.append(Row(contrast, stage, split, PERPLEXITY_TASK, LOG_PERPLEXITY, estimate, seeds))
    return found


def _macro(by_task: Scores, contrast: Contrast, resamples: int) -> Iterator[tuple[str, Estimate, tuple[int, ...]]]:
    """Item, seed and item+seed level of the macro average."""
    matched = [differences(answers, contrast.weights, task) for task, answers in by_task.items()]
    if not any(seeds for _, seeds in matched):
        return
    for (_, seeds), task in zip(matched, by_task, strict=True):
        if seeds != matched[0][1]:
            raise ValueError(f"task {task}: answered with seeds {seeds}, the other tasks with {matched[0][1]}.")
    strata, seeds = [values for values, _ in matched], tuple(matched[0][1])
    yield MACRO, macro_difference([values.mean(axis=0) for values in strata], resamples), seeds
    yield MACRO, seed_t(np.mean([values.mean(axis=1) for values in strata], axis=0)), seeds
    yield MACRO, crossed_difference(strata), seeds


def _per_task(by_task: Scores, contrast: Contrast) -> Iterator[tuple[str, Estimate, tuple[int, ...]]]:
    """Per task the paired t over documents of seed means, item+seed, and for two arms every seed's exact McNemar."""
    for task, answers in by_task.items():
        values, seeds = differences(answers, contrast.weights, task)
        if not seeds:
            continue
        yield task, paired_t(values.mean(axis=0)), tuple(seeds)
        yield task, crossed_difference([values]), tuple(seeds)
        if sorted(contrast.weights.values()) != [-1.0, 1.0]:
            continue
        first, second = sorted(contrast.weights, key=contrast.weights.get, reverse=True)
        for seed in seeds:
            right = [complete(answers, arm, [seed], task)[0] > 0 for arm in (first, second)]
            estimate = mcnemar(*right)
            yield task, replace(estimate, test=f"{estimate.test}, seed {seed}"), (seed,)


def _perplexity(
    answers: tuple[Answers, Answers] | None, contrast: Contrast
) -> Iterator[tuple[Estimate, tuple[int, ...]]]:
    """Log perplexity, nats per token, first minus second (below 0: the first is better).

    A ratio of sums over documents, so its uncertainty comes from linearised values (Cochran 1977, chapter 6):
    r + (d - r t) / mean(t) with d a document's loss difference, t its tokens and r the ratio; their mean is r.
    """
    if answers is None:
        return
    likelihood, tokens = answers
    values, seeds = differences(likelihood, contrast.weights, PERPLEXITY_TASK)
    values = -values
    if not seeds:
        return
    counts = np.concatenate([complete(tokens, arm, seeds, PERPLEXITY_TASK) for arm in contrast.weights])
    if (counts != counts[0]).any():
        raise ValueError(f"task {PERPLEXITY_TASK}: the arms counted different tokens in the same documents.")
    ratios = values.sum(axis=1, keepdims=True) / counts[0].sum()
    linear = ratios + (values - ratios * counts[0]) / counts[0].mean()
    yield paired_t(linear.mean(axis=0)), tuple(seeds)
    yield seed_t(ratios[:, 0]), tuple(seeds)
    yield crossed_difference([linear]), tuple(seeds)


def tabulate(rows: list[Row], last_stage: str | None, margin: float) -> pd.DataFrame:
    """The rows as a frame, with corrections and verdicts. Contrasts before the last stage name their stage."""
    records = []
    for row in rows:
        last = row.stage == last_stage
        headline = row.contrast.headline and row.task == MACRO and row.split == SPLITS[0] and last
        records.append(
            {
                "family": HEADLINE if headline else EXPLORATORY,
                "contrast": row.contrast.name if last else row.contrast.at(row.stage),
                "task": row.task,
                "split": row.split,
                "metric": row.metric,
                **described(row.estimate, margin / 100 if row.metric == LOG_PERPLEXITY else margin),
                "stage": row.stage,
                "kind": row.contrast.kind,
                "factor": row.contrast.factor,
                "num_seeds": len(row.seeds),
            }
        )
    return finished(records, ["stage", "kind", "factor", "num_seeds", "seed_sd", "document_sd"])
