"""End to end: the real command line on the tiny model, and what survives faults, kills and repetition."""

from __future__ import annotations

import json
import signal
import time

import pandas
import pytest
from conftest import same

DEBUG = ("+experiment=debug", "offline=true")


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """The debug 2x2 with two seeds, run once for this file."""
    from conftest import CommandLine

    line = CommandLine(tmp_path_factory.mktemp("grid"))
    arguments = ("-m", *DEBUG, "name=grid", "align=ot,avg", "zero_init=true,false", "seed=0,1")
    first = line("run", *arguments)
    assert first.returncode == 0, first.stderr[-3000:]
    return line, arguments, first


def test_the_grid_leaves_every_record_and_file_of_the_contract(grid):
    line, _, first = grid
    records = line.records("grid")
    assert set(records) == {f"{a}-{z}-top-seed{s}" for a in ("ot", "avg") for z in ("zero", "nozero") for s in (0, 1)}
    for name, record in records.items():
        assert record["status"] == "ok" and record["schema_version"] == 1
        assert record["plan"]["inserted"] == [2, 4] and record["plan"]["parents"] == [[1, 2], [2, 3]]
        assert set(record["perplexity"]) >= {"base", "initial", "cpt", "sft"}
        same_start = abs(record["perplexity"]["initial"] / record["perplexity"]["base"] - 1) < 1e-4
        assert same_start == record["cell"]["zero_init"]
        assert record["cpt"]["tokens"] == 256 and record["cpt"]["steps"] == 4
        block = record["expand"]["blocks"]["2"]["mlp.up_proj.weight"]
        assert abs(block["mass"] - 1) < 1e-3 and block["marginal_error"] <= 1e-4
        for stage in ("initial", "cpt", "sft"):
            for splits in record["eval"][stage].values():
                assert splits["all"]["n"] == sum(splits[part]["n"] for part in ("select", "confirm") if part in splits)
        folder = line.folder / "multirun_reports/grid/cells" / name
        losses = [json.loads(row) for row in (folder / "log.jsonl").read_text().splitlines()]
        assert {row["stage"] for row in losses} == {"cpt", "sft"}
        assert (folder / ".hydra/config.yaml").is_file()
    sweep = line.folder / "multirun_reports/grid"
    for file in ("report.md", "report.html", "significance.csv", "significance.tex", "effects.csv", "samples.parquet"):
        assert (sweep / file).stat().st_size > 0, file
    samples = pandas.read_parquet(sweep / "samples.parquet")
    assert list(samples.columns) == [
        "cell",
        "arm",
        "align",
        "zero_init",
        "position",
        "seed",
        "overrides",
        "stage",
        "task",
        "split",
        "doc_id",
        "doc_hash",
        "metric",
        "value",
    ]
    assert set(samples["cell"]) == set(records)
    assert "[8/8]" in first.stdout and "0 failed" in first.stdout


def test_shared_stages_run_once(grid):
    line, _, _ = grid
    records = line.records("grid").values()
    store = line.folder / "store"
    assert len(list(store.glob("layer-*"))) - len(list(store.glob("layer-*.lock"))) == 4  # 2 gaps x 2 methods
    assert len({record["artefacts"]["expand"] for record in records}) == 4
    assert len({record["artefacts"]["eval"]["base"] for record in records}) == 1
    assert sum("eval-base" not in record["artefacts"]["reused"] for record in records) == 1
    assert sum("expand" not in record["artefacts"]["reused"] for record in records) == 4


def test_the_same_command_again_does_nothing_and_says_the_same(grid):
    line, arguments, _ = grid
    before = line.records("grid")
    again = line("run", *arguments)
    assert again.returncode == 0, again.stderr[-2000:]
    after = line.records("grid")
    assert {name: same(record) for name, record in after.items()} == {
        name: same(record) for name, record in before.items()
    }
    for record in after.values():
        assert {"expand", "cpt", "sft"} <= set(record["artefacts"]["reused"])


def test_a_cell_alone_equals_the_cell_in_its_grid(grid, command):
    line, _, _ = grid
    alone = command("run", *DEBUG, "name=alone", "align=avg", "zero_init=false", "seed=1")
    assert alone.returncode == 0, alone.stderr[-2000:]
    (record,) = command.records("alone").values()
    assert same(record) == same(line.records("grid")["avg-nozero-top-seed1"])


def test_damage_is_repaired_and_only_damage(grid):
    line, arguments, _ = grid
    before = line.records("grid")
    cells = line.folder / "multirun_reports/grid/cells"
    (cells / "ot-zero-top-seed0/record.json").write_text("{ half a rec")
    (cells / "avg-zero-top-seed0/record.json").unlink()
    trained = line.folder / "store" / before["ot-nozero-top-seed1"]["artefacts"]["cpt"] / "trained.safetensors"
    content = bytearray(trained.read_bytes())
    content[-5] ^= 1
    trained.write_bytes(content)
    assert line("run", *arguments).returncode == 0
    after = line.records("grid")
    assert {name: same(record) for name, record in after.items()} == {
        name: same(record) for name, record in before.items()
    }
    rebuilt = [name for name, record in after.items() if "cpt" not in record["artefacts"]["reused"]]
    assert rebuilt == ["ot-nozero-top-seed1"]


def test_one_failed_cell_leaves_the_others_and_its_traceback(command):
    run = command("run", "-m", *DEBUG, "name=faulty", "cpt.lr=1e-3,1e30", "seed=0,1")
    records = command.records("faulty")
    assert run.returncode == 1
    assert len(records) == 4
    failed = {name: record for name, record in records.items() if record["status"] == "failed"}
    assert set(failed) == {"ot-zero-top-seed0-cpt.lr1e30", "ot-zero-top-seed1-cpt.lr1e30"}
    for name, record in failed.items():
        assert record["error"]["type"] == "TrainingDiverged" and "Traceback" in record["error"]["traceback"]
        assert name in run.stdout and "record.json" in run.stdout
    assert (command.folder / "multirun_reports/faulty/report.md").is_file()


def test_skipped_cells_are_recorded_and_the_exit_code_stays_0(command):
    run = command("run", "-m", *DEBUG, "name=crossed", "align=solar,none", "zero_init=true,false", "sft.tokens=null")
    assert run.returncode == 0, run.stderr[-2000:]
    statuses = {name: record["status"] for name, record in command.records("crossed").items()}
    assert statuses == {
        "solar-zero-top-seed0-sft.tokensnull": "skipped",
        "solar-nozero-top-seed0-sft.tokensnull": "ok",
        "none-zero-top-seed0-sft.tokensnull": "skipped",
        "none-nozero-top-seed0-sft.tokensnull": "ok",
    }
    base = command.records("crossed")["none-nozero-top-seed0-sft.tokensnull"]
    assert base["perplexity"]["initial"] == pytest.approx(base["perplexity"]["base"])
    assert base["plan"]["inserted"] == [] and base["sft"] is None


def test_a_killed_run_resumes_to_the_same_result(grid, command):
    line, _, _ = grid
    arguments = (*DEBUG, "name=killed", "align=ot", "zero_init=false", "seed=0", "cpt.save_steps=1")
    expected = same(line.records("grid")["ot-nozero-top-seed0"])
    killed = []
    for _ in range(3):  # killed in whatever it is doing: once while it trains, at least
        process = command.start("run", *arguments)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None:
            if list(command.folder.glob("store/*.part/checkpoint-*")):
                break
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        killed.append(process.wait() == -signal.SIGKILL)
    assert any(killed)
    final = command("run", *arguments)
    assert final.returncode == 0, final.stderr[-2000:]
    (record,) = command.records("killed").values()
    assert same(record) == expected
    assert not list(command.folder.glob("store/*.part"))


@pytest.mark.parametrize(
    "arguments",
    [
        ("align=ott",),
        ("zero_int=true",),
        ("model=path", "model.path=nowhere"),
        ("-m", *DEBUG, "position=explicit", "position.after=[3]"),
        ("num_new_layers=30",),
        ("eval=local", "eval.tasks=[piqa]", "eval.data={piqa: nowhere.jsonl}"),
        ("data=text", "data.path=nowhere.txt"),
        ("model=llama31_8b", "offline=true"),
    ],
    ids=" ".join,
)
def test_bad_input_exits_2_with_one_message_in_seconds_and_writes_nothing(command, arguments):
    start = time.monotonic()
    run = command("run", *arguments)
    assert run.returncode == 2, run.stdout + run.stderr
    assert time.monotonic() - start < 10
    assert len(run.stderr.strip().splitlines()) == 1 and run.stderr.startswith("opt_deus: ")
    assert "Traceback" not in run.stderr + run.stdout
    assert list(command.folder.iterdir()) == []


@pytest.mark.parametrize("experiment", ["paper_1b", "paper_8b", "overnight", "review_scratch"])
def test_dry_run_prints_the_plan_and_writes_nothing(command, experiment):
    run = command("run", "-m", f"+experiment={experiment}", "dry_run=true")
    assert run.returncode == 0, run.stderr
    assert "what trains" in run.stdout and "new layers only" in run.stdout
    if experiment == "paper_8b":
        assert "11,520,053,248" in run.stdout and "32 -> 48 layers" in run.stdout
    if experiment == "paper_1b":
        assert "1,722,386,432" in run.stdout
    assert list(command.folder.iterdir()) == []


def test_a_sweep_name_that_is_a_file_and_a_store_that_cannot_be_written_are_refused(command):
    (command.folder / "store").write_text("in the way")
    run = command("run", *DEBUG, "name=x")
    assert run.returncode == 2 and "store.root=store" in run.stderr


def test_update_match_gives_the_reference_methods_update(command):
    run = command(
        "run",
        "-m",
        *DEBUG,
        "name=matched",
        "align=half,avg",
        "zero_init=false",
        "update_match=avg",
        "cpt.tokens=null",
        "sft.tokens=null",
        "eval.stages=[]",
    )
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    plain = command(
        "run",
        *DEBUG,
        "name=plain",
        "align=avg",
        "zero_init=false",
        "cpt.tokens=null",
        "sft.tokens=null",
        "eval.stages=[]",
    )
    assert plain.returncode == 0
    records = {record["cell"]["align"]: record for record in command.records("matched").values()}
    (avg,) = command.records("plain").values()
    assert records["avg"]["perplexity"]["initial"] == pytest.approx(avg["perplexity"]["initial"], rel=1e-3)
    assert records["half"]["perplexity"]["initial"] != pytest.approx(avg["perplexity"]["initial"], rel=1e-6)


def test_local_data_from_the_command_line(command, shared):
    data = shared / "data/blimp/transitive.jsonl"
    few = command.folder / "few.jsonl"
    few.write_text("".join(data.open().readlines()[:20]))
    arguments = (
        *DEBUG,
        "name=local",
        "eval=local",
        "eval.tasks=[blimp_transitive]",
        "cpt.tokens=null",
        "sft.tokens=null",
    )
    run = command("run", *arguments, "eval.data={blimp_transitive: few.jsonl}", HF_HUB_OFFLINE="1")
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    (record,) = command.records("local").values()
    assert record["eval"]["initial"]["blimp_transitive"]["all"]["n"] == 8
    missing = command("run", *arguments, "eval.data={blimp_transitive: nowhere.jsonl}")
    assert missing.returncode == 2 and "nowhere.jsonl" in missing.stderr and "blimp_transitive" in missing.stderr


def test_sft_of_fewer_tensors_than_cpt_is_rebuilt_whole_from_the_store(command):
    arguments = (
        *DEBUG,
        "name=chain",
        "align=avg",
        "zero_init=false",
        "cpt.trainable=all",
        "cpt.lr=0.01",
        "eval.stages=[sft]",
    )
    assert command("run", *arguments).returncode == 0
    assert command("run", *arguments, "eval.limit=4").returncode == 0  # evaluated again, from what the store holds
    first, second = (record["perplexity"]["sft"] for record in command.records("chain").values())
    assert first == second


def test_no_machine_path_in_what_a_sweep_leaves(grid):
    line, _, _ = grid
    for path in (line.folder / "multirun_reports").rglob("*"):
        if path.suffix in (".json", ".yaml", ".md", ".html", ".csv", ".tex", ".jsonl", ".svg"):
            assert str(line.folder) not in path.read_text(), path


@pytest.mark.slow
def test_cells_in_parallel_workers_give_the_same_records(grid, command):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    line, _, _ = grid
    workers = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    arguments = ("-m", *DEBUG, "name=grid", "align=ot,avg", "zero_init=true,false", "seed=0,1")
    run = command("run", *arguments, *workers, OMP_NUM_THREADS="1")
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    found, expected = command.records("grid"), line.records("grid")
    assert found.keys() == expected.keys()
    for name, record in found.items():
        assert record["status"] == "ok"
        assert record["perplexity"] == pytest.approx(expected[name]["perplexity"], rel=1e-4)


@pytest.mark.slow
def test_three_tracked_jobs_of_which_one_fails_are_three_runs(command):
    pytest.importorskip("wandb")
    run = command(
        "run", "-m", *DEBUG, "name=tracked", "tracker=wandb", "cpt.lr=1e-3,1e30,2e-3", WANDB_DIR=str(command.folder)
    )
    assert run.returncode == 1, run.stdout + run.stderr[-2000:]
    assert len(list(command.folder.rglob("offline-run-*"))) == 3
    assert sum(record["status"] == "failed" for record in command.records("tracked").values()) == 1
