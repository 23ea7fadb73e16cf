"""Hidden states below the first trainable layer, computed once per training text and shared by all cells.

With the base's layers frozen, everything below the first new layer maps the same tokens to the same states at every
step of every arm. The states are stored in the precision and batches of the training itself, so that the losses are
identical with and without them (tested bit by bit).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from opt_deus.config import TrainConfig
from opt_deus.training.examples import PackedBlocks, content
from opt_deus.training.run import digest

MIN_LAYERS = 4  # fewer frozen layers are not worth a file
MAX_BYTES = 4 * 2**30
STATES, IDENTITY = "states.npy", "prefix.json"


@dataclass(frozen=True)
class PrefixStates:
    """A folder for the states of one (base, training text, block and batch size, precision): read, or filled first."""

    folder: Path

    def open(
        self, model: torch.nn.Module, examples: PackedBlocks, depth: int, batch_size: int, precision: str
    ) -> PrefixBlocks:
        """The states that enter layer `depth`, computed here unless the folder holds exactly these."""
        identity = _identity(model, examples, depth, batch_size, precision)
        path = self.folder / IDENTITY
        if not path.is_file() or json.loads(path.read_text()) != identity:
            self._write(model, examples, depth, batch_size, precision)
            _replace(path, json.dumps(identity).encode())
        return PrefixBlocks(np.load(self.folder / STATES, mmap_mode="r"), examples.blocks)

    def _write(
        self, model: torch.nn.Module, examples: PackedBlocks, depth: int, batch_size: int, precision: str
    ) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        part = self.folder / f"{STATES}.{os.getpid()}.part"
        shape = (*examples.blocks.shape, model.config.hidden_size)
        states = np.lib.format.open_memmap(part, mode="w+", dtype=np.float32, shape=shape)
        for start in range(0, len(examples), batch_size):
            ids = torch.from_numpy(examples.blocks[start : start + batch_size].astype(np.int64)).to(model.device)
            states[start : start + batch_size] = _lower(model, ids, depth, precision).cpu().numpy()
        states.flush()
        part.replace(self.folder / STATES)  # a concurrent writer writes the same bytes


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
    """Layers below the first trainable one; 0 where the states below are not fixed or the architecture is unknown.

    Only a decoder that hands its input embeddings unchanged to its first layer can start higher up, and only where
    all layers are of one kind: Llama (and Mistral, Qwen2, Qwen3 without sliding windows). Gemma scales them.
    """
    config, trainable = model.config, set(trainable)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    known = config.model_type in ("llama", "mistral", "qwen2", "qwen3")
    if not known or len(kinds) > 1 or getattr(config, "attention_dropout", 0):
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


@contextlib.contextmanager
def only_layers(model: torch.nn.Module, chosen: slice, norm: bool = True) -> Iterator[None]:
    """The model runs these layers alone (and leaves out the final norm); afterwards it is whole again."""
    decoder = model.model
    layers, final_norm = decoder.layers, decoder.norm
    try:
        decoder.layers = layers[chosen]
        if not norm:
            decoder.norm = torch.nn.Identity()
        yield
    finally:
        decoder.layers, decoder.norm = layers, final_norm


@torch.no_grad()
def _lower(model: torch.nn.Module, ids: torch.Tensor, depth: int, precision: str) -> torch.Tensor:
    """States that enter layer `depth`, float32, shape (batch, length, hidden)."""
    autocast = torch.autocast(ids.device.type, dtype=torch.bfloat16, enabled=precision == "bf16")
    with only_layers(model, slice(0, depth), norm=False), autocast:
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


def _replace(path: Path, content: bytes) -> None:
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_bytes(content)
    part.replace(path)
