"""What a layer adds to the residual stream on real text, and the factor that gives one layer another's update norm."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from scipy.optimize import brentq
from torch import Tensor, nn

from opt_deus.models.surgery import layers_of

SINK_RATIO = 10.0  # a position whose state is this many times the median norm is a sink (method.md, section 6)
LARGEST_FACTOR = 1e4


@dataclass(frozen=True)
class Stream:
    """Residual states after a base layer: states (blocks, tokens, hidden); kept marks positions that are no sinks."""

    states: Tensor
    kept: Tensor


@torch.no_grad()
def streams(model: nn.Module, ids: Tensor, after: list[int]) -> dict[int, Stream]:
    """States that leave the given base layers (0-based) on token blocks ids (blocks, tokens)."""
    found: dict[int, Stream] = {}

    def keep(index: int):
        def hook(_module: nn.Module, _inputs: tuple, output: Tensor | tuple) -> None:
            states = output[0] if isinstance(output, tuple) else output
            norms = states.norm(dim=-1)
            found[index] = Stream(states, norms < SINK_RATIO * norms.median())

        return hook

    handles = [layers_of(model)[index].register_forward_hook(keep(index)) for index in set(after)]
    try:
        model.model(input_ids=ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return found


class Updates:
    """Measures the update of made layers, put where one base layer's output arrives."""

    def __init__(self, model: nn.Module, stream: Stream) -> None:
        self.layer = copy.deepcopy(layers_of(model)[0])
        self.stream = stream
        positions = torch.arange(stream.states.shape[1], device=stream.states.device)[None]
        self.rotary = model.model.rotary_emb(stream.states, positions)

    @torch.no_grad()
    def update(self, tensors: dict[str, Tensor]) -> Tensor:
        """What a layer with these tensors adds to the stream's states: (blocks, tokens, hidden)."""
        self.layer.load_state_dict(tensors)
        output = self.layer(self.stream.states, position_embeddings=self.rotary)
        moved = output[0] if isinstance(output, tuple) else output
        return moved - self.stream.states

    def norm(self, tensors: dict[str, Tensor]) -> float:
        """Root mean square over kept positions of the update's Euclidean norm."""
        return self.update(tensors)[self.stream.kept].double().square().sum(-1).mean().sqrt().item()

    def matched(self, tensors: dict[str, Tensor], outputs: tuple[str, ...], target: float) -> dict[str, Tensor]:
        """The layer with one factor on its output projections, so that its update has the target norm.

        RuntimeError where no factor up to 10,000 reaches it, e.g. for a layer whose update is zero.
        """

        def scaled(log_factor: float) -> dict[str, Tensor]:
            factor = float(torch.tensor(log_factor).double().exp())
            return {name: tensor * factor if name in outputs else tensor for name, tensor in tensors.items()}

        def excess(log_factor: float) -> float:
            return self.norm(scaled(log_factor)) - target

        bound = float(torch.tensor(LARGEST_FACTOR).log())
        if not excess(-bound) < 0 < excess(bound):
            raise RuntimeError(f"update_match: no factor brings this layer's update to the norm {target:.4g}")
        return scaled(brentq(excess, -bound, bound, xtol=1e-5))
