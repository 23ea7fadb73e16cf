"""Benchmarks by lm-eval and held-out perplexity: one row per (task, document, metric).

torch and lm-eval are imported on first use.
"""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opt_deus.config import EvalConfig
from opt_deus.data import Corpus, content_hash
from opt_deus.evaluation import definitions
from opt_deus.evaluation.checks import check

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["check", "evaluate", "fingerprint", "heldout", "perplexity", "summarise"]

VERSION = 1  # of rows and metrics; part of every evaluation's key


def evaluate(model: Any, tokenizer: Any, cfg: EvalConfig, corpus: Corpus, *, device: Any = "cpu") -> pd.DataFrame:
    """Rows task, split, doc_id, doc_hash, metric, value: the held-out perplexity and all of cfg.tasks.

    The model's weights stay in their own dtype; cfg.dtype=bfloat16 computes by autocast.
    """
    import pandas as pd

    frames = [heldout(model, tokenizer, cfg, corpus, device=device)]
    if definitions.benchmarks(cfg):
        from opt_deus.evaluation.scoring import score

        frames.append(score(model, tokenizer, cfg, corpus))
    return pd.concat(frames, ignore_index=True)


def heldout(model: Any, tokenizer: Any, cfg: EvalConfig, corpus: Corpus, *, device: Any = "cpu") -> pd.DataFrame:
    """The rows of the held-out perplexity alone."""
    from opt_deus.evaluation import held_out

    return held_out.heldout(model.to(device), tokenizer, cfg, corpus, device)


def summarise(rows: pd.DataFrame) -> dict[str, dict[str, dict[str, Any]]]:
    """Scores per task and split (see summaries.summarise)."""
    from opt_deus.evaluation import summaries

    return summaries.summarise(rows)


def perplexity(rows: pd.DataFrame) -> float:
    """Token perplexity of the held-out documents in the rows."""
    from opt_deus.evaluation import summaries

    return summaries.perplexity(rows)


def fingerprint(cfg: EvalConfig, corpus: Corpus) -> dict[str, Any]:
    """All that decides an evaluation's rows besides model and tokenizer."""
    tasks = {}
    for task in definitions.benchmarks(cfg):
        if task in cfg.data:
            tasks[task] = content_hash(Path(definitions.data_file(cfg, task)).read_text(encoding="utf-8"))[:16]
        elif task in definitions.OWN_TASKS:
            tasks[task] = content_hash(json.dumps(corpus.items(task)[: cfg.limit]))[:16]
        else:
            tasks[task] = "hub"
    numbers = {
        key: getattr(cfg, key)
        for key in ("limit", "max_length", "dtype", "batch_size", "perplexity_tokens", "perplexity_length")
    }
    held_out = content_hash("\0".join(corpus.evaluation))[:16]
    return {
        "version": VERSION,
        "lm_eval": importlib.metadata.version("lm_eval"),
        "tasks": tasks,
        "heldout": held_out,
        **numbers,
    }
