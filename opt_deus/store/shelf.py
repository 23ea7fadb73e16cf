"""What a store holds, and keeping it below a size: the least recently used goes first, never what is being built."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from opt_deus.store.artefacts import DISCARDED, LOCK, PART, discard, sibling
from opt_deus.store.verification import MANIFEST, read_manifest

STALE_SECONDS = 24 * 3600  # an unfinished build that nobody touched for a day will not be resumed
_ARTEFACT = re.compile(r"([A-Za-z0-9_-]+)-([0-9a-f]{16})")


@dataclass(frozen=True)
class Entry:
    """One artefact's folder. `size` in bytes; `last_use` in seconds since 1970; `key` None where it is damaged."""

    folder: Path
    stage: str
    hash: str
    size: int
    last_use: float
    key: dict[str, Any] | None


def entries(root: Path) -> list[Entry]:
    """The artefacts of a store, most recently used first. Other folders and files are none of its business."""
    found = []
    for folder in root.iterdir():
        match = _ARTEFACT.fullmatch(folder.name)
        if not match or not folder.is_dir():
            continue
        manifest = read_manifest(folder)
        last_use = (folder / MANIFEST if manifest else folder).stat().st_mtime
        found.append(Entry(folder, *match.groups(), _size(folder), last_use, manifest["key"] if manifest else None))
    return sorted(found, key=lambda entry: (-entry.last_use, entry.folder.name))


def prune(root: Path, max_bytes: float | None) -> list[Path]:
    """Removes what is damaged or stale, then the least recently used until at most `max_bytes` are left.

    What another process holds a lock on stays. Returns what was removed.
    """
    removed = [folder for folder in _stale(root) if _remove(folder)]
    shelf = entries(root)
    removed += [entry.folder for entry in shelf if entry.key is None and _remove(entry.folder)]
    sound = [entry for entry in shelf if entry.key is not None]
    total = sum(entry.size for entry in sound)
    for entry in reversed(sound):
        if max_bytes is None or total <= max_bytes:
            break
        if _remove(entry.folder):
            removed.append(entry.folder)
            total -= entry.size
    return removed


def _stale(root: Path) -> list[Path]:
    """Folders of interrupted builds and removals in which nothing was written for a day."""
    leftovers = [
        path
        for path in root.iterdir()
        if path.is_dir() and path.suffix in (PART, DISCARDED) and _ARTEFACT.fullmatch(path.name.split(".")[0])
    ]
    oldest = time.time() - STALE_SECONDS
    return [path for path in leftovers if max(item.stat().st_mtime for item in [path, *path.rglob("*")]) < oldest]


def _remove(folder: Path) -> bool:
    """Removes a folder unless a process holds its artefact's lock."""
    artefact = folder.with_name(folder.name.split(".")[0])
    try:
        with FileLock(sibling(artefact, LOCK), timeout=0):
            discard(folder)
    except Timeout:
        return False
    return True


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
