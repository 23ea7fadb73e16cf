"""record.json: everything that a cell leaves for the report (contract, Files, schema_version 1)."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import traceback
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas
import torch

from opt_deus.config import SAMPLE_COLUMNS, Cell, settings
from opt_deus.naming import arm_name

SCHEMA_VERSION = 1
LIBRARIES = ("torch", "transformers", "trl", "accelerate", "lm-eval", "POT", "numpy", "scipy", "hydra-core")
RECORD, SAMPLES, EVIDENCE = "record.json", "samples.parquet", "evidence.parquet"
CODE = (":/opt_deus", ":/conf", ":/experiments")  # what a result depends on, from the root of the checkout


def new_record(cell: Cell) -> dict[str, Any]:
    """An empty record: what was asked, and where and when."""
    return {
        "schema_version": SCHEMA_VERSION,
        "status": "failed",
        "reason": None,
        "cell": {
            "align": cell.align.name,
            "zero_init": cell.zero_init,
            "position": cell.position.name,
            "seed": cell.seed,
            "num_new_layers": cell.num_new_layers,
            "model": cell.model.name,
            "arm": arm_name(cell),
            "overrides": cell.overrides,
        },
        "config": settings(cell),
        "provenance": _provenance(),
        "plan": None,
        "parameters": None,
        "expand": None,
        "perplexity": {"base": None, "initial": None, "cpt": None, "sft": None},
        "cpt": None,
        "sft": None,
        "eval": {},
        "evidence": {},
        "artefacts": {"expand": None, "cpt": None, "sft": None, "eval": {}, "reused": []},
        "error": None,
    }


def _provenance() -> dict[str, Any]:
    return {
        "git": _git(),
        "versions": {name: version(name) for name in LIBRARIES},
        "platform": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _git() -> str | None:
    """Commit of the running code, with "+" where tracked files differ from it; None outside a checkout."""
    here = Path(__file__).resolve().parent
    try:
        commit = subprocess.run(["git", "-C", here, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run(
            ["git", "-C", here, "status", "--porcelain", "--untracked-files=no", "--", *CODE],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.stdout.strip() + ("+" if changed.stdout.strip() else "")


def failure(error: BaseException) -> dict[str, str]:
    return {
        "type": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
    }


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Atomically: a record is whole or absent. Numbers that are not finite become null."""
    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / (RECORD + ".part")
    aside.write_text(json.dumps(_finite(record), indent=1, allow_nan=False))
    aside.replace(folder / RECORD)


def read_record(folder: Path) -> dict[str, Any] | None:
    """The record of a cell's folder; None where it is missing or damaged."""
    try:
        record = json.loads((folder / RECORD).read_text())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and {"status", "provenance"} <= record.keys() else None


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_samples(folder: Path, record: dict[str, Any], rows: dict[str, pandas.DataFrame]) -> None:
    """Per-document rows of every stage with the cell's factors (contract, samples.parquet)."""
    cell = record["cell"]
    frames = []
    for stage, frame in rows.items():
        factors = {
            "cell": folder.name,
            "arm": cell["arm"],
            "align": cell["align"],
            "zero_init": cell["zero_init"],
            "position": cell["position"],
            "seed": cell["seed"],
            "overrides": json.dumps(cell["overrides"], sort_keys=True),
            "stage": stage,
        }
        frames.append(frame.assign(**factors))
    aside = folder / (SAMPLES + ".part")
    pandas.concat(frames)[SAMPLE_COLUMNS].to_parquet(aside, index=False)
    aside.replace(folder / SAMPLES)


def write_evidence(folder: Path, rows: pandas.DataFrame) -> None:
    """A study's values by item, beside the record."""
    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / (EVIDENCE + ".part")
    rows.to_parquet(aside, index=False)
    aside.replace(folder / EVIDENCE)
