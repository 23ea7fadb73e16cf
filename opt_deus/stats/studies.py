"""Evidence: arms of a study compared item by item (documents, text blocks or units that all of them measured)."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from scipy import stats as distributions

CONFIDENCE = 0.95


def study_contrasts(rows: pd.DataFrame, arms: list[str]) -> pd.DataFrame:
    """Every arm minus the last of `arms`, per study, quantity and site, paired by item.

    rows: columns study, arm, quantity, site, gap, item, value; an item's value is its mean over gaps and seeds. Returns
    study, quantity, site, contrast, n, estimate, ci_low, ci_high, p (paired t over items; not a number below 2 items).
    """
    if rows.empty or len(arms) < 2:
        return pd.DataFrame()
    found = []
    *methods, reference = arms
    for (study, quantity, site), group in rows.groupby(["study", "quantity", "site"], sort=False):
        table = group.pivot_table(index="item", columns="arm", values="value", aggfunc="mean")
        for arm in methods:
            if arm in table and reference in table:
                differences = (table[arm] - table[reference]).dropna().to_numpy()
                if len(differences):
                    found.append(
                        {"study": study, "quantity": quantity, "site": site, "contrast": f"{arm} - {reference}"}
                        | _paired(differences)
                    )
    return pd.DataFrame(found)


def _paired(differences: np.ndarray) -> dict[str, float]:
    n, mean = len(differences), float(differences.mean())
    if n < 2:
        return {"n": n, "estimate": mean, "ci_low": math.nan, "ci_high": math.nan, "p": math.nan}
    error = float(differences.std(ddof=1)) / math.sqrt(n)
    half = float(distributions.t.ppf((1 + CONFIDENCE) / 2, n - 1)) * error
    p = float(2 * distributions.t.sf(abs(mean) / error, n - 1)) if error > 0 else (1.0 if mean == 0 else 0.0)
    return {"n": n, "estimate": mean, "ci_low": mean - half, "ci_high": mean + half, "p": p}
