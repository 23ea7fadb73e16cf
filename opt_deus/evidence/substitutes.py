"""What a unit is replaced by when the lower layer shall do its work: its partner's activation, rescaled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from opt_deus.evidence.partners import (
    Pairing,
    Sides,
    best_partner,
    in_brackets,
    method_pairings,
    same_index,
)
from opt_deus.models.activations import correlations
from opt_deus.transport import Map

SCALES = ("least_squares", "deviation")
MEAN, RANDOM, CEILING = "mean", "random", "attainable"
RELABELLINGS = 16  # random ones, taken in turn by the documents, so that no single one's luck decides


@dataclass(frozen=True)
class Substitute:
    """slope (units,) times what stands beside each unit in the lower layer, plus offset (units,)."""

    pairing: Pairing
    slope: Tensor
    offset: Tensor

    def __call__(self, lower: Tensor) -> Tensor:
        """Lower activations (tokens, lower units) -> (tokens, units)."""
        return self.pairing.beside(lower) * self.slope + self.offset


def fit(pairing: Pairing, lower: Tensor, upper: Tensor, scale: str) -> Substitute:
    """Scale and offset per unit, from both layers' activations (tokens, units) on calibration text.

    scale: least_squares, or deviation, which gives the partner the unit's standard deviation (and keeps its sign).
    """
    beside = pairing.beside(lower)
    means = [each.mean(0) for each in (beside, upper)]
    x, y = beside - means[0], upper - means[1]
    spread = x.square().sum(0)
    wanted = (x * y).sum(0) if scale == "least_squares" else (spread * y.square().sum(0)).sqrt()
    slope = torch.where(spread > 0, wanted / torch.where(spread > 0, spread, 1.0), 0.0)
    return Substitute(pairing, slope, means[1] - slope * means[0])


def substitutes_at(
    sides: Sides, maps: Mapping[str, Map], scale: str, width: int, seed: list[int]
) -> dict[str, list[Substitute]]:
    """Every condition's substitutes at one place, from calibration text: one each, and RELABELLINGS of random.

    maps: the method's on this axis. width: channels that random moves together (a head's).
    """
    lower, upper = (torch.cat(side) for side in sides)
    units = upper.shape[1]
    of_method, pairings = method_pairings(maps), {}
    for label in maps:
        suffix = in_brackets(label)
        pairings["partner" + suffix] = of_method.get("argmax" + suffix, of_method["barycentric" + suffix])
    pairings["same_index"] = same_index(units)
    pairings[CEILING] = best_partner(correlations(lower, upper))
    found = {name: [fit(pairing, lower, upper, scale)] for name, pairing in pairings.items()}
    generator = np.random.default_rng(seed)
    orders = [torch.from_numpy(generator.permutation(units // width)) for _ in range(RELABELLINGS)]
    partners = [(order[:, None] * width + torch.arange(width)).flatten() for order in orders]
    found[RANDOM] = [fit(Pairing(partner=partner), lower, upper, scale) for partner in partners]
    found[MEAN] = [Substitute(same_index(units), torch.zeros(units).to(upper), upper.mean(0))]
    return found


def chosen_units(count: int, width: int, fraction: float, draws: int, seed: list[int]) -> Tensor:
    """(draws, count) booleans: in each draw a random part of the units, at least one, in groups of `width` channels."""
    whole = count // width
    generator = np.random.default_rng(seed)
    mask = np.zeros((draws, whole), dtype=bool)
    for row in mask:
        row[generator.choice(whole, max(1, round(fraction * whole)), replace=False)] = True
    return torch.from_numpy(mask.repeat(width, axis=1))
