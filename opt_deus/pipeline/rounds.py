"""Progressive growth: the new layers come in several rounds, each grown from what the one before has trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from opt_deus import models
from opt_deus.config import Cell, TrainConfig
from opt_deus.models import Base
from opt_deus.pipeline import stages
from opt_deus.pipeline.bench import Bench, State
from opt_deus.placing import round_sizes
from opt_deus.plan import Plan
from opt_deus.store import Artefact

VERSION = 1
SEED_STRIDE = 7_000_001  # rounds of one seed draw documents in orders of their own, none of them a base's pre-training


@dataclass(frozen=True)
class Round:
    """A round that has been grown and trained: its plan, and the artefact of its pre-training."""

    plan: Plan
    trained: Artefact


def grow(first: Bench) -> tuple[list[Round], Bench]:
    """Grows and trains all rounds but the last (conf: rounds); gives them, and the bench of the last.

    With rounds=1 that is the bench itself. Layers of earlier rounds go on training: new is what the base has not.
    """
    cell, bench, done = first.cell, first, []
    *earlier, last = _split(cell, first)
    for part in earlier:
        bench = Bench(part, first.device, bench.base, bench.carried)
        _, state = stages.expand(bench)
        artefact, state = stages.train(bench, "cpt", state)
        done.append(Round(bench.plan, artefact))
        bench = Bench(cell, first.device, _grown(bench, state), tuple(bench.new_layers))
    return done, Bench(last, first.device, bench.base, bench.carried)


def _split(cell: Cell, first: Bench) -> Iterator[Cell]:
    """One cell per round: its share of the new layers and of the pre-training budget."""
    if cell.rounds == 1:
        yield cell
        return
    for number, size in enumerate(round_sizes(len(first.plan.inserted), cell.rounds)):
        later = cell.rounds - 1 - number  # the last round has the cell's own seed
        yield replace(
            cell, rounds=1, num_new_layers=size, cpt=_share(cell.cpt, cell.rounds), seed=cell.seed + later * SEED_STRIDE
        )


def _share(train: TrainConfig, rounds: int) -> TrainConfig:
    tokens, steps = (None if amount is None else amount // rounds for amount in (train.tokens, train.steps))
    return replace(train, tokens=tokens, steps=steps)


def _grown(bench: Bench, state: State) -> Base:
    """The trained model of a round as a base of its own, float32."""

    def build(folder: Path) -> None:
        card = models.model_card(bench.base, bench.plan, f"align={bench.cell.align.name}, one of several rounds")
        models.export(bench.model(state).to("cpu"), bench.tokenizer, folder / "model", torch.float32, card)

    artefact = bench.store.get("grown", {"version": VERSION, "state": state.key}, build)
    return replace(bench.base, folder=artefact.path / "model", fingerprint=artefact.hash, num_layers=bench.plan.layers)
