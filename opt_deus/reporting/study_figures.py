"""One figure per study: estimates with intervals, arms by colour. Draws, never computes."""

from __future__ import annotations

import math

import pandas as pd
from matplotlib import pyplot as plt

# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
MARKERS = "osD^vP*X"
_MOST_PANELS = 8
_FEW_SITES = 3  # up to so many, panels are quantities; beyond, panels are sites


def study(found: pd.DataFrame) -> str | None:
    """Draws one study's summary rows over all gaps (columns of studies.SUMMARY); returns the caption."""
    whole = found[found["gap"].isna()]
    rows = (whole if len(whole) else found).drop_duplicates(["arm", "quantity", "site"])
    rows = rows[rows["estimate"].notna()]
    if rows.empty:
        return None
    by_site = rows["site"].nunique() > _FEW_SITES
    panel, line = ("site", "quantity") if by_site else ("quantity", "site")
    panels = list(rows.groupby(panel, sort=False))[:_MOST_PANELS]
    arms = list(rows["arm"].unique())
    columns = min(4, len(panels))
    tall = 1.2 + 0.22 * max(group[line].nunique() * len(arms) for _, group in panels)
    shape = (math.ceil(len(panels) / columns), columns)
    axes = plt.subplots(*shape, figsize=(3.4 * columns, tall * shape[0]), squeeze=False)[1].flatten()
    for axis, (title, group) in zip(axes, panels, strict=False):
        _panel(axis, group, line, arms)
        axis.set_title(str(title) or "all", fontsize=8)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    handles, labels = axes[0].get_legend_handles_labels()
    plt.gcf().legend(handles, labels, loc="outside lower center", ncols=min(len(arms), 6), frameon=False, fontsize=7)
    left_out = rows[panel].nunique() - len(panels)
    more = f" (of {left_out} more, see evidence.csv)" if left_out > 0 else ""
    return f"{rows['study'].iloc[0]}: estimates with 95% intervals by {panel}{more}; n is in the table."


def _panel(axis: plt.Axes, group: pd.DataFrame, line: str, arms: list[str]) -> None:
    lines = list(group[line].unique())
    for order, arm in enumerate(arms):
        rows = group[group["arm"] == arm].set_index(line)
        places, values, errors = [], [], [[], []]
        for number, name in enumerate(lines):
            if name in rows.index:
                row = rows.loc[name]
                places.append(-number - 0.8 * order / max(1, len(arms)))
                values.append(row["estimate"])
                known = pd.notna(row["low"])  # max: equal numbers may differ in their last digit
                errors[0].append(max(0.0, row["estimate"] - row["low"]) if known else 0)
                errors[1].append(max(0.0, row["high"] - row["estimate"]) if known else 0)
        style = {"color": COLOURS[order % len(COLOURS)], "fmt": MARKERS[order % len(MARKERS)]}
        axis.errorbar(values, places, xerr=errors, capsize=2, markersize=4, linewidth=1, label=arm, **style)
    axis.set_yticks([-number for number in range(len(lines))], [str(name) for name in lines], fontsize=6)
    if group["estimate"].min() > 0 and group["estimate"].max() > 20 * group["estimate"].min():
        axis.set_xscale("log")
    elif group["estimate"].min() <= 0 <= group["estimate"].max():
        axis.axvline(0, color="#555555", linewidth=0.6)
    axis.tick_params(axis="x", labelsize=7)
