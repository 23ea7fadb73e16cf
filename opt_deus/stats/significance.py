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
from statsmodels.stats.multitest import multipletests

from opt_deus.stats.contrasts import Contrast, arms_of, contrasts_of
from opt_deus.stats.crossed import crossed_difference
from opt_deus.stats.estimates import Estimate, paired_t, seed_t, verdict
from opt_deus.stats.items import RESAMPLES, macro_difference, mcnemar
from opt_deus.stats.matching import PERPLEXITY_TASK, Scores, complete, differences, likelihoods, scores

COLUMNS = (
    "family contrast level task split metric n estimate ci_low ci_high test statistic p p_adjusted correction mde "
    "equivalence_margin p_equivalence verdict"
).split()
MACRO = "macro"
BASE_STAGE = "base"  # the unexpanded model's own scores: no stage of an arm
LOG_PERPLEXITY = "log_perplexity"
SPLITS = ("all", "select", "confirm")
MARGIN = 0.5  # points of accuracy; half a percent of perplexity
HEADLINE, EXPLORATORY = "headline", "exploratory"
_CORRECTIONS = {HEADLINE: ("holm", "holm"), EXPLORATORY: ("fdr_bh", "benjamini-hochberg")}

Answers = tuple[Scores, tuple[pd.DataFrame, pd.DataFrame] | None]  # of one stage and split: see matching.py


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
    stages = stages_of(samples)
    contrasts = contrasts_of(arms_of(samples)) if stages else []
    rows, refused = [], []
    for stage in stages:
        for split in SPLITS if stage == stages[-1] else SPLITS[:1]:
            answers = scores(samples, stage, split, metric), likelihoods(samples, stage, split)
            for contrast in contrasts:
                try:
                    rows += contrast_rows(answers, contrast, stage, split, metric, resamples)
                except ValueError as error:
                    refused.append(f"{contrast.name}, stage {stage}, split {split}: {error}")
    rows.sort(key=lambda row: contrasts.index(row.contrast))
    last_stage = stages[-1] if stages else None
    return Comparison(tabulate(rows, last_stage, margin), tuple(refused), last_stage)


def stages_of(samples: pd.DataFrame) -> list[str]:
    """Stages in the order of training: initial, cpt-<fraction>, cpt, sft-<fraction>, sft."""
    ranks = {"initial": 0, "cpt": 1, "sft": 2}

    def order(stage: str) -> tuple:
        fraction = re.fullmatch(r"(cpt|sft)-(\d*\.?\d+)", stage)
        return (ranks[fraction[1]], float(fraction[2])) if fraction else (ranks.get(stage, 3), math.inf), stage

    return sorted(set(samples["stage"]) - {BASE_STAGE}, key=order)


def contrast_rows(
    answers: Answers, contrast: Contrast, stage: str, split: str, metric: str, resamples: int = RESAMPLES
) -> list[Row]:
    """The estimates of one contrast at one stage. Raises ValueError where arms answered different documents."""
    by_task, losses = answers
    estimates = [*_macro(by_task, contrast, resamples), *_per_task(by_task, contrast)]
    found = [Row(contrast, stage, split, task, metric, estimate, seeds) for task, estimate, seeds in estimates]
    for estimate, seeds in _perplexity(losses, contrast):
        found.append(Row(contrast, stage, split, PERPLEXITY_TASK, LOG_PERPLEXITY, estimate, seeds))
    return found


def _macro(by_task: Scores, contrast: Contrast, resamples: int) -> Iterator[tuple[str, Estimate, tuple[int, ...]]]:
    """Item, seed and item+seed level of the macro average."""
    matched = [differences(frame, contrast.weights, task) for task, frame in by_task.items()]
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
    for task, frame in by_task.items():
        values, seeds = differences(frame, contrast.weights, task)
        if not seeds:
            continue
        yield task, paired_t(values.mean(axis=0)), tuple(seeds)
        yield task, crossed_difference([values]), tuple(seeds)
        if sorted(contrast.weights.values()) != [-1.0, 1.0]:
            continue
        first, second = sorted(contrast.weights, key=contrast.weights.get, reverse=True)
        for seed in seeds:
            answers = [complete(frame, arm, [seed], task)[0] > 0 for arm in (first, second)]
            estimate = mcnemar(*answers)
            yield task, replace(estimate, test=f"{estimate.test}, seed {seed}"), (seed,)


def _perplexity(frames: tuple | None, contrast: Contrast) -> Iterator[tuple[Estimate, tuple[int, ...]]]:
    """Log perplexity, nats per token, first minus second (below 0: the first is better).

    A ratio of sums over documents, so its uncertainty comes from linearised values (Cochran 1977, chapter 6):
    r + (d - r t) / mean(t) with d a document's loss difference, t its tokens and r the ratio; their mean is r.
    """
    if frames is None:
        return
    losses, tokens = -frames[0], frames[1]
    values, seeds = differences(losses, contrast.weights, PERPLEXITY_TASK)
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
        estimate, log_scale = row.estimate, row.metric == LOG_PERPLEXITY
        this_margin = margin / 100 if log_scale else margin
        last = row.stage == last_stage
        headline = row.contrast.headline and row.task == MACRO and row.split == "all" and last
        records.append(
            {
                "family": HEADLINE if headline else EXPLORATORY,
                "contrast": row.contrast.name if last else row.contrast.at(row.stage),
                "level": estimate.level,
                "task": row.task,
                "split": row.split,
                "metric": row.metric,
                **{key: getattr(estimate, key) for key in "n estimate ci_low ci_high test statistic p mde".split()},
                "equivalence_margin": this_margin,
                "p_equivalence": estimate.p_equivalence(this_margin),
                "stage": row.stage,
                "kind": row.contrast.kind,
                "factor": row.contrast.factor,
                "num_seeds": len(row.seeds),
                "seed_sd": estimate.components.get("seed_sd", math.nan),
                "document_sd": estimate.components.get("document_sd", math.nan),
            }
        )
    extra = "stage kind factor num_seeds seed_sd document_sd".split()
    if not records:
        return pd.DataFrame(columns=[*COLUMNS, *extra])
    return _adjusted(pd.DataFrame(records))[[*COLUMNS, *extra]]


def _adjusted(table: pd.DataFrame) -> pd.DataFrame:
    """Adds p_adjusted, correction and verdict; rows without a p take no part."""
    table["p_adjusted"] = math.nan
    test = table["test"].str.replace(r", seed \d+$", "", regex=True)
    for (family, _, _), group in table[table["p"].notna()].groupby(["family", "level", test]):
        table.loc[group.index, "p_adjusted"] = multipletests(group["p"], method=_CORRECTIONS[family][0])[1]
    table["correction"] = [_CORRECTIONS[family][1] for family in table["family"]]
    pairs = zip(table["p_adjusted"], table["p_equivalence"], strict=True)
    table["verdict"] = [verdict(p, equivalence) for p, equivalence in pairs]
    return table
