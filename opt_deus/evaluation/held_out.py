"""Held-out perplexity, document by document, so that two models can be paired.

Not by lm-eval's rolling task: that takes texts, so a cut after a number of tokens cannot be said exactly, and it holds
the log-probabilities of the whole vocabulary for a batch twice (1.6 GB for 16 x 256 x 49,152).
"""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import torch

from opt_deus.config import EvalConfig
from opt_deus.data import Corpus, content_hash, split_of
from opt_deus.evaluation.definitions import HELDOUT
from opt_deus.evaluation.scoring import COLUMNS, undisturbed
from opt_deus.models import end_of_text

BATCH_TOKENS = 1024  # positions whose logits are held at once; results do not depend on it in float32


def selected(tokenizer: Any, cfg: EvalConfig, corpus: Corpus) -> list[tuple[str, list[int]]]:
    """(document hash, tokens cut at perplexity_length) in the order of the hash, until perplexity_tokens are there."""
    found, total = [], 0
    for identity, text in sorted((content_hash(text), text) for text in corpus.evaluation):
        if total >= cfg.perplexity_tokens:
            break
        tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][: cfg.perplexity_length]
        found.append((identity, tokens))
        total += len(tokens)
    return found


def heldout(
    model: torch.nn.Module, tokenizer: Any, cfg: EvalConfig, corpus: Corpus, device: str | torch.device
) -> pd.DataFrame:
    """Rows "loglikelihood" (natural logarithm), "tokens" and "words" of each held-out document.

    The first token is conditioned on end-of-text, as between packed training documents.
    """
    documents = selected(tokenizer, cfg, corpus)
    order = sorted(range(len(documents)), key=lambda index: len(documents[index][1]))  # little padding
    scores: dict[int, float] = {}
    per_batch = max(1, BATCH_TOKENS // cfg.perplexity_length)
    with undisturbed(model), torch.inference_mode():
        for start in range(0, len(order), per_batch):
            batch = order[start : start + per_batch]
            values = _loglikelihoods(
                model, [documents[index][1] for index in batch], end_of_text(tokenizer), cfg.dtype, device
            )
            scores.update(zip(batch, values, strict=True))
    if not all(map(math.isfinite, scores.values())):
        raise RuntimeError(
            "evaluation: the model's log-likelihoods of held-out text are not finite; its weights are broken"
        )
    rows = []
    for index, (identity, tokens) in enumerate(documents):
        words = len(tokenizer.decode(tokens).split())
        for metric, value in (("loglikelihood", scores[index]), ("tokens", len(tokens)), ("words", words)):
            rows.append((HELDOUT, split_of(identity), index, identity, metric, float(value)))
    return pd.DataFrame(rows, columns=COLUMNS)


def _loglikelihoods(
    model: torch.nn.Module, batch: list[list[int]], prefix: int, dtype: str, device: str | torch.device
) -> list[float]:
    """Sum of log p(token | prefix, tokens before) of each token list; padding stands right, where no token sees it."""
    longest = max(map(len, batch))
    tokens = torch.tensor([[prefix, *row] + [prefix] * (longest - len(row)) for row in batch], device=device)
    autocast = torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=dtype == "bfloat16")
    with autocast:
        logits = model(input_ids=tokens[:, :-1]).logits
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none")
    return [
        -row[: len(own)].sum(dtype=torch.float64).item()
        for row, own in zip(losses.view(len(batch), -1), batch, strict=True)
    ]
