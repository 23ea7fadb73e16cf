"""Trainer callbacks: stop a run that has broken, write the log, keep points of the learning curve, time the saves."""

from __future__ import annotations

import json
import math
import re
import time
from pathlib import Path
from typing import Any

import torch
from transformers import ProgressCallback, TrainerCallback

from opt_deus.training.run import Run, write_tensors

WINDOW = 3  # one hard batch raises no alarm
FACTOR, MARGIN = 3.0, 3.0  # diverged: each of the last WINDOW losses above FACTOR x first loss + MARGIN nats


class TrainingDiverged(RuntimeError):
    """The loss or the gradient left the range in which training means something."""


class DivergenceGuard(TrainerCallback):
    """Reads only the Trainer's log history, so that a resumed run judges as an uninterrupted one would."""

    def __init__(self, run: Run):
        self.run = run

    def on_log(self, args: Any, state: Any, control: Any, logs: dict, **kwargs: Any) -> None:
        if "loss" not in logs:
            return
        losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
        limit = FACTOR * losses[0] + MARGIN
        for name in ("loss", "grad_norm"):
            if not math.isfinite(logs.get(name, 0.0)):
                self._stop(state, f"{name} is {logs[name]}", losses)
        if len(losses) > WINDOW and min(losses[-WINDOW:]) > limit:
            self._stop(state, f"the last {WINDOW} losses all exceed {limit:.3f}", losses)
        if logs.get("grad_norm") == 0.0:
            self._stop(state, "every gradient is zero: no trainable tensor reaches the loss", losses)

    def _stop(self, state: Any, reason: str, losses: list[float]) -> None:
        raise TrainingDiverged(
            f"{self.run.stage}: step {state.global_step} of {state.max_steps}: {reason} "
            f"(loss {losses[-1]:.4g}, first loss {losses[0]:.4g}). "
            f"Lower {self.run.stage}.lr (now {self.run.cfg.lr:g}) or raise {self.run.stage}.warmup_ratio; "
            "if the first loss is already not finite, look at the made layers."
        )


class DeadLayerGuard(TrainerCallback):
    """At the first step every trainable layer must get some gradient.

    With zeroed outputs that is o_proj and down_proj alone (the others' gradient is exactly zero until these have
    moved), so the demand is on the layer and not on each tensor.
    """

    def __init__(self, run: Run):
        self.run = run

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step > 0:
            return
        alive: dict[str, bool] = {}
        for name, parameter in self.run.trainable.items():
            layer = layer_of(name)
            moved = parameter.grad is not None and bool(torch.count_nonzero(parameter.grad))
            alive[layer] = alive.get(layer, False) or moved
        dead = [layer for layer, moved in alive.items() if not moved]
        if dead:
            raise TrainingDiverged(
                f"{self.run.stage}: step 1 of {state.max_steps}: no gradient reaches {', '.join(dead)}. A layer whose "
                "input and output weights are both zero cannot learn; look at how it was made (align, zero_init)."
            )


def layer_of(name: str) -> str:
    """"model.layers.12.mlp.up_proj.weight" -> "model.layers.12"; a tensor outside the layers is its own group."""
    match = re.match(r"(.*?\.\d+)\.", name)
    return match.group(1) if match else name


class LogFile(TrainerCallback):
    """One JSON line per step. A resumed run first removes the lines that it will write again."""

    def __init__(self, run: Run, path: Path):
        self.run, self.path = run, path

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.is_file():
            lines = [line for line in self.path.read_text().splitlines() if self._keep(line, state.global_step)]
            part = self.path.with_suffix(".part")
            part.write_text("".join(line + "\n" for line in lines))
            part.replace(self.path)
        self.last = (state.global_step, time.perf_counter())

    def _keep(self, line: str, step: int) -> bool:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:  # cut off by a kill
            return False
        return entry.get("stage") != self.run.stage or entry.get("step", 0) <= step

    def on_log(self, args: Any, state: Any, control: Any, logs: dict, **kwargs: Any) -> None:
        if "loss" not in logs:
            return
        (step, then), now = self.last, time.perf_counter()
        self.last = (state.global_step, now)
        tokens = self.run.tokens_after(state.global_step)
        entry = {
            "stage": self.run.stage,
            "step": state.global_step,
            "tokens": tokens,
            "loss": logs["loss"],
            "lr": logs["learning_rate"],
            "grad_norm": logs.get("grad_norm"),
            "tokens_per_second": round((tokens - self.run.tokens_after(step)) / max(now - then, 1e-9), 1),
        }
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")


class LearningCurve(TrainerCallback):
    """The trainable tensors at fractions of the run, as curve-<fraction>.safetensors."""

    def __init__(self, run: Run, total_steps: int):
        self.run = run
        self.due: dict[int, list[float]] = {}
        for fraction in run.cfg.checkpoints:
            self.due.setdefault(max(1, round(fraction * total_steps)), []).append(fraction)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for fraction in self.due.get(state.global_step, []):
            path = self.run.folder / f"curve-{fraction:g}.safetensors"
            write_tensors(self.run, path, {"step": str(state.global_step)})


class ResumePoints(TrainerCallback):
    """Asks for a resume checkpoint every `save_steps` steps, or every `save_minutes` minutes."""

    def __init__(self, run: Run):
        self.run = run

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.last = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if self.run.cfg.save_steps is not None:
            due = state.global_step % self.run.cfg.save_steps == 0
        else:
            due = time.monotonic() - self.last >= 60 * self.run.cfg.save_minutes
        if due and state.global_step < state.max_steps:
            control.should_save = True
            self.last = time.monotonic()
        return control


class Bar(ProgressCallback):
    """transformers' bar, with the loss in it instead of one printed line per step."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        self.training_bar.set_description(args.run_name)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict | None = None, **kwargs: Any) -> None:
        if self.training_bar is not None and logs and "loss" in logs:
            self.training_bar.set_postfix(loss=f"{logs['loss']:.3f}", refresh=False)
