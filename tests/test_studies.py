"""Evidence in reports: arms of a study compared item by item, and named grids of several parts."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy import stats as distributions

from opt_deus.compose import compose_jobs, sweep_lines
from opt_deus.evidence.intervals import interval
from opt_deus.stats import against_controls, study_contrasts


def rows(values: dict[str, np.ndarray], gaps: int = 1) -> pd.DataFrame:
    """values: arm -> (items,), the same in every gap."""
    return pd.DataFrame(
        [
            {"study": "scale", "arm": arm, "quantity": "nll", "site": "deeper", "gap": gap, "item": f"d{i}", "value": v}
            for arm, each in values.items()
            for gap in range(gaps)
            for i, v in enumerate(each)
        ]
    )


def test_contrasts_are_paired_t_tests_over_common_items():
    generator = np.random.default_rng(0)
    avg, ot = generator.normal(size=12), generator.normal(size=12)
    found = study_contrasts(rows({"avg": avg, "ot": ot[:10]}, gaps=3), [("ot", "avg")])
    (row,) = found.to_dict("records")
    wanted = distributions.ttest_rel(ot[:10], avg[:10])
    assert row["contrast"] == "ot - avg" and row["n"] == 10
    assert row["p"] == pytest.approx(wanted.pvalue) and row["estimate"] == pytest.approx((ot[:10] - avg[:10]).mean())
    assert [row["ci_low"], row["ci_high"]] == pytest.approx(list(wanted.confidence_interval(0.95)))


def test_a_single_item_and_equal_arms_claim_nothing():
    (one,) = study_contrasts(rows({"avg": np.ones(1), "ot": np.zeros(1)}), [("ot", "avg")]).to_dict("records")
    assert np.isnan(one["p"]) and np.isnan(one["ci_low"])
    (same,) = study_contrasts(rows({"avg": np.ones(5), "ot": np.ones(5)}), [("ot", "avg")]).to_dict("records")
    assert same["estimate"] == 0 and same["p"] == 1
    assert study_contrasts(rows({"avg": np.ones(5)}), []).empty


def test_intervals_of_contrasts_cover_and_p_is_uniform_under_no_difference():
    generator = np.random.default_rng(1)
    covered, small, repeats = 0, 0, 400
    for _ in range(repeats):
        item = generator.normal(size=20)
        arms = {name: item + generator.normal(size=20) for name in ("ot", "avg")}
        (row,) = study_contrasts(rows(arms), [("ot", "avg")]).to_dict("records")
        covered += row["ci_low"] <= 0 <= row["ci_high"]
        small += row["p"] < 0.05
    assert 0.92 < covered / repeats < 0.98 and 0.02 < small / repeats < 0.08


def test_bootstrap_intervals_cover_a_ratio():
    generator = np.random.default_rng(2)
    covered, few, repeats = 0, 0, 300
    for _ in range(repeats):
        tokens = generator.integers(50, 250, size=40).astype(float)
        losses = tokens * (2 + generator.normal(scale=0.3, size=40))
        found = interval(np.stack([losses, tokens], 1), lambda means: means[..., 0] / means[..., 1])
        covered += found["low"] <= 2 <= found["high"]
        three = interval(generator.normal(2, 1, size=3))
        few += three["low"] <= 2 <= three["high"]
    assert 0.91 < covered / repeats < 0.99 and 0.91 < few / repeats < 0.99
    assert interval(np.array([3.0])) == {"estimate": 3.0, "low": None, "high": None, "n": 1}
    with pytest.raises(ValueError, match="finite"):
        interval(np.array([1.0, np.nan]))


def test_only_what_both_arms_measured_in_the_same_gap_is_compared():
    table = rows({"avg": np.arange(4.0), "ot": np.arange(4.0) + 1}, gaps=2)
    other_gap = table[table["arm"] == "ot"].assign(gap=7, value=1000.0)
    (row,) = study_contrasts(pd.concat([table, other_gap]), [("ot", "avg")]).to_dict("records")
    assert row["estimate"] == 1 and row["n"] == 4


def test_every_arm_is_held_against_the_control_of_its_own_kind():
    arms = ["avg-nozero-top", "copy-nozero-top", "ot-nozero-top", "avg-nozero-top-normmatch", "ot-nozero-top-normmatch"]
    assert set(against_controls(arms)) == {
        ("ot-nozero-top", "avg-nozero-top"),
        ("copy-nozero-top", "avg-nozero-top"),
        ("ot-nozero-top-normmatch", "avg-nozero-top-normmatch"),
    }
    assert against_controls(["copy-zero-top", "ot-zero-top"]) == [("ot-zero-top", "copy-zero-top")]


def test_a_named_grid_of_several_parts_holds_each_cell_once_and_the_user_wins():
    jobs = compose_jobs(["+experiment=sensitivity"], True, "s")
    folders = [job.folder for job in jobs]
    assert len(folders) == len(set(folders)) == 3 * (3 + 3 + 2 * 4 + 2 * 3 + 2 * 3)
    assert "ot-nozero-top-seed0-align.epsilon0.015" in folders and "avg-zero-top-seed2-zero_weightsmlp" in folders
    assert {job.cell.model.name for job in jobs} == {"scratch_m"}
    fewer = compose_jobs(["+experiment=sensitivity", "seed=7"], True, "s")
    assert {job.cell.seed for job in fewer} == {7} and 3 * len(fewer) == len(jobs)
    knobs = compose_jobs(["+experiment=mechanism_geometry", "evidence.distances=[1,2]"], True, "s")
    assert {str(job.cell.evidence.knobs["distances"]) for job in knobs} == {"[1, 2]"}  # a knob of a swept choice
    lines = sweep_lines(["+experiment=sensitivity", "seed=7"])
    assert len(lines) == 5 and all("seed=7" in line and not any("seed=0" in each for each in line) for line in lines)


@pytest.mark.parametrize("name", ["baselines", "position_scan", "lesa", "mechanism_scale", "mechanism_correlation"])
def test_named_grids_compose_and_skip_nothing(name):
    jobs = compose_jobs([f"+experiment={name}"], True, "s")
    assert len(jobs) > 3 and not [job.skipped for job in jobs if job.skipped]
