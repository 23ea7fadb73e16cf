"""The self-check of every deeper model: cheap, and made of the faults that depth up-scaling tools are known for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from opt_deus.models.blocks import block_for
from opt_deus.models.surgery import layers_of

if TYPE_CHECKING:
    from opt_deus.plan import Plan

BATCH, LENGTH, PREFILL = 2, 12, 8  # tokens; the cached pass takes PREFILL of them first, then the rest
LARGEST_TOLERANCE = 1e-2  # a layer that shares another's cache moves logits by about 5e-2 of their size


@torch.inference_mode()
def self_check(base: nn.Module, deeper: nn.Module, plan: Plan, zero_init: bool) -> dict[str, float | int]:
    """Checks a deeper model against its base and plan; RuntimeError names what differs.

    - as many layers as planned, each numbered by its place and run exactly once;
    - kept layers, embeddings, last norm and head bit-equal to the base's;
    - logits finite, and the same with and without the cache (to 1e-5 of the largest logit in float32, or to rounding);
    - with zero_init: the new layers' output projections are 0 and the logits equal the base's.

    Returns {"layers_run", "cache_difference", "base_difference"}: largest differences of logits, relative to the
    largest logit of the model without a cache (base_difference only means equality with zero_init).
    """
    _check_numbering(deeper, plan)
    _check_kept(base, deeper, plan)
    if zero_init:
        _check_zeroed(deeper, plan)
    tokens = fixed_tokens(base)
    logits, layers_run = _counted_logits(deeper, tokens, plan)
    if not torch.isfinite(logits).all():
        raise RuntimeError("self-check: the deeper model's logits hold NaN or infinite numbers.")
    tolerance = max(1e-5, 8 * torch.finfo(deeper.dtype).eps)
    cache_difference = _cache_difference(deeper, tokens, logits)
    if not cache_difference <= tolerance and not cache_difference <= _rounding(deeper, tokens, logits):
        raise RuntimeError(f"self-check: logits with and without cache differ by {cache_difference:.1e} of their size.")
    base_difference = _relative(base(tokens, use_cache=False).logits, logits)
    if zero_init and not base_difference <= tolerance:
        raise RuntimeError(f"self-check: zero-initialised, yet logits differ from the base's by {base_difference:.1e}.")
    return {"layers_run": layers_run, "cache_difference": cache_difference, "base_difference": base_difference}


def fixed_tokens(model: nn.Module) -> Tensor:
    """The same random token ids every time, (2, 12), on the model's device."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.config.vocab_size, (BATCH, LENGTH), generator=generator).to(model.device)


def _check_numbering(deeper: nn.Module, plan: Plan) -> None:
    layers = layers_of(deeper)
    if not len(layers) == deeper.config.num_hidden_layers == plan.layers:
        raise RuntimeError(
            f"self-check: the plan has {plan.layers} layers, the model {len(layers)}, "
            f"its configuration {deeper.config.num_hidden_layers}."
        )
    for index, layer in enumerate(layers):
        for name, module in layer.named_modules():
            found = getattr(module, "layer_idx", index)
            if found != index:
                raise RuntimeError(f"self-check: layer {index} {name or 'itself'}: layer_idx is {found}.")


def _check_kept(base: nn.Module, deeper: nn.Module, plan: Plan) -> None:
    prefix = block_for(base.config.model_type).layers + "."
    expected = {name: tensor for name, tensor in base.state_dict().items() if not name.startswith(prefix)}
    base_layers = [layer.state_dict() for layer in layers_of(base)]
    for index, origin in plan.kept.items():
        expected |= {f"{prefix}{index}.{name}": tensor for name, tensor in base_layers[origin].items()}
    found = deeper.state_dict()
    for name, tensor in expected.items():
        if name not in found or not torch.equal(found[name], tensor):
            raise RuntimeError(f"self-check: {name} is not the base's.")


def _check_zeroed(deeper: nn.Module, plan: Plan) -> None:
    zeroed = block_for(deeper.config.model_type).zeroed
    for index in plan.inserted:
        for name, parameter in layers_of(deeper)[index].named_parameters():
            if name in zeroed and parameter.any():
                raise RuntimeError(f"self-check: zero-initialised, yet {name} of layer {index} is not 0.")


def _counted_logits(deeper: nn.Module, tokens: Tensor, plan: Plan) -> tuple[Tensor, int]:
    """Logits without a cache, and the number of layer calls that made them."""
    calls = [0] * plan.layers

    def count(index: int) -> None:
        calls[index] += 1

    hooks = [
        layer.register_forward_hook(lambda *_, index=index: count(index))
        for index, layer in enumerate(layers_of(deeper))
    ]
    try:
        logits = deeper(tokens, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    for index, number in enumerate(calls):
        if number != 1:
            raise RuntimeError(f"self-check: layer {index} ran {number} times in one forward pass.")
    return logits, sum(calls)


def _cache_difference(deeper: nn.Module, tokens: Tensor, logits: Tensor) -> float:
    """How far logits through the default cache, in two pieces, are from those without it."""
    first = deeper(tokens[:, :PREFILL], use_cache=True)
    difference = _relative(first.logits, logits[:, :PREFILL])
    if difference <= LARGEST_TOLERANCE:  # a cache that is wrong already may not fit the second piece at all
        rest = deeper(tokens[:, PREFILL:], cache=first.cache, use_cache=True)
        difference = max(difference, _relative(rest.logits, logits[:, PREFILL:]))
    return difference


def _rounding(deeper: nn.Module, tokens: Tensor, logits: Tensor) -> float:
    """What rounding explains in layers that amplify it: ten times the change by the mere length of a pass without
    a cache, and never as much as a wrong cache makes."""
    shorter = deeper(tokens[:, :PREFILL], use_cache=False).logits
    return min(10 * _relative(shorter, logits[:, :PREFILL]), LARGEST_TOLERANCE)


def _relative(other: Tensor, logits: Tensor) -> float:
    """Largest difference over the largest logit."""
    return ((other - logits).abs().max() / logits.abs().max()).item()
