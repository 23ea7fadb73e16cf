"""Refusals before anything is trained: unknown tasks, missing or broken data files, a closed hub."""

from __future__ import annotations

import difflib
import json
import os
import tempfile
from pathlib import Path

from opt_deus.config import DataConfig, EvalConfig
from opt_deus.evaluation import definitions


def check(cfg: EvalConfig, data: DataConfig, offline: bool) -> None:
    """Raise ValueError for what cannot be evaluated. lm-eval is imported only where eval.data names a file."""
    for task in definitions.benchmarks(cfg):
        _check_name(task)
    for task in cfg.data:
        if task not in cfg.tasks:
            raise ValueError(f"eval.data names {task!r}, which is not in eval.tasks={cfg.tasks}; add it there")
        if task in definitions.OWN_TASKS or task == definitions.HELDOUT:
            raise ValueError(f"eval.data.{task}: this task takes its documents from data={data.name}; take the file out")
        _check_lines(task, definitions.data_file(cfg, task))
    hub = definitions.from_hub(cfg)
    if hub and (offline or os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")):
        raise ValueError(f"eval.tasks={hub} need data from the Hugging Face hub, which is closed (offline=true or "
                         f"HF_HUB_OFFLINE); give a local file, 'eval.data={{{hub[0]}: FILE}}', or choose eval=pydocs")
    if cfg.data:
        _check_fields(cfg)


def _check_name(task: str) -> None:
    known = [*definitions.OWN_TASKS, *definitions.registered()]
    if task not in known:
        near = difflib.get_close_matches(task, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(definitions.OWN_TASKS)} and lm-eval's tasks"
        raise ValueError(f"eval.tasks: {task!r} is unknown; {hint}")


def _check_lines(task: str, path: Path) -> None:
    where = f"eval.data.{task}: {path}"
    if not path.is_file():
        raise ValueError(f"{where} is no file; give a JSON-lines file with the fields that lm-eval's {task} reads")
    count = 0
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    if not isinstance(json.loads(line), dict):
                        raise ValueError("no object")
                    count += 1
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8 text ({error.reason} at byte {error.start}); convert it") from None
    except ValueError:
        raise ValueError(f"{where}: line {number} is not a JSON object; one object a line is expected") from None
    if not count:
        raise ValueError(f"{where} is empty; one JSON object a line is expected")


def _check_fields(cfg: EvalConfig) -> None:
    """Build each task as lm-eval does, which reads its first document: a file of another task fails here."""
    from lm_eval.tasks import TaskManager

    for task in cfg.data:
        with tempfile.TemporaryDirectory() as folder:
            try:
                TaskManager(include_defaults=False).load([definitions.local(task, definitions.data_file(cfg, task), Path(folder))])
            except Exception as error:  # whatever lm-eval, jinja or datasets say of a wrong file
                raise ValueError(f"eval.data.{task}: {definitions.data_file(cfg, task)} does not have the fields that lm-eval's "
                                 f"{task} reads ({type(error).__name__}: {error})") from error
