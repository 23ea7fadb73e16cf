"""Makes new layers and keeps each in the store: one solution serves all seeds, both zero-init arms, every position."""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from opt_deus import methods
from opt_deus.config import AlignConfig
from opt_deus.models.updates import Updates
from opt_deus.pipeline.bench import Bench
from opt_deus.pipeline.view import View
from opt_deus.store import Artefact
from opt_deus.transport import save_maps

VERSION = 2  # raised when a change of code changes what a method makes
MADE, MAPS = "layer.safetensors", "maps.safetensors"


class Makers:
    """Makes the layers of one plan; the base is loaded when the first one is missing and let go at the end."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.cell = bench.cell
        self.view = View(bench)

    def __enter__(self) -> Makers:
        return self

    def __exit__(self, *exception: object) -> None:
        self.view = View(self.bench)

    def layer(self, lower: int, upper: int | None) -> Artefact:
        """One made layer: the method's own, then (norm_match, update_match) rescaled."""
        made = self._made(self.cell.align, lower, upper)
        if self.cell.norm_match:
            made = self._derived(made, "norm_match", None, lambda: self._norm_matched(made, lower, upper))
        if self.cell.reference is not None:
            reference = self._made(self.cell.reference, lower, upper)
            with_text = {"reference": reference.hash, "text": self.bench.corpus.fingerprint}
            plain = made
            made = self._derived(
                plain, "update_match", with_text, lambda: self._update_matched(plain, reference, lower)
            )
        return made

    def maps(self, lower: int, upper: int | None) -> Artefact:
        """How the method brings the lower layer's neurons into the upper one's order: solved again, its plans kept."""
        align = self.cell.align

        def solve(folder: Path) -> dict[str, Any]:
            parents = self.view.parents(lower, upper)
            _, blocks = call(align, parents)
            about = {"lower": lower, "upper": upper, "align": align.name, **align.knobs, "diagnostics": blocks}
            save_maps(parents.maps, folder / MAPS, about)
            return {"weights": sorted(parents.maps)}

        return self.bench.store.get("maps", self._key(align, lower, upper), solve)

    def _made(self, align: AlignConfig, lower: int, upper: int | None) -> Artefact:
        def make(folder: Path) -> dict[str, Any]:
            parents, start = self.view.parents(lower, upper), time.perf_counter()
            tensors, blocks = call(align, parents)
            _check_finite(tensors, f"align={align.name}: {parents.where}")
            _save(tensors, folder)
            return {"blocks": blocks, "seconds": time.perf_counter() - start}

        return self.bench.store.get("layer", self._key(align, lower, upper), make)

    def _key(self, align: AlignConfig, lower: int, upper: int | None) -> dict[str, Any]:
        key = {
            "version": VERSION,
            "base": self.bench.base.fingerprint,
            "parents": [lower, upper if align.parents != "lower" else None],
            "align": {"name": align.name, "make": align.make, **align.knobs},
            "seed": self.cell.seed if align.seeded else None,
        }
        return key | {"text": self.bench.corpus.fingerprint} if align.calibrated else key

    def _derived(self, plain: Artefact, what: str, key: dict | None, rescale: Any) -> Artefact:
        """A rescaled copy of a made layer, under its own key; the plain one's diagnostics go with it."""

        def build(folder: Path) -> dict[str, Any]:
            _save(rescale(), folder)
            return plain.details

        return self.bench.store.get(
            "layer", {"version": VERSION, "plain": plain.hash, "rescaled": what, "with": key}, build
        )

    def _norm_matched(self, made: Artefact, lower: int, upper: int | None) -> dict[str, torch.Tensor]:
        return methods.norm_match(self.view.parents(lower, upper), load_file(made.path / MADE))

    def _update_matched(self, made: Artefact, reference: Artefact, lower: int) -> dict[str, torch.Tensor]:
        """One factor on o_proj and down_proj: the update's norm on calibration text becomes the reference method's."""
        updates = Updates(self.view.model, self.view.streams[lower])
        target = updates.norm(load_file(reference.path / MADE))
        return updates.matched(load_file(made.path / MADE), self.view.block.zeroed, target)


def call(align: AlignConfig, parents: methods.Parents) -> tuple[methods.Layer, methods.Diagnostics]:
    """What a method makes of parents."""
    module, _, name = align.make.partition(":")
    return getattr(importlib.import_module(module), name)(parents, **align.knobs)


def _check_finite(tensors: dict[str, torch.Tensor], where: str) -> None:
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise RuntimeError(f"{where}: {name} is not finite")


def _save(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, folder / MADE)
