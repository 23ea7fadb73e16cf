"""A neighbour as it is: LLaMA PRO's copy of the layer below (arXiv 2401.02415), and of the layer above as control."""

from __future__ import annotations

from opt_deus.methods import Diagnostics, Layer, Parents, diagnose


def lower(parents: Parents) -> tuple[Layer, Diagnostics]:
    """The layer below."""
    return _copy(parents.lower)


def upper(parents: Parents) -> tuple[Layer, Diagnostics]:
    """The layer above."""
    return _copy(parents.upper)


def _copy(layer) -> tuple[Layer, Diagnostics]:
    return {name: tensor.clone() for name, tensor in layer.items()}, {name: diagnose("none") for name in layer}
