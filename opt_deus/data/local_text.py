"""Text of your own (data=text): a .txt file, documents between blank lines, or a .jsonl file with a key "text"."""

from __future__ import annotations

import functools
import json
import math
import re
from pathlib import Path

from opt_deus.config import DataConfig
from opt_deus.data import hub
from opt_deus.data.corpus import Corpus, content_hash, endless
from opt_deus.data.pydocs import CALIBRATION_SHARE
from opt_deus.data.pydocs_corpus import default_items

MIN_DOCUMENTS = 3  # one each for training, evaluation and calibration


def check(cfg: DataConfig, offline: bool) -> None:
    """The file can be read and divided; pairs from the hub only where it is open."""
    if not cfg.path:
        raise ValueError("data.path is not set; data=text needs data.path=FILE, a .txt or .jsonl file")
    _documents(cfg)
    if cfg.pairs:
        hub.check_open(f"data.pairs={cfg.pairs}", offline)


def open_corpus(cfg: DataConfig) -> Corpus:
    """Documents held out by the order of their content's hash, so that neighbours in the file do not matter."""
    texts = sorted(_documents(cfg), key=content_hash)
    num_held_out = min(max(2, math.ceil(cfg.held_out_fraction * len(texts))), len(texts) - 1)
    num_calibration = max(1, round(CALIBRATION_SHARE * num_held_out))
    training = texts[num_held_out:]
    return Corpus(
        name=cfg.name,
        fingerprint=content_hash("\n".join([str(num_held_out), str(cfg.pairs), *map(content_hash, texts)]))[:16],
        evaluation=texts[num_calibration:num_held_out],
        calibration=texts[:num_calibration],
        documents=functools.partial(endless, training),
        pairs=functools.partial(hub.pairs, cfg.pairs) if cfg.pairs else None,
        items=default_items,
        numbers={"training_documents": len(training), "training_characters": sum(map(len, training))},
    )


def _documents(cfg: DataConfig) -> list[str]:
    """Distinct documents; ValueError naming the file where it has none, is broken or has too few."""
    path = Path(str(cfg.path)).expanduser()
    if path.suffix not in (".txt", ".jsonl") or not path.is_file():
        raise ValueError(f"data.path={cfg.path} is not an existing .txt or .jsonl file")
    stat = path.stat()
    found = _read(path, stat.st_mtime_ns, stat.st_size, cfg.min_characters)
    if len(found) < MIN_DOCUMENTS:
        raise ValueError(
            f"data.path={cfg.path} holds {len(found)} distinct documents; at least {MIN_DOCUMENTS} are needed, "
            + ("separated by blank lines" if path.suffix == ".txt" else 'one object with "text" a line')
        )
    return found


@functools.lru_cache(maxsize=1)
def _read(path: Path, modified: int, size: int, min_characters: int) -> list[str]:
    """Keyed by time and size too: a sweep checks its file once, and a changed file is read again."""
    try:
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"data.path={path} is not UTF-8 text ({error.reason} at byte {error.start}); convert it"
        ) from None
    texts = _from_lines(path, content) if path.suffix == ".jsonl" else _from_blocks(content, min_characters)
    return list(dict.fromkeys(text for text in texts if text.strip()))


def _from_lines(path: Path, content: str) -> list[str]:
    texts = []
    for number, line in enumerate(content.split("\n"), start=1):
        if line.strip():
            try:
                text = json.loads(line)["text"]
            except (ValueError, KeyError, TypeError):
                text = None
            if not isinstance(text, str):
                raise ValueError(f'data.path={path}: line {number} is not a JSON object with a string "text"')
            texts.append(text)
    return texts


def _from_blocks(content: str, min_characters: int) -> list[str]:
    """Blocks between blank lines; a short one, such as a heading, goes with what follows."""
    texts: list[str] = []
    pending = ""
    for block in re.split(r"\n\s*\n", content):
        pending = f"{pending}\n\n{block.strip()}".strip()
        if len(pending) >= min_characters:
            texts.append(pending)
            pending = ""
    return [*texts, pending] if pending else texts
