"""New layers put into the base for a pass: what reaches them and their weights there, and what they do to the loss."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from opt_deus.evidence.likelihood import Reference, losses
from opt_deus.methods import Layer
from opt_deus.models.blocks import Weight, block_for
from opt_deus.models.surgery import layers_of
from opt_deus.models.updates import streams

Place = tuple[int, str]  # gap, weight


def layer_module(model: nn.Module, tensors: Layer) -> nn.Module:
    """A decoder layer of the model's kind with these tensors, frozen."""
    module = copy.deepcopy(layers_of(model)[0]).requires_grad_(False)
    module.load_state_dict(tensors)
    return module


@contextmanager
def spliced(model: nn.Module, layers: dict[int, nn.Module]) -> Iterator[None]:
    """Inside, the model runs a further layer after each of these base layers; read it with use_cache=False."""

    def then(layer: nn.Module):
        def hook(_module: nn.Module, _inputs: tuple, keywords: dict, output: Tensor) -> Tensor:
            return layer(output, **keywords)

        return hook

    handles = [
        layers_of(model)[gap].register_forward_hook(then(layer), with_kwargs=True) for gap, layer in layers.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def losses_after(
    model: nn.Module, layers: dict[int, nn.Module], documents: Sequence[Tensor], states: Sequence[Tensor]
) -> np.ndarray:
    """As losses with these layers spliced in; states: the base's (length - 1, hidden) that leave the lowest gap.

    What lies below that gap is not computed again.
    """
    lowest, whole = min(layers), layers_of(model)
    parent, _, name = block_for(model.config.model_type).layers.rpartition(".")
    with spliced(model, {gap: layer for gap, layer in layers.items() if gap != lowest}):
        setattr(model.get_submodule(parent), name, nn.ModuleList([layers[lowest], *whole[lowest + 1 :]]))
        try:
            final = [model.model(inputs_embeds=own[None], use_cache=False).last_hidden_state[0] for own in states]
        finally:
            setattr(model.get_submodule(parent), name, whole)
    return Reference(model, documents, final).score().nll


@dataclass(frozen=True)
class Pass:
    """One document at step 0. gradients: of the mean loss by each zeroed weight. features: (tokens, inputs) of each.

    states, targets: (tokens, hidden) of the stream that leaves a gap, and the gradient of the summed loss by it.
    """

    gradients: dict[Place, Tensor]
    features: dict[Place, Tensor]
    states: dict[int, Tensor]
    targets: dict[int, Tensor]


def one_pass(model: nn.Module, layers: dict[int, nn.Module], zeroed: Sequence[Weight], ids: Tensor) -> Pass:
    """Forward and backward of one document (1, length) with the zeroed layers after their gaps."""
    features: dict[Place, Tensor] = {}
    states: dict[int, Tensor] = {}
    weights: dict[Place, Tensor] = {}
    handles = []

    def keep_input(place: Place):
        return lambda _module, inputs: features.update({place: inputs[0][0].detach()})

    def keep_output(gap: int):
        return lambda _module, _inputs, output: states.update({gap: output})

    for gap, layer in layers.items():
        handles.append(layer.register_forward_hook(keep_output(gap)))
        for weight in zeroed:
            module = layer.get_submodule(weight.name.removesuffix(".weight"))
            weights[gap, weight.name] = module.weight.requires_grad_()
            handles.append(module.register_forward_pre_hook(keep_input((gap, weight.name))))
    try:
        with spliced(model, layers), torch.enable_grad():
            ids = ids.to(model.device)
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits[0].float()
            loss = functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
            found = torch.autograd.grad(loss, [*weights.values(), *states.values()])
    finally:
        for handle in handles:
            handle.remove()
    by_weight, by_state = found[: len(weights)], found[len(weights) :]
    return Pass(
        {place: gradient / len(logits) for place, gradient in zip(weights, by_weight, strict=True)},
        features,
        {gap: state[0].detach() for gap, state in states.items()},
        {gap: gradient[0] for gap, gradient in zip(states, by_state, strict=True)},
    )


class HeldOut:
    """Documents on which a step is judged: the base's losses, and its states (length - 1, hidden) at the gaps."""

    def __init__(
        self, model: nn.Module, documents: list[Tensor], gaps: list[int], states: list[dict[int, Tensor]] | None = None
    ) -> None:
        self.model, self.documents = model, documents
        self.tokens = np.array([ids.shape[1] - 1 for ids in documents])
        self.before = losses(model, documents)
        self.states = states or [
            {gap: stream.states[0] for gap, stream in streams(model, ids[:, :-1].to(model.device), gaps).items()}
            for ids in documents
        ]

    def drops(self, layers: dict[int, nn.Module]) -> np.ndarray:
        """Of each document's summed loss by these layers, in nats."""
        states = [own[min(layers)] for own in self.states]
        return self.before - losses_after(self.model, layers, self.documents, states)
