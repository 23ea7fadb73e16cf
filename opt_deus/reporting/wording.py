"""Numbers and p-values as text, and machine paths taken out of text."""

from __future__ import annotations

import hashlib
import math
import re
from typing import Any

MISSING = "-"
# An absolute path of two parts or more; "1/2" or "ot/avg" is none.
_PATH = re.compile(r"(?<![\w./~])(?:/[\w.@+~-]+){2,}/?")


def number(value: Any, digits: int = 2) -> str:
    """Fixed decimals; a dash for what is missing or not finite; 4 digits and an exponent where it is huge."""
    if value is None or not math.isfinite(value):
        return MISSING
    return f"{value:,.{digits}f}" if abs(value) < 1e6 else f"{value:.3e}"


def signed(value: Any, digits: int = 2) -> str:
    text = number(value, digits)
    if text == MISSING or text.startswith("-"):
        return text if float(text.replace(",", "") if text != MISSING else 1) else text.lstrip("-")
    return f"+{text}" if float(text.replace(",", "")) else text


def interval(low: Any, high: Any, digits: int = 2, *, sign: bool = False) -> str:
    write = signed if sign else number
    return MISSING if write(low, digits) == MISSING else f"[{write(low, digits)}, {write(high, digits)}]"


def p_value(p: Any) -> str:
    if p is None or math.isnan(p):
        return MISSING
    return "<0.0001" if p < 1e-4 else f"{p:.4f}" if p < 0.1 else f"{p:.2f}"


def counted(count: int, noun: str) -> str:
    """ "1 seed", "3 seeds"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def listed(items: list[str]) -> str:
    return ", ".join(items[:-1]) + (" and " if items[1:] else "") + items[-1] if items else ""


def without_paths(text: str) -> str:
    """Absolute paths cut to their last part and a mark of the whole, so that two paths stay two."""

    def cut(match: re.Match) -> str:
        path = match[0].rstrip("/")
        return f"{path.rsplit('/', 1)[1]}~{hashlib.sha256(path.encode()).hexdigest()[:6]}"

    return _PATH.sub(cut, text)
