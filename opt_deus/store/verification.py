"""Is a folder what its manifest says? Sizes and SHA-256 of every file, once per process unless a file was touched."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from opt_deus.store.fingerprints import canonical, fingerprint, sha256_of

MANIFEST = "manifest.json"

log = logging.getLogger(__name__)

# Folder -> sizes, times and inodes of its files when this process last hashed them: 12 cells of one grid ask for one
# 212 MB delta, which is hashed once unless a file was touched since.
_verified: dict[str, list[tuple]] = {}


def files_in(folder: Path) -> dict[str, Path]:
    """Relative name -> path of every file below a folder, its manifest left out, in a fixed order."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path for path in paths if path != folder / MANIFEST}


def _signature(folder: Path, names: dict[str, Any]) -> list[tuple]:
    """What changes when a file is written to: size, time and inode."""
    stats = [(name, (folder / name).stat()) for name in sorted(names)]
    return [(name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino) for name, stat in stats]


def complete_manifest(folder: Path, key: dict[str, Any]) -> dict[str, Any] | None:
    """The manifest of a folder whose key and files are as it says, else None; damage is logged."""
    if not folder.is_dir():
        return None
    manifest, fault = read_manifest(folder), None
    if manifest is None:
        fault = "its manifest is missing or damaged"
    elif canonical(manifest["key"]) != canonical(key):
        fault = "its manifest belongs to another key"
    else:
        fault = _damage(folder, manifest["files"])
    if fault:
        log.warning("store: %s is corrupt (%s) and will be built again.", folder.name, fault)
        return None
    return manifest


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest, or None where it is missing, unreadable or altered."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        seal = manifest.pop("seal")
        return manifest if seal == fingerprint(manifest) else None
    except (OSError, ValueError, KeyError, AttributeError):
        return None


def _damage(folder: Path, files: dict[str, dict]) -> str | None:
    """What is wrong with the files, in words, or None."""
    try:
        signature = _signature(folder, files)
        if _verified.get(str(folder.resolve())) == signature:
            return None
        for name, expected in files.items():
            if (folder / name).stat().st_size != expected["bytes"]:
                return f"{name} has another size"
        for name, expected in files.items():
            if sha256_of(folder / name) != expected["sha256"]:
                return f"{name} has another content"
    except OSError as error:
        return f"{Path(error.filename or '').name or 'a file'}: {error.strerror}"
    _verified[str(folder.resolve())] = signature
    return None


def remember_verified(folder: Path, files: dict[str, dict]) -> None:
    """The files were hashed by this process a moment ago, when it built them."""
    _verified[str(folder.resolve())] = _signature(folder, files)
