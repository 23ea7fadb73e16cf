"""The report on published lm-eval result files: aggregates only, so every comparison is an unpaired one."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from opt_deus import stats
from opt_deus.reporting import html, latex, markdown
from opt_deus.reporting.document import Bullets, Cell, Document, Section, Table
from opt_deus.reporting.published import METRIC, Published, read_published
from opt_deus.reporting.sections import tests_table
from opt_deus.reporting.wording import listed, number
from opt_deus.reporting.writing import write_text
from opt_deus.stats.aggregates import macro_average, macro_se, wins
from opt_deus.stats.published import published_table

MAIN_TESTS = ["unpaired z", "paired t"]


def write_lm_eval_report(pattern: str, out: Path, mapping: Mapping[str, list] | None = None) -> None:
    """Reads the files that fit a pattern; writes report.md, report.html, significance.csv and .tex into `out`."""
    runs = read_published(pattern, mapping)
    table = published_table(_pairs(runs), METRIC)
    report = _document(runs, table)
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "significance.csv", table[stats.COLUMNS].to_csv(index=False))
    write_text(out / "significance.tex", latex.render([_macro_table(rows, group) for group, rows in _grouped(table)]))
    write_text(out / "report.md", markdown.render(report))
    write_text(out / "report.html", html.render(report, out))


def _pairs(runs: list[Published]) -> list[dict]:
    """All pairs within a group and step; methods in the order of their averages, the better one first."""
    groups: dict[tuple[str, int], list[Published]] = defaultdict(list)
    for run in runs:
        groups[run.group, run.step].append(run)
    pairs = []
    for (group, step), members in groups.items():
        members.sort(key=lambda run: (-macro_average(run.counts), run.method))
        pairs += [
            {
                "group": group,
                "step": step,
                "first": first.method,
                "second": second.method,
                "counts": (first.counts, second.counts),
                "subtasks": (first.subtasks, second.subtasks),
                "perplexities": (first.word_perplexity, second.word_perplexity),
            }
            for first, second in itertools.combinations(members, 2)
        ]
    return pairs


def _document(runs: list[Published], table: pd.DataFrame) -> Document:
    sections = [Section("Read this first", [Bullets(_caveats(runs))])]
    for group, members in itertools.groupby(sorted(runs, key=lambda run: (run.group, run.step)), lambda run: run.group):
        members = sorted(members, key=lambda run: -macro_average(run.counts))
        blocks = [_scores(members), _wins(members)]
        rows = table[table["group"] == group]
        if len(rows):
            blocks.append(_macro_table(rows, group))
            blocks.append(_task_table(rows, group))
        sections.append(Section(group, blocks))
    sections.append(Section("How to read the numbers", [Bullets(_method())]))
    return Document("Report on published results", sections)


def _caveats(runs: list[Published]) -> list[str]:
    """One run of each method, no answers per document, and whatever differs between the runs of one group."""
    found = [
        "The files hold aggregates only: two models are compared as if they had answered different documents. A paired "
        "test on the unpublished answers could see smaller differences; the column 'most discordant' says when.",
        "One run of each method: nothing here speaks about other seeds.",
    ]
    for group, members in itertools.groupby(sorted(runs, key=lambda run: run.group), lambda run: run.group):
        members = list(members)
        for key in members[0].environment:
            values = sorted({run.environment.get(key, "") for run in members})
            if len(values) > 1:
                shown = "; ".join(
                    f"{_short(value)} ({listed([run.method for run in members if run.environment.get(key) == value])})"
                    for value in values
                )
                found.append(f"{group}: the runs differ in {key}: {shown}.")
    return found


def _scores(runs: list[Published]) -> Table:
    tasks = list(dict.fromkeys(task for run in runs for task in run.counts))
    body: list[list[Cell]] = []
    for run in runs:
        cells = [
            f"{run.counts[task].right} = {number(100 * run.counts[task].rate)}" if task in run.counts else "-"
            for task in tasks
        ]
        average = f"{number(macro_average(run.counts))} ({number(macro_se(run.counts))})"
        body.append([run.method, str(run.step), *cells, average, number(run.word_perplexity)])
    sizes = ", ".join(f"{task} n = {max(run.counts[task].n for run in runs if task in run.counts)}" for task in tasks)
    caption = f"Right answers and {METRIC} in points; the average with its standard error; {sizes}"
    return Table(caption, ["method", "step", *tasks, "average", "word perplexity"], body)


def _wins(runs: list[Published]) -> Table:
    body: list[list[Cell]] = []
    for first, second in itertools.permutations(runs, 2):
        if first.step != second.step or set(first.counts) != set(second.counts):
            continue
        known = first.word_perplexity is not None and second.word_perplexity is not None
        perplexities = (first.word_perplexity, second.word_perplexity) if known else None
        body.append([first.method, second.method, *map(str, wins(first.counts, second.counts, perplexities))])
    return Table(
        "Benchmarks won, tied and lost (perplexity included)", ["method", "against", "won", "tied", "lost"], body
    )


def _macro_table(rows: pd.DataFrame, group: str) -> Table:
    chosen = rows[(rows["task"] == "macro") & rows["test"].isin(MAIN_TESTS)]
    return _table(f"{group}: differences of the average, points", chosen)


def _task_table(rows: pd.DataFrame, group: str) -> Table:
    chosen = rows[(rows["test"] == MAIN_TESTS[0]) & (rows["task"] != "macro") & ~rows["task"].str.startswith("macro ")]
    return _table(f"{group}: differences per task, points", chosen, "task", "max_discordant")


def _table(caption: str, rows: pd.DataFrame, *more: str) -> Table:
    """The usual columns; no seeds, but the task and the most discordant documents where asked for."""
    table = tests_table(caption, rows.assign(num_seeds=1, contrast=rows["first"] + " - " + rows["second"]))
    seeds = table.headers.index("seeds")
    headers = [header for place, header in enumerate(table.headers) if place != seeds]
    body = [[cell for place, cell in enumerate(row) if place != seeds] for row in table.rows]
    for column in more:
        headers.append(column.replace("max_discordant", "most discordant"))
        texts = ["-" if pd.isna(value) else str(value if column == "task" else int(value)) for value in rows[column]]
        body = [[*row, text] for row, text in zip(body, texts, strict=True)]
    return Table(caption, headers, body)


def _grouped(table: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    return list(table.groupby("group")) if len(table) else []


def _short(value: str) -> str:
    return value if len(value) < 60 else value[:57] + "..."


def _method() -> list[str]:
    return [
        "Level item: new questions. Unpaired z: squared standard errors of both models added; for the average those "
        "of its tasks propagated, with a group's published pooled error for its subtasks.",
        "Level task: new benchmarks, from the differences of tasks alone. With 7 tasks the smallest exact p is 1/64.",
        "Most discordant: the largest number of documents that exactly one of the two got right, at which an exact "
        "paired test would still have p < 0.05; '-': no paired test on these counts can be significant.",
        "Adjusted p: Benjamini-Hochberg over all rows of one level and test. significance.csv also has Wilcoxon, sign "
        "and sign-flip tests, leave-one-task-out and the subtasks with Cochran's Q.",
    ]
