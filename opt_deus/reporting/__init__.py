"""Reports from records: tables, figures, HTML, Markdown, LaTeX. Draws, never computes statistics."""

from __future__ import annotations

from pathlib import Path

from opt_deus import stats
from opt_deus.reporting import figures, html, latex, markdown, studies
from opt_deus.reporting.lm_eval import write_lm_eval_report
from opt_deus.reporting.reading import read_sweep
from opt_deus.reporting.results import Results, compute
from opt_deus.reporting.sections import document, tests_table
from opt_deus.reporting.writing import write_text

__all__ = ["write_lm_eval_report", "write_report"]


def write_report(sweep_folder: Path) -> None:
    """Reads cells/*/record.json and samples.parquet; writes the report and its tables beside them (contract, Files).

    Works with whatever part of a sweep is there. Raises ValueError where no cell left a record.
    """
    sweep_folder = Path(sweep_folder)
    results = compute(read_sweep(sweep_folder))
    _write_tables(results, sweep_folder)
    drawn = figures.draw(results, sweep_folder / "figures")
    report = document(results, drawn)
    write_text(sweep_folder / "report.md", markdown.render(report))
    write_text(sweep_folder / "report.html", html.render(report, sweep_folder / "figures"))


def _write_tables(results: Results, folder: Path) -> None:
    table = results.table
    results.sweep.samples.to_parquet(folder / "samples.parquet", index=False)
    write_text(folder / "significance.csv", table[stats.COLUMNS].to_csv(index=False))
    write_text(folder / "effects.csv", stats.effects(table).to_csv(index=False))
    evidence = studies.summary_table(results.sweep)
    if len(evidence):
        write_text(folder / "evidence.csv", evidence.to_csv(index=False))
    last = table[(table["stage"] == results.comparison.last_stage) & (table["split"] == "all")] if len(table) else table
    averages = [("macro", "points", 2), ("heldout", "nats per token", 4)]
    tables = [
        tests_table(f"Differences of {task}, {unit}", last[last["task"] == task], digits=digits)
        for task, unit, digits in averages
        if (last["task"] == task).any()
    ]
    write_text(folder / "significance.tex", latex.render(tables))
