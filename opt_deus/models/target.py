"""The folder that an export goes to, checked before any work is done. Imports no torch."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def check_target(folder: Path | str, num_bytes: int = 0, key: str = "out") -> None:
    """ValueError unless the folder is new or empty, its parent can be written and the disk holds num_bytes more."""
    folder = Path(folder).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{key}={folder}: there is something already; choose a new or empty folder.")
    parent = next(path for path in folder.absolute().parents if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise ValueError(f"{key}={folder}: {parent} is not a folder that can be written; choose another.")
    free = shutil.disk_usage(parent).free
    if free < num_bytes:
        raise ValueError(
            f"{key}={folder}: {num_bytes / 1e9:.1f} GB are needed and {free / 1e9:.1f} GB are free; "
            "free some or choose another disk."
        )
