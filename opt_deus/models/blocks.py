"""A decoder block as a table: every tensor of a layer and the axes that it connects.

Code walks the table and never tests a tensor's name. To add an architecture, add a table (CONTRIBUTING.md).

Axes. "residual" is the stream shared by all layers. "query", "key" and "value" are heads x head dimension;
"attention" is o_proj's input: the value axis, repeated for every query head of a KV group. "middle" is the stream
between attention and MLP, "mlp" the hidden neurons.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Weight:
    """One tensor of a layer; name is relative to the layer, e.g. "self_attn.q_proj.weight"."""

    name: str
    rows: str  # axis of dimension 0
    columns: str | None = None  # axis of dimension 1; None for a vector (norm weight or bias)
    zeroed: bool = False  # zero-initialisation sets it to 0
    norm: bool = False  # a norm's weight: taken from the neighbours, never aligned on its rows
    signed: bool = False  # negating a neuron's row (or column) here and in the other signed weights changes nothing


@dataclass(frozen=True)
class Derived:
    """An axis that no weight of its own aligns: its alignment follows from those of axes before it."""

    axis: str
    source: str  # the axis whose alignment it takes
    identity: bool = False  # half of it arrives unaligned: the residual path is added
    repeated: bool = False  # the source's heads are repeated for every query head of their KV group


@dataclass(frozen=True)
class Block:
    """The tensors of one decoder layer in the order of the forward pass."""

    model_type: str
    weights: tuple[Weight, ...]
    derived: tuple[Derived, ...] = ()
    rotary: str | None = "halves"  # entries d and d + width / 2 of a q or k head turn together; None: no turn allowed
    layers: str = "model.layers"  # where the list of layers is in the causal language model

    def weight(self, name: str) -> Weight:
        return next(weight for weight in self.weights if weight.name == name)

    @property
    def zeroed(self) -> tuple[str, ...]:
        return tuple(weight.name for weight in self.weights if weight.zeroed)


LLAMA = Block(
    model_type="llama",
    weights=(
        Weight("input_layernorm.weight", "residual", norm=True),
        Weight("self_attn.q_proj.weight", "query", "residual"),
        Weight("self_attn.q_proj.bias", "query"),
        Weight("self_attn.k_proj.weight", "key", "residual"),
        Weight("self_attn.k_proj.bias", "key"),
        Weight("self_attn.v_proj.weight", "value", "residual"),
        Weight("self_attn.v_proj.bias", "value"),
        Weight("self_attn.o_proj.weight", "attention_output", "attention", zeroed=True),
        Weight("self_attn.o_proj.bias", "attention_output", zeroed=True),
        Weight("post_attention_layernorm.weight", "middle", norm=True),
        Weight("mlp.gate_proj.weight", "mlp", "middle"),
        Weight("mlp.gate_proj.bias", "mlp"),
        Weight("mlp.up_proj.weight", "mlp", "middle", signed=True),
        Weight("mlp.up_proj.bias", "mlp", signed=True),
        Weight("mlp.down_proj.weight", "mlp_output", "mlp", zeroed=True, signed=True),
        Weight("mlp.down_proj.bias", "mlp_output", zeroed=True),
    ),
    derived=(
        Derived("attention", "value", repeated=True),
        Derived("middle", "attention_output", identity=True),
    ),
)

BLOCKS = {block.model_type: block for block in (LLAMA,)}


def block_for(model_type: str) -> Block:
    """The table of an architecture; ValueError names the ones there are."""
    if model_type not in BLOCKS:
        raise ValueError(
            f"model: architecture {model_type!r} has no table in opt_deus/models/blocks.py; "
            f"known: {', '.join(sorted(BLOCKS))}. CONTRIBUTING.md shows how to add one."
        )
    return BLOCKS[model_type]
