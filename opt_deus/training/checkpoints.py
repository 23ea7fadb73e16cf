"""Resume checkpoints that hold only what changes: trainable tensors, optimizer, schedule, random state.

A checkpoint is written beside its final name, `complete.json` last, and then renamed, so that a kill at any moment
leaves either a whole checkpoint or one that is passed over.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.utils.data import SequentialSampler
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from opt_deus.training.run import Run, load_tensors, write_tensors

WEIGHTS = "trainable.safetensors"
COMPLETE = "complete.json"
KEPT = 2

logger = logging.getLogger(__name__)


class Resumable:
    """Mixed into transformers' Trainer and trl's SFTTrainer; `run` is set before train()."""

    run: Run

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        """Examples come in the seeded order already."""
        return SequentialSampler(self.train_dataset if train_dataset is None else train_dataset)

    def floating_point_ops(self, inputs: Any) -> int:
        """Nobody reads the count, and states in place of token ids have none."""
        return 0

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        final = self.run.folder / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        part = final.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        if not _fits(self.run):
            return
        part.mkdir(parents=True)
        write_tensors(self.run, part / WEIGHTS, {})
        self._save_optimizer_and_scheduler(str(part))
        self._save_rng_state(str(part))
        self.state.save_to_json(str(part / TRAINER_STATE_NAME))
        mark_complete(part, self.run)
        shutil.rmtree(final, ignore_errors=True)
        part.rename(final)
        _sync(final.parent)
        for old in checkpoints(self.run.folder)[KEPT:]:
            shutil.rmtree(old)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        tensors = load_file(Path(resume_from_checkpoint) / WEIGHTS)
        load_tensors(self.run, tensors)


def _fits(run: Run) -> bool:
    """Weights and two moments must fit the disk. Without a resume point the training still goes on."""
    needed = 3 * sum(parameter.numel() * 4 for parameter in run.trainable.values())
    free = shutil.disk_usage(run.folder).free
    if free < needed:
        logger.warning("%s: no resume point: %.1f GB needed, %.1f GB free", run.stage, needed / 1e9, free / 1e9)
    return free >= needed


def mark_complete(folder: Path, run: Run) -> None:
    """Everything on disk first, then the mark with the files' sizes."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    for path in files:
        _sync(path)
    mark = {
        "files": {path.name: path.stat().st_size for path in files},
        "identity": run.identity,
        "seconds": run.seconds,
    }
    (folder / COMPLETE).write_text(json.dumps(mark))
    _sync(folder / COMPLETE)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checkpoints(folder: Path) -> list[Path]:
    """Folders named like checkpoints, newest step first."""
    found = [(int(match.group(1)), path) for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*")
             if (match := re.fullmatch(PREFIX_CHECKPOINT_DIR + r"-(\d+)", path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def newest(run: Run) -> Path | None:
    """The newest whole checkpoint of this very run; what is broken or of another run is removed."""
    for part in run.folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*.part"):
        shutil.rmtree(part)
    for path in checkpoints(run.folder):
        mark = _mark(path)
        if mark is not None and mark["identity"] == run.identity:
            run.seconds_before = mark["seconds"]
            return path
        logger.warning("%s: %s is incomplete or of another run; removed", run.stage, path.name)
        shutil.rmtree(path)
    return None


def _mark(folder: Path) -> dict | None:
    """The mark of a whole checkpoint, or None."""
    try:
        mark = json.loads((folder / COMPLETE).read_text())
        sizes = {name: (folder / name).stat().st_size for name in mark["files"]}
    except (OSError, ValueError, KeyError):
        return None
    return mark if sizes == mark["files"] else None


def remove_all(folder: Path) -> None:
    for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        shutil.rmtree(path)
