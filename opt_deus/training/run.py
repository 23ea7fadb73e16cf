"""What the parts of one training run share."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from opt_deus.config import TrainConfig


@dataclass
class Run:
    """One call of train(): what trains, where its files lie, and who it is."""

    stage: str
    cfg: TrainConfig
    folder: Path
    trainable: dict[str, torch.nn.Parameter]  # by full name in the whole model
    lengths: np.ndarray  # tokens of every example, in order
    identity: dict[str, Any]  # a checkpoint is resumed only by the run that would have written it
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
