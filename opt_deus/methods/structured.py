"""Alignment within the exact symmetries of a block, so that a relabelled copy of a layer is recovered exactly.

The lower layer is relabelled as a whole (opt_deus.methods.symmetry): what is minimised is the squared distance between
its free weights and those of the layer above. Because every symmetry is orthogonal that is the same as maximising inner
products, which are computed once per pair of units ("overlaps": upper unit times lower unit).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from opt_deus.methods import Diagnostics, Layer, Parents, diagnose, mean_of, norm_ratio
from opt_deus.methods.symmetry import Symmetry, random_symmetry
from opt_deus.transport import check_plan, solve_exact

WITHIN_HEAD = ("none", "permutation", "procrustes")
ROTARIES = ("none", "planes")
_ROUNDS = 20  # of the alternation between heads and turns, which settles in two or three


def ot_structured(
    parents: Parents,
    mlp: bool = True,
    down: bool = True,
    heads: bool = True,
    signs: bool = False,
    within_head: str = "none",
    rotary: str = "none",
) -> tuple[Layer, Diagnostics]:
    """The upper layer averaged with the lower one, relabelled to be as near to it as the chosen symmetries allow.

    mlp: one assignment for gate and up rows, and down columns with `down`; signs: of a neuron's up row and down column.
    heads: KV groups, and query heads inside them, over q, k, v and o together. within_head: within a head, v rows and o
    columns by permutation or orthogonal map (procrustes). rotary: within a head, q and k by a rotation of every rotary
    frequency pair. Heads are matched by what remains after the alignment within them, or turned copies are mismatched.
    """
    if within_head not in WITHIN_HEAD:
        raise ValueError(f"align.within_head={within_head}: unknown; choose one of {', '.join(WITHIN_HEAD)}.")
    if rotary not in ROTARIES:
        raise ValueError(f"align.rotary={rotary}: unknown; choose one of {', '.join(ROTARIES)}.")
    if rotary == "planes" and parents.block.rotary is None:
        raise ValueError(
            f"align.rotary=planes: turning a head changes the function of {parents.block.model_type}; use none."
        )
    if signs and not any(weight.signed for weight in parents.block.weights):
        raise ValueError(
            f"align.signs=true: {parents.block.model_type}'s neurons have no sign symmetry; set it to false."
        )
    if not heads and (within_head != "none" or rotary != "none"):
        raise ValueError(
            f"align.heads=false with align.within_head={within_head}, align.rotary={rotary}: set align.heads=true."
        )
    found = {}
    if mlp:
        found |= _match_neurons(parents, down, signs)
    if heads:
        found |= _match_heads(parents, within_head, rotary)
    return average_relabelled(parents, Symmetry(parents.heads, **found), "structured")


def random_symmetric(parents: Parents) -> tuple[Layer, Diagnostics]:
    """Control: the upper layer averaged with a random exact relabelling of the lower one (function unchanged)."""
    return average_relabelled(parents, random_symmetry(parents), "random")


def average_relabelled(parents: Parents, symmetry: Symmetry, solver: str) -> tuple[Layer, Diagnostics]:
    """The mean of the upper layer and the relabelled lower one; diagnostics: mean row distance before and after."""
    layer, diagnostics = {}, {}
    for weight in parents.weights:
        below, above = parents.pair(weight.name)
        aligned = symmetry(weight, below)
        layer[weight.name] = mean_of(aligned, parents, weight.name)
        if weight.columns is not None:
            parents.maps[weight.name] = symmetry.rows(weight, len(below))
            diagnostics[weight.name] = diagnose(
                solver,
                mass=1.0,
                marginal_error=0.0,
                cost_identity=(below - above).norm(dim=1).mean().item(),
                cost_plan=(aligned - above).norm(dim=1).mean().item(),
                effective_support=1.0,
                aligned_norm_ratio=norm_ratio(aligned, below),
            )
    return layer, diagnostics


def _match_neurons(parents: Parents, down: bool, signs: bool) -> dict[str, Tensor | None]:
    """One assignment of the MLP neurons over all weights that have them."""
    if not signs:
        return {"neurons": _assign(_overlaps(parents, "mlp", 1, columns=down)[..., 0, 0], parents.where)}
    plain, signed = (_overlaps(parents, "mlp", 1, columns=down, signed=mark)[..., 0, 0] for mark in (False, True))
    partner = _assign(plain + signed.abs(), parents.where)
    chosen = signed[torch.arange(len(partner), device=partner.device), partner]
    return {"neurons": partner, "signs": torch.where(chosen < 0, -1.0, 1.0).to(chosen.dtype)}


def _match_heads(parents: Parents, within_head: str, rotary: str) -> dict[str, Tensor]:
    """The best assignment of KV groups, given the best alignment inside every pair of them."""
    shape, per_group = parents.heads, parents.heads.per_group
    key, values = (_overlaps(parents, axis, shape.head_dim) for axis in ("key", "value"))
    query, output = (
        # (upper group, upper head in it, lower group, lower head in it, width, width)
        _overlaps(parents, axis, shape.head_dim).unflatten(1, (-1, per_group)).unflatten(0, (-1, per_group))
        for axis in ("query", "attention")
    )
    pairs = [
        [
            _match_group(
                key[up, low], values[up, low], query[up, :, low], output[up, :, low], within_head, rotary, parents.where
            )
            for low in range(shape.num_kv)
        ]
        for up in range(shape.num_kv)
    ]
    groups = _assign(torch.tensor([[pair.overlap for pair in row] for row in pairs], device=key.device), parents.where)
    chosen = [pairs[up][low] for up, low in enumerate(groups.tolist())]
    return {
        "groups": groups,
        "heads": torch.cat([low * per_group + pair.heads for low, pair in zip(groups.tolist(), chosen, strict=True)]),
        "rotary": None if rotary == "none" else torch.stack([pair.rotary for pair in chosen]),
        "value": None if within_head == "none" else torch.stack([pair.value for pair in chosen]),
    }


@dataclass(frozen=True)
class _GroupMatch:
    """How a lower KV group fits an upper one: the larger the overlap, the better."""

    overlap: float
    heads: Tensor
    rotary: Tensor
    value: Tensor


def _match_group(
    key: Tensor, values: Tensor, query: Tensor, output: Tensor, within_head: str, rotary: str, where: str
) -> _GroupMatch:
    """Alternates between the heads' assignment and the turns inside the heads, each the best given the other.

    key, values (width, width); query, output (heads, heads, width, width). Starts from the turns that k and v alone
    ask for: of a turned copy they are already right.
    """
    turn_qk, turn_vo = _best_turn(key, rotary), _best_turn(values, within_head)
    places = torch.arange(len(query), device=query.device)
    heads = None
    for _ in range(_ROUNDS):
        overlaps = (query * turn_qk).sum((2, 3)) + (output * turn_vo).sum((2, 3))
        previous, heads = heads, _assign(overlaps, where)
        if previous is not None and torch.equal(previous, heads):
            break
        all_qk, all_vo = key + query[places, heads].sum(0), values + output[places, heads].sum(0)
        turn_qk, turn_vo = _best_turn(all_qk, rotary), _best_turn(all_vo, within_head)
    overlap = (all_qk * turn_qk).sum() + (all_vo * turn_vo).sum()
    return _GroupMatch(overlap.item(), heads, turn_qk, turn_vo)


def _best_turn(overlap: Tensor, kind: str) -> Tensor:
    """The map R (width, width) of a kind that maximises <R, overlap>, overlap = upper rows x lower rows^T."""
    if kind == "procrustes":
        left, _, right = torch.linalg.svd(overlap)
        return left @ right
    turn = torch.eye(len(overlap), dtype=overlap.dtype, device=overlap.device)
    if kind == "permutation":
        return turn[_assign(overlap, "a head")]
    if kind == "planes":
        first = torch.arange(len(overlap) // 2, device=overlap.device)
        second = first + len(first)
        angle = torch.atan2(
            overlap[second, first] - overlap[first, second], overlap[first, first] + overlap[second, second]
        )
        turn[first, first] = turn[second, second] = angle.cos()
        turn[second, first], turn[first, second] = angle.sin(), -angle.sin()
    return turn


def _overlaps(parents: Parents, axis: str, width: int, columns: bool = True, signed: bool | None = None) -> Tensor:
    """Inner products of all units of an axis: (upper units, lower units, width, width), summed over its weights.

    columns=False leaves out weights that have the axis as inputs; signed takes only those (not) marked so.
    """
    total = 0
    for weight in parents.weights:
        along_rows = weight.rows == axis
        if weight.norm or not (along_rows or (columns and weight.columns == axis)):
            continue
        if signed is not None and weight.signed != signed:
            continue
        low, up = (tensor if along_rows else tensor.T for tensor in parents.pair(weight.name))
        product = up.reshape(len(up), -1) @ low.reshape(len(low), -1).T
        total = total + product.unflatten(1, (-1, width)).unflatten(0, (-1, width)).transpose(1, 2)
    return total


def _assign(overlap: Tensor, where: str) -> Tensor:
    """For every upper unit its lower partner, so that the sum of overlaps (upper, lower) is largest."""
    plan = solve_exact(-overlap.T)
    check_plan(plan, where)
    return plan.partner
