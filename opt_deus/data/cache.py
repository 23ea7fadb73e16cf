"""Parsed docstrings of one package version as a JSON-lines file, so that parsing (some 25 s) happens once."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from opt_deus.data import pydocs
from opt_deus.data.corpus import content_hash
from opt_deus.data.pydocs import Docstring


def folder() -> Path:
    """Beside the model cache: $OPT_DEUS_CACHE/corpora or ~/.cache/opt_deus/corpora."""
    return Path(os.environ.get("OPT_DEUS_CACHE") or Path.home() / ".cache" / "opt_deus") / "corpora"


def docstrings(package: str, version: str) -> list[Docstring]:
    """All docstrings of an installed package, from the cache if its file is whole."""
    python = f"py{sys.version_info.major}.{sys.version_info.minor}"  # ast.unparse writes signatures differently
    path = folder() / f"{package}-{version}-{python}-parser{pydocs.PARSER_VERSION}.jsonl"
    found = _load(path)
    if found is None:
        found = list(pydocs.read(package))
        _save(path, found)
    return found


def _load(path: Path) -> list[Docstring] | None:
    try:
        header, _, body = path.read_text(encoding="utf-8").partition("\n")
        if json.loads(header) != {"sha256": content_hash(body)}:
            return None
        return [Docstring(**json.loads(line)) for line in body.splitlines()]
    except (OSError, ValueError, TypeError):  # absent, cut off or of another form: parsed again
        return None


def _save(path: Path, found: list[Docstring]) -> None:
    """Written aside and renamed, so that a reader never sees half a file; without a writable cache nothing is kept."""
    body = "".join(json.dumps(asdict(entry)) + "\n" for entry in found)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, suffix=".part", delete=False) as file:
            file.write(json.dumps({"sha256": content_hash(body)}) + "\n" + body)
        os.replace(file.name, path)
    except OSError:
        return
