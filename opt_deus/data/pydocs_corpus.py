"""The corpus of docstrings (data=pydocs)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from opt_deus.config import DataConfig
from opt_deus.data import cache, pairs, pydocs, tasks
from opt_deus.data.corpus import Corpus, content_hash, endless

PACKAGES = ("numpy", "scipy", "statsmodels", "pandas", "torch")  # where the local tasks of other corpora come from
HELD_OUT_FRACTION = 0.1


def check(cfg: DataConfig, offline: bool) -> None:
    """Every package is installed."""
    if not cfg.packages:
        raise ValueError(
            "data.packages is empty; name at least one installed package, for example data.packages=[scipy]"
        )
    for package in cfg.packages:
        pydocs.locate(package)


def open_corpus(cfg: DataConfig) -> Corpus:
    """Docstrings over `min_characters`; pairs and task items from docstrings of any length."""
    return _open(cfg.name, tuple(cfg.packages), cfg.held_out_fraction, cfg.min_characters)


@functools.lru_cache(maxsize=2)
def _open(name: str, packages: tuple[str, ...], held_out_fraction: float, min_characters: int) -> Corpus:
    divided = _divided(packages, held_out_fraction)
    long = {part: [entry for entry in members if len(entry.text) > min_characters] for part, members in divided.items()}
    if empty := [part for part, members in long.items() if not members]:
        raise ValueError(
            f"data.packages={list(packages)} leave no docstring over {min_characters} characters for "
            f"{', '.join(empty)}; add packages or raise data.held_out_fraction"
        )
    texts = {part: [entry.text for entry in members] for part, members in long.items()}
    identity = [f"{package}=={version}" for package, version in pydocs.versions(packages).items()]
    identity += [part + pydocs.content(members) for part, members in long.items()]
    return Corpus(
        name=name,
        fingerprint=content_hash("\n".join(identity))[:16],
        evaluation=texts["evaluation"],
        calibration=texts["calibration"],
        documents=functools.partial(endless, texts["training"]),
        pairs=functools.partial(_pairs, packages, held_out_fraction),
        items=functools.partial(items, packages, held_out_fraction),
        numbers={"training_documents": len(texts["training"]), "training_characters": sum(map(len, texts["training"]))},
        caveat="docstrings of public packages may have been in the base model's training data",
    )


@functools.lru_cache(maxsize=2)
def _divided(packages: tuple[str, ...], held_out_fraction: float) -> dict[str, list[pydocs.Docstring]]:
    """Docstrings of any length by part; one parse serves the corpus, its pairs and the tasks."""
    found = [entry for name, version in pydocs.versions(packages).items() for entry in cache.docstrings(name, version)]
    return pydocs.divide(found, held_out_fraction)


def _pairs(packages: tuple[str, ...], held_out_fraction: float, seed: int) -> Iterator[dict[str, str]]:
    return endless(_questions(packages, held_out_fraction), seed)


@functools.lru_cache(maxsize=2)
def _questions(packages: tuple[str, ...], held_out_fraction: float) -> list[dict[str, str]]:
    return list(pairs.pairs(_divided(packages, held_out_fraction)["training"]))


@functools.lru_cache(maxsize=8)
def items(packages: tuple[str, ...], held_out_fraction: float, task: str) -> list[dict[str, Any]]:
    """Items of a local task, from the held-out modules."""
    divided = _divided(packages, held_out_fraction)
    return tasks.items(task, divided["evaluation"], divided["training"])


default_items = functools.partial(items, PACKAGES, HELD_OUT_FRACTION)
