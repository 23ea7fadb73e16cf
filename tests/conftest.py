"""Shared by all tests: the command line as a user types it, and where the optional real data lies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def shared_folder() -> Path | None:
    """The real data of tests: $OPT_DEUS_SHARED or ../shared beside the checkout; None where it is absent."""
    for candidate in (os.environ.get("OPT_DEUS_SHARED"), ROOT.parent / "shared"):
        if candidate and (Path(candidate) / "data").is_dir():
            return Path(candidate)
    return None


@pytest.fixture
def shared() -> Path:
    folder = shared_folder()
    if folder is None:
        pytest.skip("the shared data is not here")
    return folder


class CommandLine:
    """Runs `python -m opt_deus.<entry>` in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(
        self, entry: str, *arguments: str, timeout: float = 600, **environment: str
    ) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", f"opt_deus.{entry}", *arguments]
        return subprocess.run(
            command, cwd=self.folder, env=self.environment(environment), capture_output=True, text=True, timeout=timeout
        )

    def start(self, entry: str, *arguments: str, **environment: str) -> subprocess.Popen:
        command = [sys.executable, "-m", f"opt_deus.{entry}", *arguments]
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=self.environment(environment),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    @staticmethod
    def environment(extra: dict[str, str]) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(ROOT), **extra}

    def records(self, name: str) -> dict[str, dict]:
        cells = self.folder / "multirun_reports" / name / "cells"
        return {path.parent.name: json.loads(path.read_text()) for path in sorted(cells.glob("*/record.json"))}


@pytest.fixture
def command(tmp_path: Path) -> CommandLine:
    return CommandLine(tmp_path)


def same(record: dict) -> dict:
    """What two runs of the same cell must agree on (contract: all but provenance, seconds, speed and reuse)."""
    times = ("seconds", "tokens_per_second")

    def strip(value):
        if isinstance(value, dict):
            return {key: strip(each) for key, each in value.items() if key not in times}
        return [strip(each) for each in value] if isinstance(value, list) else value

    plain = strip({key: value for key, value in record.items() if key not in ("provenance", "config")})
    plain["artefacts"] = {key: value for key, value in plain["artefacts"].items() if key != "reused"}
    return plain
