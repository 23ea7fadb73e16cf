"""What is committed: no machine path, no large file, finished examples that follow the contract."""

from __future__ import annotations

import json
import re
import subprocess

import pytest
from conftest import ROOT

MACHINE_PATH = re.compile(r"(?<![\w.])/(?:root|home/\w+|work|tmp|opt|mnt|Users/\w+)/")
LARGEST = 1_500_000  # bytes


@pytest.fixture(scope="module")
def tracked():
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_committed_files_are_small(tracked):
    assert not [path for path in tracked if path.stat().st_size > LARGEST]


def test_committed_reports_hold_no_machine_path(tracked):
    reports = [path for path in tracked if "multirun_reports" in path.parts]
    texts = [path for path in reports if path.suffix not in (".parquet", ".png")]
    found = {path: match[0] for path in texts if (match := MACHINE_PATH.search(path.read_text()))}
    assert not found


def test_committed_cells_are_finished_and_made_by_committed_code(tracked):
    for path in tracked:
        if "multirun_reports" in path.parts and path.name == "record.json":
            record = json.loads(path.read_text())
            assert record["schema_version"] == 1 and record["status"] in ("ok", "skipped"), path
            assert record["provenance"]["git"] and not record["provenance"]["git"].endswith("+"), path
