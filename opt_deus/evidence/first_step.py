"""What a new layer has to learn from, where zero-initialisation hides everything else (evidence=first_step).

With zeroed output projections every method starts as the base, but not from the same features: a method's layer still
decides what reaches o_proj (the heads' outputs) and down_proj (the hidden neurons), and so which step is open to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from opt_deus.evidence import Finding, Subject
from opt_deus.evidence.intervals import interval
from opt_deus.evidence.likelihood import Notebook, first_documents, numbered, per_token
from opt_deus.evidence.splicing import HeldOut, Pass, Place, layer_module, one_pass
from opt_deus.models.surgery import zero_outputs
from opt_deus.models.updates import SINK_RATIO

CALIBRATION = "calibration documents"


def measure(
    subject: Subject,
    documents: int = 16,
    calibration: int = 16,
    ridges: Sequence[float] = (1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0),
    steps: Sequence[float] = (0.003, 0.01, 0.03, 0.1, 0.3),
) -> Finding:
    """Of the cell's layers with zeroed outputs, put into the base.

    gradient: Frobenius norm of the gradient that reaches a zeroed weight from one document's mean loss (nats per
    token), one backward pass at step 0. gradient_per_feature: the same over the root mean square of the entries of that
    module's input. Intervals over `calibration` documents; gap None: mean over gaps.

    The fit, in each gap by itself. Features f_t: the inputs of all zeroed weights, each over its root mean square.
    Target: -g_t, g_t the gradient of the summed loss by the residual stream there. The linear map W minimises
    sum |W f_t + g_t|^2 + r c |W|^2, c the mean eigenvalue of sum f_t f_t', on the even calibration documents (all
    positions). r is the one of `ridges` with the steepest descent -sum <g_t, W f_t> / sqrt(sum |W f_t|^2) on the odd
    documents. gradient_explained, there: 1 - sum |g_t + W f_t|^2 / sum |g_t|^2.
    The step: W times a factor such that the update's root mean square norm is s times the states' (sink positions left
    out); s from `steps`, the last before the loss of the odd documents stops falling, 0 if the first one raises it.
    loss_drop: the base's loss minus that with the step in the zeroed weights, on `documents` held-out documents, nats
    per token, paired by document. Site "layer": one gap; "all layers": every gap's W at once, a common s chosen alike.
    """
    book = Notebook()
    study = Study(subject, first_documents(subject.calibration.documents, calibration))
    _add_gradients(book, study)
    held_out = HeldOut(subject.model, first_documents(subject.evaluation.documents, documents), study.gaps)
    items = numbered("document", len(held_out.documents))
    fits = {gap: study.fit(gap, ridges) for gap in study.gaps}
    for gap, fit in fits.items():
        explained = interval(fit.energy, lambda means: 1 - means[..., 0] / means[..., 1])
        book.line("gradient_explained", "layer", gap, CALIBRATION, explained)
    for gap in [*fits, None]:
        site, chosen = ("all layers", fits) if gap is None else ("layer", {gap: fits[gap]})
        step = study.line_search(chosen, steps)
        drops = held_out.drops(study.stepped(chosen, step))
        book.line("step", site, gap, CALIBRATION, step)
        book.values("loss_drop", site, gap, items, drops / held_out.tokens)
        book.line("loss_drop", site, gap, "documents", per_token(drops, held_out.tokens))
    return Finding(book.rows(), book.summary)


@dataclass(frozen=True)
class Fit:
    """A gap's map by weight, scaled so that the update's root mean square norm equals the states'.

    energy: (odd documents, 2), sums of |g + W f|^2 and |g|^2 with W as it was fitted.
    """

    weights: dict[str, Tensor]
    energy: np.ndarray


class Study:
    """The passes over the calibration text, what is fitted to them, and models that took the step."""

    def __init__(self, subject: Subject, documents: list[Tensor]) -> None:
        if len(documents) < 2:
            raise ValueError("evidence.calibration: the fit needs two documents, one to choose the ridge and step by.")
        self.model, self.documents = subject.model, documents
        self.gaps = [gap for gap, _ in subject.plan.parents]
        made = {gap: zero_outputs(subject.block, subject.made(gap)) for gap in self.gaps}
        self.layers = {gap: layer_module(self.model, tensors) for gap, tensors in made.items()}
        self.zeroed = [weight for weight in subject.block.weights if weight.zeroed and weight.columns is not None]
        self.norms: list[dict[Place, float]] = []
        self.passes: list[Pass] = []
        for ids in documents:
            found = one_pass(self.model, self.layers, self.zeroed, ids)
            self.norms.append({place: gradient.norm().item() for place, gradient in found.gradients.items()})
            self.passes.append(Pass({}, found.features, found.states, found.targets))  # gradients are large
        odd = [each.states for each in self.passes[1::2]]
        self.odd = HeldOut(self.model, documents[1::2], self.gaps, odd)

    def fit(self, gap: int, ridges: Sequence[float]) -> Fit:
        """As measure says: fitted on the even documents, ridge chosen on the odd ones."""
        names = [weight.name for weight in self.zeroed]
        even, odd = self.passes[::2], self.passes[1::2]
        pooled = {name: torch.cat([each.features[gap, name] for each in even]) for name in names}
        scales = {name: max(root_mean_square(features), 1e-30) for name, features in pooled.items()}

        def problem(passes: list[Pass]) -> tuple[Tensor, Tensor]:
            parts = [torch.cat([each.features[gap, name] for each in passes]).double() / scales[name] for name in names]
            return torch.cat(parts, 1), torch.cat([each.targets[gap] for each in passes]).double()

        features, targets = problem(odd)

        def descent(fitted: Tensor) -> float:
            moved = features @ fitted.T
            return -((targets * moved).sum() / moved.norm().clamp(min=1e-300)).item()

        seen, wanted = problem(even)
        best = max(ridge_fits(seen, -wanted, ridges), key=descent)
        update, states = features @ best.T, torch.cat([each.states[gap] for each in odd])
        kept = states.norm(dim=1) < SINK_RATIO * states.norm(dim=1).median()
        size = root_mean_square(states[kept]) / max(root_mean_square(update[kept]), 1e-300)
        lengths = [len(each.targets[gap]) for each in odd]
        energy = [
            [(target + moved).square().sum().item(), target.square().sum().item()]
            for target, moved in zip(targets.split(lengths), update.split(lengths), strict=True)
        ]
        parts = zip(names, best.split([pooled[name].shape[1] for name in names], dim=1), strict=True)
        return Fit({name: (part * size / scales[name]).float() for name, part in parts}, np.array(energy))

    def stepped(self, fits: dict[int, Fit], step: float) -> dict[int, nn.Module]:
        """These gaps' layers, their outputs a step along the fit."""
        for gap, fit in fits.items():
            for name, weight in fit.weights.items():
                self.layers[gap].get_parameter(name).data.copy_(step * weight)
        return {gap: self.layers[gap] for gap in fits}

    def line_search(self, fits: dict[int, Fit], steps: Sequence[float]) -> float:
        """The step after which the loss of the odd documents stops falling; 0 where the first raises it."""
        best, largest = 0.0, 0.0
        for step in sorted(steps):
            drop = self.odd.drops(self.stepped(fits, step)).sum()
            if not drop > largest:
                break
            best, largest = step, drop
        return best


def ridge_fits(features: Tensor, targets: Tensor, ridges: Sequence[float]) -> list[Tensor]:
    """For each ridge r the (outputs, inputs) map W that minimises |features W' - targets|^2 + r c |W|^2.

    features (n, inputs), targets (n, outputs), float64; c is the mean eigenvalue of features' features.
    """
    gram, cross = features.T @ features, features.T @ targets
    unit = gram.diagonal().mean().clamp(min=1e-300)
    eye = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    return [torch.cholesky_solve(cross, torch.linalg.cholesky(gram + ridge * unit * eye)).T for ridge in ridges]


def root_mean_square(values: Tensor) -> float:
    return values.double().square().mean().sqrt().item()


def _add_gradients(book: Notebook, study: Study) -> None:
    items = numbered("calibration document", len(study.documents))
    for weight in study.zeroed:
        pooled: dict[str, list[np.ndarray]] = {}
        for gap in study.gaps:
            norms = np.array([found[gap, weight.name] for found in study.norms])
            sizes = np.array([root_mean_square(found.features[gap, weight.name]) for found in study.passes])
            for quantity, values in (("gradient", norms), ("gradient_per_feature", norms / sizes)):
                pooled.setdefault(quantity, []).append(values)
                book.values(quantity, weight.name, gap, items, values)
                book.line(quantity, weight.name, gap, CALIBRATION, interval(values))
        for quantity, per_gap in pooled.items():
            book.line(quantity, weight.name, None, CALIBRATION, interval(np.mean(per_gap, axis=0)))
