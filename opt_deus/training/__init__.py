"""One train() for pre-training a small base, continual pre-training and SFT; transformers' Trainer and trl underneath."""

from __future__ import annotations

from opt_deus.training.examples import PackedBlocks, pair_examples, packed_blocks, token_budget
from opt_deus.training.guards import TrainingDiverged
from opt_deus.training.precision import precision
from opt_deus.training.stage import train

__all__ = ["PackedBlocks", "TrainingDiverged", "pair_examples", "packed_blocks", "precision", "token_budget", "train"]
