"""Hashes of values and of files: what a key is made of, and what a reuse is checked against."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

BLOCK_BYTES = 1 << 20


def canonical(obj: Any) -> str:
    """JSON with sorted keys and no spaces: equal values give equal text, whatever the order of their keys.

    Raises ValueError for what JSON cannot hold (a Path, a tensor, NaN): a key must mean the same on every machine.
    """
    try:
        return json.dumps(obj, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"fingerprint: {error}; use finite numbers, strings, booleans, lists and dicts.") from error


def fingerprint(obj: Any) -> str:
    """16 hex digits of the SHA-256 of the canonical JSON."""
    return hashlib.sha256(canonical(obj).encode()).hexdigest()[:16]


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's content, read in blocks of 1 MB."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def fingerprint_files(paths: Iterable[Path | str]) -> str:
    """16 hex digits over names and contents of files; neither their folder nor the order of `paths` matters."""
    return fingerprint(sorted([Path(path).name, sha256_of(Path(path))] for path in paths))
