"""Rows of samples -> arrays matched by (task, document hash). A document that an arm lacks is refused by name.

Samples: a frame with the columns of samples.parquet (contract): cell, arm, align, zero_init, position, seed, overrides,
stage, task, split, doc_id, doc_hash, metric, value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

PERPLEXITY_TASK = "heldout"
LIKELIHOOD, TOKENS = "loglikelihood", "tokens"
POINTS = 100.0
_NAMED = 5  # documents named in a refusal


@dataclass(frozen=True)
class Answers:
    """Values of one task: shape (documents, columns), NaN where missing; columns: (arm, seed) -> column."""

    documents: list[str]
    columns: dict[tuple[str, int], int]
    values: np.ndarray

    def seeds(self, arms: Iterable[str]) -> list[int]:
        """Seeds for which every one of these arms has answers."""
        found = [{seed for name, seed in self.columns if name == arm} for arm in arms]
        return sorted(set.intersection(*found)) if found else []

    def of(self, arm: str, seeds: list[int]) -> np.ndarray:
        """One arm's values, shape (S, documents), NaN where missing."""
        return self.values[:, [self.columns[arm, seed] for seed in seeds]].T

    def among(self, arms: Iterable[str]) -> Answers:
        """Without the documents that none of these arms answered."""
        places = [place for (arm, _), place in self.columns.items() if arm in set(arms)]
        kept = ~np.isnan(self.values[:, places]).all(axis=1)
        documents = [document for document, keep in zip(self.documents, kept, strict=True) if keep]
        return Answers(documents, self.columns, self.values[kept])


Scores = dict[str, Answers]


def scores(samples: pd.DataFrame, stage: str, split: str, metric: str) -> Scores:
    """Accuracy of every document in points (0 or 100), by task."""
    rows = _selected(samples, stage, split)
    rows = rows[(rows["metric"] == metric) & (rows["task"] != PERPLEXITY_TASK)]
    return {str(task): _answers(group, POINTS) for task, group in rows.groupby("task", sort=True)}


def likelihoods(samples: pd.DataFrame, stage: str, split: str) -> tuple[Answers, Answers] | None:
    """Held-out log-likelihood (nats) and tokens of every document; None without any."""
    rows = _selected(samples, stage, split)
    rows = rows[rows["task"] == PERPLEXITY_TASK]
    frames = [rows[rows["metric"] == metric] for metric in (LIKELIHOOD, TOKENS)]
    return None if any(frame.empty for frame in frames) else (_answers(frames[0]), _answers(frames[1]))


def differences(answers: Answers, weights: Mapping[str, float], task: str) -> tuple[np.ndarray, list[int]]:
    """The weighted sum of arms for every document: shape (S, n), and the S seeds that all these arms have.

    Documents in a fixed order, so that nothing depends on the order of rows. Raises ValueError naming documents that
    one of the arms lacks.
    """
    seeds = answers.seeds(weights)
    parts = [weight * complete(answers, arm, seeds, task) for arm, weight in weights.items()]
    return np.sum(parts, axis=0), seeds


def complete(answers: Answers, arm: str, seeds: list[int], task: str) -> np.ndarray:
    """The values of one arm, shape (S, n). Raises ValueError naming missing documents."""
    values = answers.of(arm, seeds)
    for seed, lacking in zip(seeds, np.isnan(values), strict=True):
        if lacking.any():
            documents = [answers.documents[place] for place in np.flatnonzero(lacking)]
            more = f" and {len(documents) - _NAMED} more" if documents[_NAMED:] else ""
            raise ValueError(
                f"task {task}: arm {arm}, seed {seed} has no answer to {len(documents)} documents that others answered "
                f"({', '.join(documents[:_NAMED])}{more}); arms are compared on the same documents, so evaluate them "
                "with the same settings."
            )
    return values


def _selected(samples: pd.DataFrame, stage: str, split: str) -> pd.DataFrame:
    rows = samples[samples["stage"] == stage]
    return rows if split == "all" else rows[rows["split"] == split]


def _answers(rows: pd.DataFrame, unit: float = 1.0) -> Answers:
    """Rows of one task and metric as a table. Documents of equal content, which real benchmarks have, are told apart
    by their order. Raises ValueError where two cells share an arm and seed."""
    cells = rows.groupby(["arm", "seed"])["cell"].nunique()
    if (cells > 1).any():
        arm, seed = cells.index[cells > 1][0]
        raise ValueError(f"arm {arm}, seed {seed}: {cells.max()} cells share this arm and seed; keep one of them.")
    rows = rows.sort_values(["arm", "seed", "doc_hash", "doc_id"], kind="stable")
    copy = rows.groupby(["arm", "seed", "doc_hash"]).cumcount()
    indexed = rows.assign(copy=copy).set_index(["doc_hash", "copy", "arm", "seed"])["value"]
    wide = indexed.unstack(["arm", "seed"]).sort_index().sort_index(axis=1)
    columns = {(str(arm), int(seed)): place for place, (arm, seed) in enumerate(wide.columns)}
    return Answers([str(document) for document, _ in wide.index], columns, wide.to_numpy(dtype=float) * unit)
