"""The report's sections on evidence: what each study found for every arm, and arms compared item by item."""

from __future__ import annotations

from typing import Any

import pandas as pd

from opt_deus import stats
from opt_deus.reporting.document import Cell, Figure, Section, Table
from opt_deus.reporting.reading import Sweep
from opt_deus.reporting.wording import interval, number, p_value, signed

SUMMARY = ["study", "arm", "seed", "quantity", "site", "gap", "estimate", "low", "high", "n", "items"]
_MOST_COLUMNS = 8  # of arms side by side on a page


def summary_table(sweep: Sweep) -> pd.DataFrame:
    """Every cell's findings, one row each (evidence.csv)."""
    rows: list[dict[str, Any]] = []
    for record in sweep.with_status("ok").values():
        for study, summary in (record.get("evidence") or {}).items():
            cell = {"study": study, "arm": sweep.short(record["cell"]["arm"]), "seed": record["cell"]["seed"]}
            rows += [cell | finding for finding in summary]
    return pd.DataFrame(rows, columns=SUMMARY)


def sections(sweep: Sweep, figures: dict[str, Figure]) -> list[Section]:
    """One section per study, in the order of the cells."""
    table, found_sections = summary_table(sweep), []
    for study, found in table.groupby("study", sort=False):
        drawn = [figures[f"evidence_{study}"]] if f"evidence_{study}" in figures else []
        compared = _comparisons(sweep, study, list(found["arm"].unique()))
        found_sections.append(Section(f"Evidence: {study}", [*drawn, *_findings(found), *compared]))
    return found_sections


def _findings(found: pd.DataFrame) -> list[Table]:
    """Estimates over all gaps, a column per arm (the first seed's)."""
    whole = found[found["gap"].isna()]
    whole = whole if len(whole) else found
    arms = list(whole["arm"].unique())
    tables = []
    for start in range(0, len(arms), _MOST_COLUMNS):
        shown = arms[start : start + _MOST_COLUMNS]
        body: list[list[Cell]] = []
        for (site, quantity, gap), rows in whole.groupby(["site", "quantity", "gap"], sort=False, dropna=False):
            by_arm = rows.drop_duplicates("arm").set_index("arm")
            gap_text = "all" if pd.isna(gap) else str(int(gap))
            body.append([str(site), str(quantity), gap_text, *(_cell(by_arm, arm) for arm in shown), _counts(rows)])
        tables.append(Table("Estimate [95% interval]", ["site", "quantity", "gap", *shown, "n"], body))
    return tables


def _counts(rows: pd.DataFrame) -> str:
    counts = sorted({f"{int(n)} {items}" for n, items in zip(rows["n"], rows["items"], strict=True)})
    return ", ".join(counts)


def _cell(by_arm: pd.DataFrame, arm: str) -> str:
    if arm not in by_arm.index:
        return "-"
    row = by_arm.loc[arm]
    digits = _digits(row["estimate"])
    between = f" {interval(row['low'], row['high'], digits)}" if pd.notna(row["low"]) else ""
    return f"{number(row['estimate'], digits)}{between}"


def _digits(value: float) -> int:
    return 1 if abs(value) >= 100 else 2 if abs(value) >= 10 else 3 if abs(value) >= 1 else 4


def _comparisons(sweep: Sweep, study: str, arms: list[str]) -> list[Table]:
    rows = sweep.evidence
    if len(rows):
        rows = rows[rows["study"] == study].assign(arm=lambda table: table["arm"].map(sweep.short))
    contrasts = stats.study_contrasts(rows, stats.against_controls(arms))
    body: list[list[Cell]] = [
        [
            row["site"],
            row["quantity"],
            row["contrast"],
            signed(row["estimate"], 4),
            interval(row["ci_low"], row["ci_high"], 4, sign=True),
            str(int(row["n"])),
            p_value(row["p"]),
        ]
        for _, row in contrasts.iterrows()
    ]
    headers = ["site", "quantity", "contrast", "difference", "95% interval", "n items", "p"]
    caption = "Paired by item, mean over gaps and seeds; p of a paired t test, not corrected for their number"
    return [Table(caption, headers, body)] if body else []
