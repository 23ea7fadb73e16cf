"""Reports: complete, honest about what is missing, self-contained, escaped, and agreeing with the golden file."""

from __future__ import annotations

import csv
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from synthetic_records import make_samples, write_sweep

from opt_deus.config import SAMPLE_COLUMNS
from opt_deus.report import main
from opt_deus.reporting import write_report
from opt_deus.reporting.document import Link, Table
from opt_deus.reporting.latex import render as render_latex
from opt_deus.reporting.markdown import escape
from opt_deus.reporting.published import read_published
from opt_deus.reporting.wording import interval, number, p_value, signed, without_paths
from opt_deus.stats import COLUMNS as SIGNIFICANCE_COLUMNS
from opt_deus.stats.aggregates import macro_average, macro_se, wins
from opt_deus.stats.published import published_table

FILES = ["report.md", "report.html", "significance.csv", "significance.tex", "effects.csv", "samples.parquet"]
SMALL = {"seeds": (0,), "stages": ("initial", "sft"), "num_documents": 8}


def read(folder: Path) -> str:
    """The text of report.md, where escapes are undone."""
    return (folder / "report.md").read_text().replace("&lt;", "<").replace("\\|", "|")


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished 2x2 with three seeds and a learning curve."""
    folder = write_sweep(tmp_path_factory.mktemp("multirun_reports") / "review", make_samples(num_documents=30))
    write_report(folder)
    return folder


def small(folder: Path, statuses: dict[str, str] | None = None, **changes) -> Path:
    return write_sweep(folder / "small", make_samples(**SMALL | changes), statuses)


def change_record(folder: Path, cell: str, change) -> None:
    path = folder / "cells" / cell / "record.json"
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


# ---- the whole report


def test_every_file_of_the_contract_is_there(sweep: Path) -> None:
    assert all((sweep / name).stat().st_size for name in FILES)
    for figure in ("interaction", "seeds", "forest", "initial_perplexity", "learning_curves", "losses"):
        assert (sweep / "figures" / f"{figure}.svg").read_text().startswith("<?xml")
        assert (sweep / "figures" / f"{figure}.png").read_bytes().startswith(b"\x89PNG")
    assert not list(sweep.glob("*.part"))


def test_tables_have_the_contract_s_columns(sweep: Path) -> None:
    assert pd.read_csv(sweep / "significance.csv").columns.tolist() == SIGNIFICANCE_COLUMNS
    samples = pd.read_parquet(sweep / "samples.parquet")
    assert samples.columns.tolist() == SAMPLE_COLUMNS
    assert len(samples) == len(make_samples(num_documents=30))


def test_the_answer_s_numbers_are_those_of_the_table(sweep: Path) -> None:
    table = pd.read_csv(sweep / "significance.csv").query("level == 'item+seed' and family == 'headline'")
    row = table[table["contrast"] == "ot - avg | zero_init=true"].iloc[0]
    text = read(sweep)
    sentence = next(line for line in text.splitlines() if line.startswith("With zero_init=true held fixed"))
    assert f"{signed(row['estimate'])} points {interval(row['ci_low'], row['ci_high'], sign=True)}" in sentence
    assert f"n = {row['n']} documents, 3 seeds; level item+seed" in sentence
    assert {"difference": "an effect", "inconclusive": "no effect shown"}[row["verdict"]] in sentence
    assert number(row["mde"]) in text and "disputed margins are 0.10 to 0.51" in text


def test_initial_perplexity_and_every_cell_with_a_link_to_its_record(sweep: Path) -> None:
    text = read(sweep)
    assert "Held-out perplexity before any training" in text
    for cell in (sweep / "cells").iterdir():
        assert f"[{cell.name}](cells/{cell.name}/record.json)" in text
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert links and all((sweep / link).exists() for link in links)


class Collector(HTMLParser):
    """Tags opened and closed, and every address that the page would load or link to."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attributes: list) -> None:
        self.tags.add(tag)
        if tag not in ("meta", "link", "img", "br"):
            self.open.append(tag)
        self.addresses += [value for key, value in attributes if key in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_html_is_well_formed_self_contained_and_escaped(sweep: Path) -> None:
    page = (sweep / "report.html").read_text()
    collector = Collector()
    collector.feed(page)
    assert collector.open == [] and "script" not in collector.tags
    outside = [address for address in collector.addresses if not address.startswith(("#", "data:", "cells/"))]
    assert outside == []
    assert "<b>caveat</b>" not in page and "&lt;b&gt;caveat&lt;/b&gt;" in page
    assert "prefers-color-scheme: dark" in page and 'name="viewport"' in page


def test_no_machine_path_in_any_text_output(tmp_path: Path) -> None:
    folder = small(tmp_path, {"ot-zero-top-seed0": "failed"})

    def with_paths(record: dict) -> None:
        record["error"]["message"] = "cannot read /mnt/secret/models/base: broken"
        record["provenance"]["platform"] = "Linux /opt/secret/python"
        record["config"]["model"]["caveat"] = "from /data/private/model"

    change_record(folder, "ot-zero-top-seed0", with_paths)
    cell = folder / "cells" / "avg-zero-top-seed0" / "samples.parquet"
    samples = pd.read_parquet(cell)
    samples.assign(overrides='{"model.path": "/data/private/model"}').to_parquet(cell)
    write_report(folder)
    for path in [*folder.glob("*.*"), *(folder / "figures").glob("*.svg")]:
        content = path.read_bytes()
        for secret in (b"/mnt/secret", b"/opt/secret", b"/data/private", str(tmp_path).encode()):
            assert secret not in content, path.name
    assert not pd.read_parquet(folder / "samples.parquet")["overrides"].str.contains("/data").any()


def test_the_same_records_give_the_same_report(sweep: Path) -> None:
    before = {path: path.read_bytes() for path in [*map(sweep.joinpath, FILES), *(sweep / "figures").iterdir()]}
    (sweep / "figures" / "old.svg").write_text("left over")
    write_report(sweep)
    after = {path: path.read_bytes() for path in before}
    assert [path.name for path in before if before[path] != after[path]] == []
    assert not (sweep / "figures" / "old.svg").exists()


# ---- partial sweeps and caveats


def test_failed_skipped_and_missing_cells_are_named_with_reasons(tmp_path: Path) -> None:
    folder = small(tmp_path, {"ot-zero-top-seed0": "failed", "avg-zero-top-seed0": "skipped"})
    cells = [path.name for path in (folder / "cells").iterdir()] + ["copy-zero-top-seed0"]
    (folder / "sweep.json").write_text(json.dumps({"cells": cells}))
    (folder / "cells" / "avg-nozero-top-seed0" / "record.json").write_text('{"status": "o')
    write_report(folder)
    text = read(folder)
    assert "5 cells asked for: 1 ok, 1 failed, 1 skipped, 2 without a record." in text
    assert "RuntimeError: layer <16> &amp; plan" in text and "align=none has no zero_init" in text
    assert "copy-zero-top-seed0 | no record" in text
    assert "cannot answer objection 1" in text


def test_nothing_but_failures_still_gives_a_report(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path / "small", make_samples(**SMALL), dict.fromkeys(
        [f"{align}-{zero}-top-seed0" for align in ("ot", "avg") for zero in ("zero", "nozero")], "failed"))  # fmt: skip
    write_report(folder)
    assert all((folder / name).exists() for name in FILES)
    assert "4 cells asked for: 0 ok, 4 failed" in read(folder)
    assert pd.read_csv(folder / "significance.csv").columns.tolist() == SIGNIFICANCE_COLUMNS


@pytest.mark.parametrize("aligns, zero_inits", [(("ot",), (True,)), (("half", "copy"), (True, False))])
def test_a_sweep_without_the_pair_says_that_it_cannot_answer(tmp_path: Path, aligns, zero_inits) -> None:
    folder = small(tmp_path, aligns=aligns, zero_inits=zero_inits)
    write_report(folder)
    assert "cannot answer objection 1" in read(folder)
    rows = list(csv.DictReader((folder / "significance.csv").open()))
    assert bool(rows) == (len(aligns) > 1)


def test_one_seed_answers_for_these_runs_only(tmp_path: Path) -> None:
    folder = small(tmp_path)
    write_report(folder)
    text = read(folder)
    assert "Only 1 seed: nothing here generalises to new runs" in text
    assert "level item: holds for these runs, new questions" in text


def test_unequal_budgets_mixed_environments_and_lost_samples_are_named(tmp_path: Path) -> None:
    folder = small(tmp_path)

    def differ(record: dict) -> None:
        record["cpt"]["tokens"] = 99
        record["provenance"]["versions"] = {"torch": "1.0"}
        record["provenance"]["git"] = "abc1234+"

    change_record(folder, "ot-zero-top-seed0", differ)
    (folder / "cells" / "avg-nozero-top-seed0" / "samples.parquet").unlink()
    write_report(folder)
    text = read(folder).partition("## Objection")[0]
    assert "Unequal budgets in cpt" in text and "99 tokens: ot-zero-top-seed0" in text
    assert "cells differ in versions" in text and "cells differ in git" in text and "uncommitted changes" in text
    assert "without samples.parquet, left out of all tests: avg-nozero-top-seed0" in text
    assert "random weights <b>caveat" in text


def test_names_leave_out_what_all_cells_share_and_budgets_are_compared_within_a_seed(tmp_path: Path) -> None:
    samples = make_samples(**SMALL | {"seeds": (0, 1)})
    tail = "-cpt.lr3e-4-tiny"
    folder = write_sweep(tmp_path / "named", samples.assign(arm=samples["arm"] + tail, cell=samples["cell"] + tail))
    for cell in folder.glob("cells/*seed1*"):
        change_record(folder, cell.name, lambda record: record["sft"].update(tokens=513))
    write_report(folder)
    text = read(folder)
    assert "every cell shares: cpt.lr3e-4-tiny" in text
    assert f"[ot-zero-top-seed1](cells/ot-zero-top-seed1{tail}/record.json)" in text
    assert "Unequal budgets" not in text
    change_record(folder, f"ot-zero-top-seed1{tail}", lambda record: record["sft"].update(tokens=514))
    write_report(folder)
    text = read(folder)
    assert "Unequal budgets in sft, seed 1" in text and "514 tokens: ot-zero-top-seed1" in text


def test_a_clean_sweep_has_no_false_alarm(sweep: Path) -> None:
    text = read(sweep).partition("## Objection")[0]
    for word in ("Unequal", "Mixed", "failed:", "uncommitted", "Not compared", "without samples.parquet"):
        assert word not in text


def test_arms_with_different_documents_are_refused_in_the_report(tmp_path: Path) -> None:
    folder = small(tmp_path)
    path = folder / "cells" / "ot-zero-top-seed0" / "samples.parquet"
    samples = pd.read_parquet(path)
    lost = samples.loc[samples["task"] == "summary", "doc_hash"].iloc[0]
    samples[samples["doc_hash"] != lost].to_parquet(path)
    write_report(folder)
    text = read(folder)
    assert "Not compared: ot - avg | zero_init=true" in text and lost in text
    assert "With zero_init=false held fixed" in text and "With zero_init=true held fixed" not in text


# ---- wording and renderers


def test_numbers_as_text() -> None:
    assert [number(value) for value in (1234.5, None, float("nan"), 6.8e6)] == ["1,234.50", "-", "-", "6.800e+06"]
    assert [signed(value) for value in (0.5, -0.5, 0.0, -0.001)] == ["+0.50", "-0.50", "0.00", "0.00"]
    assert interval(float("nan"), 1.0) == "-" and interval(-1, 1, 1, sign=True) == "[-1.0, +1.0]"
    assert [p_value(p) for p in (0.00001, 0.0079, 0.5, float("nan"))] == ["<0.0001", "0.0079", "0.50", "-"]


def test_paths_are_cut_but_stay_apart_and_fractions_stay() -> None:
    one, two = without_paths("/a/b/model"), without_paths("/c/d/model")
    assert one != two and one.startswith("model~") and "/" not in one
    assert without_paths("1/2 of ot/avg, https://example.org/x") == "1/2 of ot/avg, https://example.org/x"


def test_markdown_and_latex_escape_what_users_type() -> None:
    assert escape("a|b <i>*x*</i> [t](u)\nz") == "a\\|b &lt;i>\\*x\\*&lt;/i> [t]\\(u) z"
    text = render_latex([Table("50% & more_of", ["a", "b"], [["x_1 < 2", Link("\\y", "z")], ["[1, 2]", "#"]])])
    assert r"\caption{50\% \& more\_of}" in text and r"x\_1 \textless{} 2 & \textbackslash{}y \\" in text
    assert text.count(r"\toprule") == text.count(r"\midrule") == text.count(r"\bottomrule") == 1


# ---- the entry


def test_the_entry_writes_again_from_records(sweep: Path, capsys) -> None:
    (sweep / "report.md").unlink()
    assert main([f"sweep={sweep}"]) == 0
    assert (sweep / "report.md").exists() and "report.md" in capsys.readouterr().out


BAD = [
    ([], "no arguments"),
    (["sweep"], "sweep: not understood"),
    (["swep=x"], "swep=x: not understood"),
    (["sweep=a", "sweep=b"], "given twice"),
    (["sweep=a", "out=b"], "one of the two forms"),
    (["lm_eval=*.json"], "one of the two forms"),
    (["lm_eval=nothing/*.json", "out=b"], "no file fits"),
    (["sweep=nowhere"], "no cells/*/record.json"),
]


@pytest.mark.parametrize("arguments, message", BAD)
def test_bad_input_exits_2_with_one_message_and_writes_nothing(
    arguments: list[str], message: str, capsys, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


# ---- foreign result files


def lm_eval_file(folder: Path, name: str, rate: float, n: int = 100, old: bool = False) -> None:
    key, stderr = ("acc", "acc_stderr") if old else ("acc,none", "acc_stderr,none")
    result = {task: {key: rate, stderr: (rate * (1 - rate) / (n - 1)) ** 0.5} for task in ("piqa", "boolq", "arc")}
    content = {"results": result | {"wikitext": {"word_perplexity,none": 9.0, "word_perplexity_stderr,none": "N/A"}}}
    if not old:
        content["n-samples"] = {task: {"original": n, "effective": n} for task in result}
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(content))


def test_old_and_new_layouts_are_read_alike(tmp_path: Path) -> None:
    lm_eval_file(tmp_path / "in", "g__new__checkpoint-1__x.json", 0.6)
    lm_eval_file(tmp_path / "in", "g__old__checkpoint-1__x.json", 0.6, old=True)
    new, old = read_published(str(tmp_path / "in" / "*.json"))
    assert new.counts == old.counts and new.counts["piqa"].right == 60 and new.word_perplexity == 9.0


def test_foreign_names_need_a_mapping(tmp_path: Path, capsys) -> None:
    lm_eval_file(tmp_path / "in", "one.json", 0.6)
    lm_eval_file(tmp_path / "in", "two.json", 0.5)
    arguments = [f"lm_eval={tmp_path / 'in' / '*.json'}", f"out={tmp_path / 'out'}"]
    assert main(arguments) == 2
    assert "one.json: not named" in capsys.readouterr().err and not (tmp_path / "out").exists()
    (tmp_path / "map").write_text(json.dumps({"one.json": ["g", "better", 5], "two.json": ["g", "worse", 5]}))
    assert main([*arguments, f"mapping={tmp_path / 'map'}"]) == 0
    rows = pd.read_csv(tmp_path / "out" / "significance.csv")
    assert set(rows["contrast"]) == {"better - worse | group=g, step=5"}
    assert rows.query("task == 'macro' and test == 'unpaired z'")["estimate"].iloc[0] == pytest.approx(10)
    assert "better" in (tmp_path / "out" / "report.html").read_text()


def test_a_file_that_is_no_result_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "g__m__checkpoint-1__x.json").write_text("[1, 2]")
    with pytest.raises(ValueError, match="g__m__checkpoint-1__x.json: no lm-eval result file"):
        read_published(str(tmp_path / "*.json"))


@pytest.fixture(scope="module")
def golden() -> dict:
    from conftest import shared_folder

    folder = shared_folder()
    if folder is None:
        pytest.skip("the shared data is not here")
    reference = json.loads((folder / "data" / "published_results.golden.json").read_text())
    runs = {run.name: run for run in read_published(str(folder / "data" / "published_results" / "*.json"))}
    return {"reference": reference, "runs": runs}


def test_golden_counts_averages_and_errors(golden: dict) -> None:
    runs, reference = golden["runs"], golden["reference"]
    assert len(runs) == 27 and len(reference["average"]) == 12
    for name, average in reference["average"].items():
        run, expected = runs[name], reference["tasks"][name]
        assert {task: count.right for task, count in run.counts.items()} == expected["k"]
        assert all(count.n == reference["n"][task] for task, count in run.counts.items())
        assert macro_average(run.counts) == pytest.approx(average, abs=1e-6)
        assert macro_se(run.counts) == pytest.approx(expected["macro_se"], abs=1e-6)
        assert run.word_perplexity == pytest.approx(expected["word_perplexity"], abs=1e-6)


def test_golden_wins(golden: dict) -> None:
    runs = golden["runs"]
    for name, expected in golden["reference"]["wins_of_8"].items():
        first, second = opt_deus_and(runs, *name.split("|"))
        perplexities = first.word_perplexity, second.word_perplexity
        assert wins(first.counts, second.counts, perplexities) == tuple(expected.values())


def opt_deus_and(runs: dict, group: str, other: str) -> tuple:
    """The paper's own method at its last step, whatever its file calls it, and another one."""
    own = f"{group}|OpT-DeUS-Top|12100"
    return runs.get(own) or runs[f"{group}|OpT-DeUS|12100"], runs[f"{group}|{other}|12100"]


RANK_TESTS = {
    "Wilcoxon, zeros dropped": "p_wilcoxon_zeros_dropped",
    "Wilcoxon, Pratt": "p_wilcoxon_pratt",
    "sign": "p_sign",
    "sign-flip permutation": "p_signflip",
}


def test_golden_comparisons(golden: dict) -> None:
    checked = 0
    for name, expected in golden["reference"]["comparisons"].items():
        group, _, _, other = name.split("|")
        first, second = opt_deus_and(golden["runs"], group, other)
        pair = {"group": group, "step": 1, "first": "a", "second": "b", "counts": (first.counts, second.counts)}
        pair["subtasks"] = (first.subtasks, second.subtasks)
        by_margin = {margin: published_table([pair], "acc", float(margin)) for margin in ("0.5", "1.0")}
        rows = by_margin["0.5"].set_index(["task", "test"])
        for task, values in expected["per_task"].items():
            row = rows.loc[(task, "unpaired z")]
            assert_row(row, values["diff"], values["ci95"], values["z"], values["p"])
            discordant = None if np.isnan(row["max_discordant"]) else row["max_discordant"]
            assert discordant == values["max_discordant_p05"]
        macro, tasks = expected["macro"], expected["tasks"]
        assert_row(rows.loc[("macro", "unpaired z")], macro["diff"], macro["ci95"], macro["z"], macro["p"])
        assert rows.loc[("macro", "unpaired z"), "mde"] == pytest.approx(macro["mde80"], abs=1e-6)
        assert_row(rows.loc[("macro", "paired t")], tasks["mean"], tasks["ci95_t"], tasks["t"], tasks["p_t"])
        for test, key in RANK_TESTS.items():
            assert rows.loc[("macro", test), "p"] == pytest.approx(tasks[key], abs=1e-6)
        for margin, table in by_margin.items():
            equivalence = table.set_index(["task", "test"])["p_equivalence"]
            assert equivalence[("macro", "unpaired z")] == pytest.approx(macro["tost_z"][margin], abs=1e-6)
            assert equivalence[("macro", "paired t")] == pytest.approx(macro["tost_t"][margin], abs=1e-6)
        subtasks, mmlu = rows.loc["mmlu subtasks"], expected["mmlu57"]
        assert subtasks.loc["paired t", "estimate"] == pytest.approx(mmlu["mean"], abs=1e-6)
        assert subtasks.loc["paired t", "statistic"] == pytest.approx(mmlu["t"], abs=1e-6)
        assert subtasks.loc["paired t", "p"] == pytest.approx(mmlu["p_t"], abs=1e-6)
        assert subtasks.loc["sign", "p"] == pytest.approx(mmlu["p_sign"], abs=1e-6)
        assert subtasks.loc["Cochran Q", "statistic"] == pytest.approx(mmlu["Q"], abs=1e-6)
        for task, value in expected["leave_one_task_out"].items():
            assert rows.loc[(f"macro without {task}", "unpaired z"), "estimate"] == pytest.approx(value, abs=1e-6)
        checked += 1
    assert checked == 4


def assert_row(row: pd.Series, estimate: float, ends: list[float], statistic: float, p: float) -> None:
    found = [row["estimate"], row["ci_low"], row["ci_high"], row["statistic"], row["p"]]
    assert found == pytest.approx([estimate, *ends, statistic, p], abs=1e-6)


def test_the_published_report_is_written(golden: dict, tmp_path: Path) -> None:
    from conftest import shared_folder

    pattern = shared_folder() / "data" / "published_results" / "CPT-11.5B__*.json"
    assert main([f"lm_eval={pattern}", f"out={tmp_path}"]) == 0
    rows = pd.read_csv(tmp_path / "significance.csv")
    assert rows["contrast"].nunique() == 9 * 8 // 2 and rows.columns.tolist() == SIGNIFICANCE_COLUMNS
    text = (tmp_path / "report.md").read_text()
    assert "the runs differ in GPU" in text and "/models/" not in text
