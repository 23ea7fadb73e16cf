"""What can be refused from the configuration alone: one message with key, value and remedy."""

from __future__ import annotations

import difflib
import math
from typing import Any

from opt_deus.combinations import check_combination
from opt_deus.config import AlignConfig, Cell, EvidenceConfig, TrainConfig

RUNTIME_KEYS = (
    "name",
    "device",
    "dry_run",
    "offline",
    "fail_fast",
    "tracker",
    "store",
    "cpt.save_steps",
    "cpt.save_minutes",
    "cpt.cache_prefix",
    "sft.save_steps",
    "sft.save_minutes",
    "sft.cache_prefix",
)
FACTORS = ("align", "zero_init", "position", "seed")
CHOICES: dict[str, tuple[str, ...]] = {
    "zero_weights": ("both", "attention", "mlp"),
    "dtype": ("auto", "float32", "bfloat16"),
    "eval.dtype": ("float32", "bfloat16"),
    "cpt.trainable": ("new", "all"),
    "sft.trainable": ("new", "all"),
    "cpt.cache_prefix": ("auto", "true", "false"),
    "sft.cache_prefix": ("auto", "true", "false"),
}
SCHEDULES = (
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
)
CHOICES |= {"cpt.schedule": SCHEDULES, "sft.schedule": SCHEDULES}
STAGES = ("initial", "cpt", "cpt_checkpoints", "sft")


def is_runtime(key: str) -> bool:
    """True for a key that cannot change a result; such keys enter neither folder names nor hashes."""
    return any(key == known or key.startswith(known + ".") for known in RUNTIME_KEYS)


def nearest(word: str, known: list[str] | tuple[str, ...]) -> str:
    """The end of a refusal: the nearest known word, or all of them."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"nearest: {close[0]!r}" if close else f"choose one of: {', '.join(sorted(known))}"


def check(cell: Cell) -> None:
    """Everything that can be refused from the configuration alone.

    Raises ValueError with key, value and remedy; Meaningless where a grid should skip the cell instead.
    """
    _check_name(cell.name)
    if cell.seed < 0:
        raise ValueError(f"seed={cell.seed}: a seed is 0 or larger.")
    for key, known in CHOICES.items():
        value = _lookup(cell, key)
        if value is not None and str(value).lower() not in known:
            raise ValueError(f"{key}={value}: unknown; {nearest(str(value), known)}.")
    if cell.device not in ("auto", "cpu", "cuda", "cuda:0"):
        raise ValueError(
            f"device={cell.device}: choose auto, cpu or cuda (another GPU: CUDA_VISIBLE_DEVICES=N device=cuda)."
        )
    for stage in ("cpt", "sft"):
        _check_training(stage, getattr(cell, stage))
    _check_evaluation(cell)
    for group in ("align", "evidence"):
        _check_knobs(group, getattr(cell, group))
    for key in ("tokens", "length"):
        _positive(f"evidence.{key}", getattr(cell.evidence, key))
    check_combination(cell)


def _lookup(cell: Cell, key: str) -> Any:
    value: Any = cell
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _check_name(name: str) -> None:
    allowed = name and all(letter.isascii() and (letter.isalnum() or letter in "._-") for letter in name)
    if not allowed or name.strip(".") == "" or len(name) > 120:
        raise ValueError(
            f"name={name!r}: the sweep's name becomes a folder; use 1 to 120 letters, digits, '.', '_' or '-', "
            "e.g. name=review."
        )


def _positive(key: str, value: float | int | None, *, zero: bool = False) -> None:
    if value is None:
        return
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        raise ValueError(f"{key}={value}: must be a finite number {'>= 0' if zero else '> 0'}.")


def _check_training(stage: str, train: TrainConfig) -> None:
    for key in (
        "tokens",
        "steps",
        "block_size",
        "batch_size",
        "accumulation",
        "lr",
        "max_grad_norm",
        "save_steps",
        "save_minutes",
    ):
        _positive(f"{stage}.{key}", getattr(train, key))
    _positive(f"{stage}.weight_decay", train.weight_decay, zero=True)
    if not 0 <= train.warmup_ratio < 1:
        raise ValueError(f"{stage}.warmup_ratio={train.warmup_ratio}: a share of the steps, 0 <= ratio < 1.")
    for fraction in train.checkpoints:
        if not 0 < fraction <= 1:
            raise ValueError(f"{stage}.checkpoints={train.checkpoints}: fractions of the run, 0 < fraction <= 1.")
    step = train.block_size * train.batch_size * train.accumulation
    if train.steps is None and train.tokens is not None and train.tokens < step:
        raise ValueError(
            f"{stage}.tokens={train.tokens}: one step takes {step} tokens (block_size x batch_size x accumulation); "
            "give at least that many or lower the sizes."
        )


def _check_evaluation(cell: Cell) -> None:
    for key in ("batch_size", "max_length", "perplexity_tokens", "perplexity_length", "limit"):
        _positive(f"eval.{key}", getattr(cell.eval, key))
    for stage in cell.eval.stages:
        if stage not in STAGES:
            raise ValueError(f"eval.stages={cell.eval.stages}: {stage!r} is no stage; {nearest(stage, STAGES)}.")
    if "cpt_checkpoints" in cell.eval.stages and not cell.cpt.checkpoints:
        raise ValueError(
            "eval.stages names cpt_checkpoints but cpt.checkpoints=[] keeps none; "
            "set e.g. cpt.checkpoints=[0.2,0.4,0.6,0.8]."
        )
    if not 0 < cell.data.held_out_fraction < 1:
        raise ValueError(f"data.held_out_fraction={cell.data.held_out_fraction}: a share between 0 and 1.")


KNOBS: dict[str, tuple[Any, ...]] = {
    "solver": ("sinkhorn", "exact", "unbalanced", "partial"),
    "flow": ("tmf", "release", "none"),
    "cost": ("euclidean", "sqeuclidean", "cosine"),
    "epsilon_scale": ("absolute", "max", "median", "mean"),
    "within_head": ("none", "permutation", "procrustes"),
    "rotary": ("none", "planes"),
    "half.norms": ("half", "average"),
    "lesa.norms": ("layer0", "neighbours"),
    "lesa.samples": ("directions", "inputs"),
    "swap.scale": ("least_squares", "deviation"),
}
MAY_BE_ZERO = ("norm_weight", "long_seeds")
SHARES = ("mass", "fraction", "norm_weight")


def _check_knobs(group: str, choice: AlignConfig | EvidenceConfig) -> None:
    """Knobs with named values, and numbers; the YAML of a method or a study gives the defaults and so the types."""
    for knob, value in choice.knobs.items():
        known = KNOBS.get(f"{choice.name}.{knob}", KNOBS.get(knob))
        if known is not None and str(value) not in known:
            raise ValueError(f"{group}.{knob}={value}: unknown; {nearest(str(value), known)}.")
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            _positive(f"{group}.{knob}", value, zero=knob in MAY_BE_ZERO)
            if knob in SHARES and value > 1:
                raise ValueError(f"{group}.{knob}={value}: a share, at most 1.")
