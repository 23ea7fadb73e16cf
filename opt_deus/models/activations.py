"""What the units of a layer do on real text: the signal on an axis of the block's table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from opt_deus.models.blocks import Block
from opt_deus.models.surgery import layers_of
from opt_deus.models.updates import SINK_RATIO


@dataclass(frozen=True)
class Activations:
    """values: (layer, axis) -> float32 (blocks, tokens, units). kept (blocks, tokens): positions that are no sinks."""

    values: dict[tuple[int, str], Tensor]
    kept: Tensor

    def flat(self, layer: int, axis: str) -> Tensor:
        """(kept tokens, units), block after block."""
        return self.values[layer, axis][self.kept]


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
def entering_states(model: nn.Module, ids: Tensor, layers: Iterable[int]) -> dict[int, Tensor]:
    """Residual states (blocks, tokens, hidden) that enter base layers (0-based), on token blocks ids."""
    found: dict[int, Tensor] = {}

    def keep(index: int):
        def hook(_module: nn.Module, inputs: tuple, keywords: dict) -> None:
            found[index] = (inputs[0] if inputs else keywords["hidden_states"]).detach()

        return hook

    handles = [layers_of(model)[index].register_forward_pre_hook(keep(index), with_kwargs=True) for index in layers]
    try:
        model.model(input_ids=ids.to(model.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return found


@torch.no_grad()
def kept_everywhere(model: nn.Module, ids: Tensor) -> Tensor:
    """Marks (blocks, tokens) the positions that are a sink at the entry of no layer: the same for every gap."""
    kept: list[Tensor] = []

    def mark(_module: nn.Module, inputs: tuple, keywords: dict) -> None:
        kept.append(no_sinks([inputs[0] if inputs else keywords["hidden_states"]]))

    handles = [layer.register_forward_pre_hook(mark, with_kwargs=True) for layer in layers_of(model)]
    try:
        model.model(input_ids=ids.to(model.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return torch.stack(kept).all(0)


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


def no_sinks(states: Iterable[Tensor]) -> Tensor:
    """Marks (blocks, tokens) the positions that are a sink in none of these states (blocks, tokens, hidden).

    A sink has more than SINK_RATIO times the median norm (method.md, section 6: it distorts every statistic).
    """
    norms = torch.stack([each.norm(dim=-1) for each in states])
    return (norms <= SINK_RATIO * norms.flatten(1).median(dim=1).values[:, None, None]).all(0)


def unit_activations(
    model: nn.Module, block: Block, ids: Tensor, layers: Iterable[int], axes: Iterable[str]
) -> Activations:
    """Signals on the axes in the given base layers (0-based), on token blocks ids (blocks, tokens)."""
    layers, axes = sorted(set(layers)), tuple(axes)
    states = entering_states(model, ids, layers)
    values = {
        (layer, axis): signal
        for layer in layers
        for axis, signal in layer_activations(model, block, states[layer], layer, axes).items()
    }
    return Activations(values, no_sinks(states.values()))
