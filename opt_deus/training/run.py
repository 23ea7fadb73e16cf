"""What the parts of one training run share."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from opt_deus.config import TrainConfig


@dataclass
class Run:
    """One call of train(): what trains, where its files lie, and who it is."""

    stage: str
    cfg: TrainConfig
    folder: Path
    trainable: dict[str, torch.nn.Parameter]  # by full name in the whole model
    lengths: np.ndarray  # tokens of every example, in order
    identity: dict[str, Any] = field(default_factory=dict)  # whose checkpoints these are
    seconds_before: float = 0.0  # spent by the runs that this one resumes
    started: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        return self.seconds_before + time.perf_counter() - self.started

    def tokens_after(self, step: int) -> int:
        """Tokens seen after `step` optimizer steps. The last batch of a pass over the examples may be smaller."""
        passes, rest = divmod(step, self.steps_per_pass)
        examples = rest * self.cfg.batch_size * self.cfg.accumulation
        return int(passes * self.lengths.sum() + self.lengths[:examples].sum())

    @property
    def steps_per_pass(self) -> int:
        per_step = self.cfg.batch_size * self.cfg.accumulation
        return -(-len(self.lengths) // per_step)


def identity(run: Run, examples: str, seed: int, precision: str) -> dict[str, Any]:
    """What a checkpoint must have been written by to be resumed; run-time knobs are left out."""
    settings = {key: value for key, value in asdict(run.cfg).items() if key not in TrainConfig.RUNTIME}
    return {
        "stage": run.stage,
        "seed": seed,
        "precision": precision,
        "settings": settings,
        "examples": examples,
        "trainable": hashlib.sha256("\n".join(run.trainable).encode()).hexdigest(),
        "start": digest(run.trainable.values()),
    }


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Hexadecimal SHA-256 of the tensors' values."""
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return total.hexdigest()


def write_tensors(run: Run, path: Path, metadata: dict[str, str]) -> None:
    """The trainable tensors; the name appears only when the file is whole."""
    part = path.with_suffix(".part")
    tensors = {name: parameter.detach().cpu().contiguous() for name, parameter in run.trainable.items()}
    save_file(tensors, part, metadata=metadata)
    part.replace(path)


def load_tensors(run: Run, tensors: dict[str, torch.Tensor]) -> None:
    """Copy stored tensors into the trainable parameters; the sets of names must be equal."""
    if set(tensors) != set(run.trainable):
        raise RuntimeError(f"{run.stage}: stored tensors do not match: {sorted(set(tensors) ^ set(run.trainable))[:3]}")
    with torch.no_grad():
        for name, tensor in tensors.items():
            run.trainable[name].copy_(tensor)
