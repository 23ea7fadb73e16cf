"""Where a base model comes from: checked early and cheaply, then brought into a folder with safetensors.

Imports no torch: transformers is imported by the builders, inside prepare.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from opt_deus.config import ModelConfig, TrainConfig
from opt_deus.models import hub, wheel
from opt_deus.models.sizes import read_json, shape, shape_of

if TYPE_CHECKING:
    from opt_deus.store import Store

SOURCES = ("wheel", "hub", "path", "tiny", "scratch")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
# What decides a checkpoint's answers; a README does not.
CONTENT = ("*.safetensors", "config.json", "generation_config.json", "*token*.json", "*.jinja")
CONTENT += ("tokenizer.model", "vocab.json", "vocab.txt", "merges.txt")
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class Base:
    """A base model on disk. fingerprint: 16 hex digits over the contents of weights, configuration and tokenizer."""

    name: str
    folder: Path
    fingerprint: str
    model_type: str
    num_layers: int
    caveat: str | None
    license: str | None  # from the front matter of the folder's README.md


def cache_root() -> Path:
    """Where base models are kept, outside store.root: $OPT_DEUS_CACHE or ~/.cache/opt_deus."""
    return Path(os.environ.get("OPT_DEUS_CACHE") or "~/.cache/opt_deus").expanduser()


def check(cfg: ModelConfig, offline: bool, cache: Store | None = None, tokenizer: bool = True) -> None:
    """ValueError for a model that cannot serve, in a second: no torch, no download.

    cache: given, a model that is cached already needs neither the network nor pip. tokenizer=False: a folder
    without a tokenizer will do (nothing but surgery is wanted).
    """
    if cfg.source not in SOURCES:
        raise ValueError(f"model.source={cfg.source}: unknown; choose one of {', '.join(SOURCES)}.")
    shape(cfg)
    if cfg.source == "path":
        check_folder(Path(cfg.path).expanduser(), f"model.path={cfg.path}", tokenizer)
    elif cfg.source == "hub":
        hub.check(cfg, offline)
    elif cfg.source == "wheel":
        cached = cache is not None and cache.find("base", wheel.KEY) is not None
        if not cached:
            wheel.check(cfg, offline)


def prepare(
    cfg: ModelConfig,
    cache: Store,
    offline: bool,
    pretrain: Callable[[Path], dict | None] | None = None,
    pretrain_key: dict[str, Any] | None = None,
) -> Base:
    """The base model in a folder with safetensors; downloads, converts or trains at most once per cache.

    pretrain (source=scratch): trains the model into the folder that it is given; pretrain_key: what decides its
    weights besides sizes and pretraining, e.g. {"data": fingerprint}. Raises ValueError like check, and where the
    network or the hub refuses.
    """
    if cfg.source == "path":
        folder = Path(cfg.path).expanduser().resolve()
        return _base(cfg, folder, _kept_fingerprint(folder, cache))
    if cfg.source == "hub":
        folder = hub.snapshot(cfg, offline)
        check_folder(folder, f"model={cfg.name} ({cfg.hub_id})", tokenizer=True)
        return _base(cfg, folder, _kept_fingerprint(folder, cache))
    key, build = _recipe(cfg, offline, pretrain, pretrain_key)

    def build_and_fingerprint(folder: Path) -> dict:
        details = build(folder) or {}
        return {**details, "fingerprint": fingerprint_folder(folder)}

    artefact = cache.get("base", key, build_and_fingerprint, resumable=cfg.source == "scratch")
    return _base(cfg, artefact.path, artefact.details["fingerprint"])


def check_folder(folder: Path, key: str, tokenizer: bool) -> None:
    """ValueError unless the folder holds complete safetensors weights and, if asked for, a tokenizer."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = set(read_json(index, key).get("weight_map", {}).values())
        missing = sorted(shards - set(os.listdir(folder)))
        if missing or not shards:
            raise ValueError(
                f"{key}: {index.name} names {(missing or ['no file'])[0]}, which is not there; copy it again."
            )
    elif not (folder / "model.safetensors").is_file():
        pickled = sorted(path.name for pattern in PICKLED for path in folder.glob(pattern))
        found = f"only {pickled[0]}, a pickle, which can run code and is never loaded" if pickled else "no weights"
        raise ValueError(
            f"{key}: it holds {found}; give model.safetensors. To convert where you trust the file: "
            "transformers' from_pretrained, then save_pretrained."
        )
    for path in folder.glob("*.safetensors"):
        try:
            with safe_open(path, framework="numpy"):  # reads the header and compares it with the file's size
                pass
        except SafetensorError as error:
            raise ValueError(f"{key}: {path.name} is broken ({error}); copy the checkpoint again.") from error
    if tokenizer and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ValueError(f"{key}: it has no tokenizer ({', '.join(TOKENIZER_FILES)}); copy the model's tokenizer in.")


def fingerprint_folder(folder: Path) -> str:
    """16 hex digits over names and contents of the files that decide a checkpoint's answers."""
    return _short_hash([[path.name, file_hash(path)] for path in content_files(folder)])


def content_files(folder: Path) -> list[Path]:
    return sorted({path for pattern in CONTENT for path in folder.glob(pattern)})


def file_hash(path: Path) -> str:
    """SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _recipe(
    cfg: ModelConfig, offline: bool, pretrain: Callable | None, pretrain_key: dict | None
) -> tuple[dict[str, Any], Callable[[Path], dict | None]]:
    """Key and builder of a base model that is made here."""
    if cfg.source == "wheel":
        return wheel.KEY, partial(wheel.build, cfg, offline)
    if cfg.source == "tiny":
        from opt_deus.models import fresh  # imports torch

        return {"model": "tiny", "sizes": cfg.sizes, "recipe": fresh.TINY_RECIPE}, partial(fresh.build_tiny, cfg.sizes)
    assert pretrain is not None and pretrain_key is not None, "source=scratch: the pipeline gives the pre-training"
    pretraining = {name: value for name, value in cfg.pretraining.items() if name not in TrainConfig.RUNTIME}
    return {"model": "scratch", "sizes": cfg.sizes, "pretraining": pretraining, **pretrain_key}, pretrain


def _base(cfg: ModelConfig, folder: Path, fingerprint: str) -> Base:
    numbers = shape_of(folder, f"model={cfg.name}")
    return Base(
        name=cfg.name,
        folder=folder,
        fingerprint=fingerprint,
        model_type=numbers["model_type"],
        num_layers=numbers["num_hidden_layers"],
        caveat=cfg.caveat,
        license=_license(folder / "README.md"),
    )


def _kept_fingerprint(folder: Path, cache: Store) -> str:
    """The fingerprint of a folder that is not ours, computed again only where a file's size or time has changed."""
    stamps = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in content_files(folder)]
    key = {"folder": str(folder), "files": stamps}
    return cache.get("fingerprint", key, lambda _: {"fingerprint": fingerprint_folder(folder)}).details["fingerprint"]


def _license(readme: Path) -> str | None:
    """The licence that a model card's front matter states."""
    lines = readme.read_text(encoding="utf-8", errors="replace").splitlines() if readme.is_file() else []
    if not lines or lines[0] != "---":
        return None
    front = lines[1 : lines.index("---", 1)] if "---" in lines[1:] else []
    return next((line.removeprefix("license:").strip() for line in front if line.startswith("license:")), None)


def _short_hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
