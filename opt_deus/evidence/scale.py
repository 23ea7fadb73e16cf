"""How far a method's layers move the model before any training, and which way (evidence=scale).

An update is what a layer adds to the residual stream. Initial perplexity mostly follows its size (method.md, section
7), so size and direction are stated beside it: of the made layer and of both its parents, on the same base states.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from opt_deus.evidence import Finding, Subject
from opt_deus.evidence.intervals import interval
from opt_deus.evidence.likelihood import Notebook, Reference, first_documents, numbered
from opt_deus.methods import Layer
from opt_deus.models.updates import Stream, Updates, streams

PARENTS = ("lower parent", "upper parent")


def measure(subject: Subject, documents: int = 32, blocks: int = 8) -> Finding:
    """Of the cell's layers as made (norm_match and update_match applied, never zeroed).

    perplexity, and kl = KL(base || deeper) in nats per token: `documents` held-out documents, interval over them; the
    rows hold nll and kl per token. update_norm: root mean square over positions of the update's Euclidean norm, on base
    states of `blocks` held-out blocks, sink positions left out. update_cosine: of the update with a parent's, inner
    product over all kept positions of a block. Intervals over blocks; gap None: mean over gaps, block by block.
    """
    book = Notebook()
    every_gap = [lower for lower, _ in subject.plan.parents]
    reference = Reference(subject.model, first_documents(subject.evaluation.documents, documents))
    made = {gap: subject.made(gap) for gap in every_gap}
    book.scores("base", reference.score())
    book.scores("deeper", reference.score(subject.deeper(made)))
    found = streams(subject.model, subject.evaluation.blocks[:blocks].to(subject.model.device), every_gap)
    products = {}
    for gap in every_gap:
        parents = subject.parents(gap)
        products[gap] = block_products(subject, found[gap], made[gap], [parents.lower, parents.upper])
    _add_updates(book, products)
    return Finding(book.rows(), book.summary)


def block_products(subject: Subject, stream: Stream, made: Layer, parents: list[Layer | None]) -> np.ndarray:
    """(blocks, 5): mean per kept position of made.made, lower.lower, upper.upper, made.lower, made.upper.

    A parent that is not there has NaN.
    """
    updates = Updates(subject.model, stream)
    positions = stream.kept.sum(1)

    def kept(tensors: Layer) -> Tensor:
        return (updates.update(tensors) * stream.kept[..., None]).double()

    def mean(first: Tensor, second: Tensor) -> Tensor:
        return (first * second).sum((1, 2)) / positions

    own = kept(made)
    nothing = torch.full((len(own),), torch.nan, dtype=torch.float64, device=own.device)
    squares, crosses = [], []
    for parent in parents:
        other = None if parent is None else kept(parent)
        squares.append(nothing if other is None else mean(other, other))
        crosses.append(nothing if other is None else mean(own, other))
    return torch.stack([mean(own, own), *squares, *crosses], 1).cpu().numpy()


def _norm(place: int):
    return lambda means: np.sqrt(means[..., place])


def _cosine(parent: int):
    return lambda means: means[..., 3 + parent] / np.sqrt(means[..., 0] * means[..., 1 + parent])


def _add_updates(book: Notebook, products: dict[int, np.ndarray]) -> None:
    """Norms and cosines of every gap, then their means over the gaps."""
    quantities = [("update_norm", "made", [0], _norm(0))]
    quantities += [("update_norm", name, [1 + place], _norm(1 + place)) for place, name in enumerate(PARENTS)]
    quantities += [
        ("update_cosine", name, [0, 1 + place, 3 + place], _cosine(place)) for place, name in enumerate(PARENTS)
    ]
    for quantity, site, places, statistic in quantities:
        per_gap = []
        for gap, table in products.items():
            if np.isnan(table[:, places]).any():
                continue
            values = statistic(table)
            per_gap.append(values)
            book.values(quantity, site, gap, numbered("block", len(values)), values)
            known = np.nan_to_num(table)  # other columns may be a parent that is not there
            book.line(quantity, site, gap, "blocks", interval(known, statistic))
        if per_gap:
            book.line(quantity, site, None, "blocks", interval(np.mean(per_gap, axis=0)))
