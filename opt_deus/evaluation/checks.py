"""Refusals before anything is trained: unknown tasks, missing or broken data files, a closed hub."""

from __future__ import annotations

import contextlib
import difflib
import io
import json
import tempfile
from pathlib import Path

from opt_deus.config import DataConfig, EvalConfig
from opt_deus.data import hub
from opt_deus.evaluation import definitions


def check(cfg: EvalConfig, data: DataConfig, offline: bool) -> None:
    """Raise ValueError for what cannot be evaluated. lm-eval is imported only where eval.data names a file."""
    if not cfg.tasks:
        raise ValueError("eval.tasks is empty; name tasks, or eval.tasks=[heldout] for the held-out perplexity alone")
    for task in definitions.benchmarks(cfg):
        _check_name(task)
    for task in cfg.data:
        if task not in cfg.tasks:
            raise ValueError(f"eval.data names {task!r}, which is not in eval.tasks={cfg.tasks}; add it there")
        if task in definitions.OWN_TASKS or task == definitions.HELDOUT:
            raise ValueError(
                f"eval.data.{task}: this task takes its documents from data={data.name}; take the file out"
            )
        _check_lines(task, definitions.data_file(cfg, task))
    missing = definitions.from_hub(cfg)
    if missing and hub.is_closed(offline):
        raise ValueError(
            f"eval.tasks={missing} need data from the Hugging Face hub, which is closed (offline=true or "
            f"HF_HUB_OFFLINE); give a local file, 'eval.data={{{missing[0]}: FILE}}', or choose eval=pydocs"
        )
    if cfg.data:
        _check_fields(cfg)


def _check_name(task: str) -> None:
    known = [*definitions.OWN_TASKS, *definitions.registered()]
    if task not in known:
        near = difflib.get_close_matches(task, known, n=1)
        hint = (
            f"did you mean {near[0]}?" if near else f"known are {', '.join(definitions.OWN_TASKS)} and lm-eval's tasks"
        )
        raise ValueError(f"eval.tasks: {task!r} is unknown; {hint}")


def _check_lines(task: str, path: Path) -> None:
    where = f"eval.data.{task}: {path}"
    if not path.is_file():
        raise ValueError(f"{where} is no file; give a JSON-lines file with the fields that lm-eval's {task} reads")
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8 text ({error.reason} at byte {error.start}); convert it") from None
    if not any(line.strip() for line in lines):
        raise ValueError(f"{where} is empty; one JSON object a line is expected")
    for number, line in enumerate(lines, start=1):
        if line.strip() and not _is_object(line):
            raise ValueError(f"{where}: line {number} is not a JSON object; one object a line is expected")


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _check_fields(cfg: EvalConfig) -> None:
    """Build each task as lm-eval does, which reads its first document: a file of another task fails here."""
    from lm_eval.tasks import TaskManager

    for task in cfg.data:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):  # datasets' bars
            try:
                TaskManager(include_defaults=False).load(
                    [definitions.local(task, definitions.data_file(cfg, task), Path(folder))]
                )
            except Exception as error:  # whatever lm-eval, jinja or datasets say of a wrong file
                raise ValueError(
                    f"eval.data.{task}: {definitions.data_file(cfg, task)} does not have the fields that lm-eval's "
                    f"{task} reads ({type(error).__name__}: {error})"
                ) from error
