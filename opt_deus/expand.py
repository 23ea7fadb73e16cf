"""python -m opt_deus.expand model=... align=... position=... out=DIR: one deeper checkpoint, nothing else."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from opt_deus.compose import compose_jobs
from opt_deus.config import Cell

USAGE = "python -m opt_deus.expand [group=choice] [key=value] out=DIR"


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0 written, 1 failed, 2 bad input."""
    arguments = sys.argv[1:] if argv is None else argv
    overrides = [each for each in arguments if not each.startswith("out=")]
    targets = [each.removeprefix("out=") for each in arguments if each.startswith("out=")]
    try:
        if len(targets) != 1 or not targets[0]:
            raise ValueError(f"out: give one folder for the checkpoint, e.g. out=deeper. Usage: {USAGE}")
        cell = compose_jobs(overrides, False, "expand")[0].cell
        out = Path(targets[0])
        _check(cell, out)
    except ValueError as error:
        print(f"opt_deus: {error}", file=sys.stderr)
        return 2
    if cell.dry_run:
        from opt_deus.dry_run import describe

        print(describe(compose_jobs(overrides, False, "expand"), False))
        return 0
    return _write(cell, out)


def _check(cell: Cell, out: Path) -> None:
    from opt_deus import models
    from opt_deus.placing import plan_of
    from opt_deus.preflight import check_plan, check_writable
    from opt_deus.store import Store

    check_plan(cell)
    if cell.dry_run:
        return
    models.check(cell.model, cell.offline, Store(models.cache_root()), tokenizer=False)
    shape = models.shape(cell.model)
    layers = plan_of(cell, shape["num_hidden_layers"]).layers
    models.check_target(out, 2 * models.parameter_counts(shape, layers)["total"])  # bytes: bfloat16 at least
    check_writable("store.root", Path(cell.store.root))


def _write(cell: Cell, out: Path) -> int:
    if cell.offline:
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    from opt_deus.pipeline import export_cell

    try:
        export_cell(cell, out)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"opt_deus: align={cell.align.name}: {error}", file=sys.stderr)
        return 1
    print(f"written: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
