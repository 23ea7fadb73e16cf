"""Load, convert, insert, self-check, save.

Imported here at once: what needs no torch (refusals take a second). The rest is looked up on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

from opt_deus.models.sizes import parameter_counts, shape, shape_of
from opt_deus.models.sources import Base, cache_root, check, prepare
from opt_deus.models.target import check_target

_LATE = {
    "checkpoint": ("load", "load_tokenizer", "export", "checkpoint_dtype"),
    "surgery": (
        "deepen",
        "layer_tensors",
        "layer_parameter_names",
        "zero_outputs",
        "delta",
        "apply_delta",
    ),
    "inspection": ("self_check",),
    "lower": ("LowerStates", "can_start_higher", "only_layers"),
    "fresh": ("new_model", "train_tokenizer", "end_of_text"),
    "card": ("model_card",),
}
_MODULES = {name: module for module, names in _LATE.items() for name in names}

__all__ = ["Base", "cache_root", "check", "check_target", "parameter_counts", "prepare", "shape", "shape_of", *_MODULES]


def __getattr__(name: str) -> Any:
    """A function whose module imports torch (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
