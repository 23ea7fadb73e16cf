"""Parsed docstrings of one package version, kept beside the base models, so that parsing (some 25 s) happens once."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from opt_deus.data import pydocs
from opt_deus.data.pydocs import Docstring
from opt_deus.models import cache_root
from opt_deus.store import Store

FILE = "docstrings.jsonl"


def docstrings(package: str, version: str) -> list[Docstring]:
    """All docstrings of an installed package, from the cache where it has them."""
    key = {
        "package": package,
        "version": version,
        "parser": pydocs.PARSER_VERSION,
        "python": list(sys.version_info[:2]),  # ast.unparse writes signatures differently
    }

    def build(folder: Path) -> None:
        lines = (json.dumps(asdict(docstring)) + "\n" for docstring in pydocs.read(package))
        (folder / FILE).write_text("".join(lines), encoding="utf-8")

    kept = Store(cache_root()).get("docstrings", key, build).path / FILE
    return [Docstring(**json.loads(line)) for line in kept.read_text(encoding="utf-8").splitlines()]
