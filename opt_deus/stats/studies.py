"""Evidence: arms of a study compared item by item (documents, text blocks or units that all of them measured)."""

from __future__ import annotations

import pandas as pd

from opt_deus.stats.estimates import paired_t


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
                    t = paired_t(differences)
                    numbers = {name: getattr(t, name) for name in ("n", "estimate", "ci_low", "ci_high", "p")}
                    found.append(what | numbers)
    return pd.DataFrame(found)
