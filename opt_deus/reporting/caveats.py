"""What a reader must know before any number: from records alone, named at the top of the report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from opt_deus.reporting.results import Results
from opt_deus.reporting.wording import counted, listed, without_paths

FEW_SEEDS = 5
_SHOWN = 4  # cells named per caveat
# Provenance that must agree between cells that are compared.
ENVIRONMENT = ("git", "versions", "platform", "device", "threads", "dtype", "base_fingerprint", "data_fingerprint")


def caveats(results: Results) -> list[str]:
    finished = {results.sweep.short(cell): record for cell, record in results.sweep.with_status("ok").items()}
    found = _models(results.sweep.records) + _incomplete(results) + _seeds(results)
    found += _mixed(finished) + _budgets(finished)
    if results.sweep.without_samples:
        found.append(
            f"Finished cells without samples.parquet, left out of all tests: {_named(results.sweep.without_samples)}."
        )
    found += [f"Not compared: {without_paths(reason)}" for reason in results.comparison.refused]
    return found


def _models(records: dict[str, dict]) -> list[str]:
    said: dict[str, str] = {}
    for record in records.values():
        model = (record.get("config") or {}).get("model") or {}
        if model.get("caveat"):
            said[f"Base model {model.get('name')}"] = str(model["caveat"])
        if caveat := (record.get("provenance") or {}).get("data_caveat"):
            said["Data"] = str(caveat)
    return [f"{what}: {without_paths(caveat)}" for what, caveat in said.items()]


def _incomplete(results: Results) -> list[str]:
    sweep, found = results.sweep, []
    for status, what in (("failed", "failed"), ("skipped", "skipped as meaningless")):
        cells = sweep.with_status(status)
        if cells:
            names = _named([sweep.short(cell) for cell in cells])
            found.append(f"{counted(len(cells), 'cell')} {what}: {names}. Reasons are in Completeness.")
    if sweep.missing:
        found.append(f"{counted(len(sweep.missing), 'cell')} asked for left no record: {_named(sweep.missing)}.")
    return found


def _seeds(results: Results) -> list[str]:
    seeds = results.means["num_seeds"].max() if len(results.means) else 0
    if not seeds or seeds >= FEW_SEEDS:
        return []
    if seeds < 3:
        return [f"Only {counted(int(seeds), 'seed')}: nothing here generalises to new runs (needs at least 3)."]
    return [f"Few seeds ({int(seeds)}): the spread between runs is known only roughly, and intervals are wide for it."]


def _mixed(finished: dict[str, dict]) -> list[str]:
    found = []
    for key in ENVIRONMENT:
        values = _groups(finished, lambda record, key=key: (record.get("provenance") or {}).get(key))
        if len(values) > 1:
            detail = "; ".join(f"{_short(value)} ({counted(len(cells), 'cell')})" for value, cells in values.items())
            found.append(f"Mixed environments: cells differ in {key}: {without_paths(detail)}.")
    dirty = [cell for cell, record in finished.items() if str(record["provenance"].get("git") or "").endswith("+")]
    if dirty:
        found.append(f"{counted(len(dirty), 'cell')} ran with uncommitted changes of the code.")
    metrics = _groups(finished, lambda record: ((record.get("config") or {}).get("eval") or {}).get("metric"))
    if len(metrics) > 1:
        found.append(f"Cells name different metrics for the average: {listed([_short(value) for value in metrics])}.")
    return found


def _budgets(finished: dict[str, dict]) -> list[str]:
    """Arms are compared within a seed, and a budget may end at another example for another seed."""
    found = []
    for stage in ("cpt", "sft"):
        for seed, cells in _groups(finished, lambda record: record["cell"]["seed"]).items():
            same_seed = {cell: finished[cell] for cell in cells}
            values = _groups(same_seed, lambda record, stage=stage: (record.get(stage) or {}).get("tokens"))
            if len(values) > 1:
                detail = "; ".join(f"{value or 0} tokens: {_named(cells)}" for value, cells in values.items())
                found.append(f"Unequal budgets in {stage}, seed {seed}: {detail}.")
    trainable = _groups(finished, lambda record: (record.get("parameters") or {}).get("trainable"))
    if len(trainable) > 1:
        detail = "; ".join(f"{value}: {_named(cells)}" for value, cells in trainable.items())
        found.append(f"Unequal numbers of trained parameters: {detail}.")
    return found


def _groups(records: dict[str, dict], value_of: Callable[[dict], Any]) -> dict[str, list[str]]:
    """Value as text -> cells that have it."""
    groups: dict[str, list[str]] = defaultdict(list)
    for cell, record in records.items():
        value = value_of(record)
        groups["" if value is None else str(value)].append(cell)
    return dict(groups)


def _named(cells: list[str]) -> str:
    more = len(cells) - _SHOWN
    return ", ".join(cells[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _short(value: str) -> str:
    return (value or "not recorded") if len(value) < 60 else value[:57] + "..."
