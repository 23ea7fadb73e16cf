"""Pure: two neighbouring layers -> the layer between them. One file per family of methods.

A method is `make(parents, **knobs) -> (layer, diagnostics)`: the made tensors by relative name, in the parents' dtype,
and per weight the numbers that record.json asks for. It never loads, saves, trains or knows positions. A new method is
one such function and one YAML in conf/align/.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from opt_deus.models.blocks import Block, Weight
from opt_deus.transport import Map

Layer = dict[str, Tensor]
Diagnostics = dict[str, dict]


@dataclass(frozen=True)
class Heads:
    """Attention's shape: query heads, the KV heads that they share in groups, and the width of one head."""

    num_query: int
    num_kv: int
    head_dim: int

    @classmethod
    def of(cls, config: Any) -> Heads:
        """From a Hugging Face configuration."""
        return cls(config.num_attention_heads, config.num_key_value_heads, config.head_dim)

    @property
    def per_group(self) -> int:
        return self.num_query // self.num_kv


@dataclass(frozen=True)
class Base:
    """What a method may ask of the whole base, beyond its two parents; everything is computed when first asked for.

    num_layers: of the base. weight(layer, name): one tensor of one layer, name relative to the layer.
    activations(layer, axis): what the units of an axis of the block's table do on calibration text, float32
    (tokens, units), sink positions left out. seed: the cell's, the same in every slot. memo: what a method computes
    once for all slots (once).
    """

    num_layers: int
    weight: Callable[[int, str], Tensor]
    activations: Callable[[int, str], Tensor]
    seed: int = 0
    memo: dict[Any, Any] = field(default_factory=dict)

    def once(self, key: Any, compute: Callable[[], Any]) -> Any:
        """compute() at the first call with a key, its result at later ones."""
        if key not in self.memo:
            self.memo[key] = compute()
        return self.memo[key]


@dataclass(frozen=True)
class Parents:
    """What a method may see: a read-only view of the base from one slot.

    lower, upper: tensors of the layers below and above by name relative to the layer; None where there is none.
    base, layer: the whole base, and the lower parent's index in it; None where parents stand alone (tests).
    maps: where a method leaves, by weight name, how it brought the lower layer's rows into the upper layer's order.
    ValueError if a tensor is not in the architecture's table: a method must never fall through to something else.
    """

    lower: Mapping[str, Tensor] | None
    upper: Mapping[str, Tensor] | None
    block: Block
    heads: Heads
    where: str  # names the slot in messages, e.g. "layer 16"
    seed: int = 0  # of what a method draws; where enters too, so that slots differ
    device: torch.device | str = "cpu"  # where plans are solved
    base: Base | None = None
    layer: int | None = None
    maps: dict[str, Map] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = {weight.name for weight in self.block.weights}
        for layer in (self.lower, self.upper):
            if layer is None:
                continue
            if unknown := sorted(set(layer) - known):
                raise ValueError(
                    f"{self.where}: tensor {unknown[0]!r} is not in the table of {self.block.model_type!r} in "
                    "opt_deus/models/blocks.py, so no method knows how to make it; add it to the table."
                )
            needed = {weight.name for weight in self.block.weights if weight.columns is not None or weight.norm}
            if missing := sorted(needed - set(layer)):
                raise ValueError(f"{self.where}: the layer has no tensor {missing[0]!r}, which its table asks for.")
        if self.lower is not None and self.upper is not None:
            for name in sorted(set(self.lower) | set(self.upper)):
                shapes = [tuple(layer[name].shape) if name in layer else None for layer in (self.lower, self.upper)]
                if shapes[0] != shapes[1]:
                    raise ValueError(f"{self.where}: {name} has shapes {shapes[0]} below and {shapes[1]} above.")

    @property
    def weights(self) -> list[Weight]:
        """The table's rows that these layers have (a bias may be absent), in forward order."""
        present = self.lower if self.lower is not None else self.upper
        return [weight for weight in self.block.weights if weight.name in present]

    def pair(self, name: str) -> tuple[Tensor, Tensor]:
        """The two parents' tensors in float64 on the solving device."""
        return tuple(layer[name].to(self.device, torch.float64) for layer in (self.lower, self.upper))


def mean_of(aligned: Tensor, parents: Parents, name: str) -> Tensor:
    """Average of an aligned lower tensor (float64) with the upper one, rounded once, to the parents' dtype."""
    upper = parents.upper[name]
    return ((aligned + upper.to(aligned.device, torch.float64)) / 2).to(upper.device, upper.dtype)


def diagnose(solver: str, **numbers: float | None) -> dict:
    """A weight's diagnostics for record.json; what has no meaning for a method stays None."""
    empty = ("mass", "marginal_error", "cost_identity", "cost_plan", "effective_support", "aligned_norm_ratio")
    return {"solver": solver, **dict.fromkeys(empty), **numbers}


def norm_ratio(aligned: Tensor, weight: Tensor) -> float | None:
    """Frobenius norm of the aligned lower weight over the original's; None for an all-zero original."""
    size = weight.norm().item()
    return aligned.norm().item() / size if size > 0 else None


def norm_match(parents: Parents, layer: Layer) -> Layer:
    """The layer with every matrix rescaled to the mean Frobenius norm of its parents' (contract: norm_match).

    Separates what alignment does from what a smaller weight does. Vectors stay. ValueError for a made matrix that is
    zero while its parents are not.
    """
    matched = {}
    for name, made in layer.items():
        norms = [above[name].double().norm().item() for above in (parents.lower, parents.upper) if above is not None]
        size, wanted = made.double().norm().item(), sum(norms) / len(norms)
        if made.ndim < 2 or size == wanted:
            matched[name] = made
        elif size == 0:
            raise ValueError(f"norm_match=true: {parents.where}, {name} was made zero and cannot be rescaled.")
        else:
            matched[name] = (made.double() * (wanted / size)).to(made.dtype)
    return matched
