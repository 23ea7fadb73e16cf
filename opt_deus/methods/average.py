"""Averages without alignment: Avg-DeUS and the control that tells scale from alignment."""

from __future__ import annotations

import torch

from opt_deus.methods import Diagnostics, Layer, Parents, diagnose, mean_of
from opt_deus.transport import Assignment


def avg(parents: Parents) -> tuple[Layer, Diagnostics]:
    """Avg-DeUS: the mean of the two neighbours, neuron by neuron of the same index."""
    layer, diagnostics = {}, {}
    for weight in parents.weights:
        below, above = parents.pair(weight.name)
        layer[weight.name] = mean_of(below, parents, weight.name)
        if weight.columns is not None:
            parents.maps[weight.name] = Assignment(torch.arange(len(below)), solver="identity")
            apart = (below - above).norm(dim=1).mean().item()
            diagnostics[weight.name] = diagnose(
                "identity",
                mass=1.0,
                marginal_error=0.0,
                cost_identity=apart,
                cost_plan=apart,
                effective_support=1.0,
                aligned_norm_ratio=1.0,
            )
    return layer, diagnostics


def half(parents: Parents, norms: str = "half") -> tuple[Layer, Diagnostics]:
    """W_{i+1} / 2, what an alignment of mass 0 leaves. norms: half (as all else) or average (of the neighbours)."""
    if norms not in ("half", "average"):
        raise ValueError(f"align.norms={norms}: unknown; choose half or average.")
    layer = {}
    for weight in parents.weights:
        if weight.norm and norms == "average":
            layer[weight.name] = mean_of(parents.pair(weight.name)[0], parents, weight.name)
        else:
            layer[weight.name] = parents.upper[weight.name] / 2
    return layer, {weight.name: diagnose("none") for weight in parents.weights if weight.columns is not None}
