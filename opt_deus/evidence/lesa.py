"""Why LESA's new layers are what they are (method.md, objection 4): its networks on the layers that they learn from.

Depends on the base and the plan's gaps, not on the cell's method or text. A quantity is "who: what". Who: the ways of
training (`ways_of`), also on layers "left out" and as "new layer" in a gap; "untrained"; "zero", "neighbours' mean" and
"scaled neighbours' mean" (the best factor per weight). r2 is 1 - error / error of predicting 0, pooled over layers: a
single layer's has the layers' mean error of predicting 0 below the line, so that the layers' mean is the pooled one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas
import torch
from torch import Tensor, nn
from tqdm import tqdm

from opt_deus.evidence import COLUMNS, Finding, Subject
from opt_deus.evidence.intervals import interval
from opt_deus.methods import Base
from opt_deus.methods import lesa as method
from opt_deus.methods.lesa import Factors, Recipe, generator_for, moments
from opt_deus.models.surgery import layer_tensors

WHOLE_BASE = -1  # the gap of what belongs to no gap
START_BATCHES = 20
Row = tuple[str, int, str, float]  # quantity, gap, item, value


@dataclass(frozen=True)
class Way:
    """One way of training: its seeds, and the layers that it never learns to predict."""

    who: str
    recipe: Recipe
    seeds: Sequence[int]
    left_out: Sequence[int] = ()


def ways_of(samples: str, seeds: Sequence[int], epochs_long: int, long_seeds: int, inner: Sequence[int]) -> list[Way]:
    """As released; without the norm term; longer, where every seventh layer is left out: learnt, or known by heart?"""
    released = Recipe(samples=samples)
    long = replace(released, epochs=epochs_long)
    return [
        Way("released", released, seeds),
        Way("no norm term", replace(released, norm_weight=0.0), seeds),
        Way(f"{epochs_long} epochs", long, seeds[:long_seeds], inner[3::7]),
    ]


@dataclass
class Lesson:
    """One weight of all layers: its factors, and the right ones as samples (L, samples, width)."""

    name: str
    factors: Factors
    rights: Tensor
    recipe: Recipe
    sizes: dict[int, tuple[float, float]] = field(default_factory=dict)

    def between(self, built: nn.Module, lower: int, upper: int) -> Tensor:
        """The samples that a network puts between two layers."""
        return built(torch.cat([self.rights[lower], self.rights[upper]], 1))

    def matrix(self, samples: Tensor) -> Tensor:
        return self.factors.matrix(self.recipe.turned(samples))

    def size(self, layer: int) -> tuple[float, float]:
        """Spectral norm and stable rank of a layer's own matrix."""
        if layer not in self.sizes:
            self.sizes[layer] = spectrum(self.matrix(self.rights[layer]))
        return self.sizes[layer]


def spectrum(matrix: Tensor) -> tuple[float, float]:
    """Spectral norm, and stable rank: squared Frobenius over squared spectral norm (0 for a zero matrix)."""
    wide = matrix.double() if matrix.shape[0] <= matrix.shape[1] else matrix.T.double()
    gram = wide @ wide.T
    largest = max(torch.linalg.eigvalsh(gram)[-1].item(), 0.0)
    return math.sqrt(largest), gram.trace().item() / largest if largest else 0.0


@torch.no_grad()
def measure(
    subject: Subject,
    seeds: Sequence[int] = (0, 1, 2),
    samples: str = "directions",
    epochs_long: int = 100,
    long_seeds: int = 1,
    spectra: int = 4,
) -> Finding:
    """Trains every weight's network as released and without the norm term for all seeds, and long for the first ones.

    samples: as of the method. spectra: how many layers, and gaps of the plan, have their singular values taken.
    ValueError without a seed or for a base of fewer than 3 layers.
    """
    layers = [layer_tensors(subject.model, index) for index in range(subject.plan.base_layers)]
    if len(layers) < 3 or not seeds:
        raise ValueError(f"evidence.seeds={list(seeds)}, {len(layers)} base layers: LESA needs a seed and 3 layers.")
    base = Base(len(layers), weight=lambda layer, name: layers[layer][name], activations=lambda layer, axis: None)
    device = next(subject.model.parameters()).device
    ways = ways_of(samples, list(seeds), epochs_long, long_seeds, range(1, len(layers) - 1))
    rows = []
    matrices = [weight.name for weight in subject.block.weights if weight.columns is not None]
    for name in tqdm(matrices, desc="evidence lesa", unit="weight", disable=None, leave=False):
        factors = method.factorise(base, name, device)
        lesson = Lesson(name, factors, method.right_factors(base, name, factors, ways[0].recipe), ways[0].recipe)
        found = _study(lesson, ways, subject.gaps, spectra)
        rows += [(quantity, name, gap, item, value) for quantity, gap, item, value in found]
    table = pandas.DataFrame(rows, columns=COLUMNS)
    return Finding(table, _summary(table))


def _study(lesson: Lesson, ways: list[Way], gaps: list[int], spectra: int) -> Iterator[Row]:
    """Everything of one weight."""
    inner = range(1, len(lesson.rights) - 1)
    yield from _neighbours(lesson, inner)
    yield from _start(lesson, ways[0])
    for way in ways:
        learnt = [layer for layer in inner if layer not in way.left_out]
        for seed in way.seeds:
            built, item = (
                method.train(lesson.rights, way.recipe, generator_for(seed, lesson.name), learnt),
                f"seed{seed}",
            )
            for who, layers in ((way.who, learnt), (f"{way.who}, left out", way.left_out)):
                if layers:
                    each = [moments(lesson.between(built, i - 1, i + 1), lesson.rights[i]) for i in layers]
                    yield from _agreement(who, item, torch.stack(each), layers, lesson.rights[0].numel())
            for layer in spread(inner, spectra):
                sizes = _sizes(lesson, lesson.between(built, layer - 1, layer + 1), [layer])
                yield from _named(way.who, WHOLE_BASE, f"{item}/layer{layer}", sizes)
            for gap in spread(gaps, spectra):
                sizes = _sizes(lesson, lesson.between(built, gap, gap + 1), [gap, gap + 1])
                yield from _named(f"{way.who}, new layer", gap, item, sizes)


def spread(values: Sequence[int], count: int) -> list[int]:
    """At most `count` of the values, evenly from first to last."""
    places = np.linspace(0, len(values) - 1, min(count, len(values))).round().astype(int)
    return [values[place] for place in places]


def _named(who: str, gap: int, item: str, values: dict[str, float]) -> Iterator[Row]:
    return ((f"{who}: {what}", gap, item, value) for what, value in values.items())


def _agreement(who: str, item: str, sums: Tensor, layers: Sequence[int], entries: int) -> Iterator[Row]:
    """What follows from every layer's moments (layers, 3); entries: of a right factor."""
    pp, pt, tt = sums.mean(0).tolist()
    under = "" if item == "base" else f"{item}/"  # without a seed the layers are the items
    for layer, r2 in zip(layers, ((2 * sums[:, 1] - sums[:, 0]) / tt).tolist(), strict=True):
        yield f"{who}: r2", WHOLE_BASE, f"{under}layer{layer}", r2
    shape = {"cosine": pt / math.sqrt(pp * tt) if pp else 0.0, "norm ratio": math.sqrt(pp / tt)}
    yield from _named(who, WHOLE_BASE, item, {"mean square x 1e6": (pp - 2 * pt + tt) / entries * 1e6, **shape})


def _neighbours(lesson: Lesson, inner: Sequence[int]) -> Iterator[Row]:
    rights = lesson.rights
    sums = torch.stack([moments((rights[i - 1] + rights[i + 1]) / 2, rights[i]) for i in inner])
    yield from _agreement("neighbours' mean", "base", sums, inner, rights[0].numel())
    factor = sums[:, 1].sum() / sums[:, 0].sum()
    scaled = sums * torch.stack([factor**2, factor, torch.ones_like(factor)])
    yield from _agreement("scaled neighbours' mean", "base", scaled, inner, rights[0].numel())


def _start(lesson: Lesson, way: Way) -> Iterator[Row]:
    """The loss's two terms before any training: for an output of 0 (mean over all layers), and as a network starts."""
    rows, count, recipe = lesson.rights.flatten(0, 1), lesson.rights.shape[1], way.recipe
    square = sum(layer.double().square().mean().item() for layer in lesson.rights) / len(lesson.rights)
    norm = recipe.norm_weight * recipe.batch_size * rows.shape[1] * square
    zero = {"mean square x 1e6": square * 1e6, **_shares((1 - recipe.norm_weight) * square, norm)}
    yield from _named("zero", WHOLE_BASE, "base", zero)
    for seed in way.seeds:
        generator = generator_for(seed, lesson.name)
        built = method.network(rows.shape[1], recipe, generator, rows.device)
        terms = []
        for _ in range(START_BATCHES):
            batch = torch.randint(count, len(rows) - count, (recipe.batch_size,), generator=generator).to(rows.device)
            outputs = built(torch.cat([rows[batch - count], rows[batch + count]], 1))
            terms.append([term.item() for term in method.loss_terms(outputs, rows[batch], recipe.norm_weight)])
        yield from _named("untrained", WHOLE_BASE, f"seed{seed}", _shares(*np.mean(terms, axis=0).tolist()))


def _shares(error: float, norm: float) -> dict[str, float]:
    return {"error term x 1e6": error * 1e6, "norm term x 1e6": norm * 1e6, "norm term's share": norm / (error + norm)}


def _sizes(lesson: Lesson, samples: Tensor, against: list[int]) -> dict[str, float]:
    """Singular values of what is predicted, against the mean of some layers of the base."""
    size, rank = spectrum(lesson.matrix(samples))
    sizes, ranks = np.mean([lesson.size(layer) for layer in against], axis=0).tolist()
    return {
        "spectral norm ratio": size / sizes,
        "stable rank": rank,
        "stable rank of the base's": ranks,
        "stable rank of the right factor": spectrum(samples)[1],
    }


def _summary(table: pandas.DataFrame) -> list[dict[str, Any]]:
    """Per weight, and of the weights' mean (site all): means over layers or gaps, intervals over seeds.

    Where no seed enters the interval is over layers; there is none for what the base alone determines.
    """
    units = table.item.str.split("/").str[0]
    found = []
    for quantity, rows in table.groupby("quantity", sort=False):
        means = rows.groupby(["site", units]).value.mean().unstack().loc[rows.site.unique()]
        items = means.columns[0].rstrip("0123456789") + "s"
        for site, values in [*means.iterrows(), ("all", means.mean())]:
            numbers = interval(values.to_numpy())
            found.append({"quantity": quantity, "site": site, "gap": None, "items": items, **numbers})
    return found
