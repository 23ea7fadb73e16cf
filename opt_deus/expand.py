"""python -m opt_deus.expand model=... align=... position=... out=DIR: one deeper checkpoint, nothing else.

save_plans=DIR: the transport plans of every pair of layers as well, or (without out=) alone.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from opt_deus.compose import compose_jobs
from opt_deus.config import Cell

USAGE = "python -m opt_deus.expand [group=choice] [key=value] out=DIR [save_plans=DIR]"
TARGETS = ("out", "save_plans")


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0 written, 1 failed, 2 bad input."""
    arguments = sys.argv[1:] if argv is None else argv
    overrides = [each for each in arguments if each.partition("=")[0] not in TARGETS]
    try:
        targets = _targets(arguments)
        cell = compose_jobs(overrides, False, "expand")[0].cell
        _check(cell, targets)
    except ValueError as error:
        print(f"opt_deus: {error}", file=sys.stderr)
        return 2
    if cell.dry_run:
        from opt_deus.dry_run import describe

        print(describe(compose_jobs(overrides, False, "expand"), False))
        return 0
    return _write(cell, targets)


def _targets(arguments: list[str]) -> dict[str, Path]:
    """The folders to write, by key."""
    found: dict[str, Path] = {}
    for key, value in (each.split("=", 1) for each in arguments if each.partition("=")[0] in TARGETS and "=" in each):
        if not value or key in found:
            raise ValueError(f"{key}={value}: give one folder, e.g. {key}=deeper. Usage: {USAGE}")
        found[key] = Path(value)
    if not found:
        raise ValueError(f"out: give one folder for the checkpoint, e.g. out=deeper. Usage: {USAGE}")
    return found


def _check(cell: Cell, targets: dict[str, Path]) -> None:
    from opt_deus import data, models
    from opt_deus.placing import plan_of
    from opt_deus.preflight import check_plan, check_writable
    from opt_deus.store import Store

    check_plan(cell)
    if cell.rounds > 1:
        raise ValueError(f"rounds={cell.rounds}: expand trains nothing; use opt_deus.run to grow in rounds.")
    if len({folder.absolute() for folder in targets.values()}) < len(targets):
        raise ValueError(f"save_plans={targets['save_plans']}: the same folder as out; give each its own.")
    if "save_plans" in targets and not cell.align.aligns:
        raise ValueError(f"save_plans={targets['save_plans']}: align={cell.align.name} aligns nothing; try align=ot.")
    if cell.dry_run:
        return
    reads_text = cell.align.calibrated or cell.reference is not None
    models.check(cell.model, cell.offline, Store(models.cache_root()), tokenizer=reads_text)
    if reads_text:
        data.check(cell.data, cell.offline)
    shape = models.shape(cell.model)
    layers = plan_of(cell, shape["num_hidden_layers"]).layers
    size = 2 * models.parameter_counts(shape, layers)["total"]  # bytes: bfloat16 at least
    for key, folder in targets.items():
        models.check_target(folder, size if key == "out" else 0, key)
    check_writable("store.root", Path(cell.store.root))


def _write(cell: Cell, targets: dict[str, Path]) -> int:
    if cell.offline:
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    from opt_deus.pipeline import export_cell, export_plans

    try:
        for key, export in (("save_plans", export_plans), ("out", export_cell)):
            if key in targets:
                export(cell, targets[key])
                print(f"written: {targets[key]}")
    except (ValueError, RuntimeError, OSError) as error:
        print(f"opt_deus: align={cell.align.name}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
