"""Writing a report's files: whole or not at all, so that a reader never sees half of one."""

from __future__ import annotations

from pathlib import Path


def write_text(path: Path, text: str) -> None:
    aside = path.with_name(path.name + ".part")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)
