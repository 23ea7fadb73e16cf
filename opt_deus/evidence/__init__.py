"""What a method really does, measured on the base before anything is trained.

A study is `measure(subject, **knobs) -> Finding`: one function and one YAML in conf/evidence/. It runs as a stage of a
cell (`evidence=NAME`), for that cell's method; a grid over align gives every method the same text, so that the report
can pair methods by item.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pandas
from torch import Tensor

from opt_deus.methods import Heads, Layer, Parents
from opt_deus.models.blocks import Block
from opt_deus.plan import Plan
from opt_deus.transport import Map

COLUMNS = ["quantity", "site", "gap", "item", "value"]


@dataclass(frozen=True)
class Text:
    """Text that no training sees. documents: token ids (1, length) of each, cut; blocks: packed ids (n, length)."""

    documents: list[Tensor]
    blocks: Tensor


@dataclass(frozen=True)
class Subject:
    """What a study may see of a cell.

    model: the base, float32, eval mode, to be left as it was found. A gap is named by the base layer below it; gaps:
    those of the cell's plan that have a layer on both sides. evaluation and calibration share no module of the corpus.
    made(gap): the new layer's tensors as the cell has them before zero-initialisation, by relative name. maps(gap): how
    the method brought the lower layer's rows into the upper one's order, by weight name; {} where it aligns nothing.
    parents(gap): the gap's own parents; remake(parents): the cell's method on any parents (norm_match applied).
    deeper(made): a whole new model with these layers (gap -> tensors, one for every gap of the plan), never zeroed.
    """

    model: Any
    tokenizer: Any
    block: Block
    heads: Heads
    plan: Plan
    align: str
    seed: int
    evaluation: Text
    calibration: Text
    made: Callable[[int], Layer]
    maps: Callable[[int], dict[str, Map]]
    parents: Callable[[int], Parents]
    remake: Callable[[Parents], Layer]
    deeper: Callable[[dict[int, Layer]], Any]

    @property
    def gaps(self) -> list[int]:
        return [lower for lower, upper in self.plan.parents if upper is not None]


@dataclass(frozen=True)
class Finding:
    """A study's result. rows: COLUMNS, one value per item (document, block or unit) that methods can be paired by.

    summary: what the report shows, a list of {"quantity", "site", "gap", "estimate", "low", "high", "n", "items"}:
    95% interval, n items (named by `items`); gap None: over all gaps.
    """

    rows: pandas.DataFrame
    summary: list[dict[str, Any]]
