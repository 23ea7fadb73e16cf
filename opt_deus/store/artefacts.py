"""Artefacts on disk. At every moment, also after kill -9, a folder `<stage>-<hash>` is complete or absent."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from opt_deus.store.fingerprints import canonical, fingerprint, sha256_of
from opt_deus.store.verification import MANIFEST, complete_manifest, files_in, remember_verified

PART = ".part"
DISCARDED = ".discarded"
LOCK = ".lock"
PATIENCE_SECONDS = 3.0  # a process that waits longer for another one says so


@dataclass(frozen=True)
class Artefact:
    """A complete, verified folder. `details` is what its build returned."""

    path: Path
    stage: str
    hash: str
    reused: bool
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.stage}-{self.hash}"


class Store:
    """Artefacts under one root, named by stage and by the hash of their key."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)

    def find(self, stage: str, key: dict[str, Any]) -> Artefact | None:
        """The complete and verified artefact, or None where there is none or it is corrupt (which is logged)."""
        folder = self._folder(stage, key)
        manifest = complete_manifest(folder, key)
        if manifest is None:
            return None
        with suppress(OSError):  # a store that may only be read serves as well
            os.utime(folder / MANIFEST)  # last use, which prune goes by
        return Artefact(folder, stage, manifest["hash"], True, manifest["details"])

    def get(
        self, stage: str, key: dict[str, Any], build: Callable[[Path], dict | None], *, resumable: bool = False
    ) -> Artefact:
        """The artefact of this stage and key, built by `build(folder)` unless it is there already.

        `build` writes files into the folder it is given and may return a JSON-able dict, kept as `details`. One process
        builds, others wait and reuse. resumable=True: what an interrupted build left is handed to `build` again.
        """
        if found := self.find(stage, key):
            return found
        folder = self._folder(stage, key)
        with self._explained():
            self.root.mkdir(parents=True, exist_ok=True)
            with locked(sibling(folder, LOCK)):
                if found := self.find(stage, key):
                    return found
                discard(folder)
                return self._build(folder, stage, key, build, resumable)

    def _build(self, folder: Path, stage: str, key: dict, build: Callable, resumable: bool) -> Artefact:
        part = sibling(folder, PART)
        if not resumable:
            discard(part)
        part.mkdir(exist_ok=True)
        (part / MANIFEST).unlink(missing_ok=True)  # of a build interrupted between its manifest and its renaming
        start = time.monotonic()
        details = build(part) or {}
        files = {
            name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)} for name, path in files_in(part).items()
        }
        # Through JSON, so that a fresh artefact's details equal a reused one's (no tuples, no integer keys).
        manifest = json.loads(
            canonical(
                {
                    "stage": stage,
                    "hash": _hash(stage, key),
                    "key": key,
                    "files": files,
                    "details": details,
                    "seconds": round(time.monotonic() - start, 3),
                    "created": datetime.now(UTC).isoformat(timespec="seconds"),
                }
            )
        )
        manifest["seal"] = fingerprint(manifest)  # so that a damaged manifest is noticed too
        for path in files_in(part).values():
            _sync(path)
        _write_synced(part / MANIFEST, json.dumps(manifest, indent=1))
        _sync(part)
        part.rename(folder)
        _sync(self.root)
        remember_verified(folder, files)
        return Artefact(folder, stage, manifest["hash"], False, manifest["details"])

    def _folder(self, stage: str, key: dict[str, Any]) -> Path:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", stage):
            raise ValueError(f"stage={stage!r}: use letters, digits, - and _.")
        return self.root / f"{stage}-{_hash(stage, key)}"

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turns the system's errors about the store into ones that name the store and the remedy."""
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                remedy = f"free some (python -m opt_deus.store prune root={self.root} max_gb=10) or choose another."
                raise OSError(error.errno, f"store.root={self.root}: no space left; {remedy}") from error
            about_store = str(error.filename or "").startswith(str(self.root)) or error.errno == errno.EROFS
            if about_store and isinstance(error, PermissionError | NotADirectoryError | FileExistsError):
                why = error.strerror or str(error)
                raise ValueError(
                    f"store.root={self.root}: cannot be written ({why}); choose a folder of yours."
                ) from error
            raise


def _hash(stage: str, key: dict[str, Any]) -> str:
    return fingerprint({"stage": stage, "key": key})


def sibling(folder: Path, ending: str) -> Path:
    return folder.with_name(folder.name + ending)


def discard(folder: Path) -> None:
    """Removes a folder so that it is never seen half removed: renamed first, then deleted."""
    aside = sibling(folder, DISCARDED)
    shutil.rmtree(aside, ignore_errors=True)
    if folder.exists():
        folder.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the operating system's lock on a file; a dead process holds none. Says once when it has to wait.

    The empty lock files stay: removing one that a third process waits for would let two of them build.
    """
    lock = FileLock(path)
    try:
        lock.acquire(timeout=PATIENCE_SECONDS, poll_interval=0.1)
    except Timeout:
        print(f"store: waiting for {path.stem}, which another process is building ...", file=sys.stderr, flush=True)
        lock.acquire(poll_interval=0.5)
    try:
        yield
    finally:
        lock.release()


def _write_synced(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
