"""dry_run=true: the plan of a grid in words and tables; loads and downloads nothing, imports no torch.

Formulas. One token costs 2 operations per weight it meets on the way forward; the backward pass costs the same again
for the gradients of activations from the top down to the lowest trained layer, and again for the trained weights.
Memory of training: float32 weights, and for trained weights gradient, and AdamW's two moments.
"""

from __future__ import annotations

from dataclasses import dataclass

from opt_deus import models
from opt_deus.compose import Job
from opt_deus.config import Cell, TrainConfig
from opt_deus.placing import plan_of
from opt_deus.plan import Plan
from opt_deus.preflight import stored_bytes

RATES = {"2 CPU cores with bfloat16 (seen: SmolLM2-135M)": 0.25e12, "one H100-class GPU at 40% of its peak": 400e12}


@dataclass(frozen=True)
class Budget:
    """One stage of one arm: what trains, tokens, floating-point operations."""

    stage: str
    what: str
    trained: int
    tokens: int
    flops: float


def describe(jobs: list[Job], multirun: bool) -> str:
    """The whole plan as text."""
    running = [job for job in jobs if not job.skipped]
    arms: dict[str, Cell] = {}
    for job in running:
        arms.setdefault(job.folder.replace(f"-seed{job.cell.seed}", ""), job.cell)
    first = running[0].cell
    lines = [
        f"{len(running)} cells in {len(arms)} arms, {len(jobs) - len(running)} skipped: multirun_reports/{first.name}"
    ]
    lines += [f"  skipped {job.folder}: {job.skipped}" for job in jobs if job.skipped]
    for arm, cell in arms.items():
        lines += ["", *_arm(arm, cell)]
    lines += ["", *_cost([job.cell for job in running])]
    return "\n".join(lines)


def _arm(arm: str, cell: Cell) -> list[str]:
    shape = models.shape(cell.model)
    plan = plan_of(cell, shape["num_hidden_layers"])
    counts = models.parameter_counts(shape, plan.layers)
    base = models.parameter_counts(shape)
    lines = [
        f"{arm}: {cell.model.name}, {plan.base_layers} -> {plan.layers} layers, "
        f"{base['total']:,} -> {counts['total']:,} parameters",
        f"  new layers at output indices {_listed(plan.inserted)}; "
        f"parents {_listed([tuple(each) for each in plan.parents])}",
        f"  made by {cell.align.name} {cell.align.knobs or ''}".rstrip()
        + (f", {'zeroed outputs' if cell.zero_init else 'outputs kept'}" if cell.align.make else ""),
        f"  {'stage':<6}{'what trains':<34}{'parameters':>16}{'tokens':>14}{'lr':>10}{'TFLOP':>14}",
    ]
    for budget in budgets(cell, plan, shape):
        lr = getattr(cell, budget.stage).lr
        lines.append(
            f"  {budget.stage:<6}{budget.what:<34}{budget.trained:>16,}{budget.tokens:>14,}{lr:>10.0e}"
            f"{budget.flops / 1e12:>14,.1f}"
        )
    lines.append(
        f"  eval   {', '.join(cell.eval.tasks)} ({cell.eval.limit or 'all'} documents each) at base, "
        f"{', '.join(cell.eval.stages)}; held-out perplexity on about {cell.eval.perplexity_tokens:,} tokens"
    )
    lines.append(
        f"  memory in training about {_memory(cell, plan, shape) / 1e9:.1f} GB; "
        f"disk {stored_bytes(cell) / 1e9:.2f} GB a cell"
    )
    return lines


def _listed(values: list, most: int = 6) -> str:
    if len(values) <= most:
        return ", ".join(map(str, values)) or "none"
    return ", ".join(map(str, values[:3])) + ", ..., " + ", ".join(map(str, values[-2:]))


def budgets(cell: Cell, plan: Plan, shape: dict) -> list[Budget]:
    """Per training stage: what trains and what it costs."""
    found = []
    for stage in ("cpt", "sft"):
        train: TrainConfig = getattr(cell, stage)
        tokens = _tokens(train, stage)
        if not tokens:
            continue
        everything = (train.trainable or ("all" if cell.align.make is None else "new")) == "all"
        counts = models.parameter_counts(shape, plan.layers)
        trained = counts["total"] if everything else len(plan.inserted) * counts["layer"]
        lowest = 0 if everything else min(plan.inserted)
        forward = plan.layers * counts["layer"] + shape["vocab_size"] * shape["hidden_size"]
        backward = (plan.layers - lowest) * counts["layer"] + shape["vocab_size"] * shape["hidden_size"]
        what = "everything" if everything else f"the {len(plan.inserted)} new layers only"
        found.append(Budget(stage, what, trained, tokens, 2.0 * (forward + backward + trained) * tokens))
    return found


def _tokens(train: TrainConfig, stage: str) -> int:
    """Whole blocks in pre-training, whole pairs in fine-tuning (so at least the budget there)."""
    if train.steps is not None:
        return train.steps * train.block_size * train.batch_size * train.accumulation
    tokens = train.tokens or 0
    return tokens if stage == "sft" else tokens // train.block_size * train.block_size


def _memory(cell: Cell, plan: Plan, shape: dict) -> float:
    """Bytes: float32 weights; gradients and two moments of what trains; activations and logits of one batch."""
    counts = models.parameter_counts(shape, plan.layers)
    stages = budgets(cell, plan, shape)
    trained = max((budget.trained for budget in stages), default=0)
    batch = cell.cpt.batch_size * cell.cpt.block_size
    lowest = min(plan.inserted, default=0)
    activations = batch * (plan.layers - lowest) * (12 * shape["hidden_size"] + 4 * shape["intermediate_size"])
    return 4.0 * (counts["total"] + 3 * trained + activations + 3 * batch * shape["vocab_size"])


def _cost(cells: list[Cell]) -> list[str]:
    flops = 0.0
    for cell in cells:
        shape = models.shape(cell.model)
        flops += sum(budget.flops for budget in budgets(cell, plan_of(cell, shape["num_hidden_layers"]), shape))
    lines = [
        f"training of all cells: {flops / 1e15:,.3f} PFLOP, disk up to {sum(map(stored_bytes, cells)) / 1e9:.1f} GB"
    ]
    lines += [
        f"  about {flops / rate / 3600:,.2f} hours at {rate / 1e12:g} TFLOP/s: {where}" for where, rate in RATES.items()
    ]
    return [*lines, "  evaluation, expansion and loading come on top"]
