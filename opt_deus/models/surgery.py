"""Model surgery: take layers out, build the deeper model, keep only what was changed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from opt_deus.models.blocks import Block, block_for

if TYPE_CHECKING:
    from opt_deus.plan import Plan

# Configuration entries that speak of single layers. Hard case: they must follow an insertion, or the model is
# refused at save or gets layers of the wrong kind.
LAYER_LISTS = ("layer_types", "mlp_layer_types", "no_rope_layers")  # one entry per layer
LAYER_INDICES = ("mlp_only_layers", "cross_attention_layers")  # indices of layers
LAYER_THRESHOLDS = ("max_window_layers", "first_k_dense_replace")  # the first so many layers are of one kind


def layers_of(model: nn.Module) -> nn.ModuleList:
    """The decoder layers of a causal language model."""
    return model.get_submodule(block_for(model.config.model_type).layers)


def layer_tensors(model: nn.Module, index: int) -> dict[str, Tensor]:
    """One layer's parameters by relative name, detached views of the model (read them, do not write into them).

    ValueError for a tensor that the architecture's table does not have: nothing falls through unnoticed.
    """
    tensors = {name: parameter.detach() for name, parameter in layers_of(model)[index].named_parameters()}
    block = block_for(model.config.model_type)
    unknown = set(tensors) - {weight.name for weight in block.weights}
    if unknown:
        raise ValueError(
            f"model: layer {index} has {sorted(unknown)[0]}, which the table of {block.model_type!r} in "
            "opt_deus/models/blocks.py does not name; add it there."
        )
    return tensors


def layer_parameter_names(model: nn.Module, indices: Iterable[int]) -> list[str]:
    """Full names of the parameters in these layers, in the model's order."""
    layers, prefix = layers_of(model), block_for(model.config.model_type).layers
    return [f"{prefix}.{index}.{name}" for index in indices for name, _ in layers[index].named_parameters()]


def zero_outputs(block: Block, tensors: dict[str, Tensor], which: str = "both") -> dict[str, Tensor]:
    """Zero-initialisation: output projections (weights and biases) become 0, so that the layer passes its input on.

    which: both; or attention's or mlp's alone (then the other part still acts).
    """
    rows = {"both": {"attention_output", "mlp_output"}, "attention": {"attention_output"}, "mlp": {"mlp_output"}}[which]
    names = {weight.name for weight in block.weights if weight.zeroed and weight.rows in rows}
    return {name: torch.zeros_like(t) if name in names else t for name, t in tensors.items()}


def deepen(base: nn.Module, plan: Plan, made: dict[int, dict[str, Tensor]]) -> nn.Module:
    """The deeper model, in eval mode, with the base's dtype and device; it copies everything and shares nothing.

    made: output index -> the new layer's tensors by relative name (cast to the base's dtype here).
    ValueError names the layer and the weight where made does not fit the plan or the base's layers.
    """
    prefix = block_for(base.config.model_type).layers
    _check_made(base, plan, made)

    def source(name: str) -> Tensor:
        if not name.startswith(f"{prefix}."):
            return _tensor(base, name)
        index, relative = name.removeprefix(f"{prefix}.").split(".", 1)
        slot = plan.slots[int(index)]
        if slot.new and relative in made[int(index)]:
            return made[int(index)][relative]
        return _tensor(base, f"{prefix}.{slot.lower}.{relative}")  # a kept layer's tensor, or any layer's buffer

    return rebuild(base, deeper_config(base.config, plan), source, base.dtype)


def rebuild(model: nn.Module, config: Any, source: Callable[[str], Tensor], dtype: torch.dtype) -> nn.Module:
    """A model of the same class from a configuration, its tensors cloned from source(name).

    Parameters get the dtype; buffers keep theirs (rotary frequencies must stay float32 in a bfloat16 model).
    The class itself is built on the meta device, so every layer_idx comes from the configuration and nothing is
    initialised in vain.
    """
    with torch.device("meta"):
        rebuilt = type(model)(config)
    rebuilt.tie_weights()
    filled: dict[nn.Parameter, nn.Parameter] = {}  # what is tied on the meta device stays tied
    for module_name, module in rebuilt.named_modules():
        prefix = f"{module_name}." if module_name else ""
        for name, empty in list(module.named_parameters(recurse=False)):
            if empty not in filled:
                tensor = source(prefix + name).detach()
                filled[empty] = nn.Parameter(tensor.to(dtype, copy=True).contiguous())
            module._parameters[name] = filled[empty]
        for name, _ in list(module.named_buffers(recurse=False)):
            module._buffers[name] = source(prefix + name).clone()
    if getattr(model, "generation_config", None) is not None:
        rebuilt.generation_config = copy.deepcopy(model.generation_config)
    return rebuilt.eval()


def recast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy of a model with its parameters in another dtype."""
    return rebuild(model, copy.deepcopy(model.config), lambda name: _tensor(model, name), dtype)


def deeper_config(config: Any, plan: Plan) -> Any:
    """The configuration of the deeper model: per-layer entries follow the insertion map, a new layer takes its
    lower parent's kind."""
    deeper = copy.deepcopy(config)
    deeper.num_hidden_layers = plan.layers
    for name in LAYER_LISTS:
        values = getattr(config, name, None)
        if values:
            _check_length(name, values, plan)
            setattr(deeper, name, [values[slot.lower] for slot in plan.slots])
    for name in LAYER_INDICES:
        values = getattr(config, name, None)
        if values:
            setattr(deeper, name, [index for index, slot in enumerate(plan.slots) if slot.lower in values])
    for name in LAYER_THRESHOLDS:
        value = getattr(config, name, None)
        if value is not None:
            setattr(deeper, name, sum(slot.lower < value for slot in plan.slots))
    return deeper


def delta(model: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    """Clones of the named parameters on the CPU, ready for safetensors.torch.save_file."""
    return {name: _tensor(model, name).detach().to("cpu", copy=True).contiguous() for name in names}


def apply_delta(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Write tensors into the parameters of those names, in place; ValueError for an unknown name or another shape."""
    for name, tensor in tensors.items():
        try:
            parameter = model.get_parameter(name)
        except AttributeError as error:
            raise ValueError(f"delta: the model has no parameter {name!r}; it was made for another plan.") from error
        if parameter.shape != tensor.shape:
            raise ValueError(
                f"delta: {name} has shape {tuple(tensor.shape)}, the model {tuple(parameter.shape)}; "
                "it was made for another base."
            )
        with torch.no_grad():
            parameter.copy_(tensor)


def _tensor(model: nn.Module, name: str) -> Tensor:
    """A parameter or buffer by its full name."""
    owner, _, leaf = name.rpartition(".")
    return getattr(model.get_submodule(owner), leaf)


def _check_made(base: nn.Module, plan: Plan, made: dict[int, dict[str, Tensor]]) -> None:
    if len(layers_of(base)) != plan.base_layers:
        raise ValueError(f"plan: it is for {plan.base_layers} layers, the base has {len(layers_of(base))}.")
    if sorted(made) != plan.inserted:
        raise ValueError(f"made layers: at output indices {sorted(made)}, the plan inserts at {plan.inserted}.")
    expected = {name: tensor.shape for name, tensor in layer_tensors(base, 0).items()}
    for index, tensors in made.items():
        if set(tensors) != set(expected):
            name = sorted(set(tensors) ^ set(expected))[0]
            raise ValueError(f"made layer {index}: {name} is {'unknown' if name in tensors else 'missing'}.")
        for name, tensor in tensors.items():
            if tensor.shape != expected[name]:
                raise ValueError(
                    f"made layer {index}: {name} has shape {tuple(tensor.shape)}, not {tuple(expected[name])}."
                )


def _check_length(name: str, values: list, plan: Plan) -> None:
    if len(values) != plan.base_layers:
        raise ValueError(
            f"model: {name} in config.json has {len(values)} entries for {plan.base_layers} layers; correct it there."
        )
