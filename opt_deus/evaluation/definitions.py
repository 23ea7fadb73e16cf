"""What a task is for lm-eval: our items as a task given in full, or its own task with data from a local file."""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path
from typing import Any

from opt_deus.config import EvalConfig
from opt_deus.data import Corpus
from opt_deus.data.tasks import CANDIDATES as OWN_TASKS

HELDOUT = "heldout"  # perplexity of held-out documents: in every evaluation
SPLITS = ("training_split", "validation_split", "test_split", "fewshot_split")


@functools.cache
def registered() -> dict[str, Path]:
    """Names of lm-eval's tasks and groups -> their YAML files, read as text: lm-eval's own index takes 8 s."""
    folder = Path(next(iter(importlib.util.find_spec("lm_eval").submodule_search_locations))) / "tasks"
    name = re.compile(r"^[\"']?(?:task|group)[\"']?: *[\"']?([^\s\"'#\[]+)", re.MULTILINE)
    found = {}
    for path in sorted(folder.rglob("*.yaml")):
        for match in name.findall(path.read_text(encoding="utf-8", errors="replace")):
            found.setdefault(match, path)
    return found


def own(name: str, items: list[dict[str, Any]]) -> dict[str, Any]:
    """A task of four choices from items {"id", "context", "choices", "label"}; nothing is cached on disk."""

    def dataset(**_: Any) -> dict[str, Any]:
        import datasets

        return {"test": datasets.Dataset.from_list(items)}

    metrics = [{"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in ("acc", "acc_norm")]
    return {
        "task": name,
        "custom_dataset": dataset,
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "choices",
        "doc_to_target": "label",
        "metric_list": metrics,
    }


def local(name: str, data: Path, folder: Path) -> str:
    """A YAML that includes lm-eval's own task and changes only where the data comes from.

    Splits that the file does not hold are null; `folder` also takes the converted data, so that a later file of the
    same name is never answered from a cache.
    """
    import yaml
    from lm_eval.tasks._yaml_loader import load_yaml

    definition = load_yaml(registered()[name], resolve_func=False)
    asked = definition.get("test_split") or definition.get("validation_split")
    if asked is None:
        raise ValueError(f"lm-eval's {name} has no test or validation data of its own; name a single task, not a group")
    splits = {key: asked if definition.get(key) == asked else None for key in SPLITS if key in definition}
    if definition.get("test_split"):
        splits["validation_split"] = None
    source = {"data_files": {asked: str(data)}, "cache_dir": str(folder / "cache")}
    content = {
        "include": str(registered()[name]),
        "task": name,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": source,
        **splits,
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return str(path)


def data_file(cfg: EvalConfig, task: str) -> Path:
    return Path(cfg.data[task]).expanduser().absolute()


def benchmarks(cfg: EvalConfig) -> list[str]:
    """The tasks that lm-eval scores; the held-out perplexity needs no mention."""
    return [task for task in cfg.tasks if task != HELDOUT]


def from_hub(cfg: EvalConfig) -> list[str]:
    """Tasks whose data lm-eval downloads."""
    return [task for task in benchmarks(cfg) if task not in cfg.data and task not in OWN_TASKS]


def specifications(cfg: EvalConfig, corpus: Corpus, folder: Path) -> list[str | dict[str, Any]]:
    """What `simple_evaluate(tasks=...)` takes, in the order of cfg.tasks; files are written to `folder`."""
    found: list[str | dict[str, Any]] = []
    for task in benchmarks(cfg):
        if task in cfg.data:
            found.append(local(task, data_file(cfg, task), folder))
        elif task in OWN_TASKS:
            found.append(own(task, corpus.items(task)[: cfg.limit]))
        else:
            found.append(task)
    return found
