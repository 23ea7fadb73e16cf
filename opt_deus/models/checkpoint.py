"""Checkpoints on disk: loaded from safetensors only, written whole or not at all."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from opt_deus.models.inspection import fixed_tokens
from opt_deus.models.sources import TOKENIZER_FILES
from opt_deus.models.surgery import recast
from opt_deus.models.target import check_target

SAFETENSORS_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def load(folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[nn.Module, Any]:
    """(model in eval mode, tokenizer or None where the folder has none).

    ValueError names the tensor where one is missing from the files or not finite. No pickle, no remote code,
    no network.
    """
    model, report = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        use_safetensors=True,
        attn_implementation="sdpa",
        local_files_only=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are in the report, by name
    )
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if report[kind]:  # transformers would fill these with random numbers, or drop them, after a warning
            raise ValueError(
                f"model: the weights in {folder} do not fit its config.json: {kind.replace('_', ' ')}, "
                f"e.g. {sorted(report[kind])[0]}; copy the checkpoint again."
            )
    for name, parameter in model.named_parameters():
        # One sum tells of most tensors that they are finite, ten times faster than looking at every number.
        if not parameter.sum(dtype=torch.float32).isfinite() and not parameter.isfinite().all():
            raise ValueError(f"model: {folder}: {name} holds NaN or infinite numbers; use an intact checkpoint.")
    return model.to(device).eval(), load_tokenizer(folder)


def load_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer, or None where it has none."""
    if not any((Path(folder) / name).is_file() for name in TOKENIZER_FILES):
        return None
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


@contextlib.contextmanager
def _no_bars() -> Iterator[None]:
    """A cell loads its base several times, in a second each: no bar of transformers' own for that."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def checkpoint_dtype(folder: Path) -> torch.dtype:
    """The floating dtype that most numbers of a checkpoint are stored in, read from the files' headers."""
    numbers: dict[str, int] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in list(file.keys()):
                entry = file.get_slice(name)
                size = torch.Size(entry.get_shape()).numel()
                numbers[entry.get_dtype()] = numbers.get(entry.get_dtype(), 0) + size
    known = {name: count for name, count in numbers.items() if name in SAFETENSORS_DTYPES}
    if not known:
        raise ValueError(
            f"model: {folder} stores its weights as {', '.join(sorted(numbers)) or 'nothing'}; "
            f"give a checkpoint in one of {', '.join(SAFETENSORS_DTYPES)}."
        )
    return SAFETENSORS_DTYPES[max(known, key=known.get)]


def export(model: nn.Module, tokenizer: Any, folder: Path | str, dtype: torch.dtype, card: str) -> None:
    """Writes a Hugging Face checkpoint in the given dtype with its model card, reads it back, then renames it in place.

    The model is left as it is. ValueError where the folder is in use or cannot be written or the disk is too full;
    RuntimeError names what differs after reading back.
    """
    folder = Path(folder).expanduser()
    num_bytes = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    check_target(folder, num_bytes)
    if model.dtype != dtype:
        model = recast(model, dtype)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as temporary:
        part = Path(temporary) / folder.name
        model.save_pretrained(part)
        if tokenizer is not None:
            tokenizer.save_pretrained(part)
        readme = part / "README.md"
        readme.write_text(card, encoding="utf-8")
        for path in part.iterdir():  # safetensors makes its files readable by their owner alone
            path.chmod(readme.stat().st_mode)
        _check_written(model, part)
        part.rename(folder)


def _check_written(model: nn.Module, folder: Path) -> None:
    """Reads a checkpoint back: the same parameters, no tied tensor twice, the same logits."""
    again, _ = load(folder, model.dtype, str(model.device))
    written = dict(again.named_parameters())
    for name, parameter in model.named_parameters():
        if name not in written or not torch.equal(written[name], parameter):
            raise RuntimeError(f"export: {name} differs after reading {folder} back.")
    if len(written) != len(dict(model.named_parameters())):
        raise RuntimeError(f"export: {folder} has other parameters than the model: a tied tensor was split.")
    stored = {name for path in folder.glob("*.safetensors") for name in _names(path)}
    if model.config.tie_word_embeddings and "lm_head.weight" in stored:
        raise RuntimeError("export: lm_head.weight was written although the embeddings are tied.")
    tokens = fixed_tokens(model)
    with torch.inference_mode():
        if not torch.equal(again(tokens).logits, model(tokens).logits):
            raise RuntimeError(f"export: the logits differ after reading {folder} back.")


def _names(path: Path) -> list[str]:
    with safe_open(path, framework="pt") as file:
        return list(file.keys())
