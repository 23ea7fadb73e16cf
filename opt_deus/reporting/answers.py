"""The answer to objection 1 in plain sentences, from the rows of significance.csv."""

from __future__ import annotations

import pandas as pd

from opt_deus import stats
from opt_deus.reporting.results import Results, primary_rows
from opt_deus.reporting.wording import counted, interval, listed, number, p_value, signed

# Differences of averages that the paper claims and the referee doubts, in points: smallest and largest.
DISPUTED = (0.10, 0.51)
QUESTION = (
    "The method was zero-initialised and its control was not. With zero-initialisation held fixed, does "
    "aligning the parents by optimal transport before averaging change anything?"
)


def objection_1(results: Results) -> list[str]:
    """Sentences, the answer first."""
    table = results.table
    headline = table[table["family"] == "headline"]
    if headline.empty and table["contrast"].str.startswith("ot - avg").any():
        return ["No benchmark was scored for ot and avg: only held-out perplexity compares them (Tests)."]
    if headline.empty:
        return [
            "This sweep holds no finished pair of ot and avg that differ in nothing else: it cannot answer objection 1."
        ]
    headline = primary_rows(headline)
    simple, interactions = headline[headline["kind"] == "simple"], headline[headline["kind"] == "interaction"]
    sentences = [_simple(row) for _, row in simple.iterrows()]
    sentences += [_interaction(row) for _, row in interactions.iterrows()]
    return [*sentences, _resolution(simple), *_initial(results)]


def _simple(row: pd.Series) -> str:
    condition = row["contrast"].partition(" | ")[2]
    return f"With {condition} held fixed, ot minus avg is {_difference(row)}: {_finding(row)} {_sizes(row)}"


def _difference(row: pd.Series) -> str:
    """Estimate and interval; without any spread there is no interval to give."""
    if pd.isna(row["ci_low"]):
        return f"{signed(row['estimate'])} points (no spread, so no interval)"
    return f"{signed(row['estimate'])} points {interval(row['ci_low'], row['ci_high'], sign=True)}"


def _interaction(row: pd.Series) -> str:
    return (
        f"The difference of these two differences (the interaction of alignment and zero-initialisation) is "
        f"{_difference(row)}: {_finding(row)} {_sizes(row)}"
    )


def _finding(row: pd.Series) -> str:
    margin = f"{number(row['equivalence_margin'], 1)} points"
    adjusted = f"adjusted p {p_value(row['p_adjusted'])}"
    return {
        "difference": f"an effect ({adjusted}).",
        "equivalent": f"equivalent within {margin} (two one-sided tests, p {p_value(row['p_equivalence'])}).",
        "inconclusive": f"no effect shown ({adjusted}).",
        "not_testable": "not testable with this few runs.",
    }[row["verdict"]]


def _sizes(row: pd.Series) -> str:
    size = f"n = {counted(int(row['n']), 'document')}, {counted(int(row['num_seeds']), 'seed')}"
    return f"({size}; level {row['level']}: holds for {stats.LEVELS[row['level']]}.)"


def _resolution(simple: pd.DataFrame) -> str:
    """What the grid could have seen, against what is disputed."""
    seen = simple["mde"].dropna()
    low, high = DISPUTED
    if seen.empty:
        return "What this grid could have seen cannot be said."
    coarsest = seen.max()
    verdict = "too coarse for any of them" if coarsest > high else "fine enough for the largest of them"
    if coarsest <= low:
        verdict = "fine enough for all of them"
    return (
        f"Such a grid sees a true difference of {listed([number(value) for value in seen])} points in 4 of 5 cases (at "
        f"the level named above, 5% two-sided, before correction); the paper's disputed margins are {number(low)} to "
        f"{number(high)} points, so it is {verdict}."
    )


def _initial(results: Results) -> list[str]:
    """Before training: the base against each arm, by zero-initialisation."""
    means = results.means_of("heldout", "initial")
    base = results.means_of("heldout", "base")
    if means.empty:
        return []
    texts = []
    for zero_init, group in means.groupby("zero_init", sort=True):
        arms = listed([f"{row['arm']} {_with_interval(row)}" for _, row in group.iterrows()])
        texts.append(f"{'with' if zero_init else 'without'} zero-initialisation: {arms}")
    text = f" The base has {_with_interval(base.iloc[0])}." if len(base) else ""
    size = counted(int(means["n"].max()), "document")
    return [
        f"Held-out perplexity before any training [95% interval; n = {size}], {'; '.join(texts)}.{text} With "
        "zero-initialisation (of both outputs) every method starts as the base, so these then rank nothing."
    ]


def _with_interval(row: pd.Series) -> str:
    return f"{number(row['mean'])} {interval(row['ci_low'], row['ci_high'])}"
