"""Readable folder names of cells (contract, Files): <align>-<zero|nozero>-<position>-seed<k>, then further keys."""

from __future__ import annotations

import hashlib
import re

from opt_deus.config import Cell

SHORT = {"num_new_layers": "k", "norm_match": "normmatch", "update_match": "updatematch", "model": "", "data": ""}
LONGEST = 150


def arm_name(cell: Cell) -> str:
    """The cell without its seed."""
    return _shorten("-".join(part for part in (_factors(cell), _suffix(cell)) if part))


def cell_folder(cell: Cell) -> str:
    return _shorten("-".join(part for part in (_factors(cell), f"seed{cell.seed}", _suffix(cell)) if part))


def _factors(cell: Cell) -> str:
    return f"{cell.align.name}-{'zero' if cell.zero_init else 'nozero'}-{cell.position.name}"


def _suffix(cell: Cell) -> str:
    return "-".join(_part(key, value) for key, value in sorted(cell.overrides.items()))


def _part(key: str, value: str) -> str:
    short = SHORT.get(key, key)
    if value.lower() == "true":
        return short
    plain = value.strip("[]").replace(",", "+").replace(" ", "")
    readable = re.sub(r"[^A-Za-z0-9.+_-]+", "_", plain).strip("_")
    if readable != plain:  # two different values must not share a folder
        readable = f"{readable[:24]}_{hashlib.sha256(value.encode()).hexdigest()[:6]}"
    return f"{short}{readable}"


def _shorten(name: str) -> str:
    if len(name) <= LONGEST:
        return name
    return f"{name[: LONGEST - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
