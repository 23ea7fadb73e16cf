"""Text and pairs from the Hugging Face hub (data=fineweb_edu; pairs for data=text)."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import Any

from opt_deus.config import DataConfig
from opt_deus.data.corpus import Corpus, content_hash, endless, share
from opt_deus.data.pydocs_corpus import default_items

HELD_OUT_DOCUMENTS = {"evaluation": 200, "calibration": 32}  # the first ones of the stream whose hash is held out
SHUFFLE_BUFFER = 10_000  # documents; a stream cannot be shuffled whole


def is_closed(offline: bool) -> bool:
    """Whether no file may be fetched from the hub."""
    return offline or os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def check_open(key: str, offline: bool) -> None:
    """Refuse a hub data set where the hub is closed."""
    if is_closed(offline):
        raise ValueError(
            f"{key} needs the Hugging Face hub, which offline=true or HF_HUB_OFFLINE closes; "
            "choose data=pydocs, or data=text with a file of yours"
        )


def check(cfg: DataConfig, offline: bool) -> None:
    """The hub is open and the data set named."""
    if not cfg.hub_id:
        raise ValueError(f"data.hub_id={cfg.hub_id!r} names no data set; for example HuggingFaceFW/fineweb-edu")
    check_open(f"data.hub_id={cfg.hub_id}", offline)


def open_corpus(cfg: DataConfig) -> Corpus:
    """A streamed data set with a column "text". Documents are held out by the hash of their content."""
    held_out = _held_out(str(cfg.hub_id), cfg.hub_config, cfg.held_out_fraction)
    identity = [
        str(cfg.hub_id),
        str(cfg.hub_config),
        str(cfg.held_out_fraction),
        str(cfg.pairs),
        *map(content_hash, sum(held_out.values(), [])),
    ]
    return Corpus(
        name=cfg.name,
        fingerprint=content_hash("\n".join(identity))[:16],
        evaluation=held_out["evaluation"],
        calibration=held_out["calibration"],
        documents=functools.partial(_training, cfg),
        pairs=functools.partial(pairs, cfg.pairs) if cfg.pairs else None,
        items=default_items,
        numbers={"hub_id": cfg.hub_id, "hub_config": cfg.hub_config},
    )


def _stream(hub_id: str, hub_config: str | None) -> Any:
    import datasets

    return datasets.load_dataset(hub_id, name=hub_config, split="train", streaming=True)


def _is_held_out(text: str, fraction: float) -> bool:
    return share("document:" + text) < fraction


@functools.lru_cache(maxsize=2)
def _held_out(hub_id: str, hub_config: str | None, fraction: float) -> dict[str, list[str]]:
    wanted = sum(HELD_OUT_DOCUMENTS.values())
    texts: dict[str, None] = {}  # distinct, in order
    for row in _stream(hub_id, hub_config):
        if _is_held_out(row["text"], fraction):
            texts[row["text"]] = None
        if len(texts) == wanted:
            break
    found = list(texts)
    if len(found) < 2:
        raise ValueError(f"data.hub_id={hub_id}: {len(found)} documents are held out; raise data.held_out_fraction")
    cut = max(1, len(found) * HELD_OUT_DOCUMENTS["calibration"] // wanted)
    return {"evaluation": found[cut:], "calibration": found[:cut]}


def _training(cfg: DataConfig, seed: int) -> Iterator[str]:
    """Endless: the stream shuffled in a buffer, another order each epoch."""
    shuffled = _stream(str(cfg.hub_id), cfg.hub_config).shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER)
    epoch = 0
    while True:
        shuffled.set_epoch(epoch)
        yield from (row["text"] for row in shuffled if not _is_held_out(row["text"], cfg.held_out_fraction))
        epoch += 1


def pairs(hub_id: str, seed: int) -> Iterator[dict[str, str]]:
    """Endless question-answer pairs of a data set with the columns instruction, input and output (Alpaca's form)."""
    import datasets

    rows = datasets.load_dataset(hub_id, split="train")
    for index in endless(range(len(rows)), seed):
        row = rows[index]
        question = "\n\n".join(part for part in (row["instruction"], row["input"]) if part)
        yield {"prompt": question, "completion": row["output"]}
