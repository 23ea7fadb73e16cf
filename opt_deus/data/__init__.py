"""Text: training documents and pairs, held-out documents, local task items. No torch here."""

from __future__ import annotations

from opt_deus.config import DataConfig
from opt_deus.data import hub, local_text, pydocs_corpus
from opt_deus.data.corpus import Corpus, content_hash, endless, share, split_of

__all__ = ["Corpus", "check", "content_hash", "endless", "has_pairs", "open_corpus", "share", "split_of"]

SOURCES = {"pydocs": pydocs_corpus, "hub": hub, "text": local_text}


def _source(cfg: DataConfig):
    if cfg.source not in SOURCES:
        raise ValueError(f"data.source={cfg.source!r} is unknown; choose one of {', '.join(SOURCES)}")
    if not 0 < cfg.held_out_fraction < 1:
        raise ValueError(f"data.held_out_fraction={cfg.held_out_fraction} must lie between 0 and 1, for example 0.1")
    return SOURCES[cfg.source]


def check(cfg: DataConfig, offline: bool) -> None:
    """Refuse in a moment what cannot be opened later."""
    _source(cfg).check(cfg, offline)


def open_corpus(cfg: DataConfig, offline: bool) -> Corpus:
    """The corpus of a `data` choice, divided into training, evaluation and calibration."""
    check(cfg, offline)
    return _source(cfg).open_corpus(cfg)


def has_pairs(cfg: DataConfig) -> bool:
    """Whether SFT can run: the source makes its own pairs, or a hub data set of pairs is named."""
    return cfg.source == "pydocs" or cfg.pairs is not None
