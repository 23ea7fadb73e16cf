"""Evidence: a study of the cell's method as a store artefact, before anything is trained."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pandas
import torch
from safetensors.torch import load_file

from opt_deus import models, transport
from opt_deus.evidence import COLUMNS, Finding, Subject, Text
from opt_deus.methods import norm_match
from opt_deus.pipeline.bench import Bench, State
from opt_deus.pipeline.making import MAPS, Makers, call
from opt_deus.pipeline.view import View
from opt_deus.store import Artefact

VERSION = 2  # raised when a change of code changes a study's results
ROWS = "rows.parquet"


def study(bench: Bench, state: State) -> Artefact:
    """The finding of cell.evidence on the layers that `state` was made of. details: {"summary": ...}."""
    cell, evidence = bench.cell, bench.cell.evidence
    key = {
        "version": VERSION,
        "base": bench.base.fingerprint,
        "text": bench.corpus.fingerprint,
        "slots": [[slot.lower, slot.upper, slot.new] for slot in bench.plan.slots],
        "layers": {str(index): Path(made).parent.name for index, made in state.made},
        "align": {"name": cell.align.name, "make": cell.align.make, **cell.align.knobs},
        "norm_match": cell.norm_match,
        "study": {"measure": evidence.measure, "tokens": evidence.tokens, "length": evidence.length, **evidence.knobs},
        "seed": cell.seed if evidence.seeded or cell.align.seeded else None,
    }

    def build(folder: Path) -> dict[str, Any]:
        module, _, name = evidence.measure.partition(":")
        finding: Finding = getattr(importlib.import_module(module), name)(subject_of(bench, state), **evidence.knobs)
        finding.rows[COLUMNS].to_parquet(folder / ROWS, index=False)
        return {"summary": finding.summary}

    return bench.store.get("evidence", key, build)


def rows_of(artefact: Artefact) -> pandas.DataFrame:
    return pandas.read_parquet(artefact.path / ROWS)


def subject_of(bench: Bench, state: State) -> Subject:
    """What a study sees of the bench's cell."""
    view, makers, cell = View(bench), Makers(bench), bench.cell
    made = {bench.plan.slots[index].lower: Path(path) for index, path in state.made}
    upper = dict(bench.plan.parents)
    evidence = cell.evidence

    def remake(parents):
        layer, _ = call(cell.align, parents)
        return norm_match(parents, layer) if cell.norm_match else layer

    def deeper(layers):
        by_index = {index: layers[bench.plan.slots[index].lower] for index in bench.plan.inserted}
        return models.deepen(view.model, bench.plan, by_index).to(bench.device)

    return Subject(
        model=view.model.to(bench.device),
        tokenizer=bench.tokenizer,
        block=view.block,
        heads=view.heads,
        plan=bench.plan,
        align=cell.align.name,
        seed=cell.seed,
        evaluation=_text(view, view.held_out, view.evaluation, evidence.tokens, evidence.length),
        calibration=_text(view, bench.corpus.calibration, view.calibration, evidence.tokens, evidence.length),
        made=lambda gap: load_file(made[gap]),
        maps=lambda gap: transport.load_maps(makers.maps(gap, upper[gap]).path / MAPS)[0],
        parents=lambda gap: view.parents(gap, upper[gap]),
        remake=remake,
        deeper=deeper,
    )


def _text(view: View, documents: list[str], blocks: Any, tokens: int, length: int) -> Text:
    """Whole documents, cut at `length`, and packed blocks, of at least `tokens` tokens where there are as many."""
    chosen, total = [], 0
    for document in documents:
        if total >= tokens:
            break
        ids = view.bench.tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"][:length]
        if len(ids) > 1:
            chosen.append(torch.tensor([ids]))
            total += len(ids)
    return Text(chosen, blocks(-(-tokens // length), length))
