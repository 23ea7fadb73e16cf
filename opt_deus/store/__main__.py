"""Entry: `python -m opt_deus.store list|prune [root=DIR] [max_gb=N]` - what is kept, its size, and a size cap."""

from __future__ import annotations

import math
import sys
from datetime import datetime
from pathlib import Path

from opt_deus.store.fingerprints import canonical
from opt_deus.store.shelf import Entry, entries, prune

USAGE = "usage: python -m opt_deus.store list|prune [root=DIR] [max_gb=N]"
GB = 1e9
SUMMARY_CHARACTERS = 80


def main(arguments: list[str]) -> int:
    """Exit code: 0, or 2 with one message for bad arguments."""
    try:
        command, root, max_bytes = parse(arguments)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if command == "prune":
        for folder in prune(root, max_bytes):
            print(f"removed {folder.name}")
    print(table(entries(root)))
    return 0


def parse(arguments: list[str]) -> tuple[str, Path, float | None]:
    """Command, root and cap in bytes. Raises ValueError naming the argument and what it takes."""
    if not arguments or arguments[0] not in ("list", "prune"):
        raise ValueError(f"{arguments[0] if arguments else 'no command'}: choose list or prune. {USAGE}")
    command, values = arguments[0], {"root": "store"}
    allowed = ("root", "max_gb") if command == "prune" else ("root",)
    for argument in arguments[1:]:
        key, separator, value = argument.partition("=")
        if not separator or key not in allowed:
            raise ValueError(f"{argument}: {command} takes {' and '.join(f'{name}=...' for name in allowed)}. {USAGE}")
        values[key] = value
    root = Path(values["root"])
    if not root.is_dir():
        raise ValueError(f"root={values['root']}: no such folder; give the store's folder, e.g. root=store.")
    return command, root, _bytes(values["max_gb"]) if "max_gb" in values else None


def _bytes(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise ValueError(f"max_gb={text}: give a number of gigabytes, 0 or more, e.g. max_gb=20.")
    return number * GB


def table(shelf: list[Entry]) -> str:
    """One line per artefact, most recently used first, and the total."""
    lines = [f"{'stage':<12} {'hash':<16} {'MB':>10}  {'last use':<16}  key"]
    for entry in shelf:
        used = datetime.fromtimestamp(entry.last_use).strftime("%Y-%m-%d %H:%M")
        summary = "damaged: will be built again" if entry.key is None else canonical(entry.key)
        if len(summary) > SUMMARY_CHARACTERS:
            summary = summary[: SUMMARY_CHARACTERS - 3] + "..."
        lines.append(f"{entry.stage:<12} {entry.hash:<16} {entry.size / 1e6:>10.1f}  {used:<16}  {summary}")
    lines.append(f"{len(shelf)} artefacts, {sum(entry.size for entry in shelf) / GB:.2f} GB")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
