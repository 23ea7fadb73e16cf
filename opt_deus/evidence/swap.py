"""The intervention: does the lower layer's partner of a unit do that unit's work?

In layer l + 1 a random part of the units (MLP neurons, or whole heads at o_proj's input) gives, in place of its own
activation, its partner's activation in layer l on the same tokens, rescaled by a scale and an offset per unit that were
fitted on calibration text. What that costs is the loss (nats per token) of held-out documents above the intact model's.

partner        the method's: its assignment, a soft plan's heaviest lower unit, the image under another map
same_index     unit j of layer l
random         a random unit (a random whole head), others in every document
attainable     the best one-to-one partner by correlation on calibration text
mean           no partner at all: the unit's mean on calibration text
gain.X         cost of random minus cost of X
share_of_attainable.X     gain.X / gain.attainable, where the latter is above 0

The error that a partner of correlation r leaves has 1 - r^2 of the unit's variance with scale=least_squares (without
correlation it becomes the mean), and 2 (1 - r) with scale=deviation, which so tells weak partners apart better.

Every document and draw has its own random units, the same for all conditions and methods. Sink positions keep their own
activations, or the loss of the sink would be all that is seen.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas
import torch
from torch import Tensor
from tqdm import tqdm

from opt_deus.evidence import COLUMNS, Finding, Subject
from opt_deus.evidence.intervals import interval
from opt_deus.evidence.likelihood import first_documents
from opt_deus.evidence.partners import gap_activations
from opt_deus.evidence.substitutes import CEILING, MEAN, RANDOM, SCALES, Substitute, chosen_units, substitutes_at
from opt_deus.evidence.unit_maps import maps_on
from opt_deus.methods import Heads
from opt_deus.models import can_start_higher, only_layers
from opt_deus.models.activations import unit_activations, where_axis_lives
from opt_deus.models.blocks import Block
from opt_deus.models.surgery import layers_of
from opt_deus.models.updates import streams

SITES = ("mlp", "attention")


def unit_width(axis: str, heads: Heads) -> int:
    """Channels that are swapped together: a whole head's, or one neuron."""
    return heads.head_dim if axis == "attention" else 1


@torch.no_grad()
def losses(model: Any, ids: Tensor, inputs: dict[str, Tensor], first: int) -> Tensor:
    """Loss of each row of inputs, run from layer `first`, on one text ids (1, length): nats per token but the first."""
    with only_layers(model.model, slice(first, None)):
        states = model.model(**inputs, use_cache=False).last_hidden_state
    head = model.get_output_embeddings()
    # row by row, because the logits of all rows are large
    each = [torch.nn.functional.cross_entropy(head(row[:-1]).float(), ids[0, 1:]) for row in states]
    return torch.stack(each).double()


class Swapper:
    """One document in the intact model, and what it costs there to swap units."""

    def __init__(self, model: Any, block: Block, ids: Tensor, gaps: list[int]) -> None:
        self.model, self.block, self.ids = model, block, ids.to(model.device)
        self.activations = unit_activations(model, block, self.ids, range(len(layers_of(model))), SITES)
        self.streams = streams(model, self.ids, gaps)
        self.intact = losses(model, self.ids, {"input_ids": self.ids}, 0).item()

    def cost(self, gap: int, axis: str, substitutes: list[Substitute], chosen: Tensor) -> np.ndarray:
        """Loss above the intact model's, by substitute, with the chosen units (draws, units) swapped: mean of draws."""
        lower = self.activations.values[gap, axis][0]
        given = torch.stack([substitute(lower) for substitute in substitutes])[:, None]
        where = chosen.to(lower.device)[:, None] & self.activations.kept[0][:, None]  # (draws, tokens, units)
        shape = (len(substitutes), len(chosen))

        def swap(_module: Any, inputs: tuple) -> tuple:
            own = inputs[0].unflatten(0, shape)
            return (torch.where(where, given, own).flatten(0, 1),)

        name, _ = where_axis_lives(self.block, axis)
        handle = layers_of(self.model)[gap + 1].get_submodule(name).register_forward_pre_hook(swap)
        rows = shape[0] * shape[1]
        inputs, first = {"input_ids": self.ids.expand(rows, -1)}, 0
        if can_start_higher(self.model.config):
            inputs, first = {"inputs_embeds": self.streams[gap].states.expand(rows, -1, -1)}, gap + 1
        try:
            found = losses(self.model, self.ids, inputs, first)
        finally:
            handle.remove()
        return found.unflatten(0, shape).mean(1).numpy(force=True) - self.intact


def measure(
    subject: Subject,
    documents: int = 16,
    every: int = 4,
    fraction: float = 0.25,
    draws: int = 1,
    scale: str = "least_squares",
) -> Finding:
    """The first `documents` held-out documents; every so manyth gap of the plan, one gap and site at a time.

    fraction: of the units, swapped at once; draws: how often other ones, in each document. rows: one value per
    document. Intervals over documents. ValueError for knobs out of range.
    """
    if scale not in SCALES:
        raise ValueError(f"evidence.scale={scale}: unknown; choose one of {', '.join(SCALES)}.")
    if not 0 < fraction <= 1 or draws < 1 or every < 1:
        raise ValueError(
            f"evidence.fraction={fraction}, evidence.draws={draws}, evidence.every={every}: the fraction must be above "
            "0 and at most 1, the others at least 1."
        )
    chosen_documents = first_documents(subject.evaluation.documents, documents)
    gaps = subject.gaps[::every]
    fitted = _fit_all(subject, gaps, scale)
    rows = []
    for index, document in enumerate(tqdm(chosen_documents, desc="swap", leave=False, disable=None)):
        swapper = Swapper(subject.model, subject.block, document, gaps)
        for (gap, axis), conditions in fitted.items():
            substitutes = [each[index % len(each)] for each in conditions.values()]
            units, width = len(substitutes[0].offset), unit_width(axis, subject.heads)
            chosen = chosen_units(units, width, fraction, draws, [index, gap, SITES.index(axis)])
            costs = swapper.cost(gap, axis, substitutes, chosen)
            item = f"document {index}"
            rows += [(name, axis, gap, item, cost) for name, cost in zip(conditions, costs, strict=True)]
    table = pandas.DataFrame(rows, columns=COLUMNS)
    return Finding(table, summarise(table))


def _fit_all(subject: Subject, gaps: list[int], scale: str) -> dict[tuple[int, str], dict[str, list[Substitute]]]:
    """(gap, axis) -> condition -> substitutes that documents take in turn, on the calibration text."""
    fitted = {}
    for gap, sides in gap_activations(subject.model, subject.block, subject.calibration.blocks, gaps, SITES):
        maps = subject.maps(gap)
        for place, axis in enumerate(SITES):
            on_axis = maps_on(axis, maps, subject.block, subject.heads)
            width = unit_width(axis, subject.heads)
            fitted[gap, axis] = substitutes_at(sides[axis], on_axis, scale, width, [gap, place])
    return fitted


def summarise(rows: pandas.DataFrame) -> list[dict[str, Any]]:
    """Costs, gains over random and shares of the attainable, over all gaps and per gap; intervals over documents."""
    lines = []
    for axis, at_axis in rows.groupby("site", sort=False):
        for gap, part in [(None, at_axis), *at_axis.groupby("gap", sort=False)]:
            costs = part.pivot_table(index="item", columns="quantity", values="value", sort=False)
            gains = costs[[RANDOM]].to_numpy() - costs.drop(columns=RANDOM)
            found = {name: interval(costs[name]) for name in costs}
            found |= {f"gain.{name}": interval(gains[name]) for name in gains}
            if (found[f"gain.{CEILING}"]["low"] or 0.0) > 0:
                for name in gains.columns.drop([CEILING, MEAN]):
                    pair = gains[[name, CEILING]].to_numpy()
                    found[f"share_of_attainable.{name}"] = interval(pair, lambda means: means[..., 0] / means[..., 1])
            place = {"site": axis, "gap": gap if gap is None else int(gap)}
            lines += [{"quantity": name, **place, **each, "items": "documents"} for name, each in found.items()]
    return lines
