"""Rows of samples -> arrays matched by (task, document hash). A document that an arm lacks is refused by name.

Samples: a frame with the columns of samples.parquet (contract): cell, arm, align, zero_init, position, seed, overrides,
stage, task, split, doc_id, doc_hash, metric, value.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

PERPLEXITY_TASK = "heldout"
LIKELIHOOD, TOKENS = "loglikelihood", "tokens"
POINTS = 100.0
_NAMED = 5  # documents named in a refusal

Scores = dict[str, pd.DataFrame]  # task -> documents x (arm, seed)


def scores(samples: pd.DataFrame, stage: str, split: str, metric: str) -> Scores:
    """Accuracy of every document in points (0 or 100): task -> frame of documents x (arm, seed), NaN where missing."""
    rows = _selected(samples, stage, split)
    rows = rows[(rows["metric"] == metric) & (rows["task"] != PERPLEXITY_TASK)]
    return {str(task): _wide(group) * POINTS for task, group in sorted(rows.groupby("task"))}


def likelihoods(samples: pd.DataFrame, stage: str, split: str) -> tuple[pd.DataFrame, pd.DataFrame] | None:
    """Held-out log-likelihood (nats) and tokens of every document, each documents x (arm, seed); None without any."""
    rows = _selected(samples, stage, split)
    rows = rows[rows["task"] == PERPLEXITY_TASK]
    frames = [rows[rows["metric"] == metric] for metric in (LIKELIHOOD, TOKENS)]
    return None if any(frame.empty for frame in frames) else (_wide(frames[0]), _wide(frames[1]))


def differences(frame: pd.DataFrame, weights: dict[str, float], what: str) -> tuple[np.ndarray, list[int]]:
    """The weighted sum of arms for every document: shape (S, n), and the S seeds that all these arms have.

    Documents in a fixed order, so that nothing depends on the order of rows. Raises ValueError naming documents that
    one of the arms lacks; `what` names the task.
    """
    seeds = shared_seeds(frame, list(weights))
    parts = [weight * complete(frame, arm, seeds, what) for arm, weight in weights.items()]
    return np.sum(parts, axis=0), seeds


def shared_seeds(frame: pd.DataFrame, arms: list[str]) -> list[int]:
    """Seeds for which every one of these arms has answers."""
    columns = set(frame.columns)
    seeds = sorted({seed for arm, seed in columns if arm in arms})
    return [seed for seed in seeds if all((arm, seed) in columns for arm in arms)]


def complete(frame: pd.DataFrame, arm: str, seeds: list[int], what: str) -> np.ndarray:
    """The values of one arm, shape (S, n). Raises ValueError naming missing documents."""
    values = frame[[(arm, seed) for seed in seeds]]
    lacking = values.isna()
    if lacking.to_numpy().any():
        column = lacking.columns[lacking.any()][0]
        documents = [str(document) for document, _ in lacking.index[lacking[column]]]
        named = ", ".join(documents[:_NAMED]) + (f" and {len(documents) - _NAMED} more" if documents[_NAMED:] else "")
        raise ValueError(
            f"task {what}: arm {column[0]}, seed {column[1]} has no answer to {len(documents)} documents that others "
            f"answered ({named}); arms are compared on the same documents, so evaluate them with the same settings."
        )
    return values.to_numpy(dtype=float).T


def _selected(samples: pd.DataFrame, stage: str, split: str) -> pd.DataFrame:
    rows = samples[samples["stage"] == stage]
    return rows if split == "all" else rows[rows["split"] == split]


def _wide(rows: pd.DataFrame) -> pd.DataFrame:
    """Documents x (arm, seed). Documents of equal content, which real benchmarks have, are told apart by order."""
    cells = rows.groupby(["arm", "seed"])["cell"].nunique()
    if (cells > 1).any():
        arm, seed = cells.index[cells > 1][0]
        raise ValueError(f"arm {arm}, seed {seed}: {cells.max()} cells share this arm and seed; keep one of them.")
    rows = rows.sort_values(["arm", "seed", "doc_hash", "doc_id"], kind="stable")
    copy = rows.groupby(["arm", "seed", "doc_hash"]).cumcount()
    indexed = rows.assign(copy=copy).set_index(["doc_hash", "copy", "arm", "seed"])["value"]
    return indexed.unstack(["arm", "seed"]).sort_index().sort_index(axis=1)
