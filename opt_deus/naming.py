"""Readable folder names of cells (contract, Files): <align>-<zero|nozero>-<position>-seed<k>, then further keys."""

from __future__ import annotations

import hashlib
import math
import re
from typing import Any

from opt_deus.config import Cell

SHORT = {"num_new_layers": "k", "norm_match": "normmatch", "update_match": "updatematch"}
SHORT |= dict.fromkeys(("model", "data", "evidence"), "")
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


def one_spelling(value: Any) -> str:
    """One spelling per value, however it was typed: 3e-4 and 0.0003 are "3e-4", True is "true"."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float) and math.isfinite(value):
        digits, exponent = f"{value:.15e}".split("e")
        short = f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"
        return min((text for text in (repr(value), short) if float(text) == value), key=len)
    if isinstance(value, list):
        return "[" + ",".join(map(one_spelling, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{one_spelling(key)}:{one_spelling(each)}" for key, each in value.items()) + "}"
    return str(value)
