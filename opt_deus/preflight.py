"""Refusals beyond the configuration: plans that do not fit, missing files, folders that cannot be written, no space.

Loads no weight and imports no torch; a whole sweep is checked before its first cell runs.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

from opt_deus import data, evaluation, models
from opt_deus.compose import Job
from opt_deus.config import Cell
from opt_deus.placing import plan_of, round_sizes
from opt_deus.store import Store

BYTES = 4  # float32 on disk


def check_jobs(jobs: list[Job], reports: Path) -> None:
    """Raises ValueError (key, value, remedy) if any cell that is to run cannot."""
    running = [job for job in jobs if not job.skipped]
    for job in running:
        check_plan(job.cell)
    if running[0].cell.dry_run:
        return
    seen: set[str] = set()
    for job in running:
        parts = repr((job.cell.model, job.cell.data, job.cell.eval, job.cell.offline, job.cell.sft.tokens))
        if parts not in seen:
            _check_sources(job.cell)
        seen.add(parts)
    check_writable("name", reports / jobs[0].cell.name)
    check_writable("store.root", Path(jobs[0].cell.store.root))
    _check_space([job.cell for job in running])


def check_plan(cell: Cell) -> None:
    """Raises ValueError where the plan does not fit the base, or in one of several rounds what there is by then."""
    layers = models.shape(cell.model)["num_hidden_layers"]
    total = len(plan_of(cell, layers).inserted)
    if cell.rounds == 1:
        return
    if cell.rounds > total:
        raise ValueError(f"rounds={cell.rounds}: {total} new layers leave a round without one; use fewer rounds.")
    for size in round_sizes(total, cell.rounds):
        layers = plan_of(replace(cell, num_new_layers=size), layers).layers


def _check_sources(cell: Cell) -> None:
    models.check(cell.model, cell.offline, Store(models.cache_root()))
    data.check(cell.data, cell.offline)
    evaluation.check(cell.eval, cell.data, cell.offline)
    trains = cell.sft.tokens is not None or cell.sft.steps is not None
    if trains and not data.has_pairs(cell.data):
        raise ValueError(
            f"sft.tokens={cell.sft.tokens}: data={cell.data.name} has no question-answer pairs; "
            "set sft.tokens=null or choose data=pydocs."
        )


def check_writable(key: str, folder: Path) -> None:
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ValueError(f"{key}={folder}: {there} cannot be written; choose a folder of yours.")


def _check_space(cells: list[Cell]) -> None:
    """Room for the trained tensors of all cells and one optimizer state, on the store's disk; what is there counts."""
    root = Path(cells[0].store.root).absolute()
    disk = next(each for each in (root, *root.parents) if each.exists())
    held = sum(path.stat().st_size for path in root.rglob("*") if path.is_file()) if root.is_dir() else 0
    need = sum(map(stored_bytes, cells)) + 3 * max(map(stored_bytes, cells))
    free = shutil.disk_usage(disk).free
    if need > free + held:
        raise ValueError(
            f"store.root={cells[0].store.root}: the grid may need {need / 1e9:.1f} GB, {free / 1e9:.1f} GB are free; "
            "free some space or choose another folder."
        )


def stored_bytes(cell: Cell) -> int:
    """What the store keeps of one cell at most: trained tensors after CPT, SFT and at their checkpoints."""
    shape = models.shape(cell.model)
    layers = plan_of(cell, shape["num_hidden_layers"]).layers
    base, total = (models.parameter_counts(shape, count)["total"] for count in (None, layers))
    kept = 0
    for train in (cell.cpt, cell.sft):
        if train.tokens is not None or train.steps is not None:
            everything = (train.trainable or ("all" if cell.align.make is None else "new")) == "all"
            kept += (total if everything else total - base) * (1 + len(train.checkpoints))
    if cell.rounds > 1:  # every round but the last leaves its own tensors and a whole model
        kept += (cell.rounds - 1) * (total + total - base)
    return kept * BYTES
