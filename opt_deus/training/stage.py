"""train(): one stage of training, resumable at any moment, with the same result as without interruption."""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import Trainer, TrainerCallback, set_seed

from opt_deus.config import TrainConfig
from opt_deus.models.lower import only_layers
from opt_deus.training import checkpoints, guards
from opt_deus.training.examples import content, lengths
from opt_deus.training.prefix import PrefixStates, frozen_layers, worth_it
from opt_deus.training.run import Run, identity, load_tensors, write_tensors
from opt_deus.training.trainers import attach, make_trainer

TRAINED = "trained.safetensors"


def train(
    model: torch.nn.Module,
    tokenizer: Any,
    examples: Any,
    cfg: TrainConfig,
    *,
    trainable: set[str] | str,
    folder: Path,
    seed: int,
    precision: str,
    device: str,
    log: Path | None,
    stage: str,
    callbacks: Sequence[TrainerCallback] = (),
    prefix: PrefixStates | None = None,
) -> dict[str, Any]:
    """Train `trainable` ("all", or full parameter names) in place; everything else stays bit-identical.

    `folder` keeps resume checkpoints, curve-<fraction>.safetensors and, at the end, trained.safetensors with the
    final trainable tensors; a second call with the same folder resumes, or takes over the finished result.
    `prefix` offers a folder for the states below the first trainable layer (prefix.py); cfg.cache_prefix decides.
    Returns {"tokens", "steps", "seconds", "tokens_per_second", "final_loss", "trainable"}: the loss in nats is the mean
    of the last tenth of the steps, trainable the number of parameters.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    chosen = choose(model, trainable)
    with _as_before(model, chosen):
        run = Run(stage, cfg, folder, chosen, lengths(examples, tokenizer))
        run.identity = identity(run, content(examples), seed, precision)
        finished = _finished(run)
        if finished is not None:
            return finished
        set_seed(seed)
        run.started = time.perf_counter()  # the states below count where they are computed
        with _from_first_trainable(model, examples, run, precision, device, prefix) as fed:
            trainer = make_trainer(model, tokenizer, fed, run, seed, precision, device)
            attach(trainer, run, log, callbacks)
            resume = checkpoints.newest(run)
            trainer.train(resume_from_checkpoint=str(resume) if resume else None)
            return _finish(run, trainer)


def choose(model: torch.nn.Module, trainable: set[str] | str) -> dict[str, torch.nn.Parameter]:
    """The trainable parameters by name, in the model's order; a tied tensor goes by its first name."""
    parameters = dict(model.named_parameters())
    if trainable == "all":
        chosen = parameters
    else:
        first_name = {id(parameter): name for name, parameter in parameters.items()}
        every = dict(model.named_parameters(remove_duplicate=False))
        unknown = sorted(set(trainable) - set(every))
        if unknown or not trainable:
            raise ValueError(f"trainable: the model has no parameter {unknown[:3] or '(empty set)'}; nothing to train")
        names = {first_name[id(every[name])] for name in trainable}
        chosen = {name: parameter for name, parameter in parameters.items() if name in names}
    wrong = [name for name, parameter in chosen.items() if parameter.dtype != torch.float32]
    if wrong:
        raise ValueError(f"dtype: {wrong[0]} is not float32; load the weights as float32, bf16 is for autocast only")
    return chosen


@contextlib.contextmanager
def _as_before(model: torch.nn.Module, chosen: dict[str, torch.nn.Parameter]) -> Iterator[None]:
    """Freeze all but `chosen`; afterwards give the model back as it was but for its weights.

    accelerate wraps `forward` in autocast and trl in its fused head, on the instance: left there, a later float32
    evaluation would run in bfloat16. accelerate also marks the model as prepared: left there, the next stage on the
    same model would silently run without autocast. So every attribute that they add goes.
    """
    attributes = dict(model.__dict__)
    flags = {parameter: parameter.requires_grad for parameter in model.parameters()}
    was_training, config = model.training, copy.deepcopy(model.config)
    generation = copy.deepcopy(getattr(model, "generation_config", None))
    wanted = {id(parameter) for parameter in chosen.values()}
    try:
        for parameter in flags:
            parameter.requires_grad_(id(parameter) in wanted)
        yield
    finally:
        for parameter, flag in flags.items():
            parameter.requires_grad_(flag)
            parameter.grad = None
        for name in model.__dict__.keys() - attributes.keys():
            del model.__dict__[name]
        model.__dict__.update(attributes)
        model.config.__dict__.update(config.__dict__)
        model.generation_config = generation
        model.train(was_training)
        gc.collect()  # the Trainer holds itself and the optimizer's moments in a cycle


@contextlib.contextmanager
def _from_first_trainable(
    model: torch.nn.Module, examples: Any, run: Run, precision: str, device: str, prefix: PrefixStates | None
) -> Iterator[Any]:
    """The examples; as stored states, with the model cut to the layers above, where that pays."""
    depth = frozen_layers(model, run.trainable) if prefix is not None else 0
    if prefix is None or not worth_it(model, examples, depth, run.cfg, prefix.root):
        yield examples
        return
    model.to(device)
    states = prefix.open(model, examples, depth, run.cfg.batch_size, precision)
    with only_layers(model.model, slice(depth, None)):
        yield states


def _finish(run: Run, trainer: Trainer) -> dict[str, Any]:
    """Check the weights, store them with the result, and drop the resume checkpoints."""
    broken = [name for name, parameter in run.trainable.items() if not bool(torch.isfinite(parameter).all())]
    if broken:
        raise guards.TrainingDiverged(f"{run.stage}: after the last step {broken[0]} is not finite; lower the rate")
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    last = losses[-max(1, len(losses) // 10) :]
    tokens, seconds = run.tokens_after(trainer.state.global_step), run.seconds
    result = {
        "tokens": tokens,
        "steps": trainer.state.global_step,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds, 1),
        "final_loss": sum(last) / len(last),
        "trainable": sum(parameter.numel() for parameter in run.trainable.values()),
    }
    metadata = {"result": json.dumps(result), "identity": json.dumps(run.identity)}
    write_tensors(run, run.folder / TRAINED, metadata)
    checkpoints.remove_all(run.folder)
    return result


def _finished(run: Run) -> dict[str, Any] | None:
    """The result of this very run where it is complete; its tensors are loaded."""
    path = run.folder / TRAINED
    if not path.is_file():
        return None
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    if json.loads(metadata["identity"]) != run.identity:
        path.unlink()
        return None
    load_tensors(run, load_file(path))
    checkpoints.remove_all(run.folder)
    return json.loads(metadata["result"])
