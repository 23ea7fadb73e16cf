"""What every source of text offers: training text and pairs, and held-out documents that never leak into them."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any


def content_hash(text: str) -> str:
    """Hexadecimal SHA-256 of a text: identity of documents, order of items, splits."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def share(text: str) -> float:
    """A fixed number in [0, 1) for a text; `share(x) < 0.1` picks the same tenth on every machine."""
    return int(content_hash(text)[:13], 16) / 16**13


def split_of(doc_hash: str) -> str:
    """The fixed half of a task's documents that this one belongs to: "select" (to choose by) or "confirm"."""
    return "select" if share("split:" + doc_hash) < 0.5 else "confirm"


def endless(entries: Sequence[Any], seed: int) -> Iterator[Any]:
    """All entries in a seeded order, then again in another one, without end."""
    epoch = 0
    while entries:
        yield from random.Random(f"{seed}-{epoch}").sample(entries, len(entries))
        epoch += 1


@dataclass(frozen=True)
class Corpus:
    """Text divided into training, evaluation and calibration; the last two are disjoint and held out of training.

    `documents` and `pairs` take a seed and return endless streams; `pairs` is None where the source has none.
    `fingerprint` covers content and the rules that divided it.
    """

    name: str
    fingerprint: str
    evaluation: list[str]
    calibration: list[str]
    documents: Callable[[int], Iterator[str]] = field(repr=False)
    pairs: Callable[[int], Iterator[dict[str, str]]] | None = field(default=None, repr=False)
    items: Callable[[str], list[dict[str, Any]]] | None = field(
        default=None, repr=False
    )  # of the tasks in data/tasks.py
    numbers: dict[str, Any] = field(default_factory=dict)
    caveat: str | None = None

    def training_documents(self, seed: int) -> Iterator[str]:
        """Endless training texts; every epoch has its own order."""
        return self.documents(seed)

    def training_pairs(self, seed: int) -> Iterator[dict[str, str]]:
        """Endless {"prompt", "completion"} pairs from the training part."""
        if self.pairs is None:
            raise ValueError(f"data={self.name} has no question-answer pairs; set sft.tokens=null or data=pydocs")
        return self.pairs(seed)

    def describe(self) -> dict[str, Any]:
        """Name, fingerprint and counts, as the record states them."""
        return {
            "name": self.name,
            "fingerprint": self.fingerprint,
            "evaluation_documents": len(self.evaluation),
            "calibration_documents": len(self.calibration),
            **self.numbers,
        }
