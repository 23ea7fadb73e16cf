"""What ran: completeness, budgets, environment and reused stages, from records alone."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from opt_deus.reporting.document import Block, Cell, Link, Table
from opt_deus.reporting.reading import Sweep
from opt_deus.reporting.results import Results
from opt_deus.reporting.wording import counted, number, without_paths

_LONGEST = 200


def count_line(results: Results) -> str:
    sweep = results.sweep
    counts = [f"{len(sweep.with_status(status))} {status}" for status in ("ok", "failed", "skipped")]
    asked = len(sweep.records) + len(sweep.missing)
    line = f"{counted(asked, 'cell')} asked for: {', '.join(counts)}, {len(sweep.missing)} without a record."
    shared = sweep.shared_suffix.removeprefix("-")
    return f"{line} All names here leave out what every cell shares: {shared}." if shared else line


def cell_link(sweep: Sweep, cell: str) -> Link:
    """A cell's short name, leading to its record."""
    return Link(sweep.short(cell), f"cells/{cell}/record.json")


def completeness(sweep: Sweep) -> list[Block]:
    body: list[list[Cell]] = []
    for cell, record in sweep.records.items():
        seconds = (record.get("provenance") or {}).get("seconds")
        reused = (record.get("artefacts") or {}).get("reused") or []
        body.append(
            [cell_link(sweep, cell), record["status"], _reason(record), number(seconds, 0), ", ".join(reused) or "-"]
        )
    body += [
        [sweep.short(cell), "no record", "it never ran, or its record cannot be read", "-", "-"]
        for cell in sweep.missing
    ]
    headers = ["cell", "status", "reason", "seconds", "stages reused from the store"]
    return [Table("All cells; each name leads to its record", headers, body)]


def _reason(record: dict[str, Any]) -> str:
    error = record.get("error") or {}
    text = record.get("reason") or (f"{error.get('type')}: {error.get('message')}" if error else "-")
    text = without_paths(" ".join(str(text).split()))
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def budgets(sweep: Sweep) -> list[Block]:
    body: list[list[Cell]] = []
    for cell, record in sweep.with_status("ok").items():
        parameters = record.get("parameters") or {}
        stages = [record.get(stage) or {} for stage in ("cpt", "sft")]
        expand = record.get("expand") or {}
        body.append(
            [
                cell_link(sweep, cell),
                number(parameters.get("total"), 0),
                number(parameters.get("trainable"), 0),
                number(expand.get("seconds"), 1),
                *(
                    number(stage.get(key), digits)
                    for stage in stages
                    for key, digits in (("tokens", 0), ("steps", 0), ("tokens_per_second", 0), ("final_loss", 3))
                ),
            ]
        )
    headers = ["cell", "parameters", "trained", "expand s"]
    headers += [f"{stage} {what}" for stage in ("cpt", "sft") for what in ("tokens", "steps", "tokens/s", "final loss")]
    return [Table("Budgets of the finished cells", headers, body)] if body else []


def environment(sweep: Sweep) -> list[Block]:
    """One row per distinct value of each provenance entry."""
    values: dict[tuple[str, str], int] = defaultdict(int)
    finished = sweep.with_status("ok") or sweep.records
    for record in finished.values():
        for key, value in (record.get("provenance") or {}).items():
            if key not in ("started", "seconds"):
                text = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
                values[key, without_paths(text)] += 1
    body: list[list[Cell]] = [[key, text, str(count)] for (key, text), count in sorted(values.items())]
    return [Table("Environment, with the number of cells", ["what", "value", "cells"], body)] if body else []
