"""The stages of a cell as store artefacts: expand, train, evaluate. Each function finds its artefact or builds it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas
from tqdm import tqdm

from opt_deus import evaluation, models, training
from opt_deus.config import NO_NEW_CONTENT, training_key
from opt_deus.models import lower
from opt_deus.pipeline.bench import Bench, State
from opt_deus.pipeline.making import MADE, Makers
from opt_deus.store import Artefact

# Raised when a change of code changes a stage's results: artefacts of older versions are then not reused.
VERSIONS = {"expand": 2, "cpt": 1, "sft": 3, "eval": 1}
TRAINED, ROWS, LOG = "trained.safetensors", "rows.parquet", "log.jsonl"


def expand(bench: Bench) -> tuple[Artefact, State]:
    """The deeper model right after expansion, self-checked. details: seconds, blocks per output index, self_check."""
    cell, slots = bench.cell, bench.plan
    zeroed = cell.zero_weights if cell.zero_init else None
    layers: dict[int, Artefact] = {}
    if cell.align.make is not None:
        new = [(index, slot) for index, slot in enumerate(slots.slots) if slot.new]
        with Makers(bench) as makers:
            for index, slot in tqdm(new, desc=f"expand {cell.align.name}", disable=None, leave=False):
                layers[index] = makers.layer(slot.lower, slot.upper)
    made = tuple((index, layers[index].path / MADE if layers else slots.slots[index].lower) for index in slots.inserted)
    key = {
        "version": VERSIONS["expand"],
        "base": bench.base.fingerprint,
        "slots": [[slot.lower, slot.upper, slot.new] for slot in slots.slots],
        "layers": {str(index): artefact.hash for index, artefact in layers.items()},
        "zeroed": zeroed,
    }
    unchecked = State("", made, zeroed)

    def build(folder: Path) -> dict[str, Any]:
        base = bench.base_model()
        deeper = models.deepen(base, slots, bench.made_layers(unchecked, base))
        return {
            "self_check": models.self_check(base, deeper, slots, zeroed == "both"),
            "seconds": sum(artefact.details["seconds"] for artefact in layers.values()),
            "blocks": {str(index): artefact.details["blocks"] for index, artefact in layers.items()},
        }

    artefact = bench.store.get("expand", key, build)
    return artefact, State(artefact.hash, made, zeroed, shared=lowest_new(bench))


def lowest_new(bench: Bench) -> int:
    """How many layers lie below the first new one."""
    return min(bench.new_layers, default=bench.plan.layers)


def train(bench: Bench, stage: str, start: State, *, callbacks: tuple = ()) -> tuple[Artefact, State] | None:
    """Continual pre-training ("cpt") or supervised fine-tuning ("sft") from a state; None without a budget."""
    cell = bench.cell
    settings = getattr(cell, stage)
    if settings.tokens is None and settings.steps is None:
        return None
    trainable = settings.trainable or ("all" if cell.align.name in NO_NEW_CONTENT else "new")
    key = {
        "version": VERSIONS[stage],
        "start": start.key,
        "settings": {**training_key(settings), "trainable": trainable},
        "data": bench.corpus.fingerprint,
        "seed": cell.seed,
        "precision": bench.precision,
    }

    def build(folder: Path) -> dict[str, Any]:
        model = bench.take(start)
        names = models.layer_parameter_names(model, bench.new_layers) if trainable == "new" else "all"
        details = training.train(
            model,
            bench.tokenizer,
            _examples(bench, stage, settings),
            settings,
            trainable=names,
            folder=folder,
            seed=cell.seed,
            precision=bench.precision,
            device=bench.device,
            log=folder / LOG,
            stage=stage,
            callbacks=callbacks,
            prefix=training.PrefixStates(
                lambda identity, fill: bench.store.get("prefix", identity, fill).path, bench.store.root
            ),
        )
        trained.append(model)
        return details

    trained: list[Any] = []
    artefact = bench.store.get(stage, key, build, resumable=True)
    shared = start.shared if trainable == "new" else 0
    state = State(artefact.hash, start.made, start.zeroed, (*start.trained, artefact.path / TRAINED), shared)
    if trained:
        bench.hold(state, trained[0])
    return artefact, state


def _examples(bench: Bench, stage: str, settings: Any) -> Any:
    if stage == "cpt":
        documents = bench.corpus.training_documents(bench.cell.seed)
        return training.packed_blocks(documents, bench.tokenizer, training.token_budget(settings), settings.block_size)
    pairs = bench.corpus.training_pairs(bench.cell.seed)
    steps = settings.steps
    count = None if steps is None else steps * settings.batch_size * settings.accumulation
    budget = training.token_budget(settings)
    examples = training.pair_examples(pairs, bench.tokenizer, budget, settings.block_size, num_examples=count)
    return training.batches_of_like_length(examples, bench.tokenizer, settings.batch_size)


def checkpoint_states(artefact: Artefact, end: State) -> dict[str, State]:
    """Learning-curve checkpoints kept by a training stage: "cpt-0.2" -> the model there."""
    states = {}
    for file in sorted(artefact.path.glob("curve-*.safetensors")):
        fraction = file.stem.removeprefix("curve-")
        if float(fraction) < 1:
            trained = (*end.trained[:-1], file)
            states[f"{artefact.stage}-{fraction}"] = replace(end, key=f"{end.key}@{fraction}", trained=trained)
    return states


def evaluate(bench: Bench, state: State, *, benchmarks: bool) -> tuple[Artefact, pandas.DataFrame]:
    """Per-document results of a state: held-out perplexity, and the benchmarks where asked for."""
    cell = bench.cell
    key = {
        "version": VERSIONS["eval"],
        "model": state.key,
        "base": bench.base.fingerprint,
        "eval": evaluation.fingerprint(cell.eval, bench.corpus),
        "benchmarks": benchmarks,
    }

    def build(folder: Path) -> dict[str, Any]:
        run = evaluation.evaluate if benchmarks else evaluation.heldout
        with _lower_states(bench, state, {"eval": key["eval"], "benchmarks": benchmarks}):
            rows = run(bench.model(state), bench.tokenizer, cell.eval, bench.corpus, device=bench.device)
        rows.to_parquet(folder / ROWS, index=False)
        return {"rows": len(rows)}

    artefact = bench.store.get("eval", key, build)
    return artefact, pandas.read_parquet(artefact.path / ROWS)


@contextlib.contextmanager
def _lower_states(bench: Bench, state: State, what: dict[str, Any]) -> Iterator[None]:
    """Evaluation from the states below the first new layer, which all cells share, where that pays."""
    model = bench.model(state)
    if state.shared < lower.MIN_LAYERS or not lower.can_start_higher(model.config):
        yield
        return
    key = {**what, "base": bench.base.fingerprint, "depth": state.shared, "device": bench.device}
    known = bench.store.find("states", key)
    states = lower.LowerStates(state.shared, known.path if known else None)
    with states.under(model):
        yield
    if states.grown:
        bench.store.get("states", key, states.save)
