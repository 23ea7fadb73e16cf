"""Tracker runs: one per cell, offline, always finished, never in the way (hard case 11)."""

from __future__ import annotations

import builtins
import logging
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import wandb
from wandb.proto import wandb_internal_pb2

from opt_deus.config import TrackerConfig
from opt_deus.training import tracking
from opt_deus.training.tracking import logged_in, open_run

BLOCK, FULL, LAST = 32768, 1, 4
WANDB = TrackerConfig(name="wandb", project="test")


@pytest.fixture(autouse=True)
def _logged_out(monkeypatch, tmp_path):
    """No key, no network, whatever this machine has."""
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("NETRC", raising=False)


def records(path: Path) -> Iterator[bytes]:
    """The records of a .wandb file: LevelDB's log format (32 KiB blocks) after a header of 7 bytes."""
    data, position, pieces = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        left = BLOCK - position % BLOCK
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        pieces += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (FULL, LAST):
            yield pieces
            pieces = b""


def stored(folder: Path) -> dict:
    """What an offline run's file says: name, group, exit code, history."""
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    found = {"history": []}
    for data in records(path):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.HasField("run"):
            found |= {"name": record.run.display_name, "group": record.run.run_group, "project": record.run.project}
        if record.HasField("exit"):
            found["exit"] = record.exit.exit_code
        if record.HasField("history"):
            found["history"].append({item.key or item.nested_key[0]: item.value_json for item in record.history.item})
    return found


def test_three_offline_jobs_of_which_the_second_fails(tmp_path):
    for job in range(3):
        try:
            with open_run(WANDB, "sweep", f"cell-{job}", {"seed": job}, tmp_path / str(job)) as run:
                run.log({"perplexity/base": 10.0 + job})
                arguments = SimpleNamespace(run_name="cpt")
                logs = {"loss": 2.0, "learning_rate": 1e-4, "grad_norm": 0.5}
                run.callbacks[0].on_log(arguments, SimpleNamespace(global_step=1), None, logs=logs)
                if job == 1:
                    raise RuntimeError("this cell fails")
        except RuntimeError:
            assert job == 1
    wandb.teardown()  # its service has written everything only when it has ended
    runs = [stored(tmp_path / str(job)) for job in range(3)]
    assert [run["name"] for run in runs] == ["cell-0", "cell-1", "cell-2"]
    assert {(run["group"], run["project"]) for run in runs} == {("sweep", "test")}
    assert [run["exit"] for run in runs] == [0, 1, 0]
    for job, run in enumerate(runs):
        merged = {key: value for line in run["history"] for key, value in line.items()}
        assert float(merged["perplexity/base"]) == 10.0 + job
        assert float(merged["cpt/loss"]) == 2.0 and int(merged["cpt/step"]) == 1


def test_none_writes_nothing(tmp_path):
    with open_run(TrackerConfig(), "sweep", "cell", {}, tmp_path) as run:
        run.log({"a": 1.0})
        assert run.callbacks == []
    assert list(tmp_path.iterdir()) == []


def test_a_missing_wandb_is_a_warning(tmp_path, monkeypatch, caplog):
    real = builtins.__import__

    def refuse(name, *rest, **named):
        if name == "wandb":
            raise ImportError("no wandb here")
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with caplog.at_level(logging.WARNING), open_run(WANDB, "sweep", "cell", {}, tmp_path) as run:
        run.log({"a": 1.0})
    assert "no wandb here" in caplog.text and "opt-deus[wandb]" in caplog.text


def test_a_tracker_that_breaks_on_the_way_ends_nothing(tmp_path, monkeypatch, caplog):
    def broken(*_, **__):
        raise OSError("disk full")

    calls = []
    fake = SimpleNamespace(log=lambda numbers: (calls.append(numbers), broken()), finish=broken)
    monkeypatch.setattr(tracking, "_start", lambda *_: fake)
    with caplog.at_level(logging.WARNING), open_run(WANDB, "sweep", "cell", {}, tmp_path) as run:
        run.log({"a": 1.0})
        run.log({"a": 2.0})
    assert len(calls) == 1 and caplog.text.count("disk full") == 1


def test_online_only_where_logged_in(tmp_path, monkeypatch):
    modes = []
    monkeypatch.setattr(wandb, "init", lambda **named: modes.append(named["mode"]))

    def start(offline: bool = False) -> None:
        with open_run(WANDB, "sweep", "cell", {}, tmp_path, offline):
            pass

    start()
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password " + "x" * 40 + "\n")
    (tmp_path / ".netrc").chmod(0o600)
    start()
    start(offline=True)
    monkeypatch.setenv("WANDB_MODE", "offline")
    start()
    assert modes == ["offline", "online", "offline", "offline"]
    monkeypatch.setenv("WANDB_MODE", "online")
    (tmp_path / ".netrc").unlink()
    assert not logged_in()
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert logged_in()
