"""Base models from the Hugging Face hub: safetensors snapshots, and what to say when the hub refuses."""

from __future__ import annotations

from pathlib import Path

from opt_deus.config import ModelConfig

PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt", "README.md"]
LEFT_OUT = ["original/*", "onnx/*"]
GATED = ("meta-llama/",)  # owners whose models need an accepted licence


def check(cfg: ModelConfig, offline: bool) -> None:
    """ValueError where the snapshot is not here and cannot be fetched: offline, or gated and nobody logged in."""
    import huggingface_hub

    if not cfg.hub_id:
        raise ValueError(f"model={cfg.name}: model.hub_id is not set; give OWNER/NAME.")
    cached = huggingface_hub.try_to_load_from_cache(cfg.hub_id, "config.json", revision=cfg.revision)
    if isinstance(cached, str):
        return
    if _closed(offline):
        raise ValueError(
            f"model={cfg.name}: {cfg.hub_id} is not in the hub's cache and the hub is closed (offline=true or "
            "HF_HUB_OFFLINE=1); run once with it open, or use model=path model.path=DIR with a copy."
        )
    if cfg.hub_id.startswith(GATED) and not huggingface_hub.get_token():
        raise ValueError(_gated(cfg))


def snapshot(cfg: ModelConfig, offline: bool) -> Path:
    """The folder of the snapshot, fetched if need be (with the hub's progress bars); ValueError says what stops it."""
    import huggingface_hub
    from huggingface_hub import errors

    check(cfg, offline)
    try:
        return Path(
            huggingface_hub.snapshot_download(
                cfg.hub_id,
                revision=cfg.revision,
                allow_patterns=PATTERNS,
                ignore_patterns=LEFT_OUT,
                local_files_only=_closed(offline),
            )
        )
    except errors.GatedRepoError as error:
        raise ValueError(_gated(cfg)) from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise ValueError(
            f"model.hub_id={cfg.hub_id}, model.revision={cfg.revision}: the hub has no such model; correct it."
        ) from error
    except (errors.LocalEntryNotFoundError, errors.HfHubHTTPError, OSError) as error:
        raise ValueError(
            f"model={cfg.name}: {cfg.hub_id} could not be fetched from the hub ({type(error).__name__}: {error}); "
            "try again with a network, or use model=path model.path=DIR with a copy."
        ) from error


def _closed(offline: bool) -> bool:
    from huggingface_hub import constants

    return offline or constants.HF_HUB_OFFLINE


def _gated(cfg: ModelConfig) -> str:
    return (
        f"model={cfg.name}: {cfg.hub_id} is gated. Accept its licence at https://huggingface.co/{cfg.hub_id}, make a "
        "token at https://huggingface.co/settings/tokens, run `hf auth login`; or use model=path model.path=DIR."
    )
