"""Benchmarks by lm-eval: one row per task, document and metric."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd
import torch
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tqdm import tqdm

from opt_deus.config import EvalConfig
from opt_deus.data import Corpus, split_of
from opt_deus.evaluation import definitions, packing

COLUMNS = ["task", "split", "doc_id", "doc_hash", "metric", "value"]
ROLLING_UNITS = {"word_perplexity": "words", "byte_perplexity": "bytes"}  # samples hold (loglikelihood, count)


class _Scorer(HFLM):
    """lm-eval's model, with the choices of a document packed into one sequence where the model follows a mask."""

    def _loglikelihood_tokens(self, requests: list, disable_tqdm: bool = False, override_bs: int | None = None) -> list:
        autocast = torch.autocast(self.device.type, self.mixed_precision_dtype, self.mixed_precision_dtype is not None)
        packed = self._packed(requests)
        answers: dict[int, packing.Answer] = {}
        choices = sum(len(one.requests) for one in packed)
        with tqdm(total=choices, desc="scoring", unit="choice", file=sys.__stderr__, disable=None) as bar:
            for start in range(0, len(packed), self.batch_size):
                batch = packed[start : start + self.batch_size]
                answers.update(packing.score(self.model, batch, autocast))
                bar.update(sum(len(one.requests) for one in batch))
        rest = [index for index in range(len(requests)) if index not in answers]
        plain = super()._loglikelihood_tokens([requests[index] for index in rest], True, override_bs) if rest else []
        answers.update(zip(rest, plain, strict=True))
        return [answers[index] for index in range(len(requests))]

    def _packed(self, requests: list) -> list[packing.Packed]:
        """What needs no truncation; nothing where the model takes no such mask or does not follow it.

        lm-eval's rolling windows come without strings and share no context but the prefix token.
        """
        if requests[0][0] is None or self.model.config._attn_implementation != "sdpa":
            return []
        fitting = [one for one in packing.pack(requests) if one.length < self.max_length]
        return fitting if fitting and packing.agrees(self.model, fitting[0]) else []


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No bars of lm-eval's own, and no git and pip of its environment report: the record has its own provenance."""
    with (
        mock.patch("lm_eval.evaluator.get_git_commit_hash", lambda: None),
        mock.patch("lm_eval.evaluator.add_env_info", lambda results: None),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        yield


@contextlib.contextmanager
def undisturbed(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode and a quiet lm-eval; afterwards mode, random streams and log levels are what they were."""
    python, numpy, devices = random.getstate(), np.random.get_state(), range(torch.cuda.device_count())
    loggers = {name: logging.getLogger(name) for name in ("lm_eval", "datasets")}
    levels = {name: logger.level for name, logger in loggers.items()}
    training, cached = model.training, model.config.use_cache
    model.eval()
    model.config.use_cache = False  # nothing is generated token by token
    for logger in loggers.values():
        logger.setLevel(logging.ERROR)
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        for name, logger in loggers.items():
            logger.setLevel(levels[name])
        model.train(training)
        model.config.use_cache = cached


def score(model: torch.nn.Module, tokenizer: Any, cfg: EvalConfig, corpus: Corpus) -> pd.DataFrame:
    """Rows of cfg.tasks. The tokenizer is copied, because lm-eval gives it a padding token."""
    with undisturbed(model), quiet(), tempfile.TemporaryDirectory() as folder:
        scorer = _Scorer(
            pretrained=model,
            tokenizer=copy.deepcopy(tokenizer),
            batch_size=cfg.batch_size,
            max_length=cfg.max_length,
            mixed_precision_dtype=None if cfg.dtype == "float32" else cfg.dtype,
            softmax_dtype="float32",
        )
        results = simple_evaluate(
            model=scorer,
            tasks=definitions.specifications(cfg, corpus, Path(folder)),
            limit=cfg.limit,
            task_manager=TaskManager(include_defaults=bool(definitions.from_hub(cfg))),
            log_samples=True,
            bootstrap_iters=0,
            use_cache=None,
            cache_requests=False,
        )
    return _rows(results, definitions.benchmarks(cfg))


def _rows(results: dict[str, Any], asked: list[str]) -> pd.DataFrame:
    """Samples as rows. Members of a group (mmlu's subjects) carry the group's name: its score weights them by size."""
    members = results.get("group_subtasks", {})
    rows = []
    for task in asked:
        for member in _leaves(task, members):
            for sample in results["samples"][member]:
                document = (task, split_of(sample["doc_hash"]), sample["doc_id"], sample["doc_hash"])
                rows += [(*document, metric, value) for metric, value in _values(sample).items()]
    return pd.DataFrame(rows, columns=COLUMNS)


def _leaves(task: str, members: dict[str, list[str]]) -> list[str]:
    children = members.get(task) or []
    return [leaf for child in children for leaf in _leaves(child, members)] or [task]


def _values(sample: dict[str, Any]) -> dict[str, float]:
    """Numeric metrics of one document; filters other than lm-eval's default stand behind a comma, as in its tables."""
    suffix = "" if sample["filter"] == "none" else "," + sample["filter"]
    found: dict[str, float] = {}
    for metric in sample["metrics"]:
        value = sample[metric]
        if metric in ROLLING_UNITS:
            found["loglikelihood"], found[ROLLING_UNITS[metric]] = map(float, value)
        elif isinstance(value, (bool, int, float, np.number)):
            found[metric + suffix] = float(value)
    return found
