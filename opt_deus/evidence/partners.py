"""Which lower unit stands beside each upper unit: under a method's maps, and under the references that judge them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opt_deus.evidence.unit_maps import as_matrix
from opt_deus.models import only_layers
from opt_deus.models.activations import standardised, unit_activations
from opt_deus.models.blocks import Block
from opt_deus.models.surgery import layer_tensors
from opt_deus.transport import Assignment, DensePlan, Map, solve_exact

HELD_BYTES = 2**30  # of activations at once


@dataclass(frozen=True)
class Pairing:
    """What stands beside every upper unit: lower unit partner[j] times factor[j], or a mixture of lower units.

    partner (upper,), factor (upper,) or None for 1; or mixture (upper, lower), or (1, lower) for all upper units alike.
    of_scores: the mixture is the mean, weighted by its rows, of lower units that were standardised first, so that its
    covariance with the standardised upper unit is the weighted mean of their correlations.
    """

    partner: Tensor | None = None
    factor: Tensor | None = None
    mixture: Tensor | None = None
    of_scores: bool = False

    def beside(self, lower: Tensor) -> Tensor:
        """Lower activations (tokens, lower) -> (tokens, upper), or (tokens, 1)."""
        if self.partner is not None:
            chosen = lower[:, self.partner.to(lower.device)]
            return chosen if self.factor is None else chosen * self.factor.to(chosen)
        mixture = self.mixture.to(lower)
        if not self.of_scores:
            return lower @ mixture.T
        scores, live = standardised(lower)
        shares = mixture * live
        return scores @ (shares / shares.sum(1, keepdim=True).clamp_min(torch.finfo(shares.dtype).tiny)).T


def same_index(units: int) -> Pairing:
    return Pairing(partner=torch.arange(units))


def method_pairings(maps: Mapping[str, Map]) -> dict[str, Pairing]:
    """The pairings of a method's maps (of unit_maps.maps_on), a weight's name in brackets where its maps differ.

    barycentric: the lower units mapped as the method maps weight rows; for an assignment that is the partner itself,
    and the only pairing. A soft plan also has argmax, its heaviest lower unit, and weighted, the mean over its units.
    """
    found = {}
    for label, one in maps.items():
        suffix = in_brackets(label)
        if isinstance(one, Assignment):
            found["barycentric" + suffix] = Pairing(partner=one.partner)
            continue
        weights = as_matrix(one)
        found["barycentric" + suffix] = Pairing(mixture=weights)
        if isinstance(one, DensePlan):
            has_mass = (weights.sum(1) > 0).float()  # without mass nothing is the heaviest
            found["argmax" + suffix] = Pairing(partner=weights.argmax(1), factor=has_mass)
            found["weighted" + suffix] = Pairing(mixture=weights, of_scores=True)
    return found


def in_brackets(label: str) -> str:
    """What a quantity's name ends in where weights have maps of their own."""
    return f"[{label}]" if label else ""


def best_partner(correlation: Tensor, signed: bool = False) -> Pairing:
    """The one-to-one partners of largest mean correlation (lower, upper), or size of it, each then with its sign."""
    partner = solve_exact(1 - (correlation.abs() if signed else correlation)).partner
    chosen = correlation[partner, torch.arange(len(partner), device=partner.device)]
    return Pairing(partner=partner, factor=torch.where(chosen < 0, -1.0, 1.0) if signed else None)


Sides = tuple[list[Tensor], list[Tensor]]  # lower and upper layer: for every text block (kept tokens, units)


def gap_activations(
    model: Any, block: Block, ids: Tensor, gaps: Sequence[int], axes: Sequence[str]
) -> Iterator[tuple[int, dict[str, Sides]]]:
    """Each gap with its two layers' activations by axis, on token blocks ids (blocks, tokens).

    As many layers at once as HELD_BYTES allow. Left out, in every gap alike, are positions that are sinks at the entry
    of any layer of the model.
    """
    kept = unit_activations(model, block, ids, (), ()).kept
    held = HELD_BYTES // (4 * ids.numel() * sum(num_units(model, block, axis) for axis in axes))
    for group in batches(gaps, held):
        layers = {layer for gap in group for layer in (gap, gap + 1)}
        with only_layers(model.model, slice(max(layers) + 1)):  # what is above is of no use here
            values = unit_activations(model, block, ids, layers, axes).values
        by_block = {place: [one[keep] for one, keep in zip(each, kept, strict=True)] for place, each in values.items()}
        del values
        for gap in group:
            yield gap, {axis: (by_block[gap, axis], by_block[gap + 1, axis]) for axis in axes}


def num_units(model: Any, block: Block, axis: str) -> int:
    """Of an axis that some matrix of the block reads or writes."""
    tensors = layer_tensors(model, 0)
    return next(
        tensors[weight.name].shape[0 if weight.rows == axis else 1]
        for weight in block.weights
        if weight.columns is not None and axis in (weight.rows, weight.columns)
    )


def batches(gaps: Sequence[int], layers_at_once: int) -> list[list[int]]:
    """Gaps in groups whose layers (l and l + 1 of a gap l) are at most so many, but at least one gap in each."""
    groups: list[list[int]] = []
    for gap in gaps:
        if groups and len({layer for each in [*groups[-1], gap] for layer in (each, each + 1)}) <= layers_at_once:
            groups[-1].append(gap)
        else:
            groups.append([gap])
    return groups
