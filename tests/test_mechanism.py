"""End to end on the tiny model: every way to make a layer, rounds of growth, plans written out, studies."""

from __future__ import annotations

import json

import pandas
import pytest
import torch
import yaml
from conftest import ROOT
from safetensors.torch import load_file

from opt_deus.pipeline.rounds import SEED_STRIDE

DEBUG = ("+experiment=debug", "offline=true")
UNTRAINED = (*DEBUG, "cpt.tokens=null", "sft.tokens=null", "eval.stages=[]")
ALIGNS = sorted(path.stem for path in (ROOT / "conf/align").glob("*.yaml"))
STUDIES = sorted(path.stem for path in (ROOT / "conf/evidence").glob("*.yaml") if path.stem != "none")


@pytest.fixture(scope="module")
def every_method(tmp_path_factory):
    from conftest import CommandLine

    line = CommandLine(tmp_path_factory.mktemp("methods"))
    run = line("run", "-m", *UNTRAINED, "name=all", f"align={','.join(ALIGNS)}", "zero_init=false")
    assert run.returncode == 0, run.stderr[-3000:]
    return line


@pytest.mark.parametrize("align", ALIGNS)
def test_every_method_runs_in_a_cell(every_method, align):
    records = every_method.records("all")
    record = next(each for each in records.values() if each["cell"]["align"] == align)
    assert record["status"] == "ok", record["error"]
    assert record["perplexity"]["initial"] > 1
    if align not in ("none", "solar"):
        block = record["expand"]["blocks"]["2"]["mlp.up_proj.weight"]
        assert {"solver", "mass", "effective_support", "aligned_norm_ratio"} <= set(block)


@pytest.mark.parametrize(
    "position", [("single", "position.gap=1"), ("fraction", "position.start=0", "position.stop=1")]
)
def test_every_method_takes_single_and_fractional_positions(command, position):
    choice, *knobs = position
    makers = ",".join(align for align in ALIGNS if align not in ("none", "solar"))
    arguments = [*UNTRAINED, "name=where", f"align={makers}", "zero_init=false", f"position={choice}", *knobs]
    arguments += ["num_new_layers=2"] * (choice == "fraction")
    assert command("run", "-m", *arguments).returncode == 0
    for record in command.records("where").values():
        assert len(record["plan"]["inserted"]) == (1 if choice == "single" else 2)


def test_rounds_grow_from_what_was_trained_and_divide_the_budget(command):
    arguments = (*DEBUG, "zero_init=true", "cpt.tokens=512", "sft.tokens=null")
    assert command("run", *arguments, "name=one").returncode == 0
    twice = command("run", *arguments, "name=two", "rounds=2")
    assert twice.returncode == 0, twice.stderr[-2000:]
    (one,), (two,) = command.records("one").values(), command.records("two").values()
    assert two["status"] == "ok", two["error"]
    assert one["plan"]["layers"] == two["plan"]["layers"] == 6 and two["plan"]["base_layers"] == 4
    assert len(two["plan"]["inserted"]) == 2
    assert one["cpt"]["tokens"] == two["cpt"]["tokens"] and one["cpt"]["steps"] == two["cpt"]["steps"]
    first, last = two["plan"]["rounds"]
    assert (first["base_layers"], first["layers"], last["base_layers"], last["layers"]) == (4, 5, 5, 6)
    assert [len(each["inserted"]) for each in (first, last)] == [1, 1]
    assert one["cpt"]["trainable"] == two["cpt"]["trainable"]  # layers of the first round go on training
    assert two["perplexity"]["base"] == one["perplexity"]["base"]
    assert two["perplexity"]["initial"] != pytest.approx(one["perplexity"]["initial"], abs=1e-9)  # trained before
    again = command("run", *arguments, "name=two", "rounds=2")
    assert again.returncode == 0
    (repeated,) = command.records("two").values()
    assert repeated["perplexity"] == two["perplexity"] and "cpt" in repeated["artefacts"]["reused"]


def test_no_round_replays_a_bases_pre_training():
    bases = [yaml.safe_load(path.read_text()) for path in (ROOT / "conf/model").glob("scratch_*.yaml")]
    taken = {base["pretraining"]["seed"] for base in bases}
    assert taken and not taken & {seed + later * SEED_STRIDE for seed in range(100) for later in range(20)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("rounds=0",), "rounds=0"),
        (("rounds=3", "num_new_layers=2"), "leave a round without one"),
        (("rounds=3",), "2 new layers leave a round without one"),  # the default k, known only with the base
        (("zero_weights=mlp", "zero_init=false"), "means nothing with zero_init=false"),
        (("align=ot", "align.solver=partial", "align.mass=1.5"), "align.mass=1.5: a share"),
        (("evidence=swap", "evidence.scale=least"), "evidence.scale=least: unknown"),
        (("evidence=scale", "evidence.tokens=0"), "evidence.tokens=0: must be"),
        (("evidence=scale", "evidence.blocks=many"), "evidence.blocks=many: must be of the kind"),
        (("rounds=2", "align=solar"), "means nothing with align=solar"),
        (("rounds=2", "position=single", "position.gap=0"), "places all layers at once"),
        (("rounds=2", "cpt.tokens=null"), "each needs a step"),
        (("evidence=sale",), "nearest: 'scale'"),
        (("evidence=scale", "align=none"), "means nothing with align=none"),
        (("align=ot", "align.solver=partal"), "nearest: 'partial'"),
    ],
)
def test_what_means_nothing_is_refused(command, arguments, message):
    refused = command("run", *DEBUG, *arguments)
    assert refused.returncode == 2 and message in refused.stderr, refused.stderr
    assert not any(command.folder.iterdir())


def test_plans_are_written_out_and_are_the_ones_that_made_the_layer(command):
    arguments = (*DEBUG, "align=ot_exact", "zero_init=false")
    done = command("expand", *arguments, "out=deeper", "save_plans=plans")
    assert done.returncode == 0, done.stderr
    content = json.loads((command.folder / "plans/plans.json").read_text())
    assert [pair["file"] for pair in content["pairs"]] == ["layers-1-2.safetensors", "layers-2-3.safetensors"]
    assert content["pairs"][0]["diagnostics"]["mlp.up_proj.weight"]["mass"] == 1
    plans = load_file(command.folder / "plans/layers-1-2.safetensors")
    deeper = load_file(command.folder / "deeper/model.safetensors")
    partner = plans["self_attn.q_proj.weight|assignment"]  # q's inputs are the residual stream, as they are
    below, made, above = (deeper[f"model.layers.{index}.self_attn.q_proj.weight"].double() for index in (1, 2, 3))
    assert torch.allclose(made, (below[partner] + above) / 2, atol=1e-2)  # the checkpoint's own dtype
    assert not torch.equal(partner, torch.arange(len(partner)))
    for refused, message in (
        (("align=copy", "save_plans=none"), "aligns nothing"),
        (("align=lesa", "save_plans=none"), "aligns nothing"),
        (("align=ot", "save_plans=same", "out=same"), "the same folder as out"),
        (("align=ot", "save_plans=plans"), "there is something already"),
        (("align=ot", "rounds=2", "out=new"), "expand trains nothing"),
        (("align=ot",), "give one folder"),
    ):
        answer = command("expand", *DEBUG, *refused)
        assert answer.returncode == 2 and message in answer.stderr, answer.stderr
    assert not any((command.folder / name).exists() for name in ("none", "same", "new"))


@pytest.mark.parametrize("study", STUDIES)
def test_every_study_leaves_rows_a_summary_and_a_section(command, study):
    arguments = (*UNTRAINED, "name=study", f"evidence={study}", "evidence.tokens=256", "evidence.length=32")
    done = command("run", "-m", *arguments, "align=ot_exact,avg", "zero_init=false")
    assert done.returncode == 0, done.stderr[-3000:]
    for name, record in command.records("study").items():
        assert record["status"] == "ok", record["error"]
        summary = record["evidence"][study]
        assert summary
        for finding in summary:
            assert set(finding) == {"quantity", "site", "gap", "estimate", "low", "high", "n", "items"}
            assert finding["n"] >= 1
            if finding["low"] is not None:
                rounding = 1e-9 * abs(finding["estimate"])
                assert finding["low"] - rounding <= finding["estimate"] <= finding["high"] + rounding
        rows = pandas.read_parquet(command.folder / f"multirun_reports/study/cells/{name}/evidence.parquet")
        assert list(rows.columns) == ["quantity", "site", "gap", "item", "value"] and len(rows)
    report = (command.folder / "multirun_reports/study/report.md").read_text()
    assert f"## Evidence: {study}" in report
    assert (command.folder / "multirun_reports/study/evidence.csv").stat().st_size
