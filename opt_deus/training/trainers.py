"""transformers' Trainer and trl's SFTTrainer, set up for one run."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import torch
from torch.nn import functional
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback, TrainingArguments
from trl import SFTConfig, SFTTrainer

from opt_deus.training import checkpoints, guards
from opt_deus.training.examples import num_steps
from opt_deus.training.run import Run


class BlockTrainer(checkpoints.Resumable, Trainer):
    """Next-token prediction on packed blocks."""


class PairTrainer(checkpoints.Resumable, SFTTrainer):
    """Loss on the answer only."""

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Mean negative log-likelihood of the answers' tokens, in nats.

        Without Triton trl projects every position onto the vocabulary, three times, and takes entropies; here only the
        positions where some answer of the batch goes on are projected, once.
        """
        if return_outputs or inputs["input_ids"].is_cuda:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        targets = inputs["labels"][:, 1:]
        kept = (targets != -100).any(dim=0).nonzero().flatten()
        tokens = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        logits = model(**tokens, logits_to_keep=kept, use_cache=False).logits
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), targets[:, kept].flatten(), reduction="sum")
        return loss / ((targets != -100).sum() if num_items_in_batch is None else num_items_in_batch)

    def _send_telemetry(self) -> None:
        """trl calls home here; this project does not."""


def make_trainer(
    model: torch.nn.Module, tokenizer: Any, examples: Any, run: Run, seed: int, precision: str, device: str
) -> Trainer:
    """A Trainer for packed blocks (or states in their place), or for prompt/completion pairs."""
    cfg, steps = run.cfg, num_steps(run.cfg, len(examples))
    if device not in ("cpu", "cuda", "cuda:0", "mps"):
        raise ValueError(f"device={device}: the Trainer takes the first; use CUDA_VISIBLE_DEVICES=N with device=cuda")
    arguments = dict(
        output_dir=str(run.folder),
        run_name=run.stage,
        max_steps=steps,
        per_device_train_batch_size=cfg.batch_size,
        gradient_accumulation_steps=cfg.accumulation,
        learning_rate=cfg.lr,
        lr_scheduler_type=cfg.schedule,
        warmup_steps=int(cfg.warmup_ratio * steps),
        weight_decay=cfg.weight_decay,
        max_grad_norm=cfg.max_grad_norm,
        bf16=precision == "bf16",
        use_cpu=device == "cpu",
        seed=seed,
        logging_steps=1,
        logging_nan_inf_filter=False,  # it would hide a NaN from the guard
        save_strategy="no",  # guards.ResumePoints asks for saves
        report_to="none",
        disable_tqdm=not sys.stderr.isatty(),
        dataloader_num_workers=0,
        dataloader_pin_memory=device != "cpu",
        activation_checkpointing=False,  # trl's default is on
    )
    if "prompt" in getattr(examples, "column_names", ()):
        with _quiet_datasets(), _tokenizer_as_before(tokenizer):
            pairs = one_device(SFTConfig(max_length=cfg.block_size, completion_only_loss=True, **arguments))
            return PairTrainer(model, pairs, train_dataset=examples, processing_class=tokenizer)
    blocks = one_device(TrainingArguments(remove_unused_columns=False, **arguments))
    return BlockTrainer(model, blocks, train_dataset=examples, data_collator=collate)


def one_device(arguments: TrainingArguments) -> TrainingArguments:
    """Never DataParallel, which a machine with several GPUs would get: it multiplies the batch."""
    arguments._n_gpu = min(arguments.n_gpu, 1)
    return arguments


def collate(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Whole blocks: no padding and no mask, so that attention takes its causal fast path."""
    batch = {name: torch.stack([torch.as_tensor(example[name]) for example in examples]) for name in examples[0]}
    return {"labels": batch.get("input_ids"), **batch}


@contextlib.contextmanager
def _quiet_datasets() -> Iterator[None]:
    """No bars for tokenising a few hundred pairs."""
    shown = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not shown:
            datasets.enable_progress_bars()


@contextlib.contextmanager
def _tokenizer_as_before(tokenizer: Any) -> Iterator[None]:
    """trl sets pad_token; the caller's tokenizer keeps its own."""
    pad = tokenizer.pad_token
    try:
        yield
    finally:
        tokenizer.pad_token = pad


def attach(trainer: Trainer, run: Run, log: Path | None, callbacks: Sequence[TrainerCallback]) -> None:
    trainer.run = run
    for shipped in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(shipped)
    own = [guards.DivergenceGuard(run), guards.DeadLayerGuard(run), guards.ResumePoints(run)]
    own.append(guards.LearningCurve(run, trainer.args.max_steps))
    if log is not None:
        own.append(guards.LogFile(run, Path(log)))
    if not trainer.args.disable_tqdm:
        own.append(guards.Bar())
    for callback in [*own, *callbacks]:
        trainer.add_callback(callback)
