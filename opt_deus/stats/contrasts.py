"""Which arms are compared: pairs of alignments within the same other factors, main effects, interactions.

A contrast is a weighted sum of arms, named by the contract's grammar: "ot - avg | zero_init=true".
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

HEADLINE_PAIR = ("ot", "avg")
# Order in a difference: methods before the controls they are held against.
ORDER = [
    "ot",
    "ot_release",
    "ot_exact",
    "ot_structured",
    "ot_activation",
    "lesa",
    "random",
    "half",
    "avg",
    "copy",
    "copy_upper",
    "solar",
    "none",
]
UNCROSSED = ("solar", "none")  # without position and zero-initialisation: compared with every arm
FACTORS = ("align", "zero_init", "position", "seed", "name")


@dataclass(frozen=True)
class Contrast:
    """`weights` sum to 0 over arms. kind: simple, main or interaction; factor: what is varied.

    `effects`: the one effect, or the two whose difference is the interaction.
    """

    effects: tuple[str, ...]
    kind: str
    factor: str
    weights: Mapping[str, float]
    headline: bool = False

    @property
    def name(self) -> str:
        return " - ".join(f"({effect})" for effect in self.effects) if len(self.effects) > 1 else self.effects[0]

    def at(self, stage: str) -> str:
        """The name with the stage as one more condition."""
        effects = tuple(f"{effect}{', ' if ' | ' in effect else ' | '}stage={stage}" for effect in self.effects)
        return replace(self, effects=effects).name


def arms_of(samples: pd.DataFrame) -> pd.DataFrame:
    """One row per arm: arm, align, zero_init (bool), position, context (the other overrides that vary between arms)."""
    arms = samples.drop_duplicates("arm")[["arm", "align", "zero_init", "position", "overrides"]].copy()
    overrides = [
        {key: each for key, each in _overrides(value).items() if key.split(".")[0] != "evidence"}  # measures, not makes
        for value in arms["overrides"]
    ]
    keys = sorted({key for values in overrides for key in values})
    varying = [key for key in keys if len({str(values.get(key)) for values in overrides}) > 1]
    arms["context"] = [", ".join(f"{key}={values[key]}" for key in varying if key in values) for values in overrides]
    arms["zero_init"] = [str(value).lower() == "true" for value in arms["zero_init"]]
    rank = {align: number for number, align in enumerate(ORDER)}
    arms["rank"] = [rank.get(align, -1) for align in arms["align"]]
    return arms.drop(columns="overrides").sort_values(["rank", "align", "arm"], ignore_index=True)


def against_controls(arms: list[str]) -> list[tuple[str, str]]:
    """(arm, control) for every arm: the control is avg of the same other factors, or the last one by ORDER.

    Arms are compared only with arms of the same zero-initialisation, position and overrides, all that follows the
    alignment in their names.
    """
    rank = {align: number for number, align in enumerate(ORDER)}
    groups: dict[str, list[str]] = {}
    for arm in sorted(arms, key=lambda arm: rank.get(arm.partition("-")[0], -1)):
        groups.setdefault(arm.partition("-")[2], []).append(arm)
    pairs = []
    for group in groups.values():
        control = next((arm for arm in group if arm.partition("-")[0] == HEADLINE_PAIR[1]), group[-1])
        pairs += [(arm, control) for arm in group if arm != control]
    return pairs


def contrasts_of(arms: pd.DataFrame) -> list[Contrast]:
    """Every contrast that these arms allow, the headline ones first."""
    several_positions = arms.loc[~arms["align"].isin(UNCROSSED), "position"].nunique() > 1
    found: list[Contrast] = []
    crossed = arms[~arms["align"].isin(UNCROSSED)]
    for (position, context), group in crossed.groupby(["position", "context"], sort=True):
        where = [f"position={position}"] * several_positions + [context] * bool(context)
        cells = {(row.align, row.zero_init): row.arm for row in group.itertuples()}
        found += _align_contrasts(cells, where) + _zero_init_contrasts(cells, where)
    found += _against_uncrossed(arms, several_positions)
    return sorted(found, key=lambda contrast: not contrast.headline)


def _align_contrasts(cells: dict[tuple[str, bool], str], where: list[str]) -> list[Contrast]:
    """For every pair of alignments: simple effects, and where both levels of zero_init exist, main and interaction."""
    found = []
    aligns = list(dict.fromkeys(align for align, _ in cells))
    for first, second in itertools.combinations(aligns, 2):
        headline = (first, second) == HEADLINE_PAIR
        simple = {}
        for zero_init in (True, False):
            if (first, zero_init) in cells and (second, zero_init) in cells:
                weights = {cells[first, zero_init]: 1.0, cells[second, zero_init]: -1.0}
                name = f"{first} - {second}{_given([f'zero_init={_text(zero_init)}', *where])}"
                simple[zero_init] = Contrast((name,), "simple", "align", weights, headline)
        found += simple.values()
        if len(simple) == 2:
            names = (simple[True].name, simple[False].name)
            weights = _combined(simple[True], simple[False], 1.0, -1.0)
            found.append(Contrast(names, "interaction", "align x zero_init", weights, headline))
            name = f"{first} - {second}{_given(['mean over zero_init', *where])}"
            found.append(Contrast((name,), "main", "align", _combined(simple[True], simple[False], 0.5, 0.5)))
    return found


def _zero_init_contrasts(cells: dict[tuple[str, bool], str], where: list[str]) -> list[Contrast]:
    """Effect of zero-initialisation within every alignment, and its mean over the alignments that have both."""
    aligns = list(dict.fromkeys(align for align, _ in cells))
    both = [align for align in aligns if (align, True) in cells and (align, False) in cells]
    effect = "zero_init=true - zero_init=false"
    found = [
        Contrast(
            (f"{effect}{_given([f'align={align}', *where])}",),
            "simple",
            "zero_init",
            {cells[align, True]: 1.0, cells[align, False]: -1.0},
        )
        for align in both
    ]
    if len(both) > 1:
        weights = {arm: weight / len(both) for simple in found for arm, weight in simple.weights.items()}
        name = f"{effect}{_given(['mean over align=' + ','.join(both), *where])}"
        found.append(Contrast((name,), "main", "zero_init", weights))
    return found


def _against_uncrossed(arms: pd.DataFrame, several_positions: bool) -> list[Contrast]:
    """Every arm against solar and none, which have neither position nor zero-initialisation."""
    found = []
    for base in arms[arms["align"].isin(UNCROSSED)].itertuples():
        for row in arms[~arms["align"].isin(UNCROSSED)].itertuples():
            if base.context and base.context != row.context:
                continue
            where = [f"zero_init={_text(row.zero_init)}"] + [f"position={row.position}"] * several_positions
            where += [row.context] * bool(row.context)
            name = f"{row.align} - {base.align}{_given(where)}"
            found.append(Contrast((name,), "simple", "align", {row.arm: 1.0, base.arm: -1.0}))
    return found


def _combined(first: Contrast, second: Contrast, a: float, b: float) -> dict[str, float]:
    weights = {arm: a * weight for arm, weight in first.weights.items()}
    return weights | {arm: b * weight for arm, weight in second.weights.items()}


def _given(conditions: list[str]) -> str:
    return " | " + ", ".join(conditions) if conditions else ""


def _text(value: bool) -> str:
    return "true" if value else "false"


def _overrides(value: Any) -> dict[str, Any]:
    """The overrides column as a dict (JSON text or a mapping), the factors that have their own columns left out."""
    if isinstance(value, str):
        value = json.loads(value) if value.strip() else {}
    return {key: item for key, item in dict(value or {}).items() if key not in FACTORS}
