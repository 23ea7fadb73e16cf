"""All pairs of published runs: the rows of significance.csv that aggregates allow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from opt_deus.stats.aggregates import (
    Count,
    heterogeneity,
    macro_unpaired,
    most_discordant,
    over_tasks,
    unpaired,
)
from opt_deus.stats.estimates import Estimate
from opt_deus.stats.rows import EXPLORATORY, MACRO, MARGIN, described, finished

Counts = Mapping[str, Count]
EXTRA = ["group", "step", "first", "second", "max_discordant"]


def published_table(pairs: list[dict[str, Any]], metric: str, margin: float = MARGIN) -> pd.DataFrame:
    """pairs: dicts with group, step, first, second (methods), and counts and subtasks, each of both methods.

    Only tasks that both report. Columns of significance.csv, then group, step, first, second and max_discordant (the
    largest number of discordant documents at which a paired test could still be significant).
    """
    records = []
    for pair in pairs:
        contrast = f"{pair['first']} - {pair['second']} | group={pair['group']}, step={pair['step']}"
        shared = {"family": EXPLORATORY, "contrast": contrast, "split": "all", "metric": metric}
        shared |= {key: pair[key] for key in EXTRA[:4]}
        for task, estimate, discordant in pair_estimates(*pair["counts"], *pair["subtasks"]):
            records.append({**shared, "task": task, "max_discordant": discordant, **described(estimate, margin)})
    return finished(records, EXTRA)


def pair_estimates(
    first: Counts, second: Counts, first_subtasks: Mapping[str, Counts], second_subtasks: Mapping[str, Counts]
) -> list[tuple[str, Estimate, int | None]]:
    """(task, estimate, most discordant) for one pair: every task, the macro average, leave-one-out, levels of tasks."""
    tasks = [task for task in first if task in second and first[task].n == second[task].n]
    first, second = ({task: counts[task] for task in tasks} for counts in (first, second))
    found = [(task, unpaired(first[task], second[task]), most_discordant(first[task], second[task])) for task in tasks]
    if len(tasks) > 1:
        found.append((MACRO, macro_unpaired(first, second), None))
        differences = [100 * (first[task].rate - second[task].rate) for task in tasks]
        found += [(MACRO, estimate, None) for estimate in over_tasks(differences)]
    for task in tasks if len(tasks) > 2 else []:
        rest = [{name: count for name, count in counts.items() if name != task} for counts in (first, second)]
        found.append((f"{MACRO} without {task}", macro_unpaired(*rest), None))
    for group in [group for group in first_subtasks if group in second_subtasks]:
        found += _subtasks(group, first_subtasks[group], second_subtasks[group])
    return found


def _subtasks(group: str, first: Counts, second: Counts) -> list[tuple[str, Estimate, None]]:
    """Unweighted over a group's subtasks, and whether they disagree more than chance allows (Cochran's Q)."""
    subtasks = [subtask for subtask in first if subtask in second]
    if len(subtasks) < 2:
        return []
    pairs = [unpaired(first[subtask], second[subtask]) for subtask in subtasks]
    differences = [pair.estimate for pair in pairs]
    found = [(f"{group} subtasks", estimate, None) for estimate in over_tasks(differences)]
    spread = [(pair.estimate, pair.se) for pair in pairs if pair.se > 0]
    q, p = heterogeneity(*zip(*spread, strict=True))
    mean = sum(differences) / len(differences)
    return [*found, (f"{group} subtasks", Estimate("task", "Cochran Q", len(spread), mean, statistic=q, p=p), None)]
