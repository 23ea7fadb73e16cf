"""One train() for pre-training a small base, continual pre-training and SFT; transformers' Trainer and trl underneath.

Names are looked up on first use: transformers' Trainer and trl take seconds to import.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "PackedBlocks": "examples",
    "PrefixStates": "prefix",
    "TrainingDiverged": "guards",
    "open_run": "tracking",
    "batches_of_like_length": "examples",
    "pair_examples": "examples",
    "packed_blocks": "examples",
    "precision": "arithmetic",
    "pretrain": "scratch",
    "token_budget": "examples",
    "train": "stage",
}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
