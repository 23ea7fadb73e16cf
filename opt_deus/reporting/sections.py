"""The report's sections from computed results: words and tables, no arithmetic."""

from __future__ import annotations

import pandas as pd

from opt_deus import stats
from opt_deus.reporting import answers, studies
from opt_deus.reporting.caveats import caveats
from opt_deus.reporting.document import Bullets, Cell, Document, Figure, Section, Table
from opt_deus.reporting.results import Results
from opt_deus.reporting.runs import budgets, cell_link, completeness, count_line, environment
from opt_deus.reporting.wording import interval, number, p_value, signed

Figures = dict[str, Figure]
_TEST_HEADERS = [
    "contrast",
    "level",
    "difference",
    "95% interval",
    "n",
    "seeds",
    "p",
    "adjusted p",
    "detectable",
    "verdict",
]


def document(results: Results, figures: Figures) -> Document:
    sections = [
        Section("Read this first", [count_line(results), Bullets(caveats(results) or ["No caveat was found."])]),
        _objection_1(results, figures),
        _perplexities(results, figures),
        _scores(results),
        _curves(figures),
        *studies.sections(results.sweep, figures),
        _significance(results),
        Section("Completeness", completeness(results.sweep)),
        Section("Budgets and environment", [*budgets(results.sweep), *environment(results.sweep)]),
        _method(),
    ]
    return Document(f"Report: {results.sweep.name}", [section for section in sections if section.blocks])


def _objection_1(results: Results, figures: Figures) -> Section:
    title = "Objection 1: transport or zero-initialisation"
    blocks = [answers.QUESTION, *answers.objection_1(results)]
    table = results.table
    last = (table["task"] == "macro") & (table["split"] == "all") & (table["stage"] == results.comparison.last_stage)
    if last.any():
        stage = results.comparison.last_stage
        caption = f"Macro average ({results.metric}) after stage {stage}, differences in points"
        blocks.append(tests_table(caption, table[last & table["level"].isin(["item", "seed", "item+seed"])]))
    return Section(title, blocks + _drawn(figures, "interaction", "seeds", "forest"))


def _perplexities(results: Results, figures: Figures) -> Section:
    means = results.means
    if means.empty or not (means["task"] == "heldout").any():
        return Section("Held-out perplexity")
    rows = means[means["task"] == "heldout"]
    stages = list(dict.fromkeys(rows["stage"]))
    documents = int(rows["n"].max())
    body: list[list[Cell]] = []
    for arm, group in rows.groupby("arm", sort=False):
        by_stage = group.set_index("stage")
        body.append([str(arm), str(group["num_seeds"].max()), *(_perplexity(by_stage, stage) for stage in stages)])
    caption = (
        f"Token perplexity, mean over seeds [95% interval over {documents} documents] (standard deviation over seeds); "
        "base: the unexpanded, untrained model"
    )
    table = Table(caption, ["arm", "seeds", *stages], body)
    return Section("Held-out perplexity", [table, *_drawn(figures, "initial_perplexity")])


def _perplexity(by_stage: pd.DataFrame, stage: str) -> str:
    if stage not in by_stage.index:
        return "-"
    row = by_stage.loc[stage]
    spread = f" ({number(row['seed_sd'])})" if pd.notna(row["seed_sd"]) and stage != "base" else ""
    return f"{number(row['mean'])} {interval(row['ci_low'], row['ci_high'])}{spread}"


def _scores(results: Results) -> Section:
    """Means of arms after every stage, then the single cells with links to their records."""
    means = results.means
    if means.empty or not (means["task"] != "heldout").any():
        return Section("Scores")
    rows = means[means["task"] != "heldout"]
    tasks = sorted(set(rows["task"]) - {"macro"})
    tasks += ["macro"] if "macro" in set(rows["task"]) else []
    body: list[list[Cell]] = []
    base = rows[rows["stage"] == "base"].drop_duplicates("task")
    if len(base):
        body.append(["base", "base", "-", *(_score(base, task) for task in tasks)])
    for (arm, stage), group in rows[rows["stage"] != "base"].groupby(["arm", "stage"], sort=False):
        body.append([arm, stage, str(group["num_seeds"].max()), *(_score(group, task) for task in tasks)])
    counts = ", ".join(f"{task} n = {int(rows.loc[rows['task'] == task, 'n'].max())}" for task in tasks)
    caption = f"{results.metric} in points, mean over seeds [95% interval over documents]; {counts}"
    return Section("Scores", [Table(caption, ["arm", "stage", "seeds", *tasks], body), *_per_cell(results)])


def _score(group: pd.DataFrame, task: str) -> str:
    rows = group[group["task"] == task]
    if rows.empty:
        return "-"
    row = rows.iloc[0]
    return f"{number(row['mean'], 1)} {interval(row['ci_low'], row['ci_high'], 1)}"


def _per_cell(results: Results) -> list[Table]:
    """Every run's macro average by stage; the name leads to the record."""
    means = results.seed_means
    if means.empty:
        return []
    samples = results.sweep.samples.drop_duplicates("cell")
    cells = dict(
        zip(zip(samples["arm"].map(results.sweep.short), samples["seed"], strict=True), samples["cell"], strict=True)
    )
    wide = means.pivot(index=["arm", "seed"], columns="stage", values="mean")
    stages = [stage for stage in dict.fromkeys(means["stage"]) if stage in wide]
    body: list[list[Cell]] = []
    for key, row in wide.iterrows():
        cell = cells[key]
        body.append([cell_link(results.sweep, cell), *(number(row[stage], 1) for stage in stages)])
    macro = results.means[results.means["task"] == "macro"]
    caption = f"Macro average ({results.metric}, points) of every run; n = {int(macro['n'].max())} documents each"
    return [Table(caption, ["cell", *stages], body)]


def _curves(figures: Figures) -> Section:
    return Section("Learning curves", _drawn(figures, "learning_curves", "losses"))


def _significance(results: Results) -> Section:
    """Per task after the last stage; everything else is in significance.csv."""
    table = results.table
    last = table[
        (table["stage"] == results.comparison.last_stage) & (table["split"] == "all") & (table["task"] != "macro")
    ]
    if last.empty:
        return Section("Tests")
    aligned = last[last["factor"] == "align"]
    blocks: list = [
        "Every contrast at every stage, split and level is in significance.csv. Adjusted p: Holm over the headline "
        "contrasts, Benjamini-Hochberg over everything else, within each level and test."
    ]
    for task, rows in aligned[aligned["task"] != "heldout"].groupby("task"):
        blocks.append(tests_table(f"Task {task}, differences in points", rows, with_test=True))
    heldout = last[last["task"] == "heldout"]
    if len(heldout):
        caption = "Held-out log perplexity, differences in nats per token (below 0: the first is better)"
        blocks.append(tests_table(caption, heldout, digits=4))
    return Section("Tests", blocks)


def tests_table(caption: str, rows: pd.DataFrame, *, digits: int = 2, with_test: bool = False) -> Table:
    """Rows of significance.csv as a table for people."""
    body: list[list[Cell]] = []
    for _, row in rows.iterrows():
        cells = [
            row["contrast"],
            row["level"],
            signed(row["estimate"], digits),
            interval(row["ci_low"], row["ci_high"], digits, sign=True),
            str(int(row["n"])),
            str(int(row["num_seeds"])),
            p_value(row["p"]),
            p_value(row["p_adjusted"]),
            number(row["mde"], digits),
            row["verdict"].replace("_", " "),
        ]
        body.append([*cells[:2], row["test"], *cells[2:]] if with_test else cells)
    headers = [*_TEST_HEADERS[:2], "test", *_TEST_HEADERS[2:]] if with_test else _TEST_HEADERS
    return Table(caption, headers, body)


def _method() -> Section:
    levels = [f"Level {level}: generalises to {meaning}." for level, meaning in stats.LEVELS.items() if level != "task"]
    return Section(
        "How to read the numbers",
        [
            "Accuracy is in points. The macro average is the unweighted mean over tasks of the per-task means. Arms "
            "are compared on the same documents, joined by their hash; a difference is the first minus the second.",
            Bullets(
                [
                    *levels,
                    "Item level: interval by stratified bootstrap over documents of seed-mean differences, p by "
                    "sign-flip permutation; per task a paired t test, and the exact McNemar test of every seed.",
                    "Seed level: t on the seeds' differences; not testable below 3 seeds.",
                    "Item+seed level: crossed random effects of documents and seeds, t with Satterthwaite's degrees of "
                    "freedom. This level answers where at least 3 seeds ran.",
                    "Detectable: the smallest true difference that a two-sided 5% test finds in 80% of such grids.",
                    "Verdict: difference (adjusted p < 0.05), equivalent (two one-sided tests at the margin, p < "
                    "0.05), inconclusive, or not testable.",
                ]
            ),
        ],
    )


def _drawn(figures: Figures, *names: str) -> list[Figure]:
    return [figures[name] for name in names if name in figures]
