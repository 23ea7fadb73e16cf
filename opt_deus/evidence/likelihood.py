"""What studies of a made layer's function share: likelihood and divergence by document, and the rows of a finding.

A model's logits are made from its final states a few positions at a time, so that a large vocabulary is never held for
a whole document, and the base's final states are computed once for all models that are compared with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas
import torch
from torch import Tensor, nn
from torch.nn import functional

from opt_deus.evidence import COLUMNS
from opt_deus.evidence.intervals import interval

POSITIONS = 256  # whose logits, of two models at most, are held at once


@dataclass(frozen=True)
class Scores:
    """Sums over a document's predicted tokens (all but its first), in nats: nll of the text, kl from base to model."""

    nll: np.ndarray
    kl: np.ndarray
    tokens: np.ndarray

    def perplexity(self) -> dict[str, Any]:
        """Of all tokens, with an interval over documents."""
        return interval(np.stack([self.nll, self.tokens], 1), lambda means: np.exp(means[..., 0] / means[..., 1]))

    def divergence(self) -> dict[str, Any]:
        """KL(base || model) of next-token distributions, nats per token, with an interval over documents."""
        return per_token(self.kl, self.tokens)


def per_token(sums: np.ndarray, tokens: np.ndarray) -> dict[str, Any]:
    """Sums by document over all documents' tokens, with an interval over documents."""
    return interval(np.stack([sums, tokens], 1), lambda means: means[..., 0] / means[..., 1])


class Reference:
    """Documents as the base reads them: what any other model is compared with. states: its final ones, where known."""

    def __init__(self, base: nn.Module, documents: Sequence[Tensor], states: list[Tensor] | None = None) -> None:
        self.base, self.documents = base, list(documents)
        self.states = [final_states(base, ids) for ids in self.documents] if states is None else states

    @torch.no_grad()
    def score(self, model: nn.Module | None = None) -> Scores:
        """Of a model with the base's vocabulary; of the base itself where none is given."""
        rows = []
        for ids, base_states in zip(self.documents, self.states, strict=True):
            states = base_states if model is None else final_states(model, ids)
            targets = ids[0, 1:].to(states.device)
            nll = kl = 0.0
            for start in range(0, len(targets), POSITIONS):
                part = slice(start, start + POSITIONS)
                logs = _log_probabilities(model or self.base, states[part])
                nll += functional.nll_loss(logs, targets[part], reduction="none").double().sum().item()
                if model is not None:
                    expected = _log_probabilities(self.base, base_states[part])
                    divergence = functional.kl_div(logs, expected, reduction="none", log_target=True).sum(-1)
                    kl += divergence.double().sum().item()
            rows.append((nll, kl, len(targets)))
        return Scores(*np.array(rows, dtype=np.float64).T)


@torch.no_grad()
def final_states(model: nn.Module, ids: Tensor) -> Tensor:
    """States (length - 1, hidden) that the output embedding reads, where the document's tokens but the first follow."""
    return model.model(input_ids=ids[:, :-1].to(model.device), use_cache=False).last_hidden_state[0]


def _log_probabilities(model: nn.Module, states: Tensor) -> Tensor:
    return functional.log_softmax(model.get_output_embeddings()(states).float(), dim=-1)


def losses(model: nn.Module, documents: Sequence[Tensor]) -> np.ndarray:
    """Negative log-likelihood of each document's tokens but the first, summed, in nats."""
    return Reference(model, documents).score().nll


def first_documents(documents: Sequence[Tensor], count: int) -> list[Tensor]:
    """The first `count` that have something to predict; ValueError where there is none."""
    found = [ids for ids in documents if ids.shape[1] > 1][:count]
    if not found:
        raise ValueError(f"evidence.documents={count}: no document of two tokens; raise it, or evidence.tokens.")
    return found


class Notebook:
    """Collects a study's rows and summary lines."""

    def __init__(self) -> None:
        self.parts: list[pandas.DataFrame] = []
        self.summary: list[dict[str, Any]] = []

    def values(self, quantity: str, site: str, gap: int | None, items: Sequence[str], values: Sequence[float]) -> None:
        """One row per item."""
        columns = {"quantity": quantity, "site": site, "gap": gap, "item": list(items), "value": np.asarray(values)}
        self.parts.append(pandas.DataFrame(columns, columns=COLUMNS).astype({"gap": "Int64", "value": "float64"}))

    def line(self, quantity: str, site: str, gap: int | None, items: str, estimate: dict[str, Any] | float) -> None:
        """A summary line from an interval, or from a bare number (low and high None, n 1)."""
        if not isinstance(estimate, dict):
            estimate = {"estimate": float(estimate), "low": None, "high": None, "n": 1}
        self.summary.append({"quantity": quantity, "site": site, "gap": gap, **estimate, "items": items})

    def scores(self, site: str, scores: Scores) -> None:
        """A model's nll and kl per token by document, its perplexity and its divergence."""
        items = numbered("document", len(scores.tokens))
        self.values("nll", site, None, items, scores.nll / scores.tokens)
        self.values("kl", site, None, items, scores.kl / scores.tokens)
        self.line("perplexity", site, None, "documents", scores.perplexity())
        self.line("kl", site, None, "documents", scores.divergence())

    def rows(self) -> pandas.DataFrame:
        if not self.parts:
            return pandas.DataFrame(columns=COLUMNS)
        return pandas.concat(self.parts, ignore_index=True)


def numbered(kind: str, count: int) -> list[str]:
    """["document 0", "document 1", ...]: the items' names."""
    return [f"{kind} {index}" for index in range(count)]
