"""A study's subject on a tiny real Llama, made as the pipeline makes it but in memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from opt_deus.evidence import Subject, Text
from opt_deus.methods import Base, Heads, Layer, Parents, norm_match
from opt_deus.models.blocks import LLAMA
from opt_deus.models.surgery import deepen, layer_tensors, layers_of
from opt_deus.plan import insert_after

VOCABULARY = 61


def tiny_llama(layers: int = 4, kv_heads: int = 2, seed: int = 0, initializer_range: float = 0.15) -> Any:
    """hidden 32, 48 neurons, 4 query heads; random weights large enough for every layer to matter."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=kv_heads, head_dim=8,
        vocab_size=VOCABULARY, num_hidden_layers=layers, tie_word_embeddings=True, initializer_range=initializer_range,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def markov_documents(count: int, length: int = 40, seed: int = 0) -> list[torch.Tensor]:
    """Token ids (1, length) of a chain in which every token has few successors: text that can be learnt."""
    generator = torch.Generator().manual_seed(seed)
    successors = torch.randint(0, VOCABULARY, (VOCABULARY, 3), generator=torch.Generator().manual_seed(99))
    documents = []
    for index in range(count):
        ids = [int(torch.randint(0, VOCABULARY, (1,), generator=generator))]
        while len(ids) < length - index % 3:  # not all of one length
            ids.append(int(successors[ids[-1], torch.randint(0, 3, (1,), generator=generator)]))
        documents.append(torch.tensor([ids]))
    return documents


def subject_of(
    model: Any, make: Callable[..., tuple[Layer, dict]], gaps: list[int], matched: bool = False, length: int = 40
) -> Subject:
    """matched: norm_match. length: of the 24 documents of either text."""
    config = model.config
    heads = Heads.of(config)
    plan = insert_after(len(layers_of(model)), gaps)
    base = Base(len(layers_of(model)), lambda layer, name: layer_tensors(model, layer)[name], _no_activations)

    def parents(gap: int) -> Parents:
        upper = layer_tensors(model, gap + 1) if gap + 1 < plan.base_layers else None
        return Parents(
            layer_tensors(model, gap), upper, LLAMA, heads, f"new layer after {gap}", seed=gap, base=base, layer=gap
        )

    def remake(own: Parents) -> Layer:
        made, _ = make(own)
        return norm_match(own, made) if matched else made

    def maps(gap: int) -> dict:
        own = parents(gap)
        make(own)
        return own.maps

    def deeper(made: dict[int, Layer]) -> Any:
        return deepen(model, plan, {index: made[plan.slots[index].lower] for index in plan.inserted})

    texts = [markov_documents(24, length, seed) for seed in (1, 2)]
    evaluation, calibration = (Text(each, torch.cat([ids[:, : length - 2] for ids in each])) for each in texts)
    return Subject(
        model=model, tokenizer=None, block=LLAMA, heads=heads, plan=plan, align="test", seed=0, evaluation=evaluation,
        calibration=calibration, made=functools.cache(lambda gap: remake(parents(gap))), maps=maps, parents=parents,
        remake=remake, deeper=deeper,
    )  # fmt: skip


def _no_activations(layer: int, axis: str) -> torch.Tensor:
    raise AssertionError(f"nobody asked for activations of {axis} in layer {layer}")
