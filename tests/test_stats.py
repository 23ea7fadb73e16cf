"""Statistics: known answers, invariances, refusals, and error rates by simulation (seeded)."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats as distributions
from statsmodels.stats.contingency_tables import mcnemar as statsmodels_mcnemar
from synthetic_records import make_samples

from opt_deus.stats import COLUMNS, arm_means, compare, effects, significance, stages_of
from opt_deus.stats.contrasts import arms_of, contrasts_of
from opt_deus.stats.crossed import crossed_difference
from opt_deus.stats.estimates import paired_t, seed_t, verdict
from opt_deus.stats.items import macro_difference, mcnemar, mcnemar_counts


@pytest.fixture(scope="module")
def samples() -> pd.DataFrame:
    return make_samples(stages=("initial", "sft"))


@pytest.fixture(scope="module")
def table(samples: pd.DataFrame) -> pd.DataFrame:
    return significance(samples, resamples=2000).table


def pick(table: pd.DataFrame, **wanted: str) -> pd.Series:
    found = table[np.logical_and.reduce([table[column] == value for column, value in wanted.items()])]
    assert len(found) == 1, f"{wanted}: {len(found)} rows"
    return found.iloc[0]


# ---- known answers


def test_mcnemar_of_220_items_discordant_30_against_12() -> None:
    estimate = mcnemar_counts(220, 30, 12)
    assert estimate.p == pytest.approx(0.0079, abs=5e-5)
    assert estimate.estimate == pytest.approx(100 * 18 / 220)
    assert 0 < estimate.ci_low < estimate.estimate < estimate.ci_high


@pytest.mark.parametrize("won, lost", [(0, 1), (5, 0), (6, 0), (7, 3), (12, 12)])
def test_mcnemar_agrees_with_statsmodels_and_its_interval_with_its_p(won: int, lost: int) -> None:
    estimate = mcnemar_counts(50, won, lost)
    reference = statsmodels_mcnemar([[10, won], [lost, 40 - won - lost]], exact=True).pvalue
    assert estimate.p == pytest.approx(reference, abs=1e-12)
    assert (estimate.p < 0.05) == (estimate.ci_low > 0 or estimate.ci_high < 0)


def test_mcnemar_cannot_see_less_than_six_documents() -> None:
    assert mcnemar_counts(100, 6, 0).p < 0.05 < mcnemar_counts(100, 5, 0).p
    assert mcnemar_counts(100, 1, 1).mde >= 6.0


def test_paired_t_agrees_with_scipy() -> None:
    first, second = np.random.default_rng(0).normal(size=(2, 20))
    reference = distributions.ttest_rel(first, second)
    interval = reference.confidence_interval(0.95)
    estimate = paired_t(first - second)
    assert (estimate.statistic, estimate.p) == pytest.approx((reference.statistic, reference.pvalue))
    assert (estimate.ci_low, estimate.ci_high) == pytest.approx((interval.low, interval.high))


def test_sign_flip_p_is_the_exact_one_where_it_can_be_counted() -> None:
    values = np.array([3.0, 1.0, 2.0, 4.0, -1.0, 2.5, 3.5, 0.0])
    signs = np.array(np.meshgrid(*[[-1, 1]] * 8)).reshape(8, -1)
    exact = np.mean(np.abs(values @ signs) >= values.sum() - 1e-9)
    assert macro_difference([values], 200_000).p == pytest.approx(exact, abs=0.003)


def test_the_macro_average_weighs_tasks_equally() -> None:
    strata = [np.r_[np.zeros(90), np.full(10, 100.0)], np.r_[np.full(4, 100.0), np.zeros(4)]]
    estimate = macro_difference(strata)
    assert estimate.estimate == pytest.approx(30.0) and estimate.n == 108
    assert crossed_difference([np.tile(values, (3, 1)) for values in strata]).estimate == pytest.approx(30.0)


def test_crossed_equals_items_where_seeds_do_not_vary_and_seeds_where_documents_do_not() -> None:
    generator = np.random.default_rng(0)
    documents = generator.normal(size=200)
    estimate = crossed_difference([np.tile(documents, (5, 1))])
    assert estimate.se == pytest.approx(paired_t(documents).se) and estimate.components["seed_sd"] == 0
    seeds = generator.normal(size=5)
    estimate = crossed_difference([np.tile(seeds[:, None], (1, 200))])
    assert estimate.se == pytest.approx(seed_t(seeds).se)
    assert estimate.components["document_sd"] == pytest.approx(0, abs=1e-9)


def test_variance_components_are_found() -> None:
    generator = np.random.default_rng(0)
    shape = (40, 1), (1, 400), (40, 400)
    seed, document, rest = (generator.normal(0, sd, size) for sd, size in zip((3, 10, 5), shape, strict=True))
    components = crossed_difference([seed + document + rest]).components
    assert components["seed_sd"] == pytest.approx(3, rel=0.2)
    assert components["document_sd"] == pytest.approx(10, rel=0.1)


@pytest.mark.parametrize(
    "p, equivalence, expected",
    [
        (0.01, 0.9, "difference"),
        (0.2, 0.01, "equivalent"),
        (0.2, 0.2, "inconclusive"),
        (math.nan, math.nan, "not_testable"),
        (0.2, math.nan, "inconclusive"),
    ],
)
def test_verdicts(p: float, equivalence: float, expected: str) -> None:
    assert verdict(p, equivalence) == expected


def test_equivalence_is_two_one_sided_tests() -> None:
    values = np.random.default_rng(0).normal(0.1, 1, 400)
    estimate = paired_t(values)
    upper = distributions.ttest_1samp(values, 0.5, alternative="less").pvalue
    lower = distributions.ttest_1samp(values, -0.5, alternative="greater").pvalue
    assert estimate.p_equivalence(0.5) == pytest.approx(max(upper, lower))


@pytest.mark.parametrize("num_seeds, testable", [(1, False), (2, False), (3, True)])
def test_below_three_seeds_nothing_is_said_about_new_runs(num_seeds: int, testable: bool) -> None:
    found = significance(make_samples(seeds=range(num_seeds), stages=("sft",)), resamples=200).table
    rows = found[found["level"].isin(["seed", "item+seed"])]
    assert len(rows) and ((rows["verdict"] != "not_testable").all() if testable else rows["p"].isna().all())
    assert (rows["verdict"] == "not_testable").all() != testable
    assert found.loc[found["level"] == "item", "p"].notna().all()


# ---- whole tables


def test_columns_and_contrast_names_are_the_contract_s(table: pd.DataFrame) -> None:
    assert list(table.columns[: len(COLUMNS)]) == COLUMNS
    names = set(table.loc[table["family"] == "headline", "contrast"])
    assert names == {
        "ot - avg | zero_init=true",
        "ot - avg | zero_init=false",
        "(ot - avg | zero_init=true) - (ot - avg | zero_init=false)",
    }
    assert set(table["level"]) == {"item", "seed", "item+seed"} and set(table["split"]) == {"all", "select", "confirm"}


def test_estimates_are_the_plain_differences_of_averages(samples: pd.DataFrame, table: pd.DataFrame) -> None:
    rows = samples[(samples["stage"] == "sft") & (samples["metric"] == "acc")]
    means = 100 * rows.groupby(["align", "zero_init", "task"])["value"].mean().groupby(["align", "zero_init"]).mean()
    simple = {zero: means["ot", zero] - means["avg", zero] for zero in (True, False)}
    wanted = {"task": "macro", "split": "all", "level": "item"}
    for zero, text in ((True, "true"), (False, "false")):
        assert pick(table, contrast=f"ot - avg | zero_init={text}", **wanted)["estimate"] == pytest.approx(simple[zero])
    interaction = pick(table, contrast="(ot - avg | zero_init=true) - (ot - avg | zero_init=false)", **wanted)
    assert interaction["estimate"] == pytest.approx(simple[True] - simple[False])
    main = pick(table, contrast="ot - avg | mean over zero_init", **wanted)
    assert main["estimate"] == pytest.approx((simple[True] + simple[False]) / 2)
    zero_init = pick(table, contrast="zero_init=true - zero_init=false | align=ot", **wanted)
    assert zero_init["estimate"] == pytest.approx(means["ot", True] - means["ot", False])


def test_log_perplexity_is_a_ratio_of_sums(samples: pd.DataFrame, table: pd.DataFrame) -> None:
    rows = samples[(samples["stage"] == "sft") & (samples["task"] == "heldout") & samples["zero_init"]]
    sums = rows.groupby(["align", "seed", "metric"])["value"].sum().unstack()
    log_perplexity = (-sums["loglikelihood"] / sums["tokens"]).groupby("align").mean()
    for level in ("item", "seed", "item+seed"):
        row = pick(table, contrast="ot - avg | zero_init=true", task="heldout", split="all", level=level)
        assert row["estimate"] == pytest.approx(log_perplexity["ot"] - log_perplexity["avg"])
        assert row["ci_low"] < row["estimate"] < row["ci_high"]


def test_holm_binds_within_the_headline_family_of_each_level(table: pd.DataFrame) -> None:
    for _, group in table[table["family"] == "headline"].groupby("level"):
        p = np.sort(group["p"].to_numpy())
        assert len(p) == 3
        expected = np.minimum(np.maximum.accumulate(p * [3, 2, 1]), 1)
        assert np.sort(group["p_adjusted"]) == pytest.approx(expected)


def test_nothing_depends_on_the_order_of_rows(samples: pd.DataFrame) -> None:
    shuffled = samples.sample(frac=1, random_state=1)
    one, two = (significance(frame, resamples=500).table for frame in (samples, shuffled))
    pd.testing.assert_frame_equal(one, two, check_exact=False, rtol=1e-9)


def test_identical_arms_differ_by_0_with_p_1(samples: pd.DataFrame) -> None:
    ot = samples[samples["align"] == "ot"]
    twin = ot.assign(**{column: ot[column].str.replace("ot-", "avg-") for column in ("arm", "cell")}, align="avg")
    found = significance(pd.concat([ot, twin]), resamples=200).table
    rows = found[found["contrast"].str.startswith(("ot - avg", "(ot - avg"))]
    assert len(rows) > 50
    assert (rows["estimate"] == 0).all() and (rows["p"] == 1).all() and (rows["verdict"] != "difference").all()


def test_a_grid_of_other_alignments_positions_and_settings() -> None:
    settings = {"aligns": ("ot", "avg", "copy"), "seeds": (0,), "stages": ("sft",), "num_documents": 10}
    parts = [make_samples(position=position, **settings) for position in ("top", "middle")]
    grid = pd.concat(parts)
    base = parts[0][(parts[0]["align"] == "copy") & parts[0]["zero_init"]]
    base = base.assign(arm="none", cell="none-seed0", align="none", zero_init=False, position="none")
    names = [contrast.name for contrast in contrasts_of(arms_of(pd.concat([grid, base])))]
    assert len(names) == len(set(names))
    for expected in (
        "ot - avg | zero_init=true, position=top",
        "avg - copy | zero_init=false, position=middle",
        "(ot - copy | zero_init=true, position=top) - (ot - copy | zero_init=false, position=top)",
        "ot - none | zero_init=true, position=middle",
        "zero_init=true - zero_init=false | mean over align=ot,avg,copy, position=top",
    ):
        assert expected in names
    matched = grid.assign(overrides='{"norm_match": "true"}', arm=grid["arm"] + "-normmatch", cell=grid["cell"] + "n")
    names = [contrast.name for contrast in contrasts_of(arms_of(pd.concat([grid, matched])))]
    assert "ot - avg | zero_init=true, position=top, norm_match=true" in names
    assert len(names) == len(set(names))


def test_contrasts_weigh_arms_to_zero(samples: pd.DataFrame) -> None:
    for contrast in contrasts_of(arms_of(samples)):
        assert sum(contrast.weights.values()) == pytest.approx(0)


def test_a_missing_document_is_refused_by_name(samples: pd.DataFrame) -> None:
    rows = samples[(samples["task"] == "summary") & (samples["stage"] == "sft") & (samples["arm"] == "ot-zero-top")]
    lost = rows["doc_hash"].iloc[3]
    gone = samples.drop(rows.index[(rows["doc_hash"] == lost) & (rows["seed"] == 1)])
    with pytest.raises(ValueError, match=rf"summary: arm ot-zero-top, seed 1.*1 documents.*{lost}"):
        compare(gone, "ot-zero-top", "avg-zero-top")
    found = significance(gone, resamples=200)
    assert any(lost in text for text in found.refused)
    assert "ot - avg | zero_init=false" in set(found.table["contrast"])
    assert "ot - avg | zero_init=true" not in set(found.table.query("split == 'all'")["contrast"])


def test_arms_evaluated_on_other_documents_do_not_disturb_a_contrast(samples: pd.DataFrame) -> None:
    small = samples[~((samples["task"] == "summary") & (samples["doc_id"] >= 30))].copy()
    small["overrides"] = '{"eval.limit": "30"}'
    for column in ("arm", "cell"):
        small[column] = small[column] + "-eval.limit30"
    found = significance(pd.concat([samples, small]), resamples=200)
    assert not found.refused
    alone = significance(samples, resamples=200).table
    pair = alone[(alone["contrast"] == "ot - avg | zero_init=true") & (alone["split"] == "all")]
    named = found.table["contrast"].str.startswith("ot - avg | zero_init=true")
    both = found.table[named & (found.table["split"] == "all")]
    assert set(pair["estimate"].round(9)) <= set(both["estimate"].round(9))


def test_the_last_stage_is_the_last_one_with_benchmarks() -> None:
    samples = make_samples(stages=("initial", "cpt", "sft"), num_documents=20)
    scored = samples[(samples["stage"] != "sft") | (samples["task"] == "heldout")]
    found = significance(scored, resamples=200)
    assert found.last_stage == "cpt"
    headline = found.table[found.table["family"] == "headline"]
    assert set(headline["stage"]) == {"cpt"} and len(headline)
    assert "sft" in set(found.table["stage"])  # its perplexity is still compared


def test_a_seed_that_one_arm_lacks_is_left_out(samples: pd.DataFrame) -> None:
    fewer = samples[~((samples["arm"] == "ot-zero-top") & (samples["seed"] == 2))]
    found = compare(fewer, "ot-zero-top", "avg-zero-top")
    assert set(found["num_seeds"]) == {1, 2}
    assert not found["test"].str.contains("seed 2").any()


def test_documents_of_equal_content_are_kept_apart(samples: pd.DataFrame) -> None:
    hashes = sorted(samples["doc_hash"].unique())[:2]
    twins = samples.assign(doc_hash=samples["doc_hash"].replace(hashes[0], hashes[1]))
    row = pick(compare(twins, "ot-zero-top", "avg-zero-top"), task="macro", level="item")
    assert row["n"] == 120


def test_two_cells_of_one_arm_and_seed_are_refused(samples: pd.DataFrame) -> None:
    twice = pd.concat([samples, samples.assign(cell=samples["cell"] + "-again")])
    with pytest.raises(ValueError, match="share this arm and seed"):
        compare(twice, "ot-zero-top", "avg-zero-top")


@pytest.mark.parametrize("wanted", ["ot", {"align": "ot"}, {"colour": "red"}])
def test_compare_refuses_what_is_not_one_arm(samples: pd.DataFrame, wanted) -> None:
    with pytest.raises(ValueError, match="fits|no such factor"):
        compare(samples, wanted, "avg-zero-top")


def test_one_arm_alone_or_no_rows_give_no_contrasts(samples: pd.DataFrame) -> None:
    assert significance(samples[samples["arm"] == "ot-zero-top"]).table.empty
    assert significance(samples.iloc[:0]).table.empty
    assert list(significance(samples.iloc[:0]).table.columns[: len(COLUMNS)]) == COLUMNS


def test_stages_in_the_order_of_training() -> None:
    stages = ["sft", "cpt", "cpt-0.2", "base", "initial", "cpt-1.0", "cpt-0.6"]
    assert stages_of(pd.DataFrame({"stage": stages})) == ["initial", "cpt-0.2", "cpt-0.6", "cpt-1.0", "cpt", "sft"]


def test_arm_means_and_effects_are_tidy(samples: pd.DataFrame, table: pd.DataFrame) -> None:
    means = arm_means(samples)
    row = pick(means, arm="ot-zero-top", stage="sft", task="macro")
    rows = samples.query("arm == 'ot-zero-top' and stage == 'sft' and metric == 'acc'")
    assert row["mean"] == pytest.approx(100 * rows.groupby("task")["value"].mean().mean())
    assert row["ci_low"] < row["mean"] < row["ci_high"] and row["n"] == 120 and row["num_seeds"] == 3
    assert set(effects(table)["kind"]) == {"simple", "main", "interaction"}
    assert set(effects(table)["task"]) == {"macro", "heldout"}


# ---- error rates by simulation: binary answers, items of mixed difficulty, correlated arms, seed noise, ties


def simulate(
    generator: np.random.Generator, num_seeds: int, seed_sd: float, effect: float = 0.0, num_documents: int = 100
) -> list[np.ndarray]:
    """Two tasks' differences in points, each (S, n), of two arms that are exchangeable where effect = 0."""
    runs = generator.normal(0, seed_sd, (2, num_seeds, 1))
    strata = []
    for _ in range(2):
        easiness = generator.normal(0, 2, num_documents)
        own = generator.normal(0, 0.5, (2, 1, num_documents))
        noise = generator.normal(0, 0.3, (2, num_seeds, num_documents))
        right = easiness + own + runs + noise + np.array([effect, 0.0])[:, None, None] > 0
        strata.append(100.0 * (right[0].astype(float) - right[1]))
    return strata


def within(rate: float, expected: float, repeats: int, deviations: float = 3.3) -> bool:
    return abs(rate - expected) < deviations * math.sqrt(expected * (1 - expected) / repeats)


def test_item_level_false_positives_and_coverage_for_these_seeds() -> None:
    generator, repeats = np.random.default_rng(0), 600
    estimates = [
        macro_difference([values.mean(axis=0) for values in simulate(generator, 3, 0.0)], 500, repeat)
        for repeat in range(repeats)
    ]
    assert within(np.mean([estimate.p < 0.05 for estimate in estimates]), 0.05, repeats)
    assert within(np.mean([estimate.ci_low <= 0 <= estimate.ci_high for estimate in estimates]), 0.95, repeats)


@pytest.mark.parametrize("num_seeds", [3, 5, 10])
@pytest.mark.parametrize("seed_sd", [0.05, 0.2, 0.5])
def test_item_and_seed_coverage(num_seeds: int, seed_sd: float) -> None:
    generator, repeats = np.random.default_rng(num_seeds), 800
    estimates = [crossed_difference(simulate(generator, num_seeds, seed_sd)) for _ in range(repeats)]
    coverage = np.mean([estimate.ci_low <= 0 <= estimate.ci_high for estimate in estimates])
    assert 0.93 <= coverage <= 0.985
    assert np.mean([estimate.p < 0.05 for estimate in estimates]) == pytest.approx(1 - coverage)


def test_items_alone_are_too_sure_where_seeds_vary() -> None:
    """Why item+seed is the primary level: shows that the simulation would notice a wrong error term."""
    generator = np.random.default_rng(0)
    strata = [simulate(generator, 3, 0.5) for _ in range(200)]
    false = [paired_t(np.concatenate(values, axis=1).mean(axis=0)).p < 0.05 for values in strata]
    assert np.mean(false) > 0.3


def test_seed_level_false_positives_on_fixed_questions() -> None:
    generator, repeats = np.random.default_rng(0), 2000
    p = [seed_t(generator.normal(0, 1, 3)).p for _ in range(repeats)]
    assert within(np.mean(np.array(p) < 0.05), 0.05, repeats)


def test_mcnemar_never_exceeds_its_level() -> None:
    generator, repeats = np.random.default_rng(0), 1000
    strata = [simulate(generator, 1, 0.0)[0][0] for _ in range(repeats)]
    false = [mcnemar(values > 0, values < 0).p < 0.05 for values in strata]
    assert np.mean(false) < 0.05 + 3.3 * math.sqrt(0.05 * 0.95 / repeats)


def test_holm_keeps_the_family_wise_error() -> None:
    generator, repeats = np.random.default_rng(0), 1000
    wrong = 0
    for _ in range(repeats):
        first, second = simulate(generator, 3, 0.2), simulate(generator, 3, 0.2)
        interaction = [a - b for a, b in zip(first, second, strict=True)]
        p = [crossed_difference(strata).p for strata in (first, second, interaction)]
        wrong += 3 * min(p) < 0.05  # Holm rejects something exactly when it rejects the smallest
    assert wrong / repeats < 0.05 + 3.3 * math.sqrt(0.05 * 0.95 / repeats)


def test_power_at_the_minimum_detectable_effect_is_near_80_percent() -> None:
    generator, repeats = np.random.default_rng(0), 500
    spreads = generator.normal(0, 10, (repeats, 5, 80)) + generator.normal(0, 10, (repeats, 1, 80))
    spreads += generator.normal(0, 1, (repeats, 5, 1))
    stated = np.median([crossed_difference([values]).mde for values in spreads])
    found = [crossed_difference([values + stated]).p < 0.05 for values in spreads]
    assert np.mean(found) == pytest.approx(0.8, abs=0.08)
