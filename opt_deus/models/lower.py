"""The lower part of a model on its own: below the first changed layer all deeper models of one base compute the same.

Their states on the same inputs are computed once, remembered by the content of the inputs, and give bit-identical
results (tested).
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

MIN_LAYERS = 4  # fewer shared layers are not worth a file
MAX_BYTES = 2**30  # of remembered states
FILE = "states.safetensors"


def can_start_higher(config: Any) -> bool:
    """Whether a decoder hands its input embeddings unchanged to its first layer, and all layers are of one kind.

    True for Llama, and for Mistral, Qwen2 and Qwen3 without sliding windows; Gemma scales its embeddings.
    """
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    known = config.model_type in ("llama", "mistral", "qwen2", "qwen3")
    return known and len(kinds) == 1 and not getattr(config, "attention_dropout", 0)


@contextlib.contextmanager
def only_layers(decoder: nn.Module, chosen: slice, norm: bool = True) -> Iterator[None]:
    """The decoder runs these layers alone (norm=False: without the final norm); afterwards it is whole again."""
    layers, final_norm = decoder.layers, decoder.norm
    try:
        decoder.layers = layers[chosen]
        if not norm:
            decoder.norm = nn.Identity()
        yield
    finally:
        decoder.layers, decoder.norm = layers, final_norm


class LowerStates:
    """States that enter layer `depth`, remembered by the content of the inputs up to MAX_BYTES."""

    def __init__(self, depth: int, folder: Path | None = None) -> None:
        self.depth = depth
        self.states: dict[str, Tensor] = load_file(folder / FILE) if folder else {}
        self.grown = False

    def save(self, folder: Path) -> None:
        save_file(self.states, folder / FILE)

    @contextlib.contextmanager
    def under(self, model: nn.Module) -> Iterator[None]:
        """Inside, the model's forward passes (without a cache) start from remembered states where there are any."""
        decoder = model.model
        forward = decoder.forward

        def remembered(input_ids=None, attention_mask=None, position_ids=None, inputs_embeds=None, **rest):
            assert inputs_embeds is None, "evaluation gives tokens"
            place = {"attention_mask": attention_mask, "position_ids": position_ids, **rest}
            states = self._states(decoder, forward, input_ids, place)
            with only_layers(decoder, slice(self.depth, None)):
                return forward(inputs_embeds=states, **place)

        decoder.forward = remembered
        try:
            yield
        finally:
            del decoder.forward

    def _states(self, decoder: nn.Module, forward: Any, input_ids: Tensor, place: dict[str, Any]) -> Tensor:
        key = _digest(input_ids, place["attention_mask"], place["position_ids"])
        if key in self.states:
            return self.states[key].to(input_ids.device)
        with only_layers(decoder, slice(0, self.depth), norm=False):
            states = forward(input_ids=input_ids, **place).last_hidden_state
        kept = sum(each.nbytes for each in self.states.values())
        if kept + states.nbytes <= MAX_BYTES:
            self.states[key] = states.detach().cpu().contiguous().clone()
            self.grown = True
        return states


def _digest(*inputs: Tensor | None) -> str:
    content = hashlib.sha256()
    for tensor in inputs:
        content.update(repr(None if tensor is None else (tuple(tensor.shape), str(tensor.dtype))).encode())
        if tensor is not None:
            content.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return content.hexdigest()
