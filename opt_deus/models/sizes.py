"""A model's numbers without its weights: shape and parameter counts by arithmetic. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from opt_deus.config import ModelConfig
from opt_deus.models.blocks import block_for

REQUIRED = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
# Which configuration entry switches on the bias of the weights whose rows lie on an axis.
BIAS_SWITCH = {
    "query": "attention_bias",
    "key": "attention_bias",
    "value": "attention_bias",
    "attention_output": "attention_bias",
    "mlp": "mlp_bias",
    "mlp_output": "mlp_bias",
}


def shape(cfg: ModelConfig) -> dict[str, Any]:
    """The architecture's numbers, from the model's YAML or, for source=path, from its config.json.

    Raises ValueError where the folder or its config.json cannot serve, or the architecture has no table.
    """
    if cfg.source != "path":
        return _complete(cfg.sizes, f"model={cfg.name}: sizes")
    if not cfg.path:
        raise ValueError("model.path is not set: model=path needs model.path=DIR, a Hugging Face checkpoint folder.")
    return shape_of(Path(cfg.path).expanduser(), f"model.path={cfg.path}")


def shape_of(folder: Path, key: str = "model") -> dict[str, Any]:
    """The numbers of a checkpoint folder; ValueError (naming key) as in shape."""
    if not folder.is_dir():
        raise ValueError(f"{key}: {folder} is not a folder; give the one that holds config.json.")
    config = read_json(folder / "config.json", key)
    _refuse_remote_code(folder, config, key)
    if config.get("quantization_config"):
        raise ValueError(
            f"{key}: the checkpoint is quantised (quantization_config in config.json), so its weights cannot be "
            "averaged or copied; give an unquantised checkpoint."
        )
    return _complete(config, f"{key}: config.json")


def _complete(found: dict[str, Any], key: str) -> dict[str, Any]:
    """The entries that a plan needs, checked; the defaults are transformers' own, and null means the same as absent."""
    model_type = found.get("model_type", "llama")
    block_for(model_type)
    for name in REQUIRED:
        if not isinstance(found.get(name), int) or found[name] < 1:
            raise ValueError(f"{key}: {name}={found.get(name)!r}; it must be a positive whole number.")
    heads = found["num_attention_heads"]
    return {
        "model_type": model_type,
        **{name: found[name] for name in REQUIRED},
        "num_key_value_heads": found.get("num_key_value_heads") or heads,
        "head_dim": found.get("head_dim") or found["hidden_size"] // heads,
        "tie_word_embeddings": bool(found.get("tie_word_embeddings", False)),
        "attention_bias": bool(found.get("attention_bias", False)),
        "mlp_bias": bool(found.get("mlp_bias", False)),
    }


def parameter_counts(shape: dict[str, Any], num_layers: int | None = None) -> dict[str, int]:
    """Parameters by part: "embedding", "layer" (one of them), "head" (0 when tied), "norm" (the last one), "total"."""
    hidden, head_dim = shape["hidden_size"], shape["head_dim"]
    query, key_value = shape["num_attention_heads"] * head_dim, shape["num_key_value_heads"] * head_dim
    axes = {
        "residual": hidden,
        "middle": hidden,
        "attention_output": hidden,
        "mlp_output": hidden,
        "query": query,
        "attention": query,
        "key": key_value,
        "value": key_value,
        "mlp": shape["intermediate_size"],
    }
    layer = 0
    for weight in block_for(shape["model_type"]).weights:
        is_bias = weight.columns is None and not weight.norm
        if not is_bias or shape.get(BIAS_SWITCH[weight.rows], False):
            layer += axes[weight.rows] * (axes[weight.columns] if weight.columns else 1)
    embedding = shape["vocab_size"] * hidden
    head = 0 if shape["tie_word_embeddings"] else embedding
    layers = shape["num_hidden_layers"] if num_layers is None else num_layers
    total = embedding + head + hidden + layers * layer
    return {"embedding": embedding, "layer": layer, "head": head, "norm": hidden, "total": total}


def _refuse_remote_code(folder: Path, config: dict[str, Any], key: str) -> None:
    """trust_remote_code is never set: a checkpoint that needs its own code is refused."""
    tokenizer = folder / "tokenizer_config.json"
    tokenizer_config = read_json(tokenizer, key) if tokenizer.is_file() else {}
    for name, found in (("config.json", config), ("tokenizer_config.json", tokenizer_config)):
        if found.get("auto_map"):
            raise ValueError(
                f"{key}: {name} has auto_map, so the checkpoint asks to run Python code of its own, which is never "
                "done here; use one whose architecture transformers has, and remove auto_map if it does not need it."
            )


def read_json(path: Path, key: str) -> dict[str, Any]:
    """A JSON object from a file; ValueError names the key that led there."""
    if not path.is_file():
        raise ValueError(f"{key}: it has no {path.name}; give a complete Hugging Face checkpoint folder.")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{key}: {path.name} cannot be read ({error}); copy the checkpoint again.") from error
    if not isinstance(found, dict):
        raise ValueError(f"{key}: {path.name} holds no JSON object; copy the checkpoint again.")
    return found
