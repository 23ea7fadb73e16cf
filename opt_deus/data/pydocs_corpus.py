"""The corpus of docstrings (data=pydocs)."""

from __future__ import annotations

import functools
from typing import Any

from opt_deus.config import DataConfig
from opt_deus.data import cache, pairs, pydocs, tasks
from opt_deus.data.corpus import Corpus, content_hash, endless


def check(cfg: DataConfig, offline: bool) -> None:
    """Every package is installed."""
    if not cfg.packages:
        raise ValueError("data.packages is empty; name at least one installed package, for example data.packages=[scipy]")
    for package in cfg.packages:
        pydocs.locate(package)


@functools.lru_cache(maxsize=2)
def parts(packages: tuple[str, ...], held_out_fraction: float) -> dict[str, list[pydocs.Docstring]]:
    """Docstrings of any length by part; one parse serves the corpus and the tasks."""
    found = [entry for name, version in pydocs.versions(packages).items() for entry in cache.docstrings(name, version)]
    return pydocs.divide(found, held_out_fraction)


@functools.lru_cache(maxsize=8)
def items(packages: tuple[str, ...], held_out_fraction: float, task: str) -> list[dict[str, Any]]:
    """Items of a local task, from the held-out modules."""
    divided = parts(packages, held_out_fraction)
    return tasks.items(task, divided["evaluation"], divided["training"])


def open_corpus(cfg: DataConfig) -> Corpus:
    """Docstrings over `min_characters`; pairs from the training modules."""
    divided = parts(tuple(cfg.packages), cfg.held_out_fraction)
    long = {name: [entry for entry in members if len(entry.text) > cfg.min_characters] for name, members in divided.items()}
    empty = [name for name, members in long.items() if not members]
    if empty:
        raise ValueError(f"data.packages={cfg.packages} leave no docstring over {cfg.min_characters} characters for "
                         f"{', '.join(empty)}; add packages or raise data.held_out_fraction")
    texts = {name: [entry.text for entry in members] for name, members in long.items()}
    questions = list(pairs.pairs(divided["training"]))
    identity = [f"{name}=={version}" for name, version in pydocs.versions(cfg.packages).items()]
    identity += [name + content for name, content in ((name, pydocs.content(members)) for name, members in long.items())]
    return Corpus(
        name=cfg.name,
        fingerprint=content_hash("\n".join(identity))[:16],
        evaluation=texts["evaluation"],
        calibration=texts["calibration"],
        documents=functools.partial(endless, texts["training"]),
        pairs=functools.partial(endless, questions),
        items=functools.partial(items, tuple(cfg.packages), cfg.held_out_fraction),
        numbers={
            "training_documents": len(texts["training"]),
            "training_characters": sum(map(len, texts["training"])),
            "training_pairs": len(questions),
        },
        caveat="docstrings of public packages may have been in the base model's training data",
    )
