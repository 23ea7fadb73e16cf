"""CPT speed: our train() against a plain Trainer script doing the same work, and the gain of prefix states.

    python benchmarks/training.py [--rounds 5] [--steps 4] [--layers 45] [--frozen 15] [--precision bf16]

The model has SmolLM2-135M's shape with random weights (speed does not depend on them) and, as with position=top, every
second layer above --frozen trains. The variants run alternately in one process on one model, so that what else the
machine does meets all alike; a ratio compares neighbours within a round. Timed: the whole call, from making the
Trainer to its result, with one warm-up round that is not counted. Where others use the machine too, processor seconds
(with OMP_NUM_THREADS=1) say more than wall seconds: --clock cpu.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from opt_deus.config import TrainConfig
from opt_deus.store import Store
from opt_deus.training import PackedBlocks, PrefixStates, precision, train

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def smollm2_shaped(layers: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=layers, num_attention_heads=9,
            num_key_value_heads=3, max_position_embeddings=2048, tie_word_embeddings=True,
        )
    )


def plain_trainer(model: LlamaForCausalLM, blocks: PackedBlocks, cfg: TrainConfig, names: set[str], bf16: bool) -> None:
    """What one would write by hand: freeze, Trainer, train, store what was trained."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in names)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=cfg.steps, per_device_train_batch_size=cfg.batch_size, learning_rate=cfg.lr,
            lr_scheduler_type=cfg.schedule, weight_decay=cfg.weight_decay, bf16=bf16, use_cpu=True, report_to="none",
            save_strategy="no", disable_tqdm=True, logging_strategy="no", dataloader_pin_memory=False,
        )
        examples = [{"input_ids": block["input_ids"], "labels": block["input_ids"]} for block in blocks]
        Trainer(model, arguments, train_dataset=examples).train()
        trained = {name: parameter.detach() for name, parameter in model.named_parameters() if name in names}
        save_file(trained, Path(folder) / "trained.safetensors")
    for left in ("forward", "_original_forward", "_is_accelerate_prepared"):  # or the next run has no autocast
        model.__dict__.pop(left, None)


def ours(model, blocks, cfg, names, arithmetic, prefix: PrefixStates | None = None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        train(
            model, None, blocks, cfg, trainable=names, folder=Path(folder), seed=0, precision=arithmetic,
            device="cpu", log=Path(folder) / "log.jsonl", stage="cpt", prefix=prefix,
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    for option, default in (("rounds", 5), ("steps", 4), ("layers", 45), ("frozen", 15)):
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall")
    parser.add_argument("--precision", default=precision("auto", "cpu"))
    chosen = parser.parse_args()
    model = smollm2_shaped(chosen.layers)
    new = range(chosen.frozen + 1, chosen.layers, 2)
    names = {name for name, _ in model.named_parameters() if name.startswith(tuple(f"model.layers.{i}." for i in new))}
    cfg = TrainConfig(tokens=None, steps=chosen.steps, cache_prefix="true")
    size = (chosen.steps * cfg.batch_size, cfg.block_size)
    blocks = PackedBlocks(np.random.default_rng(0).integers(0, 49152, size, dtype=np.int32))
    with tempfile.TemporaryDirectory() as folder:
        store = Store(folder)
        stored = PrefixStates(lambda identity, fill: store.get("prefix", identity, fill).path, store.root)
        variants: dict[str, Callable[[], None]] = {
            "plain Trainer": lambda: plain_trainer(model, blocks, cfg, names, chosen.precision == "bf16"),
            "train()": lambda: ours(model, blocks, cfg, names, chosen.precision),
            "train(), prefix states": lambda: ours(model, blocks, cfg, names, chosen.precision, stored),
        }
        seconds = measure(variants, chosen.rounds, CLOCKS[chosen.clock])
    report(seconds, blocks.blocks.size, chosen)


def measure(
    variants: dict[str, Callable[[], None]], rounds: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Seconds of every variant and round. The order turns, so that no variant always follows the same one."""
    names, seconds = list(variants), {name: [] for name in variants}
    for turn in range(-1, rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start = clock()
            variants[name]()
            taken = clock() - start
            print(f"round {turn + 1} {name}: {taken:.1f} s", file=sys.stderr, flush=True)
            if turn >= 0:  # round 0 warms up
                seconds[name].append(taken)
    return seconds


def report(seconds: dict[str, list[float]], tokens: int, chosen: argparse.Namespace) -> None:
    plain = seconds["plain Trainer"]
    print(f"{chosen.layers} layers, {chosen.precision}, {torch.get_num_threads()} threads, {tokens} tokens a run, "
          f"{chosen.clock} seconds, "
          f"n = {chosen.rounds} rounds; tokens/s relative to the plain Trainer of the same round: median (min - max)")
    for name, values in seconds.items():
        ratios = [reference / value for reference, value in zip(plain, values, strict=True)]
        speed = tokens / statistics.median(values)
        spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} - {max(ratios):.3f})"
        print(f"{name:24s} {speed:7.0f} tokens/s   {spread}")


if __name__ == "__main__":
    main()
