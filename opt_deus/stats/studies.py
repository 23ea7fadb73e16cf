"""Evidence: arms of a study compared item by item (documents, text blocks or units that all of them measured)."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from scipy import stats as distributions

CONFIDENCE = 0.95


def study_contrasts(rows: pd.DataFrame, pairs: list[tuple[str, str]]) -> pd.DataFrame:
    """The first arm of each pair minus the second, per study, quantity and site, paired by item.

    rows: columns study, arm, quantity, site, gap, item, value. Only what both arms measured in the same gap counts; an
    item's difference is its mean over gaps and seeds. Returns study, quantity, site, contrast, n, estimate, ci_low,
    ci_high, p (paired t over items; not a number below 2 items).
    """
    found = []
    rows = rows.assign(gap=rows["gap"].astype("Float64").fillna(-1).astype("int64")) if len(rows) else rows
    for (study, quantity, site), group in rows.groupby(["study", "quantity", "site"], sort=False) if len(rows) else ():
        table = group.pivot_table(index=["gap", "item"], columns="arm", values="value", aggfunc="mean")
        for first, second in pairs:
            if first in table and second in table:
                differences = (table[first] - table[second]).dropna().groupby("item").mean().to_numpy()
                if len(differences):
                    what = {"study": study, "quantity": quantity, "site": site, "contrast": f"{first} - {second}"}
                    found.append(what | _paired(differences))
    return pd.DataFrame(found)


def _paired(differences: np.ndarray) -> dict[str, float]:
    n, mean = len(differences), float(differences.mean())
    if n < 2:
        return {"n": n, "estimate": mean, "ci_low": math.nan, "ci_high": math.nan, "p": math.nan}
    error = float(differences.std(ddof=1)) / math.sqrt(n)
    half = float(distributions.t.ppf((1 + CONFIDENCE) / 2, n - 1)) * error
    p = float(2 * distributions.t.sf(abs(mean) / error, n - 1)) if error > 0 else (1.0 if mean == 0 else 0.0)
    return {"n": n, "estimate": mean, "ci_low": mean - half, "ci_high": mean + half, "p": p}
