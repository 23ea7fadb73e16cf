"""What a sweep's folder holds: records, samples and training logs of its cells."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from opt_deus.config import SAMPLE_COLUMNS
from opt_deus.reporting.wording import without_paths


@dataclass(frozen=True)
class Sweep:
    """records: cell -> record.json. samples: rows of finished cells. logs: cell -> training log lines.

    evidence: every cell's study, arm, and values by item. missing: cells asked for that left no readable record.
    without_samples: finished cells whose samples are gone.
    """

    name: str
    records: dict[str, dict[str, Any]]
    samples: pd.DataFrame
    evidence: pd.DataFrame
    logs: dict[str, list[dict[str, Any]]]
    missing: list[str]
    without_samples: list[str]

    @cached_property
    def shared_suffix(self) -> str:
        """What all arms have after align, zero-init and position, e.g. "-tiny": said once, not in every row."""
        cells = [record["cell"] for record in self.records.values()]
        heads = [f"{cell['align']}-{'zero' if cell['zero_init'] else 'nozero'}-{cell['position']}" for cell in cells]
        tails = {cell["arm"].removeprefix(head) for cell, head in zip(cells, heads, strict=True)}
        common = os.path.commonprefix([tail[::-1] for tail in tails])[::-1]
        return common[common.index("-") :] if "-" in common else ""

    def short(self, name: str) -> str:
        """An arm's or a cell's name without what all share."""
        return name.removesuffix(self.shared_suffix) if self.shared_suffix else name

    def with_status(self, status: str) -> dict[str, dict[str, Any]]:
        return {cell: record for cell, record in self.records.items() if record["status"] == status}


def read_sweep(folder: Path) -> Sweep:
    """Reads a sweep's folder. Raises ValueError where it holds no record."""
    cells = folder / "cells"
    asked = _asked(folder)
    names = list(dict.fromkeys([*asked, *sorted(path.name for path in cells.glob("*") if path.is_dir())]))
    records = {name: _record(cells / name / "record.json") for name in names}
    missing = [name for name, record in records.items() if record is None]
    records = {name: record for name, record in records.items() if record is not None}
    if not records:
        raise ValueError(f"sweep={folder}: no cells/*/record.json there; give a folder such as multirun_reports/NAME.")
    finished = [name for name, record in records.items() if record["status"] == "ok"]
    files = {name: cells / name / "samples.parquet" for name in finished}
    frames = [pd.read_parquet(path) for path in files.values() if path.exists()]
    samples = pd.concat(frames, ignore_index=True)[SAMPLE_COLUMNS] if frames else pd.DataFrame(columns=SAMPLE_COLUMNS)
    if frames:
        samples["overrides"] = [without_paths(_text(value)) for value in samples["overrides"]]
    return Sweep(
        name=folder.resolve().name,
        records=records,
        samples=samples,
        evidence=_evidence(cells, {name: records[name] for name in finished}),
        logs={name: _log(cells / name / "log.jsonl") for name in finished},
        missing=missing,
        without_samples=[name for name, path in files.items() if not path.exists()],
    )


def _evidence(cells: Path, finished: dict[str, dict[str, Any]]) -> pd.DataFrame:
    """The values of every finished cell's study, with study and arm."""
    frames = []
    for cell, record in finished.items():
        file = cells / cell / "evidence.parquet"
        for study in record.get("evidence") or {}:
            if file.exists():
                frames.append(pd.read_parquet(file).assign(study=study, arm=record["cell"]["arm"]))
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def _asked(folder: Path) -> list[str]:
    """The cells that the last command asked for; empty where nobody noted them."""
    try:
        return list(json.loads((folder / "sweep.json").read_text())["cells"])
    except (OSError, ValueError, KeyError):
        return []


def _record(path: Path) -> dict[str, Any] | None:
    try:
        record = json.loads(path.read_text())
        return record if record.get("status") in ("ok", "failed", "skipped") else None
    except (OSError, ValueError, AttributeError):
        return None


def _log(path: Path) -> list[dict[str, Any]]:
    """Lines that hold a loss; a line cut off by a crash is left out."""
    lines = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and isinstance(entry.get("loss"), int | float) and "tokens" in entry:
            lines.append(entry)
    return lines


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(dict(value or {}), sort_keys=True)
