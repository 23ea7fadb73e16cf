"""The read-only view of the base that methods and studies get: parents of a gap, signals on calibration text."""

from __future__ import annotations

import hashlib
import itertools
from functools import cached_property
from typing import Any

import torch

from opt_deus import methods, models, training
from opt_deus.data import content_hash
from opt_deus.models.activations import entering_states, layer_activations
from opt_deus.models.blocks import Block, block_for
from opt_deus.models.updates import Stream, streams
from opt_deus.pipeline.bench import Bench

CALIBRATION_LENGTH = 256
NORM_BLOCKS = 8  # update_match: a norm is known from few positions
ALIGNMENT_BLOCKS = 32  # correlations of thousands of units are not


class View:
    """One base, loaded when something is first asked of it."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench

    @cached_property
    def model(self) -> Any:
        return self.bench.base_model()

    @cached_property
    def block(self) -> Block:
        return block_for(self.bench.base.model_type)

    @property
    def heads(self) -> methods.Heads:
        return methods.Heads.of(self.model.config)

    def parents(self, lower: int, upper: int | None) -> methods.Parents:
        """What a method sees of the gap above base layer `lower`."""
        seed = self.bench.cell.seed
        return methods.Parents(
            lower=models.layer_tensors(self.model, lower),
            upper=None if upper is None else models.layer_tensors(self.model, upper),
            block=self.block,
            heads=self.heads,
            where=f"new layer after {lower}",
            seed=_mixed(seed, lower, upper),
            device=self.bench.device,
            base=self.base,
            layer=lower,
        )

    @cached_property
    def base(self) -> methods.Base:
        def activations(layer: int, axis: str) -> torch.Tensor:
            states, kept = self._entering
            return layer_activations(self.model, self.block, states[layer], layer, [axis])[axis][kept]

        return methods.Base(
            num_layers=self.bench.base.num_layers,
            weight=lambda layer, name: models.layer_tensors(self.model, layer)[name],
            activations=activations,
            seed=self.bench.cell.seed,
        )

    @cached_property
    def streams(self) -> dict[int, Stream]:
        """Base states on calibration text at every gap of the plan, by the layer below it."""
        gaps = [slot.lower for slot in self.bench.plan.slots if slot.new]
        return streams(self.model, self.calibration(NORM_BLOCKS, CALIBRATION_LENGTH), gaps)

    @cached_property
    def _entering(self) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
        """What enters the parents of the plan's gaps on calibration text, and which positions are sinks nowhere: the
        same for every plan, as made layers are shared by plans."""
        layers = {layer for pair in self.bench.plan.parents for layer in pair if layer is not None}
        ids = self.calibration(ALIGNMENT_BLOCKS, CALIBRATION_LENGTH)
        return entering_states(self.model, ids, layers)

    @cached_property
    def held_out(self) -> list[str]:
        """Held-out documents in the order of their content's hash: any part of them is a fair sample of all."""
        return sorted(self.bench.corpus.evaluation, key=content_hash)

    def calibration(self, num_blocks: int, length: int) -> torch.Tensor:
        """Token ids (num_blocks, length) of calibration text, which neither training nor evaluation sees."""
        return self._blocks(itertools.cycle(self.bench.corpus.calibration), num_blocks, length)

    def evaluation(self, num_blocks: int, length: int) -> torch.Tensor:
        """Token ids (num_blocks, length) of held-out text."""
        return self._blocks(itertools.cycle(self.held_out), num_blocks, length)

    def _blocks(self, text: Any, num_blocks: int, length: int) -> torch.Tensor:
        """A small corpus is read again."""
        blocks = training.packed_blocks(text, self.bench.tokenizer, num_blocks * length, length)
        return torch.from_numpy(blocks.blocks.astype("int64"))


def _mixed(seed: int, lower: int, upper: int | None) -> int:
    """A different stream of random numbers for every slot of every seed."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{lower}/{upper}".encode()).digest()[:6], "big")
