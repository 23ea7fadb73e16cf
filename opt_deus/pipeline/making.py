"""Makes new layers and keeps each in the store: one solution serves all seeds, both zero-init arms, every position."""

from __future__ import annotations

import hashlib
import importlib
import itertools
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from opt_deus import methods, models, training
from opt_deus.config import AlignConfig
from opt_deus.models.blocks import block_for
from opt_deus.models.updates import Stream, Updates, streams
from opt_deus.pipeline.bench import Bench
from opt_deus.store import Artefact

VERSION = 1  # raised when a change of code changes what a method makes
MADE = "layer.safetensors"
CALIBRATION_BLOCKS, CALIBRATION_LENGTH = 8, 256


class Makers:
    """Makes the layers of one plan; the base is loaded when the first one is missing and let go at the end."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.cell = bench.cell
        self.model: Any = None
        self._streams: dict[int, Stream] | None = None

    def __enter__(self) -> Makers:
        return self

    def __exit__(self, *exception: object) -> None:
        self.model = self._streams = None

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

    def _made(self, align: AlignConfig, lower: int, upper: int | None) -> Artefact:
        key = {
            "version": VERSION,
            "base": self.bench.base.fingerprint,
            "parents": [lower, upper if align.parents != "lower" else None],
            "align": {"name": align.name, "make": align.make, **align.knobs},
            "seed": self.cell.seed if align.seeded else None,
        }

        def make(folder: Path) -> dict[str, Any]:
            parents, start = self._parents(lower, upper), time.perf_counter()
            tensors, blocks = _function(align)(parents, **align.knobs)
            _check_finite(tensors, f"align={align.name}: {parents.where}")
            _save(tensors, folder)
            return {"blocks": blocks, "seconds": time.perf_counter() - start}

        return self.bench.store.get("layer", key, make)

    def _derived(self, plain: Artefact, what: str, key: dict | None, rescale: Any) -> Artefact:
        """A rescaled copy of a made layer, under its own key; the plain one's diagnostics go with it."""

        def build(folder: Path) -> dict[str, Any]:
            _save(rescale(), folder)
            return plain.details

        return self.bench.store.get("layer", {"plain": plain.hash, "rescaled": what, "with": key}, build)

    def _norm_matched(self, made: Artefact, lower: int, upper: int | None) -> dict[str, torch.Tensor]:
        return methods.norm_match(self._parents(lower, upper), load_file(made.path / MADE))

    def _update_matched(self, made: Artefact, reference: Artefact, lower: int) -> dict[str, torch.Tensor]:
        """One factor on o_proj and down_proj: the update's norm on calibration text becomes the reference method's."""
        updates = Updates(self._base(), self._calibration()[lower])
        outputs = block_for(self.bench.base.model_type).zeroed
        target = updates.norm(load_file(reference.path / MADE))
        return updates.matched(load_file(made.path / MADE), outputs, target)

    def _calibration(self) -> dict[int, Stream]:
        """Base states on calibration text, which evaluation never sees, at every gap of the plan."""
        if self._streams is None:
            tokens = CALIBRATION_BLOCKS * CALIBRATION_LENGTH
            text = itertools.cycle(self.bench.corpus.calibration)  # a small corpus is read again
            blocks = training.packed_blocks(text, self.bench.tokenizer, tokens, CALIBRATION_LENGTH)
            gaps = [slot.lower for slot in self.bench.plan.slots if slot.new]
            self._streams = streams(self._base(), torch.from_numpy(blocks.blocks.astype("int64")), gaps)
        return self._streams

    def _base(self) -> Any:
        if self.model is None:
            self.model = self.bench.base_model()
        return self.model

    def _parents(self, lower: int, upper: int | None) -> methods.Parents:
        model = self._base()
        config = model.config
        return methods.Parents(
            lower=models.layer_tensors(model, lower),
            upper=None if upper is None else models.layer_tensors(model, upper),
            block=block_for(self.bench.base.model_type),
            heads=methods.Heads(config.num_attention_heads, config.num_key_value_heads, config.head_dim),
            where=f"new layer after {lower}",
            seed=_mixed(self.cell.seed, lower, upper),
            device=self.bench.device,
        )


def _function(align: AlignConfig) -> Any:
    module, _, name = align.make.partition(":")
    return getattr(importlib.import_module(module), name)


def _mixed(seed: int, lower: int, upper: int | None) -> int:
    """A different stream of random numbers for every slot of every seed."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{lower}/{upper}".encode()).digest()[:6], "big")


def _check_finite(tensors: dict[str, torch.Tensor], where: str) -> None:
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise RuntimeError(f"{where}: {name} is not finite")


def _save(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, folder / MADE)
