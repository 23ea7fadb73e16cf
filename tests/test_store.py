"""The store: what is complete is reused, what is not is never seen, and one process builds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from opt_deus.store import Store, fingerprint, fingerprint_files
from opt_deus.store import artefacts as artefacts_module
from opt_deus.store.__main__ import main
from opt_deus.store.shelf import entries, prune

# A builder in another process: counts its builds in a file, writes in two steps with a pause between them.
SLOW_BUILD = """
import sys, time
from pathlib import Path
from opt_deus.store import Store, artefacts
root, log, pause = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
artefacts.PATIENCE_SECONDS = 0.2
def build(folder):
    with log.open("a") as file: file.write("built\\n")
    (folder / "first.bin").write_bytes(b"1" * 1000)
    time.sleep(pause)
    (folder / "second.bin").write_bytes(b"2" * 1000)
    return {"answer": 42}
artefact = Store(root).get("expand", {"x": 1}, build)
print(artefact.reused, artefact.details["answer"], (artefact.path / "second.bin").stat().st_size)
"""


def start_build(root: Path, log: Path, pause: float) -> subprocess.Popen:
    command = [sys.executable, "-c", SLOW_BUILD, str(root), str(log), str(pause)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never appeared"
        time.sleep(0.02)


def write(text: str):
    def build(folder: Path) -> dict:
        (folder / "sub").mkdir(exist_ok=True)
        (folder / "sub" / "a.txt").write_text(text)
        return {"numbers": (1, 2), "by_layer": {2: "b", 10: "a"}}

    return build


def must_not_build(folder: Path) -> None:
    raise AssertionError("built although it was in the store")


def test_built_once_then_reused_with_equal_details(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    fresh = store.get("expand", {"b": 1, "a": [1.5, None]}, write("text"))
    again = store.get("expand", {"a": [1.5, None], "b": 1}, must_not_build)
    assert (fresh.reused, again.reused) == (False, True)
    assert fresh.path == again.path == tmp_path / "store" / fresh.name
    assert fresh.details == again.details == {"numbers": [1, 2], "by_layer": {"2": "b", "10": "a"}}
    assert (again.path / "sub" / "a.txt").read_text() == "text"
    manifest = json.loads((fresh.path / "manifest.json").read_text())
    assert manifest["files"]["sub/a.txt"]["bytes"] == 4
    assert str(tmp_path) not in (fresh.path / "manifest.json").read_text()


@pytest.mark.parametrize("stage, key", [("cpt", {"x": 1}), ("expand", {"x": 2}), ("expand", {"x": 1, "y": None})])
def test_another_stage_or_key_is_another_artefact(tmp_path: Path, stage: str, key: dict) -> None:
    store = Store(tmp_path)
    store.get("expand", {"x": 1}, write("one"))
    assert store.find(stage, key) is None
    assert store.get(stage, key, write("two")).reused is False
    assert (store.find("expand", {"x": 1}).path / "sub" / "a.txt").read_text() == "one"


def corrupt_bytes(folder: Path) -> None:
    (folder / "sub" / "a.txt").write_text("tExt")  # the same size


def truncate(folder: Path) -> None:
    (folder / "sub" / "a.txt").write_text("t")


def remove_file(folder: Path) -> None:
    (folder / "sub" / "a.txt").unlink()


def remove_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def alter_manifest(folder: Path) -> None:
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"b"', '"c"'))


def cut_manifest(folder: Path) -> None:
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text[: len(text) // 2])


DAMAGES = [corrupt_bytes, truncate, remove_file, remove_manifest, alter_manifest, cut_manifest]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_corrupt_artefact_is_rebuilt_never_used(tmp_path: Path, damage, caplog) -> None:
    store = Store(tmp_path)
    folder = store.get("expand", {"x": 1}, write("text")).path
    assert store.find("expand", {"x": 1}) is not None
    damage(folder)
    assert store.find("expand", {"x": 1}) is None
    assert "corrupt" in caplog.text and folder.name in caplog.text
    rebuilt = store.get("expand", {"x": 1}, write("text"))
    assert rebuilt.reused is False
    assert (rebuilt.path / "sub" / "a.txt").read_text() == "text"
    assert store.find("expand", {"x": 1}).details["by_layer"] == {"2": "b", "10": "a"}


def test_an_artefact_moved_under_another_name_is_not_used(tmp_path: Path) -> None:
    store = Store(tmp_path)
    one, two = store.get("eval", {"x": 1}, write("one")), store.get("eval", {"x": 2}, write("two"))
    artefacts_module.discard(two.path)
    one.path.rename(two.path)
    assert store.find("eval", {"x": 2}) is None


def test_a_build_that_raises_leaves_nothing_complete(tmp_path: Path) -> None:
    store = Store(tmp_path)

    def fails(folder: Path) -> None:
        (folder / "half.txt").write_text("half")
        raise RuntimeError("solver")

    with pytest.raises(RuntimeError, match="solver"):
        store.get("expand", {"x": 1}, fails)
    assert store.find("expand", {"x": 1}) is None
    artefact = store.get("expand", {"x": 1}, write("whole"))
    assert sorted(path.name for path in artefact.path.rglob("*.txt")) == ["a.txt"]


def test_only_a_resumable_build_gets_what_was_left(tmp_path: Path) -> None:
    store = Store(tmp_path)
    seen = []

    def interrupted(folder: Path) -> None:
        seen.append((folder / "step").exists())
        (folder / "step").write_text("3")
        raise KeyboardInterrupt

    for resumable in (True, True, False):
        with pytest.raises(KeyboardInterrupt):
            store.get("cpt", {"x": 1}, interrupted, resumable=resumable)
    assert seen == [False, True, False]


def test_two_processes_one_builds_the_other_waits_and_says_so(tmp_path: Path) -> None:
    root, log = tmp_path / "store", tmp_path / "log"
    processes = [start_build(root, log, 2.0) for _ in range(2)]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert sorted(out.strip() for out, _ in outputs) == ["False 42 1000", "True 42 1000"], outputs
    assert log.read_text() == "built\n"
    waiting = [err for _, err in outputs if "waiting for expand-" in err]
    assert len(waiting) == 1 and waiting[0].count("waiting for") == 1


def test_kill_9_during_a_build_leaves_no_artefact_and_no_obstacle(tmp_path: Path) -> None:
    root, log = tmp_path / "store", tmp_path / "log"
    process = start_build(root, log, 60.0)
    name = f"expand-{fingerprint({'stage': 'expand', 'key': {'x': 1}})}"
    wait_for(root / f"{name}.part" / "first.bin")
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (root / name).exists() and (root / f"{name}.lock").exists()
    assert Store(root).find("expand", {"x": 1}) is None
    out, err = start_build(root, log, 0.0).communicate(timeout=60)
    assert out.strip() == "False 42 1000" and "waiting" not in err
    assert log.read_text() == "built\n" * 2


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_death_at_any_step_of_completion_leaves_complete_or_nothing(tmp_path: Path, monkeypatch, call: str) -> None:
    """Dies at the first, second, ... fsync or rename in turn, as a kill -9 would; a BaseException stands for it."""

    class Death(BaseException):
        pass

    store, key = Store(tmp_path), {"x": 1}
    for fatal in range(1, 20):
        calls = []
        original = os.fsync if call == "fsync" else Path.rename

        def dying(*arguments, calls=calls, fatal=fatal, original=original):
            calls.append(1)
            if len(calls) == fatal:
                raise Death
            return original(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(os if call == "fsync" else Path, call, dying)
            try:
                store.get("expand", key, write("text"))
                died = False
            except Death:
                died = True
        found = store.find("expand", key)
        assert found is None or (found.path / "sub" / "a.txt").read_text() == "text"
        if not died:
            break
        artefacts_module.discard(store._folder("expand", key))
    assert not died and fatal > 1


def test_each_artefact_is_hashed_once_per_process_unless_touched(tmp_path: Path, monkeypatch) -> None:
    from opt_deus.store import verification

    store = Store(tmp_path)
    folder = store.get("expand", {"x": 1}, write("text")).path
    hashed = []
    original = verification.sha256_of
    monkeypatch.setattr(verification, "sha256_of", lambda path: hashed.append(path.name) or original(path))
    monkeypatch.setattr(verification, "_verified", {})
    for _ in range(3):
        assert store.find("expand", {"x": 1})
    assert hashed == ["a.txt"]
    os.utime(folder / "sub" / "a.txt")
    assert store.find("expand", {"x": 1}) and hashed == ["a.txt", "a.txt"]


def test_a_root_that_cannot_be_written_is_refused_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"store\.root=.*file.*choose a folder"):
        Store(tmp_path / "file" / "store").get("expand", {}, write("text"))


def test_an_error_of_the_build_about_its_own_files_stays_as_it_is(tmp_path: Path) -> None:
    def missing(folder: Path) -> None:
        (tmp_path / "weights").read_text()

    with pytest.raises(FileNotFoundError, match="weights"):
        Store(tmp_path / "store").get("expand", {}, missing)


def test_a_full_disk_is_named_with_a_remedy(tmp_path: Path) -> None:
    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="prune") as caught:
        Store(tmp_path).get("expand", {}, full)
    assert caught.value.errno == 28


@pytest.mark.parametrize("key", [{"x": float("nan")}, {"x": Path("a")}, {"x": {1, 2}}])
def test_keys_that_json_cannot_hold_are_refused(tmp_path: Path, key: dict) -> None:
    with pytest.raises(ValueError, match="finite numbers"):
        Store(tmp_path).get("expand", key, write("text"))


def test_fingerprint_files_follows_names_and_content_not_folders(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a").write_text("a")
        (tmp_path / folder / "b").write_text("b")
    paths = [[tmp_path / folder / name for name in "ab"] for folder in ("one", "two")]
    assert fingerprint_files(paths[0]) == fingerprint_files(reversed(paths[1]))
    (tmp_path / "two" / "b").write_text("c")
    assert fingerprint_files(paths[0]) != fingerprint_files(paths[1])


def test_list_shows_what_is_there(tmp_path: Path, capsys) -> None:
    artefact = Store(tmp_path).get("expand", {"align": "ot", "layers": list(range(100))}, write("text"))
    assert main(["list", f"root={tmp_path}"]) == 0
    out = capsys.readouterr().out
    assert "expand" in out and artefact.hash in out and '"align":"ot"' in out and "1 artefacts" in out
    assert max(map(len, out.splitlines())) < 150


def make_aged(store: Store, ages: list[float]) -> list[Path]:
    """Artefacts of about 1 MB, last used so many seconds ago."""
    folders = []
    for number, age in enumerate(ages):
        folder = store.get("cpt", {"n": number}, lambda part: (part / "w").write_bytes(bytes(1_000_000)) and None).path
        os.utime(folder / "manifest.json", (time.time() - age,) * 2)
        folders.append(folder)
    return folders


def test_prune_removes_the_least_recently_used_until_below_the_cap(tmp_path: Path, capsys) -> None:
    store = Store(tmp_path)
    folders = make_aged(store, [500, 400, 300, 200])
    assert store.find("cpt", {"n": 0})  # used now
    assert main(["prune", f"root={tmp_path}", "max_gb=0.0021"]) == 0
    assert [folder.exists() for folder in folders] == [True, False, False, True]
    assert "removed " + folders[1].name in capsys.readouterr().out


def test_prune_keeps_what_is_locked_and_what_is_not_its_own(tmp_path: Path) -> None:
    store = Store(tmp_path)
    folders = make_aged(store, [500, 400])
    (tmp_path / "my-notes").mkdir()
    with artefacts_module.locked(artefacts_module.sibling(folders[0], ".lock")):
        assert prune(tmp_path, 0) == [folders[1]]
    assert folders[0].exists() and (tmp_path / "my-notes").exists()


def test_prune_removes_stale_parts_and_damaged_artefacts_only(tmp_path: Path) -> None:
    store = Store(tmp_path)
    folders = make_aged(store, [5, 4])
    (folders[0] / "manifest.json").unlink()
    parts = [tmp_path / f"cpt-{'ab'[young] * 16}.part" for young in (False, True)]
    for part in parts:
        part.mkdir()
        (part / "step").write_text("")
    two_days_ago = time.time() - 2 * 24 * 3600
    for path in (parts[0] / "step", parts[0]):
        os.utime(path, (two_days_ago,) * 2)
    assert set(prune(tmp_path, None)) == {folders[0], parts[0]}
    assert [entry.folder for entry in entries(tmp_path)] == [folders[1]] and parts[1].exists()


BAD_ARGUMENTS = [
    ([], "choose list or prune"),
    (["lst"], "choose list or prune"),
    (["list", "max_gb=1"], "list takes root"),
    (["prune", "max_gb=-1", "root=."], "max_gb=-1"),
    (["prune", "max_gb=nan", "root=."], "max_gb=nan"),
    (["prune", "max_gb=many", "root=."], "max_gb=many"),
    (["prune", "size=1"], "prune takes root"),
    (["list", "root=nowhere"], "root=nowhere"),
]


@pytest.mark.parametrize("arguments, message", BAD_ARGUMENTS)
def test_bad_arguments_exit_2_with_one_message(arguments: list[str], message: str, capsys) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and captured.out == ""


def test_the_command_line_imports_no_torch() -> None:
    code = "import sys, opt_deus.store.__main__; print('torch' in sys.modules, 'transformers' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["False", "False"]
