"""How a method brings the units of an axis into the upper layer's order, from its maps of weights' rows.

A unit is an entry of a signal inside a layer (opt_deus.models.activations): an MLP neuron, a channel of q, k, v or of a
head's output, a component of what o_proj or down_proj gives.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from opt_deus.methods import Heads
from opt_deus.models.blocks import Block
from opt_deus.transport import Assignment, DensePlan, LinearMap, Map

QUERY = "query"  # the axis whose heads are those of an axis that repeats KV heads


def sites(block: Block) -> list[str]:
    """The axes that have units of their own: rows of matrices, and heads' outputs."""
    rows = [weight.rows for weight in block.weights if weight.columns is not None]
    return list(dict.fromkeys(rows + [derived.axis for derived in block.derived if derived.repeated]))


def maps_on(axis: str, maps: Mapping[str, Map], block: Block, heads: Heads) -> dict[str, Map]:
    """A method's maps of an axis' units: {"": map} where the axis' weights agree, else by weight name; {} for none.

    An axis that repeats KV heads (heads' outputs) follows its source's map: upper query head h takes the repeat of the
    same place in its group, as the paper's flow does. Where query rows move as whole heads, and KV heads as the groups
    of these, the method relabels query heads: then head h takes the query head that its query rows come from.
    """
    found = {weight.name: maps[weight.name] for weight in block.weights if weight.rows == axis and weight.name in maps}
    for derived in block.derived:
        if derived.axis == axis and derived.repeated:
            query = maps_on(QUERY, maps, block, heads).get("")
            sources = maps_on(derived.source, maps, block, heads)
            found |= {label: repeated(source, query, heads) for label, source in sources.items()}
    first = next(iter(found.values()), None)
    return {"": first} if found and all(_same(first, other) for other in found.values()) else found


def repeated(source: Map, query: Map | None, heads: Heads) -> Map:
    """A map of KV heads' channels as a map of query heads' channels (see maps_on), on the CPU."""
    place = torch.arange(heads.num_query)
    group, inside = place // heads.per_group, place % heads.per_group
    taken = _taken_heads(source, query, heads)
    if isinstance(source, Assignment):
        low = source.partner.cpu().reshape(heads.num_kv, heads.head_dim)[group]
        head = low // heads.head_dim * heads.per_group + inside[:, None] if taken is None else taken[:, None]
        return Assignment((head * heads.head_dim + low % heads.head_dim).flatten(), source.solver)
    fits = inside == inside[:, None] if taken is None else place == taken[:, None]  # (upper head, lower head)
    matrix = source.matrix.cpu() if isinstance(source, LinearMap) else source.matrix.cpu().T  # (upper, lower)
    matrix = matrix.reshape(heads.num_kv, heads.head_dim, heads.num_kv, heads.head_dim)[group][:, :, group]
    matrix = (matrix * fits[:, None, :, None]).reshape(heads.num_query * heads.head_dim, -1)
    if isinstance(source, LinearMap):
        return LinearMap(matrix)
    return DensePlan(matrix.T / heads.per_group, source.solver, source.rescaled, source.every_neuron)


def _taken_heads(source: Map, query: Map | None, heads: Heads) -> Tensor | None:
    """For every upper query head the lower one, where query heads and their groups are relabelled together."""
    if query is None:
        return None
    taken, groups = _whole_heads(query, heads.head_dim), _whole_heads(source, heads.head_dim)
    if taken is None or groups is None:
        return None
    together = torch.equal(taken // heads.per_group, groups.repeat_interleave(heads.per_group))
    return taken if together else None


def _whole_heads(found: Map, width: int) -> Tensor | None:
    """For every upper head the lower one that alone makes it; None where heads are torn apart."""
    joined = as_matrix(found).unflatten(1, (-1, width)).unflatten(0, (-1, width)).abs().sum((1, 3)) > 0
    one_to_one = (joined.sum(0) == 1).all() and (joined.sum(1) == 1).all()
    return joined.int().argmax(1).cpu() if one_to_one else None


def as_matrix(found: Map) -> Tensor:
    """Any map as a matrix (upper, lower) that is applied to rows."""
    if isinstance(found, Assignment):
        return torch.nn.functional.one_hot(found.partner).double()
    return found.weights() if isinstance(found, DensePlan) else found.matrix


def _same(one: Map, other: Map) -> bool:
    if one is other:
        return True
    if isinstance(one, Assignment) and isinstance(other, Assignment):
        return torch.equal(one.partner.cpu(), other.partner.cpu())
    return type(one) is type(other) and torch.equal(as_matrix(one).cpu(), as_matrix(other).cpu())
