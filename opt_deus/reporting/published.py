"""lm-eval result files of any project: which run, how many right answers of how many. Old and new layouts."""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opt_deus.stats.aggregates import Count

_NAME = re.compile(r"(?P<group>.+?)__(?P<method>.+?)__checkpoint-(?P<step>\d+)__.*\.json")
METRIC = "acc"
PERPLEXITY = "word_perplexity"


@dataclass(frozen=True)
class Published:
    """One result file. counts: task -> right answers; subtasks: group task -> its subtasks' counts."""

    file: str
    group: str
    method: str
    step: int
    counts: dict[str, Count]
    subtasks: dict[str, dict[str, Count]]
    word_perplexity: float | None
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.group}|{self.method}|{self.step}"


def read_published(pattern: str, mapping: Mapping[str, list] | None = None) -> list[Published]:
    """All files that fit the pattern. mapping: file name -> [group, method, step], for other names than
    <group>__<method>__checkpoint-<step>__... Raises ValueError naming the file that cannot be read or placed."""
    paths = sorted(Path(path) for path in glob.glob(pattern, recursive=True))
    if not paths:
        raise ValueError(f"lm_eval={pattern}: no file fits; quote the pattern, e.g. 'lm_eval=results/*.json'.")
    runs = [_read(path, mapping or {}) for path in paths]
    names = [run.name for run in runs]
    double = next((run for run in runs if names.count(run.name) > 1), None)
    if double:
        raise ValueError(f"lm_eval={pattern}: two files are {double.name} (one is {double.file}); keep one of them.")
    return runs


def _read(path: Path, mapping: Mapping[str, list]) -> Published:
    match = _NAME.fullmatch(path.name)
    if path.name in mapping:
        group, method, step = mapping[path.name]
    elif match:
        group, method, step = match["group"], match["method"], match["step"]
    else:
        raise ValueError(
            f"{path.name}: not named <group>__<method>__checkpoint-<step>__....json; rename it or give "
            "mapping=FILE.json with {file name: [group, method, step]}."
        )
    try:
        content = json.loads(path.read_text())
        results = content["results"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path.name}: no lm-eval result file ({type(error).__name__}: {error}).") from None
    tree = content.get("group_subtasks") or {}
    below = {subtask for subtasks in tree.values() for subtask in subtasks}
    counts, subtasks = {}, {}
    for task in results:
        leaves = _leaves(task, tree)
        if task in below or _value(results[task], METRIC) is None:
            continue
        if leaves == [task]:
            counts[task] = _count(task, content)
        else:
            subtasks[task] = {leaf: _count(leaf, content) for leaf in leaves}
            right, n = (sum(getattr(count, what) for count in subtasks[task].values()) for what in ("right", "n"))
            counts[task] = Count(right, n, _value(results[task], f"{METRIC}_stderr"))
    perplexity = next((value for task in results if (value := _value(results[task], PERPLEXITY)) is not None), None)
    return Published(
        path.name, str(group), str(method), int(step), counts, subtasks, perplexity, _environment(content, list(counts))
    )


def _leaves(task: str, tree: Mapping[str, list[str]]) -> list[str]:
    children = tree.get(task) or []
    return [leaf for child in children for leaf in _leaves(child, tree)] if children else [task]


def _count(task: str, content: Mapping[str, Any]) -> Count:
    """Right answers of a task. Files without n-samples: n follows from the standard error of a proportion."""
    rate = _value(content["results"][task], METRIC)
    samples = (content.get("n-samples") or {}).get(task)
    if samples:
        n = int(samples["effective"])
    else:
        stderr = _value(content["results"][task], f"{METRIC}_stderr")
        if not stderr:
            raise ValueError(f"task {task}: the file gives neither n-samples nor a standard error, so n is unknown.")
        n = round(rate * (1 - rate) / stderr**2 + 1)
    return Count(round(rate * n), n)


def _value(result: Mapping[str, Any], metric: str) -> float | None:
    """A metric under its new ("acc,none") or old ("acc") name; "N/A" is none."""
    for key, value in result.items():
        if key.split(",")[0] == metric and isinstance(value, int | float):
            return float(value)
    return None


def _environment(content: Mapping[str, Any], tasks: list[str]) -> dict[str, str]:
    """What may change scores between runs of one model."""
    gpu = re.search(r"GPU \d+: (.+)", str(content.get("pretty_env_info")))
    config = content.get("config") or {}
    return {
        "GPU": gpu[1] if gpu else "",
        "batch size": str(config.get("batch_size")),
        "transformers": str(content.get("transformers_version")),
        "dtype": str(config.get("model_dtype")),
        **{f"version of {task}": str((content.get("versions") or {}).get(task)) for task in tasks},
        **{f"examples shown in {task}": str((content.get("n-shot") or {}).get(task)) for task in tasks},
    }
