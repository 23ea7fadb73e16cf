"""python -m opt_deus.run: one cell, or with -m a grid and its report (contract, Commands).

All cells are composed and checked before Hydra gets anything; report and exit code come after its launcher.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import datetime
from pathlib import Path

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from opt_deus.compose import CONF, Job, compose_jobs, sweep_lines, to_cell
from opt_deus.naming import cell_folder

REPORTS = Path("multirun_reports")
SWEEP = "sweep.json"  # the cells asked for, so that the report can name what is missing


def _folder_of(*, _root_: DictConfig) -> str:
    cell = to_cell(_root_.copy(), list(_root_.hydra.overrides.task))
    return cell_folder(cell)


OmegaConf.register_new_resolver("cell_folder", _folder_of, replace=True)


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0 all well, 1 at least one cell failed, 2 bad input."""
    arguments = sys.argv[1:] if argv is None else argv
    parsed = get_args_parser().parse_args(arguments)
    if parsed.help or parsed.hydra_help or parsed.cfg or parsed.info:
        _hand_over(arguments)
        return 0
    try:
        jobs, name = _prepare(parsed)
    except ValueError as error:
        print(f"opt_deus: {error}", file=sys.stderr)
        return 2
    if jobs[0].cell.dry_run:
        from opt_deus.dry_run import describe

        print(describe(jobs, parsed.multirun))
        return 0
    return _launch(parsed, jobs, name)


def _prepare(parsed) -> tuple[list[Job], str]:
    """The checked cells, and the sweep's name."""
    from opt_deus.preflight import check_jobs

    if parsed.config_name or parsed.config_path:
        raise ValueError("--config-name, --config-path: not taken here; use --config-dir=DIR for groups of your own.")
    if parsed.config_dir and not Path(parsed.config_dir).is_dir():
        raise ValueError(f"--config-dir={parsed.config_dir}: no such folder; give one that holds align/, model/, ...")
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    jobs = compose_jobs(parsed.overrides, parsed.multirun, stamp, parsed.config_dir)
    if jobs[0].cell.offline:  # before anything imports huggingface_hub, which reads it once
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    check_jobs(jobs, REPORTS)
    return jobs, jobs[0].cell.name


def _launch(parsed, jobs: list[Job], name: str) -> int:
    from opt_deus.reporting import write_report

    sweep = REPORTS / name
    _write_sweep(sweep, jobs)
    flags = [f"--config-dir={parsed.config_dir}"] if parsed.config_dir else []
    broken = 0
    try:
        _run_all(parsed, name, flags)
    except SystemExit as stop:
        broken = 1
        if isinstance(stop.code, str):  # fail_fast
            print(stop.code, file=sys.stderr)
    except KeyboardInterrupt:
        print("opt_deus: interrupted; the same command resumes", file=sys.stderr)
        return 130
    _hide_machine_paths(sweep)
    try:
        write_report(sweep)
    except ValueError as error:
        print(f"opt_deus: no report: {error}", file=sys.stderr)
    return max(_summary(sweep, jobs), broken)


def _hide_machine_paths(sweep: Path) -> None:
    """Hydra notes absolute folders; a report that is passed on holds none."""
    for path in [*sweep.glob("cells/*/.hydra/*.yaml"), *sweep.glob("multirun.yaml")]:
        path.write_text(path.read_text().replace(str(CONF), "conf").replace(str(Path.cwd()), "."))


def _run_all(parsed, name: str, flags: list[str]) -> None:
    """One sweep of Hydra's for each grid; cells that two grids share are found in the store the second time."""
    overrides = [each for each in parsed.overrides if not each.startswith("name=")]
    if not parsed.multirun:
        _hand_over([*flags, *overrides, f"name={name}"])
        return
    for line in sweep_lines(overrides, parsed.config_dir):
        _hand_over(["-m", *flags, *line, "hydra.sweeper.params=null", f"name={name}"])


def _hand_over(arguments: list[str]) -> None:
    """Runs Hydra on a command line, as if it had been typed."""
    previous, sys.argv = sys.argv, [sys.argv[0], *arguments]
    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(run_job)()
    finally:
        sys.argv = previous


def run_job(config: DictConfig) -> None:
    """One job of Hydra's launcher: the cell, its record, a status line. Never raises for a cell's own failure."""
    from opt_deus.pipeline import run_cell, skip_cell

    context = HydraConfig.get()
    cell = to_cell(config, list(context.overrides.task))
    folder = Path(context.runtime.output_dir)
    asked = _read_sweep(REPORTS / cell.name)
    reason = asked["skipped"].get(folder.name)
    record = skip_cell(cell, folder, reason) if reason else run_cell(cell, folder)
    _print_status(folder, record, asked)
    if record["status"] == "failed" and cell.fail_fast:
        raise SystemExit(f"opt_deus: {folder.name} failed and fail_fast=true: {record['reason']}")


def _write_sweep(sweep: Path, jobs: list[Job]) -> None:
    sweep.mkdir(parents=True, exist_ok=True)
    content = {
        "name": sweep.name,
        "started": time.time(),
        "cells": [job.folder for job in jobs],
        "skipped": {job.folder: job.skipped for job in jobs if job.skipped},
    }
    (sweep / SWEEP).write_text(json.dumps(content, indent=1))


def _read_sweep(sweep: Path) -> dict:
    return json.loads((sweep / SWEEP).read_text())


def _print_status(folder: Path, record: dict, asked: dict) -> None:
    """ "[5/12] ok avg-zero-top-seed1, 96 s; 0 failed; about 11 min left"."""
    from opt_deus.pipeline import read_record

    records = [read_record(folder.parent / cell) for cell in asked["cells"]]
    started = [each for each in records if each and _since(each) >= asked["started"] - 1]
    failed = sum(each["status"] == "failed" for each in started)
    left = len(asked["cells"]) - len(started)
    minutes = (time.time() - asked["started"]) / max(1, len(started)) * left / 60
    line = f"[{len(started)}/{len(asked['cells'])}] {record['status']} {folder.name}"
    if record["status"] == "ok":
        line += (
            f", {record['provenance']['seconds']:.0f} s ({len(record['artefacts']['reused'])} stages from the store)"
        )
    elif record["reason"]:
        line += f": {record['reason'].splitlines()[0]}"
    print(f"{line}; {failed} failed; about {minutes:.0f} min left" if left else f"{line}; {failed} failed", flush=True)


def _since(record: dict) -> float:
    return datetime.fromisoformat(record["provenance"]["started"]).timestamp()


def _summary(sweep: Path, jobs: list[Job]) -> int:
    """The end table: what failed and where its traceback is. Returns the exit code."""
    from opt_deus.pipeline import read_record

    started = _read_sweep(sweep)["started"] - 1
    records = {job.folder: read_record(sweep / "cells" / job.folder) for job in jobs}
    records = {folder: each if each and _since(each) >= started else None for folder, each in records.items()}
    bad = {folder: record for folder, record in records.items() if record is None or record["status"] == "failed"}
    counts = {
        status: sum(bool(each) and each["status"] == status for each in records.values())
        for status in ("ok", "skipped")
    }
    print(f"{counts['ok']} ok, {counts['skipped']} skipped, {len(bad)} failed; report: {sweep / 'report.md'}")
    for folder, record in bad.items():
        reason = record["reason"].splitlines()[0] if record else "left no record"
        print(f"  failed {folder}: {reason}\n    traceback: {sweep / 'cells' / folder / 'record.json'}")
    return 1 if bad else 0


if __name__ == "__main__":
    from opt_deus.run import main as entry  # by its real name, so that launchers can pickle the job

    sys.exit(entry())
