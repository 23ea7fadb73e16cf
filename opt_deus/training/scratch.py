"""A small Llama pre-trained here from scratch: a never-quantised base on which whole grids are cheap."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from opt_deus.config import ModelConfig, TrainConfig
from opt_deus.models import new_model, train_tokenizer
from opt_deus.training.arithmetic import precision
from opt_deus.training.examples import PackedBlocks, packed_blocks, token_budget
from opt_deus.training.stage import train

TOKENIZER_CHARACTERS = 10_000_000  # more text changes a small vocabulary hardly at all
HELD_OUT_TOKENS = 20_480
RECORD = "pretraining.json"


def settings(cfg: ModelConfig) -> tuple[TrainConfig, int]:
    """cfg.pretraining (keys of TrainConfig, and seed) -> the stage's settings and its seed."""
    given = dict(cfg.pretraining)
    seed = given.pop("seed", 0)
    unknown = sorted(set(given) - {entry.name for entry in fields(TrainConfig)})
    if unknown:
        raise ValueError(f"model.pretraining: unknown key {unknown[0]!r}; use the keys of TrainConfig, and seed")
    return TrainConfig(**given), seed


def pretrain(
    cfg: ModelConfig, corpus: Any, folder: Path, log: Path | None = None, device: str = "cpu", dtype: str = "auto"
) -> dict[str, Any]:
    """Tokenizer, training and checkpoint of a `source: scratch` model, in `folder` (resumable).

    `folder` becomes a Hugging Face checkpoint (float32 safetensors), with points of the learning curve in curve/.
    Returns train()'s record with the held-out loss (nats per token, float32) before and after.
    """
    train_cfg, seed = settings(cfg)
    folder, work = Path(folder), Path(folder) / "work"
    if (folder / RECORD).is_file():  # killed between the end of this function and the artefact's manifest
        shutil.rmtree(work, ignore_errors=True)
        return json.loads((folder / RECORD).read_text())
    tokenizer = _tokenizer(cfg, corpus, work / "tokenizer", seed)
    model = new_model(cfg.sizes, tokenizer, seed).to(device)
    documents = corpus.training_documents(seed)
    blocks = packed_blocks(documents, tokenizer, token_budget(train_cfg), train_cfg.block_size)
    held_out = _held_out(corpus, tokenizer, train_cfg.block_size)
    before = held_out_loss(model, held_out)
    record = train(
        model, tokenizer, blocks, train_cfg, trainable="all", folder=work, seed=seed,
        precision=precision(dtype, device), device=device, log=log, stage="pretraining",
    )
    record |= {"held_out_loss_before": before, "held_out_loss_after": held_out_loss(model, held_out)}
    _keep(model.to("cpu"), tokenizer, folder, work, record)
    return record


def _tokenizer(cfg: ModelConfig, corpus: Any, folder: Path, seed: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on the first TOKENIZER_CHARACTERS of the training documents; kept for a resumed run."""
    if not (folder / "tokenizer_config.json").is_file():
        texts = _first_characters(corpus.training_documents(seed), TOKENIZER_CHARACTERS)
        train_tokenizer(texts, cfg.sizes["vocab_size"]).save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def _first_characters(documents: Iterator[str], number: int) -> Iterator[str]:
    total = 0
    for document in documents:
        yield document
        total += len(document)
        if total >= number:
            return


def _held_out(corpus: Any, tokenizer: PreTrainedTokenizerFast, block_size: int) -> PackedBlocks:
    """Blocks of the held-out documents, at most HELD_OUT_TOKENS."""
    texts = list(_first_characters(iter(corpus.evaluation), 8 * HELD_OUT_TOKENS))
    total = sum(len(ids) + 1 for ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"])
    tokens = min(total, HELD_OUT_TOKENS)
    return packed_blocks(iter(texts), tokenizer, tokens, min(block_size, tokens))


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, blocks: PackedBlocks, batch_size: int = 8) -> float:
    """Mean loss in nats per predicted token, float32."""
    model.eval()
    total = 0.0
    for start in range(0, len(blocks), batch_size):
        ids = torch.from_numpy(blocks.blocks[start : start + batch_size].astype("int64")).to(model.device)
        total += model(input_ids=ids, labels=ids).loss.item() * len(ids)
    return total / len(blocks)


def _keep(model: Any, tokenizer: Any, folder: Path, work: Path, record: dict[str, Any]) -> None:
    """The checkpoint, the curve beside it, the record last but for removing the working files."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "curve").mkdir(exist_ok=True)
    for path in work.glob("curve-*.safetensors"):
        path.replace(folder / "curve" / path.name.removeprefix("curve-"))
    (folder / RECORD).write_text(json.dumps(record, indent=1))
    shutil.rmtree(work)
