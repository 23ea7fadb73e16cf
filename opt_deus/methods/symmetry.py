"""The exact symmetries of a decoder block: relabellings and turns that change a layer's weights, not its function.

Free are one permutation of the MLP neurons (with a sign per neuron), permutations of KV groups and of query heads
inside their group, inside a head any orthogonal map between v rows and o columns, and on q and k together a rotation
per rotary frequency pair. The residual stream and the norms are shared with the other layers and stay.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from opt_deus.methods import Heads, Parents
from opt_deus.models.blocks import Weight
from opt_deus.transport import Assignment, LinearMap, Map


@dataclass(frozen=True)
class Symmetry:
    """Which neuron, KV group and query head of a layer takes each place, and how it is turned there.

    neurons (mlp,), groups (KV heads,), heads (query heads,): index into the layer for every place; heads must follow
    their groups. signs (mlp,): +1 or -1. value, rotary (KV heads, width, width): orthogonal maps inside the heads of a
    group, on v and o and on q and k. None: nothing changes.
    """

    heads_shape: Heads
    neurons: Tensor | None = None
    signs: Tensor | None = None
    groups: Tensor | None = None
    heads: Tensor | None = None
    value: Tensor | None = None
    rotary: Tensor | None = None

    def __call__(self, weight: Weight, tensor: Tensor) -> Tensor:
        """The weight as it is in the relabelled layer."""
        if weight.norm:
            return tensor
        tensor = self._along(weight.rows, tensor, weight.signed)
        if weight.columns is None:
            return tensor
        # every turn is orthogonal, so a column turns as a row does
        return self._along(weight.columns, tensor.T, weight.signed).T

    def rows(self, weight: Weight, size: int) -> Map:
        """How a weight's rows (size of them) go over into the relabelled layer's."""
        order, turns = self._action(weight.rows, weight.signed)
        if turns is not None:
            turned = self._along(weight.rows, torch.eye(size, dtype=turns.dtype, device=turns.device), weight.signed)
            moved = ((turned == 0) | (turned == 1)).all()  # turned by whole units is but moved
            return Assignment(turned.argmax(1)) if moved else LinearMap(turned)
        places = torch.arange(size, device=None if order is None else order.device)
        return Assignment(self._along(weight.rows, places[:, None], weight.signed).flatten())

    def _along(self, axis: str, tensor: Tensor, signed: bool) -> Tensor:
        """The tensor with its first axis relabelled and turned, where the axis is free."""
        order, turns = self._action(axis, signed)
        if order is None:
            return tensor
        units = tensor.reshape(len(order), -1, tensor[0].numel())[order]
        return (units if turns is None else turns @ units).reshape(tensor.shape)

    def _action(self, axis: str, signed: bool) -> tuple[Tensor | None, Tensor | None]:
        if axis == "mlp":
            signs = self.signs if signed else None
            return self.neurons, None if signs is None else signs[:, None, None]
        per_group = self.heads_shape.per_group
        turns = {"key": self.rotary, "query": self.rotary, "value": self.value, "attention": self.value}.get(axis)
        if axis in ("key", "value"):
            return self.groups, turns
        if axis in ("query", "attention"):
            return self.heads, None if turns is None else turns.repeat_interleave(per_group, 0)
        return None, None


def random_symmetry(parents: Parents) -> Symmetry:
    """A random relabelling of MLP neurons, KV groups and query heads inside groups, from parents.seed and the slot."""
    generator = torch.Generator().manual_seed(
        zlib.crc32(f"{parents.seed} {parents.where}".encode())
    )  # it reads 32 bits
    shape = parents.heads
    groups = torch.randperm(shape.num_kv, generator=generator)
    inside = torch.stack([torch.randperm(shape.per_group, generator=generator) for _ in range(shape.num_kv)])
    return Symmetry(
        shape,
        neurons=torch.randperm(num_neurons(parents), generator=generator).to(parents.device),
        groups=groups.to(parents.device),
        heads=(groups[:, None] * shape.per_group + inside).flatten().to(parents.device),
    )


def num_neurons(parents: Parents) -> int:
    """Hidden neurons of the MLP."""
    return next(len(parents.lower[weight.name]) for weight in parents.weights if weight.rows == "mlp")
