"""Experiment trackers. The only module that knows wandb; whatever goes wrong there is a warning, never an end."""

from __future__ import annotations

import logging
import netrc
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

from transformers import TrainerCallback

from opt_deus.config import TrackerConfig

HOST = "api.wandb.ai"
START_SECONDS = 30.0  # an online start that takes longer is given up

logger = logging.getLogger(__name__)


class TrackedRun:
    """One cell's run. `callbacks` go to train(); `log` takes numbers by name."""

    def __init__(self, run: Any | None):
        self._run = run
        self.callbacks: list[TrainerCallback] = [] if run is None else [_StepLogger(self)]

    def log(self, numbers: dict[str, float]) -> None:
        """Send numbers; at the first failure warn and send no more."""
        if self._run is None:
            return
        try:
            self._run.log(numbers)
        except Exception as error:
            self._give_up(error)

    def finish(self, exit_code: int) -> None:
        if self._run is None:
            return
        try:
            self._run.finish(exit_code=exit_code)
        except Exception as error:
            self._give_up(error)
        self._run = None

    def _give_up(self, error: Exception) -> None:
        logger.warning("tracker=wandb: %s: %s; this cell goes on without it", type(error).__name__, error)
        self._run = None


class _StepLogger(TrainerCallback):
    """The Trainer's numbers as <stage>/loss and so on; train() puts the stage into run_name."""

    def __init__(self, tracked: TrackedRun):
        self.tracked = tracked

    def on_log(self, args: Any, state: Any, control: Any, logs: dict | None = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            numbers = {name: logs[name] for name in ("loss", "learning_rate", "grad_norm") if name in logs}
            numbers["step"] = state.global_step
            self.tracked.log({f"{args.run_name}/{name}": value for name, value in numbers.items()})


@contextmanager
def open_run(
    tracker: TrackerConfig, sweep: str, cell: str, config: dict, folder: Path, offline: bool = False
) -> Iterator[TrackedRun]:
    """One tracker run for one cell, always finished: exit code 0, or 1 when the block raises.

    wandb: named as the cell, grouped by sweep, in folder/wandb/. Offline unless this machine is logged in: going
    offline after a failed online start costs a timeout for every cell.
    """
    tracked = TrackedRun(_start(tracker, sweep, cell, config, folder, offline) if tracker.name == "wandb" else None)
    exit_code = 1
    try:
        yield tracked
        exit_code = 0
    finally:
        tracked.finish(exit_code)


def _start(
    tracker: TrackerConfig, sweep: str, cell: str, config: dict, folder: Path, offline: bool
) -> Any | None:
    """A wandb run, or None with a warning."""
    environment = {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}  # else it looks up its error service
    try:
        with patch.dict(os.environ, environment):
            import wandb

            folder.mkdir(parents=True, exist_ok=True)
            return wandb.init(
                project=tracker.project,
                group=sweep,
                name=cell,
                config=config,
                dir=str(folder),
                mode="online" if logged_in() and not offline else "offline",
                reinit="finish_previous",
                settings=wandb.Settings(
                    console="off",
                    disable_git=True,
                    disable_code=True,
                    silent=True,
                    init_timeout=START_SECONDS,
                    x_disable_stats=True,  # training needs the cores
                    x_save_requirements=False,
                ),
            )
    except Exception as error:
        hint = " (pip install 'opt-deus[wandb]')" if isinstance(error, ImportError) else ""
        logger.warning("tracker=wandb: %s: %s%s; this cell runs without it", type(error).__name__, error, hint)
        return None


def logged_in() -> bool:
    """True where wandb has a key and the user has not asked for offline runs."""
    if os.environ.get("WANDB_MODE", "online") != "online":
        return False
    if os.environ.get("WANDB_API_KEY"):
        return True
    with suppress(OSError, netrc.NetrcParseError):
        return netrc.netrc().authenticators(HOST) is not None
    return False
