"""Hidden states below the first trainable layer, computed once per training text and shared by all cells.

With the base's layers frozen, everything below the first new layer maps the same tokens to the same states at every
step of every arm. The states are stored in the precision and batches of the training itself, so that the losses are
identical with and without them (tested bit by bit).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from opt_deus.config import TrainConfig
from opt_deus.models.lower import MIN_LAYERS, can_start_higher, only_layers
from opt_deus.training.examples import PackedBlocks, content
from opt_deus.training.run import digest

MAX_BYTES = 4 * 2**30
STATES = "states.npy"


Keep = Callable[[dict[str, Any], Callable[[Path], None]], Path]  # identity, how to fill a folder -> the complete folder


@dataclass(frozen=True)
class PrefixStates:
    """States of one (base, training text, block and batch size, precision) in a folder that `keep` gives or has filled.

    keep: the caller's store. root: where that lies, to see whether the states fit.
    """

    keep: Keep
    root: Path

    def open(
        self, model: torch.nn.Module, examples: PackedBlocks, depth: int, batch_size: int, precision: str
    ) -> PrefixBlocks:
        """The states that enter layer `depth`, computed here unless they are kept already."""

        def fill(folder: Path) -> None:
            shape = (*examples.blocks.shape, model.config.hidden_size)
            states = np.lib.format.open_memmap(folder / STATES, mode="w+", dtype=np.float32, shape=shape)
            for start in range(0, len(examples), batch_size):
                ids = torch.from_numpy(examples.blocks[start : start + batch_size].astype(np.int64)).to(model.device)
                states[start : start + batch_size] = _lower(model, ids, depth, precision).cpu().numpy()
            states.flush()

        folder = self.keep(_identity(model, examples, depth, batch_size, precision), fill)
        return PrefixBlocks(np.load(folder / STATES, mmap_mode="r"), examples.blocks)


@dataclass(frozen=True)
class PrefixBlocks(torch.utils.data.Dataset):
    """Blocks as the states that enter the first trainable layer, float32 (block size, hidden size), and labels."""

    states: np.ndarray
    blocks: np.ndarray

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = torch.from_numpy(self.blocks[index].astype(np.int64))
        return {"inputs_embeds": torch.from_numpy(np.array(self.states[index])), "labels": labels}


def frozen_layers(model: torch.nn.Module, trainable: Iterable[str]) -> int:
    """Layers below the first trainable one; 0 where the states below are not fixed or the architecture is unknown."""
    trainable = set(trainable)
    if not can_start_higher(model.config):
        return 0
    if any(id(parameter) == id(model.get_input_embeddings().weight) and name in trainable
           for name, parameter in model.named_parameters()):
        return 0
    for depth, layer in enumerate(model.model.layers):
        if any(f"model.layers.{depth}.{name}" in trainable for name, _ in layer.named_parameters()):
            return depth
    return 0


def worth_it(model: torch.nn.Module, examples: Any, depth: int, cfg: TrainConfig, folder: Path) -> bool:
    """cache_prefix: false; true (wherever possible); auto (enough layers, fits MAX_BYTES and half of the disk)."""
    choice = cfg.cache_prefix.lower()  # a YAML true arrives as "True"
    if choice == "false" or depth == 0 or not isinstance(examples, PackedBlocks):
        return False
    if choice == "true":
        return True
    size = examples.blocks.size * model.config.hidden_size * 4
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    return depth >= MIN_LAYERS and size <= min(MAX_BYTES, shutil.disk_usage(existing).free // 2)


@torch.no_grad()
def _lower(model: torch.nn.Module, ids: torch.Tensor, depth: int, precision: str) -> torch.Tensor:
    """States that enter layer `depth`, float32, shape (batch, length, hidden)."""
    autocast = torch.autocast(ids.device.type, dtype=torch.bfloat16, enabled=precision == "bf16")
    with only_layers(model.model, slice(0, depth), norm=False), autocast:
        return model.model(input_ids=ids, use_cache=False).last_hidden_state.float()


def _identity(
    model: torch.nn.Module, examples: PackedBlocks, depth: int, batch_size: int, precision: str
) -> dict[str, Any]:
    """What decides the states: tokens, the weights below, arithmetic, and the batches in which they are computed."""
    return {
        "tokens": content(examples),
        "weights": digest([model.get_input_embeddings().weight, *model.model.layers[:depth].parameters()]),
        "shape": list(examples.blocks.shape),
        "depth": depth,
        "batch_size": batch_size,
        "precision": precision,
        "device": model.device.type,
    }
