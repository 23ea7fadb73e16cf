"""Documents and pairs -> training examples, in the order given, which is the corpus' seeded one; nothing shuffles."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import torch

from opt_deus.config import TrainConfig
from opt_deus.models import end_of_text

CHARACTERS_PER_CALL = 4_000_000  # tokenised at once: bounds memory, still feeds all tokenizer threads
PATIENCE = 1_000  # pairs in a row that do not fit before pair_examples gives up


def token_budget(cfg: TrainConfig) -> int:
    """Tokens that a stage draws: `steps` whole optimizer steps if given, otherwise `tokens` (0: no training)."""
    if cfg.steps is not None:
        return cfg.steps * cfg.batch_size * cfg.accumulation * cfg.block_size
    return cfg.tokens or 0


@dataclass(frozen=True)
class PackedBlocks(torch.utils.data.Dataset):
    """Blocks of token ids, int32, shape (number of blocks, block size)."""

    blocks: np.ndarray

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.from_numpy(self.blocks[index].astype(np.int64))}


def packed_blocks(documents: Iterable[str], tokenizer: Any, num_tokens: int, block_size: int) -> PackedBlocks:
    """Exactly num_tokens // block_size blocks: documents one after the other, an end-of-text token after each."""
    num_blocks = num_tokens // block_size
    if num_blocks < 1:
        raise ValueError(f"tokens={num_tokens} is less than one block; use at least block_size={block_size}")
    documents = iter(documents)
    ids = np.empty(num_blocks * block_size, dtype=np.int32)
    separator, filled = end_of_text(tokenizer), 0
    if separator is None:
        raise ValueError("model: its tokenizer has no end-of-text token; set eos_token in tokenizer_config.json")
    while filled < len(ids):
        texts = _next_texts(documents, min(CHARACTERS_PER_CALL, 4 * (len(ids) - filled)))
        if not texts:
            raise ValueError(f"tokens={num_tokens}: the documents hold only {filled} tokens; lower it or add text")
        encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        for tokens in encoded:
            piece = np.asarray([*tokens, separator][: len(ids) - filled], dtype=np.int32)
            ids[filled : filled + len(piece)] = piece
            filled += len(piece)
    return PackedBlocks(ids.reshape(num_blocks, block_size))


def _next_texts(documents: Iterator[str], characters: int) -> list[str]:
    """Documents of about so many characters together: the stream may be endless and is read only as far as needed."""
    texts, size = [], 0
    for document in documents:
        texts.append(document)
        size += len(document)
        if size >= characters:
            break
    return texts


def pair_examples(
    pairs: Iterator[dict], tokenizer: Any, num_tokens: int, max_length: int, num_examples: int | None = None
) -> datasets.Dataset:
    """Question-answer pairs until `num_tokens` tokens (prompt and answer) are reached, or `num_examples` if given.

    A pair longer than max_length tokens is passed over whole: a truncated answer would teach to stop early.
    """
    chosen, total, refused = [], 0, 0
    for pair in pairs:
        prompt = pair["prompt"]
        if not prompt[-1:].isspace() and not pair["completion"][:1].isspace():
            prompt += "\n"  # otherwise the question's last word and the answer's first may become one token
        length = len(tokenizer(prompt + pair["completion"], verbose=False)["input_ids"]) + 1  # end of text
        if length > max_length:
            refused += 1
            if refused == PATIENCE:
                raise ValueError(f"block_size={max_length}: {PATIENCE} pairs in a row are longer; raise it")
            continue
        refused = 0
        chosen.append({"prompt": prompt, "completion": pair["completion"]})
        total += length
        if len(chosen) == num_examples or (num_examples is None and total >= num_tokens):
            return datasets.Dataset.from_list(chosen)
    wanted = f"tokens={num_tokens}" if num_examples is None else f"{num_examples} examples"
    raise ValueError(f"{wanted}: the pairs hold only {total} tokens in {len(chosen)}; lower the budget or add pairs")


def batches_of_like_length(examples: datasets.Dataset, tokenizer: Any, batch_size: int) -> datasets.Dataset:
    """The same pairs, those of one batch about equally long, so that little is padded; the batches in mixed order.

    The order depends on the examples alone. Where they do not fill the last batch, it takes the shortest.
    """
    order = np.argsort(lengths(examples, tokenizer), kind="stable")
    rest, full = order[: len(order) % batch_size], order[len(order) % batch_size :].reshape(-1, batch_size)
    mixed = np.random.default_rng(int(content(examples)[:8], 16)).permutation(full)
    return examples.select([*mixed.flatten(), *rest])


def num_steps(cfg: TrainConfig, num_examples: int) -> int:
    """Optimizer steps of a stage: cfg.steps, otherwise one pass over the examples (the last batch may be smaller)."""
    return cfg.steps or math.ceil(math.ceil(num_examples / cfg.batch_size) / cfg.accumulation)


def lengths(examples: Any, tokenizer: Any) -> np.ndarray:
    """Tokens of every example."""
    if isinstance(examples, PackedBlocks):
        return np.full(len(examples), examples.blocks.shape[1])
    if "prompt" in examples.column_names:
        texts = [example["prompt"] + example["completion"] for example in examples]
        return np.array([len(ids) + 1 for ids in tokenizer(texts, verbose=False)["input_ids"]])  # + end of text
    return np.array([len(ids) for ids in examples["input_ids"]])


def content(examples: Any) -> str:
    """Hexadecimal SHA-256 of the examples and their order."""
    if isinstance(examples, PackedBlocks):
        return hashlib.sha256(np.ascontiguousarray(examples.blocks).data).hexdigest()
    return hashlib.sha256(json.dumps([dict(example) for example in examples]).encode()).hexdigest()
