"""What one cell works on.

Everything is opened when it is first needed: a cell whose stages are all in the store loads no weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from opt_deus import data, models, training
from opt_deus.config import Cell
from opt_deus.models import Base
from opt_deus.models.blocks import block_for
from opt_deus.placing import plan_of
from opt_deus.plan import Plan
from opt_deus.store import Store


@dataclass(frozen=True)
class State:
    """A model at one moment: the base, its made layers, and the tensors that training changed.

    key identifies the weights: equal keys, equal weights. shared: how many of the lowest layers are still the base's.
    """

    key: str
    made: tuple[tuple[int, Path | int], ...] = ()  # output index -> its file, or the base layer copied (SOLAR)
    zeroed: str | None = None  # which output projections of new layers started as zero: both | attention | mlp
    trained: tuple[Path, ...] = ()  # in order: SFT may train less than CPT did
    shared: int = 0


class Bench:
    """One cell's base, text, plan, store, and the one model that is held in memory."""

    def __init__(self, cell: Cell, device: str, base: Base | None = None, carried: tuple[int, ...] = ()) -> None:
        """base, carried: of a later round, the model that the one before left, and which of its layers are new."""
        self.cell = cell
        self.carried = carried
        self.device = device
        self.store = Store(cell.store.root)
        self.cache = Store(models.cache_root())
        self._held: tuple[str, Any] | None = None
        if base is not None:
            self.base = base

    @cached_property
    def corpus(self) -> data.Corpus:
        return data.open_corpus(self.cell.data, self.cell.offline)

    @cached_property
    def base(self) -> Base:
        cell = self.cell
        if cell.model.source != "scratch":
            return models.prepare(cell.model, self.cache, cell.offline)
        return models.prepare(
            cell.model,
            self.cache,
            cell.offline,
            pretrain=lambda folder: training.pretrain(
                cell.model, self.corpus, folder, device=self.device, dtype=cell.dtype
            ),
            pretrain_key={"data": self.corpus.fingerprint, "precision": self.precision},
        )

    @cached_property
    def plan(self) -> Plan:
        return plan_of(self.cell, self.base.num_layers)

    @property
    def new_layers(self) -> list[int]:
        """Output indices of the layers that the original base does not have."""
        return [index for index, slot in enumerate(self.plan.slots) if slot.new or slot.lower in self.carried]

    @cached_property
    def precision(self) -> str:
        return training.precision(self.cell.dtype, self.device)

    @cached_property
    def tokenizer(self) -> Any:
        """The base's tokenizer; None where its folder has none (expand needs none)."""
        return models.load_tokenizer(self.base.folder)

    def base_model(self) -> Any:
        """A fresh copy of the base in float32 on the CPU."""
        return models.load(self.base.folder)[0]

    def model(self, state: State) -> Any:
        """The model of a state, from memory when it is the one held."""
        if self._held is None or self._held[0] != state.key:
            self._held = None  # frees the old one first
            self._held = (state.key, self._build(state).to(self.device))
        return self._held[1]

    def take(self, state: State) -> Any:
        """The model of a state, to be changed by the caller; say `hold` once it is in a new state."""
        model = self.model(state)
        self._held = None
        return model

    def hold(self, state: State, model: Any) -> None:
        self._held = (state.key, model)

    def _build(self, state: State) -> Any:
        model = self.base_model()
        if state.made:
            model = models.deepen(model, self.plan, self.made_layers(state, model))
        for file in state.trained:
            models.apply_delta(model, load_file(file))
        return model

    def made_layers(self, state: State, base_model: Any) -> dict[int, dict[str, Any]]:
        """Output index -> tensors of the new layer, zero-initialised as the state says."""
        block = block_for(self.base.model_type)
        made = {}
        for index, source in state.made:
            copied = isinstance(source, int)
            tensors = models.layer_tensors(base_model, source) if copied else load_file(source)
            made[index] = models.zero_outputs(block, tensors, state.zeroed) if state.zeroed else tensors
        return made


def device_of(name: str) -> str:
    """cfg.device with "auto" decided."""
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"
