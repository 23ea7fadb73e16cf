"""Reports from records: tables, figures, HTML, Markdown, LaTeX. Draws, never computes statistics."""

from __future__ import annotations

from pathlib import Path

from opt_deus import stats
from opt_deus.reporting import figures, html, latex, markdown
from opt_deus.reporting.reading import read_sweep
from opt_deus.reporting.results import Results, compute
from opt_deus.reporting.sections import document, tests_table

__all__ = ["write_report"]


def write_report(sweep_folder: Path) -> None:
    """Reads cells/*/record.json and samples.parquet; writes the report and its tables beside them (contract, Files).

    Works with whatever part of a sweep is there. Raises ValueError where no cell left a record.
    """
    sweep_folder = Path(sweep_folder)
    results = compute(read_sweep(sweep_folder))
    _write_tables(results, sweep_folder)
    drawn = figures.draw(results, sweep_folder / "figures")
    report = document(results, drawn)
    _write(sweep_folder / "report.md", markdown.render(report))
    _write(sweep_folder / "report.html", html.render(report, sweep_folder / "figures"))


def _write_tables(results: Results, folder: Path) -> None:
    table = results.table
    results.sweep.samples.to_parquet(folder / "samples.parquet", index=False)
    _write(folder / "significance.csv", table[stats.COLUMNS].to_csv(index=False))
    _write(folder / "effects.csv", stats.effects(table).to_csv(index=False))
    last = table[(table["stage"] == results.comparison.last_stage) & (table["split"] == "all")] if len(table) else table
    averages = [("macro", "points", 2), ("heldout", "nats per token", 4)]
    tables = [
        tests_table(f"Differences of {task}, {unit}", last[last["task"] == task], digits=digits)
        for task, unit, digits in averages
        if (last["task"] == task).any()
    ]
    _write(folder / "significance.tex", latex.render(tables))


def _write(path: Path, text: str) -> None:
    """Whole or not at all: a reader never sees half a report."""
    aside = path.with_name(path.name + ".part")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)
