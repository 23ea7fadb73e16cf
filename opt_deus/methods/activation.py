"""Alignment by what units do rather than by their weights: the cost is one minus the correlation of activations.

As opt_deus.methods.structured the lower layer is relabelled as a whole, within the block's exact symmetries, so that
only the choice of partners differs from ot_structured's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opt_deus.methods import Diagnostics, Layer, Parents
from opt_deus.methods.structured import average_relabelled
from opt_deus.methods.symmetry import Symmetry
from opt_deus.models.activations import correlations
from opt_deus.transport import check_plan, solve_exact


def ot_activation(
    parents: Parents, mlp: bool = True, heads: bool = True, channels: bool = True
) -> tuple[Layer, Diagnostics]:
    """The upper layer averaged with the lower one, relabelled so that matched units' activations correlate most.

    mlp: neurons by their hidden activations. heads: KV groups by their value channels, and query heads inside a group
    by their outputs. channels: value channels inside the groups (v rows and o columns) by permutation. Correlations are
    Pearson's, on calibration text without sink positions. ValueError without a base to run.
    """
    if parents.base is None or parents.layer is None:
        raise ValueError("align=ot_activation: parents stand alone; it needs the whole base to run text through.")
    found = {}
    if mlp:
        found["neurons"] = _partners(_correlations(parents, "mlp"), parents.where)
    if heads:
        found |= _match_heads(parents, channels)
    return average_relabelled(parents, Symmetry(parents.heads, **found), "activation")


def _match_heads(parents: Parents, channels: bool) -> dict[str, Tensor]:
    """KV groups so that their channels correlate most; then query heads inside matched groups."""
    shape = parents.heads
    per_group, width = shape.per_group, shape.head_dim
    values = _correlations(parents, "value").unflatten(1, (-1, width)).unflatten(0, (-1, width)).transpose(1, 2)
    orders = torch.arange(width).expand(shape.num_kv, shape.num_kv, width).clone()  # (upper, lower) -> channels
    if channels:
        for up in range(shape.num_kv):
            for low in range(shape.num_kv):
                orders[up, low] = _partners(values[up, low], parents.where)
    matched = values.gather(3, orders[..., None].to(values.device))[..., 0].sum(2)
    groups = _partners(matched, parents.where).cpu()
    outputs = _correlations(parents, "attention").unflatten(1, (-1, width)).unflatten(0, (-1, width)).transpose(1, 2)
    heads = torch.empty(shape.num_query, dtype=torch.long)
    for up, low in enumerate(groups.tolist()):
        above, below = (slice(group * per_group, (group + 1) * per_group) for group in (up, low))
        order = orders[up, low].to(outputs.device).expand(per_group, per_group, width)[..., None]
        same = outputs[above, below].gather(3, order)[..., 0].sum(2)  # (upper head, lower head) of matched channels
        heads[above] = low * per_group + _partners(same, parents.where).cpu()
    turns = torch.eye(width, dtype=torch.float64)[orders[torch.arange(shape.num_kv), groups]] if channels else None
    places = {"groups": groups, "heads": heads, "value": turns}
    return {name: None if each is None else each.to(parents.device) for name, each in places.items()}


def _correlations(parents: Parents, axis: str) -> Tensor:
    """Pearson correlation (upper units, lower units), float64; 0 where a unit never changes."""
    low, up = (parents.base.activations(parents.layer + step, axis).double() for step in (0, 1))
    return correlations(low, up).T


def _partners(correlation: Tensor, where: str) -> Tensor:
    """For every upper unit its lower partner, so that the sum of correlations (upper, lower) is largest."""
    plan = solve_exact(1 - correlation.T)
    check_plan(plan, where)
    return plan.partner
