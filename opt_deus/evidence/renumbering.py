"""Does a method depend on how neurons and heads happen to be numbered? (evidence=renumbering)

The numbers of neurons, heads and groups in a layer are arbitrary: a relabelled base computes the same function. So a
method that means something makes the same deeper model from it; and one that pairs neurons by number makes another, of
which the one at hand is no better than any, unless neighbouring layers share a numbering. Both are measured here.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from opt_deus.evidence import Finding, Subject
from opt_deus.evidence.geometry import NEURONS, relative_distance
from opt_deus.evidence.intervals import interval
from opt_deus.evidence.likelihood import Notebook, Reference, Scores, first_documents, numbered, per_token
from opt_deus.methods import Base, Layer, Parents
from opt_deus.methods.symmetry import Symmetry, num_neurons, random_symmetry
from opt_deus.models.blocks import Weight
from opt_deus.models.surgery import layer_tensors

SAME = 1e-3  # largest difference of a relabelled base's logits, of their own size: float32 sums in another order


def measure(
    subject: Subject,
    documents: int = 8,
    draws: int = 20,
    shares: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
    noise: float = 0.5,
) -> Finding:
    """Of the cell's method (norm_match applied; update_match is not), on `documents` held-out documents.

    Each draw relabels every base layer by a random exact symmetry of its own (MLP neurons, KV groups, query heads),
    makes the layers anew from the relabelled parents, and inserts them into the base as it is, whose function the
    relabelling leaves alone (logit_difference: the largest, relative to the largest logit; RuntimeError over 1e-3).
    perplexity and kl = KL(base || deeper) in nats per token, never zeroed: "as numbered" (interval over documents) and
    "renumbered" (mean, sd, min and max over draws). share_above: of the draws with a larger value than as numbered,
    ties (to 1e-4 of the value) by half: far from 0 and 1 means that the numbering at hand is like any other.
    nll_difference: as numbered minus mean over draws, nats per token, paired by document.

    Power, sites "planted, share s": in every gap the upper parent becomes a copy of the lower one, a share s of its
    neurons permuted among themselves, mixed with Gaussian noise (each matrix sqrt(1 - noise^2) copy + noise Gaussian of
    the copy's norm; vectors copied). distance: relative distance over the neurons' weights between the made layer and
    that parent, interval over gaps. response: nll with share 1 minus share 0, nats per token, paired by document: what
    dependence on the numbering looks like where neighbours do share one.
    """
    book = Notebook()
    reference = Reference(subject.model, first_documents(subject.evaluation.documents, documents))
    own = reference.score(subject.deeper(remade(subject, subject.parents)))
    drawn, differences = [], []
    for draw in range(draws):
        relabelled = Relabelled(subject, draw)
        differences.append(relabelled.logit_difference(reference.documents[0]))
        drawn.append(reference.score(subject.deeper(remade(subject, relabelled.parents))))
    if drawn:
        _add_draws(book, own, drawn, differences)
    _add_power(book, subject, reference, shares, noise)
    return Finding(book.rows(), book.summary)


def remade(subject: Subject, parents: Callable[[int], Parents]) -> dict[int, Layer]:
    """The cell's method in every gap of the plan, on parents(gap)."""
    return {gap: subject.remake(parents(gap)) for gap, _ in subject.plan.parents}


class Relabelled:
    """The base with every layer relabelled by a random exact symmetry of its own; the draw alone is the seed, so that
    every method sees the same relabellings and methods can be paired by draw."""

    def __init__(self, subject: Subject, draw: int) -> None:
        self.subject, self.draw = subject, draw

    def symmetry(self, index: int) -> Symmetry:
        subject, where = self.subject, f"renumbering, layer {index}"
        own = layer_tensors(subject.model, index)
        return random_symmetry(Parents(own, None, subject.block, subject.heads, where, self.draw, subject.model.device))

    def layer(self, index: int) -> Layer:
        """Made anew at every call: a base in memory twice would be much, the relabelling takes little."""
        symmetry, weight = self.symmetry(index), self.subject.block.weight
        tensors = layer_tensors(self.subject.model, index)
        return {name: symmetry(weight(name), tensor).contiguous() for name, tensor in tensors.items()}

    def parents(self, gap: int) -> Parents:
        """The gap's parents, relabelled, in the relabelled base."""
        parents = self.subject.parents(gap)
        upper = None if parents.upper is None else self.layer(gap + 1)
        base = None if parents.base is None else self.base
        return replace(parents, lower=self.layer(gap), upper=upper, base=base, maps={})

    @cached_property
    def base(self) -> Base:
        """One for all gaps of the draw: what a method computes once for all slots is of this draw."""
        own = self.subject.parents(self.subject.plan.parents[0][0]).base
        return replace(
            own,
            weight=self._weight,
            activations=lambda index, axis: relabel_units(self.symmetry(index), axis, own.activations(index, axis)),
            memo={},
        )

    def _weight(self, index: int, name: str) -> Tensor:
        return self.symmetry(index)(self.subject.block.weight(name), layer_tensors(self.subject.model, index)[name])

    @torch.no_grad()
    def logit_difference(self, ids: Tensor) -> float:
        """Largest difference between the base's and the relabelled base's logits, over the largest logit."""
        model, prefix = self.subject.model, self.subject.block.layers
        layers = range(self.subject.plan.base_layers)
        tensors = {f"{prefix}.{i}.{name}": tensor for i in layers for name, tensor in self.layer(i).items()}
        inputs = {"input_ids": ids.to(model.device), "use_cache": False}
        own = model(**inputs).logits
        logits = torch.func.functional_call(model, tensors, kwargs=inputs).logits
        difference = ((logits - own).abs().max() / own.abs().max()).item()
        if not difference < SAME:
            raise RuntimeError(f"evidence=renumbering: a relabelled base differs by {difference:.2g} in its logits")
        return difference


def relabel_units(symmetry: Symmetry, axis: str, signal: Tensor) -> Tensor:
    """A signal (tokens, units) of a layer as the relabelled layer has it."""
    return symmetry(Weight(f"units of {axis}", axis), signal.T).T


def planted(parents: Parents, share: float, noise: float) -> Parents:
    """The lower layer with a noisy copy above it, a share of whose neurons is permuted (measure says how).

    The same neurons and noise for every method; a larger share holds the smaller ones' neurons. The copy's activations
    are the lower layer's, relabelled, without the noise.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(f"planted {parents.where}".encode()))
    neurons = num_neurons(parents)
    chosen = torch.randperm(neurons, generator=generator)[: round(share * neurons)]
    order = torch.arange(neurons)
    order[chosen] = chosen.roll(1)  # one cycle: every chosen neuron is displaced
    symmetry = Symmetry(parents.heads, neurons=order.to(parents.device))
    upper = {}
    for weight in parents.weights:
        own = parents.lower[weight.name]
        if weight.columns is not None:
            drawn = torch.randn(own.shape, generator=generator).to(own.device)
            own = (1 - noise**2) ** 0.5 * own + noise * own.norm() / drawn.norm() * drawn
        upper[weight.name] = symmetry(weight, own).to(parents.lower[weight.name].dtype).contiguous()
    base, below = parents.base, parents.layer
    if base is not None:

        def activations(index: int, axis: str) -> Tensor:
            if index != below + 1:
                return parents.base.activations(index, axis)
            return relabel_units(symmetry, axis, parents.base.activations(below, axis))

        def weight_of(index: int, name: str) -> Tensor:
            return upper[name] if index == below + 1 else parents.base.weight(index, name)

        base = replace(base, weight=weight_of, activations=activations, memo={})
    return replace(parents, upper=upper, base=base, maps={})


def _add_draws(book: Notebook, own: Scores, draws: list[Scores], differences: list[float]) -> None:
    items = numbered("draw", len(draws))
    book.scores("as numbered", own)
    nll = np.mean([scores.nll for scores in draws], axis=0)
    book.values("nll", "renumbered", None, numbered("document", len(nll)), nll / own.tokens)
    book.line("nll_difference", "as numbered - renumbered", None, "documents", per_token(own.nll - nll, own.tokens))
    for quantity, of in (("perplexity", Scores.perplexity), ("kl", Scores.divergence)):
        values = np.array([of(scores)["estimate"] for scores in draws])
        book.values(quantity, "renumbered", None, items, values)
        book.line(quantity, "renumbered", None, "draws", interval(values))
        centred = values - values.mean()
        deviation = interval(np.stack([centred, centred**2], 1), _deviation)
        book.line(f"{quantity}_sd", "renumbered", None, "draws", deviation)
        book.line(f"{quantity}_min", "renumbered", None, "draws", values.min())
        book.line(f"{quantity}_max", "renumbered", None, "draws", values.max())
        book.line(f"{quantity}_share_above", "as numbered", None, "draws", share_above(of(own)["estimate"], values))
    book.values("logit_difference", "relabelled base", None, items, differences)
    book.line("logit_difference", "relabelled base", None, "draws", max(differences))


def _deviation(means: np.ndarray) -> np.ndarray:
    return np.sqrt(np.maximum(means[..., 1] - means[..., 0] ** 2, 0.0))


def share_above(value: float, draws: np.ndarray) -> float:
    """Share of the draws above a value; a draw that equals it to 1e-4 counts half."""
    tied = np.abs(draws - value) <= 1e-4 * abs(value)
    return float(np.mean(np.where(tied, 0.5, draws > value)))


def _add_power(book: Notebook, subject: Subject, reference: Reference, shares: Sequence[float], noise: float) -> None:
    scored = {}
    for share in shares:
        site = f"planted, share {share:g}"
        made, distances = {}, []
        for gap, _ in subject.plan.parents:
            parents = planted(subject.parents(gap), share, noise)
            made[gap] = subject.remake(parents)
            distances.append(_neuron_distance(parents, made[gap]))
        scored[share] = reference.score(subject.deeper(made))
        book.scores(site, scored[share])
        book.values("distance", site, None, [f"gap {gap}" for gap in made], distances)
        book.line("distance", site, None, "gaps", interval(np.array(distances)))
    if {0.0, 1.0} <= set(scored):
        whole, none = scored[1.0], scored[0.0]
        book.line("response", "planted", None, "documents", per_token(whole.nll - none.nll, none.tokens))


def _neuron_distance(parents: Parents, made: Layer) -> float:
    names = [weight.name for weight in parents.weights if NEURONS in (weight.rows, weight.columns)]
    first, second = (torch.cat([layer[name].double().flatten() for name in names]) for layer in (made, parents.upper))
    return relative_distance(first, second)
