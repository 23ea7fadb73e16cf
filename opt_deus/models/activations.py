"""What the units of a layer do on real text: the signal on an axis of the block's table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from opt_deus.models.blocks import Block
from opt_deus.models.surgery import layers_of
from opt_deus.models.updates import SINK_RATIO

CONSTANT = 1e-6  # a unit whose standard deviation is below this times its largest value is constant in float32


@dataclass(frozen=True)
class Activations:
    """values: (layer, axis) -> float32 (blocks, tokens, units). kept (blocks, tokens): positions that are no sinks."""

    values: dict[tuple[int, str], Tensor]
    kept: Tensor


def where_axis_lives(block: Block, axis: str) -> tuple[str, bool]:
    """The module (relative to the layer) that carries an axis, and whether the axis is its input (or its output).

    mlp is down_proj's input (activation of gate times up), attention o_proj's input (the heads' outputs); query, key
    and value are the projections' outputs, before the rotation. ValueError for an axis that the table does not have.
    """
    readers = [weight.name for weight in block.weights if weight.columns == axis]
    writers = [weight.name for weight in block.weights if weight.rows == axis and weight.columns is not None]
    if axis == "residual" or not (readers or writers):
        raise ValueError(f"activations: {block.model_type}'s table has no units on axis {axis!r}.")
    reads = len(readers) == 1
    return (readers if reads else writers)[0].removesuffix(".weight"), reads


@torch.no_grad()
def entering_states(model: nn.Module, ids: Tensor, layers: Iterable[int]) -> tuple[dict[int, Tensor], Tensor]:
    """States (blocks, tokens, hidden) that enter the given base layers (0-based) on token blocks ids, and which
    positions (blocks, tokens) are a sink at the entry of no layer of the model: the same for every choice of layers."""
    wanted, found, kept, handles = set(layers), {}, [], []

    def look(index: int):
        def hook(_module: nn.Module, inputs: tuple, keywords: dict) -> None:
            states = (inputs[0] if inputs else keywords["hidden_states"]).detach()
            kept.append(no_sinks(states))
            if index in wanted:
                found[index] = states

        return hook

    for index, layer in enumerate(layers_of(model)):
        handles.append(layer.register_forward_pre_hook(look(index), with_kwargs=True))
    try:
        model.model(input_ids=ids.to(model.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return found, torch.stack(kept).all(0)


@torch.no_grad()
def layer_activations(
    model: nn.Module, block: Block, states: Tensor, layer: int, axes: Iterable[str]
) -> dict[str, Tensor]:
    """Signals (blocks, tokens, units), float32, on axes of one base layer, from the states that enter it."""
    module, found, handles = layers_of(model)[layer], {}, []

    def keep(axis: str, reads: bool):
        def hook(_module: nn.Module, inputs: tuple, output: Tensor) -> None:
            found[axis] = (inputs[0] if reads else output).detach().float()

        return hook

    for axis in axes:
        name, reads = where_axis_lives(block, axis)
        handles.append(module.get_submodule(name).register_forward_hook(keep(axis, reads)))
    try:
        positions = torch.arange(states.shape[1], device=states.device)[None]
        module(states, position_embeddings=model.model.rotary_emb(states, positions))
    finally:
        for handle in handles:
            handle.remove()
    return found


def no_sinks(states: Tensor) -> Tensor:
    """Marks (blocks, tokens) the positions whose state (blocks, tokens, hidden) is no sink.

    A sink has more than SINK_RATIO times the median norm (method.md, section 6: it distorts every statistic).
    """
    norms = states.norm(dim=-1)
    return norms <= SINK_RATIO * norms.median()


def unit_activations(
    model: nn.Module, block: Block, ids: Tensor, layers: Iterable[int], axes: Iterable[str]
) -> Activations:
    """Signals on the axes in the given base layers (0-based), on token blocks ids (blocks, tokens)."""
    axes = tuple(axes)
    states, kept = entering_states(model, ids, layers)
    values = {
        (layer, axis): signal
        for layer, each in states.items()
        for axis, signal in layer_activations(model, block, each, layer, axes).items()
    }
    return Activations(values, kept)


def standardised(values: Tensor) -> tuple[Tensor, Tensor]:
    """Z-scores over tokens (tokens, units), 0 for constant units, and which units (units,) are not constant."""
    centred = values - values.mean(0, dtype=torch.float64).to(values.dtype)
    deviation = centred.square().mean(0, dtype=torch.float64).sqrt()
    live = deviation > CONSTANT * values.abs().amax(0)
    return torch.where(live, centred / torch.where(live, deviation, 1.0).to(values.dtype), 0.0), live


def correlations(lower: Tensor, upper: Tensor) -> Tensor:
    """Pearson correlations (lower units, upper units) over tokens; 0 for constant units."""
    return standardised(lower)[0].T @ standardised(upper)[0] / len(lower)
