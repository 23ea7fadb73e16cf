"""How near neighbouring layers lie in weight space, and what matching neurons gains beyond chance (evidence=geometry).

Any two clouds of points come nearer when they are matched. The chance level is the same exact assignment on Gaussian
matrices whose row norms and column norms both equal the real matrix's.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from opt_deus import transport
from opt_deus.evidence import Finding, Subject
from opt_deus.evidence.intervals import interval
from opt_deus.evidence.likelihood import Notebook
from opt_deus.methods import Layer, Parents
from opt_deus.methods.structured import ot_structured
from opt_deus.models.blocks import Weight
from opt_deus.models.surgery import layer_tensors

NEURONS = "mlp"  # the axis whose units belong together over several weights
ROUNDS = 20  # of the rescaling of a surrogate's rows and columns, which settles in a few


def measure(subject: Subject, distances: Sequence[int] = (1, 2, 5, 10), pairs: int = 8, draws: int = 2) -> Finding:
    """Of the base's layers, and of the cell's method where it aligns rows.

    For every matrix and gap, lower A, upper B, rows only (inputs stay as they are):
    relative_distance: |A - B| / sqrt((|A|^2 + |B|^2) / 2), Frobenius; sqrt 2 for unrelated matrices.
    relative_distance_aligned: the same for M A, M the method's map of rows. matched_ratio: |M A - B|^2 / |A - B|^2; a
    map that blurs lowers it by shrinking A alone, which the relative distance does not reward.
    matched_ratio_exact: as matched_ratio, M the exact assignment of the rows by squared distance, for every method.
    matched_ratio_chance: the same on surrogates, mean of `draws` pairs. beyond_chance: chance minus exact.
    Intervals over gaps.

    By layer distance (site "neurons, distance d"; independent of the method and of the position): exact joint
    assignment of gate rows, up rows and down columns of layers l and l + d, `pairs` values of l spread over the base.
    The three ratios as above, interval over pairs, and per pair over neurons.
    """
    book = Notebook()
    _add_weights(book, subject, draws)
    for distance in distances:
        _add_distance(book, subject, distance, pairs, draws)
    return Finding(book.rows(), book.summary)


def relative_distance(first: Tensor, second: Tensor) -> float:
    """0 for equal matrices, sqrt 2 for orthogonal ones of any size."""
    size = ((first.square().sum() + second.square().sum()) / 2).sqrt()
    return ((first - second).norm() / size).item() if size > 0 else 0.0


def surrogate(matrix: Tensor, generator: torch.Generator) -> Tensor:
    """A Gaussian matrix with the row norms and the column norms of the given one (relative error under 1e-4).

    Independent normal entries of standard deviation r_i c_j / |matrix| (r, c: norms of row i, column j), whose rows and
    columns are then rescaled in turn until both norms are met.
    """
    rows, columns = matrix.norm(dim=1), matrix.norm(dim=0)
    drawn = torch.randn(matrix.shape, generator=generator, dtype=matrix.dtype).to(matrix.device)
    drawn = drawn * rows[:, None] * columns / matrix.norm().clamp(min=1e-30)
    for _ in range(ROUNDS):
        drawn = drawn * (rows / drawn.norm(dim=1).clamp(min=1e-30))[:, None]
        drawn = drawn * (columns / drawn.norm(dim=0).clamp(min=1e-30))
    return drawn


def _generator(place: str) -> torch.Generator:
    """Depends on the place alone: every method and seed sees the same chance level."""
    return torch.Generator().manual_seed(zlib.crc32(place.encode()))


def _ratio(matched: float, unmatched: float) -> float:
    """1 where there is nothing to gain."""
    return matched / unmatched if unmatched > 0 else 1.0


def exact_row_ratio(lower: Tensor, upper: Tensor) -> float:
    """Squared distance of the rows under their exact assignment, over that of rows of the same index."""
    costs = transport.cost(lower, upper, "sqeuclidean")
    return _ratio(transport.solve_exact(costs).cost(costs), costs.diagonal().mean().item())


def _add_weights(book: Notebook, subject: Subject, draws: int) -> None:
    found: dict[tuple[str, str], dict[int, float]] = {}
    for gap in subject.gaps:
        parents, maps = subject.parents(gap), subject.maps(gap)
        for weight in parents.weights:
            if weight.columns is None:
                continue
            for quantity, value in _weight_numbers(parents, maps.get(weight.name), weight, draws).items():
                found.setdefault((quantity, weight.name), {})[gap] = value
    for (quantity, site), values in found.items():
        for gap, value in values.items():
            book.values(quantity, site, gap, [f"gap {gap}"], [value])
        book.line(quantity, site, None, "gaps", interval(np.array(list(values.values()))))


def _weight_numbers(parents: Parents, rows: transport.Map | None, weight: Weight, draws: int) -> dict[str, float]:
    lower, upper = parents.pair(weight.name)
    numbers = {"relative_distance": relative_distance(lower, upper)}
    if rows is not None:
        below, above = lower.cpu(), upper.cpu()  # where stored maps are
        moved = rows.on_rows(below)
        numbers["relative_distance_aligned"] = relative_distance(moved, above)
        numbers["matched_ratio"] = _ratio((moved - above).square().sum().item(), (below - above).square().sum().item())
    chance = []
    for draw in range(draws):
        generator = _generator(f"{parents.where} {weight.name} {draw}")
        chance.append(exact_row_ratio(surrogate(lower, generator), surrogate(upper, generator)))
    return numbers | _against_chance(exact_row_ratio(lower, upper), float(np.mean(chance)))


def _against_chance(exact: float, chance: float) -> dict[str, float]:
    return {"matched_ratio_exact": exact, "matched_ratio_chance": chance, "beyond_chance": chance - exact}


def _add_distance(book: Notebook, subject: Subject, distance: int, pairs: int, draws: int) -> None:
    last = subject.plan.base_layers - 1 - distance
    if last < 0:
        return
    site = f"neurons, distance {distance}"
    found: dict[str, list[float]] = {}
    for lower in sorted({round(place) for place in np.linspace(0, last, pairs)}):
        parents = _two_layers(subject, lower, lower + distance)
        costs = neuron_costs(parents)
        ratio = interval(costs, lambda means: means[..., 0] / means[..., 1])
        book.line("matched_ratio_exact", site, lower, "neurons", ratio)
        chance = []
        for draw in range(draws):
            matched, unmatched = neuron_costs(_surrogates(parents, f"{parents.where} {draw}")).sum(0)
            chance.append(_ratio(matched, unmatched))
        for quantity, value in _against_chance(ratio["estimate"], float(np.mean(chance))).items():
            found.setdefault(quantity, []).append(value)
            book.values(quantity, site, lower, [f"layers {lower} and {lower + distance}"], [value])
    for quantity, values in found.items():
        book.line(quantity, site, None, "layer pairs", interval(np.array(values)))


def _two_layers(subject: Subject, lower: int, upper: int) -> Parents:
    layers = [layer_tensors(subject.model, index) for index in (lower, upper)]
    device = subject.model.device
    return Parents(*layers, subject.block, subject.heads, f"layers {lower} and {upper}", device=device)


def _neuron_weights(parents: Parents) -> list[Weight]:
    return [weight for weight in parents.weights if NEURONS in (weight.rows, weight.columns)]


def neuron_costs(parents: Parents) -> np.ndarray:
    """(neurons, 2): squared distance of each upper neuron from its jointly assigned lower one, and from its namesake.

    A neuron is its row or column in every weight that has it, biases included.
    """
    parents = replace(parents, maps={})
    ot_structured(parents, heads=False)
    weights = _neuron_weights(parents)
    assignment = next(parents.maps[weight.name] for weight in weights if weight.rows == NEURONS)
    costs = 0
    for weight in weights:
        lower, upper = (tensor if weight.rows == NEURONS else tensor.T for tensor in parents.pair(weight.name))
        apart = [moved - upper for moved in (assignment.on_rows(lower), lower)]
        costs = costs + torch.stack([each.reshape(len(each), -1).square().sum(1) for each in apart], 1)
    return costs.cpu().numpy()


def _surrogates(parents: Parents, place: str) -> Parents:
    """The same two layers with surrogates for the matrices that have neurons."""
    generator = _generator(place)
    names = {weight.name for weight in _neuron_weights(parents) if weight.columns is not None}

    def replaced(layer: Layer) -> Layer:
        return {
            name: surrogate(tensor.double(), generator) if name in names else tensor for name, tensor in layer.items()
        }

    return replace(parents, lower=replaced(parents.lower), upper=replaced(parents.upper))
