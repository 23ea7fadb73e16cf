"""The referee's test: are the units that a method pairs more correlated on real text than units of the same index?

Signed Pearson correlation over tokens of upper unit j with what stands beside it (opt_deus.evidence.partners), mean
over units. All on the second half of the held-out blocks; the first half only chooses the ceiling's partners. Sink
positions are left out. Quantities:

barycentric, argmax, weighted   the method's: image under its map, heaviest partner, mean over partners by plan weight
same_index                      unit j of both layers
random                          the expected value for a random partner: unit j's mean correlation with all units
attainable                      the best one-to-one partners of the first half, on the second
attainable_signed               the same where a partner may also count with its sign turned
share_of_attainable.X           (X - random) / (attainable - random), where the ceiling is above chance

Intervals resample text blocks and units at once. The bootstrap over blocks is exact for all but weighted and random,
whose lower units keep the spread that they have on the whole half. excluded_units: upper units without a correlation,
because they or what stands beside them never vary (an empty plan, a dead neuron).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas
import torch
from torch import Tensor
from tqdm import tqdm

from opt_deus.evidence import COLUMNS, Finding, Subject
from opt_deus.evidence.intervals import CONFIDENCE
from opt_deus.evidence.partners import (
    Pairing,
    Sides,
    best_partner,
    gap_activations,
    method_pairings,
    same_index,
)
from opt_deus.evidence.unit_maps import maps_on, sites
from opt_deus.models.activations import correlations, standardised

RANDOM, CEILING, CEILING_SIGNED = "random", "attainable", "attainable_signed"
AT_ONCE = 100  # resamples held in memory
ROUNDING = 1e-12


@dataclass(frozen=True)
class Sums:
    """What the correlations of any resample of text blocks need, for one quantity at one place.

    tokens (blocks,); table (5, blocks, units): sums over a block's tokens of x, y, xx, yy, xy, where x stands beside
    upper unit y, both as z-scores over all blocks; live (all units,): which units have a correlation, and are in table.
    """

    tokens: np.ndarray
    table: np.ndarray
    live: np.ndarray
    of_scores: bool = False

    def correlations(self, weights: np.ndarray) -> np.ndarray:
        """(resamples, live units) for weights (resamples, blocks), how often each block counts."""
        x, y, xx, yy, xy = (weights @ self.table) / (weights @ self.tokens)[:, None]
        # of scores, x is a mean of standardised units, which keep their spread
        spread = (yy - y * y) * (1.0 if self.of_scores else xx - x * x)
        varies = spread > ROUNDING  # a unit may be still in all the blocks that were drawn
        return np.where(varies, (xy - x * y) / np.sqrt(np.where(varies, spread, 1.0)), 0.0)


def block_sums(pairing: Pairing, lower: list[Tensor], upper: list[Tensor]) -> Sums:
    """From the activations of both layers (kept tokens, units), block by block."""
    counts = [len(each) for each in lower]
    beside = pairing.beside(torch.cat(lower))
    y, live = standardised(torch.cat(upper))
    if pairing.of_scores:
        x, live_x = beside, beside.abs().amax(0) > 0
    else:
        x, live_x = standardised(beside)
    x, live = x.expand_as(y), live & live_x
    parts = (x, y, x * x, y * y, x * y)
    table = [torch.stack([block.sum(0, dtype=torch.float64) for block in part.split(counts)]) for part in parts]
    table = torch.stack(table)[:, :, live].numpy(force=True)
    return Sums(np.array(counts, dtype=np.float64), table, live.numpy(force=True), pairing.of_scores)


def pairings_at(sides: Sides, maps: dict, halves: int) -> dict[str, Pairing]:
    """All quantities' pairings; the ceilings' are chosen on the first `halves` text blocks."""
    units = sides[1][0].shape[1]
    found = method_pairings(maps)
    found["same_index"] = same_index(units)
    found[RANDOM] = Pairing(mixture=torch.ones(1, units), of_scores=True)
    on_choosing_half = correlations(*(torch.cat(side[:halves]) for side in sides))
    found[CEILING] = best_partner(on_choosing_half)
    found[CEILING_SIGNED] = best_partner(on_choosing_half, signed=True)
    return found


def bootstrap(sums: Sums, block_draws: np.ndarray, unit_draws: np.ndarray) -> np.ndarray:
    """(1 + resamples,): the mean correlation over units, and its resamples.

    block_draws (resamples, blocks): how often each block counts; unit_draws (resamples, all units): positive weights.
    """
    values = [sums.correlations(np.ones((1, len(sums.tokens)))).mean(1)]
    for start in range(0, len(block_draws), AT_ONCE):
        chosen = sums.correlations(block_draws[start : start + AT_ONCE])
        weights = unit_draws[start : start + AT_ONCE][:, sums.live]
        values.append((chosen * weights).sum(1) / weights.sum(1))
    return np.concatenate(values)


def draws(blocks: int, units: int, resamples: int, seed: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Bootstrap weights of blocks, the same for every seed so that places can be pooled, and of units (exponential)."""
    at_blocks = np.random.default_rng(0).multinomial(blocks, np.full(blocks, 1 / blocks), size=resamples)
    return at_blocks.astype(np.float64), np.random.default_rng(seed).standard_exponential((resamples, units))


def block_values(sums: Sums) -> np.ndarray:
    """(blocks,): jackknife pseudo-values of the mean correlation, so that methods can be paired block by block."""
    blocks = len(sums.tokens)
    whole = sums.correlations(np.ones((1, blocks))).mean()
    without = sums.correlations(1 - np.eye(blocks)).mean(1)
    return blocks * whole - (blocks - 1) * without


def measure(subject: Subject, resamples: int = 1_000) -> Finding:
    """Every gap of the plan, every axis that has units (unit_maps.sites).

    rows: item "block <i>" is text block i, of the second half; value its jackknife pseudo-value. ValueError for fewer
    than 4 blocks of text.
    """
    ids = subject.evaluation.blocks
    if len(ids) < 4:
        raise ValueError(
            f"evidence.tokens: {len(ids)} blocks of text; activation_correlation needs 4, two to choose the "
            "ceiling and two to measure on: raise evidence.tokens or lower evidence.length."
        )
    half, axes = len(ids) // 2, sites(subject.block)
    found: dict[tuple[str, str], dict[int, np.ndarray]] = {}
    rows, excluded = [], []
    walk = gap_activations(subject.model, subject.block, ids, subject.gaps, axes)
    for gap, sides in tqdm(walk, desc="correlation", total=len(subject.gaps), leave=False, disable=None):
        maps = subject.maps(gap)
        for place, axis in enumerate(axes):
            lower, upper = (side[half:] for side in sides[axis])
            on_axis = maps_on(axis, maps, subject.block, subject.heads)
            units = upper[0].shape[1]
            weights = draws(len(upper), units, resamples, [gap, place])
            for quantity, pairing in pairings_at(sides[axis], on_axis, half).items():
                sums = block_sums(pairing, lower, upper)
                if dead := units - int(sums.live.sum()):
                    excluded.append(_line(f"excluded_units.{quantity}", axis, gap, np.array([dead]), units, "units"))
                if sums.live.any():
                    found.setdefault((axis, quantity), {})[gap] = bootstrap(sums, *weights)
                    values = enumerate(block_values(sums), start=half)
                    rows += [(quantity, axis, gap, f"block {item}", value) for item, value in values]
    return Finding(pandas.DataFrame(rows, columns=COLUMNS), summarise(found, len(ids) - half) + excluded)


def summarise(found: dict[tuple[str, str], dict[int, np.ndarray]], blocks: int) -> list[dict]:
    """Lines over all gaps and per gap, of every quantity and its share of the attainable.

    found: (axis, quantity) -> gap -> (1 + resamples,), as bootstrap gives it.
    """
    lines = []
    for (axis, quantity), by_gap in found.items():
        floors, ceilings = found[axis, RANDOM], found[axis, CEILING]
        for gap, members in [(None, list(by_gap)), *((gap, [gap]) for gap in by_gap)]:
            own, floor, ceiling = (np.mean([one[at] for at in members], 0) for one in (by_gap, floors, ceilings))
            lines.append(_line(quantity, axis, gap, own, blocks))
            above_chance = np.quantile((ceiling - floor)[1:], (1 - CONFIDENCE) / 2) > 0
            if quantity not in (RANDOM, CEILING, CEILING_SIGNED) and above_chance:
                share = (own - floor) / (ceiling - floor)
                lines.append(_line(f"share_of_attainable.{quantity}", axis, gap, share, blocks))
    return lines


def _line(quantity: str, axis: str, gap: int | None, values: np.ndarray, n: int, items: str = "text blocks") -> dict:
    """A line of the summary; values: the estimate and its resamples, or the estimate alone."""
    low = high = None
    if len(values) > 1:
        low, high = np.quantile(values[1:], [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]).tolist()
    numbers = {"estimate": float(values[0]), "low": low, "high": high, "n": n}
    return {"quantity": quantity, "site": axis, "gap": gap, **numbers, "items": items}
