"""Which arithmetic a device computes natively. Weights stay float32 either way: bf16 means autocast."""

from __future__ import annotations

from pathlib import Path

import torch

NATIVE_CPU_FLAGS = {"amx_bf16", "avx512_bf16"}
CHOICES = {"bfloat16": "bf16", "bf16": "bf16", "float32": "fp32", "fp32": "fp32"}


def precision(dtype: str, device: str) -> str:
    """`dtype` (auto, bfloat16, float32) on `device` (cpu, cuda, cuda:1) -> "bf16" or "fp32".

    auto is bf16 where matrix products in bfloat16 are native: CUDA capability 8.0 on, CPUs with AMX or AVX-512 BF16.
    """
    if dtype in CHOICES:
        return CHOICES[dtype]
    if dtype != "auto":
        raise ValueError(f"dtype={dtype!r} is unknown; choose auto, bfloat16 or float32")
    if device.startswith("cuda"):
        return "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp32"
    return "bf16" if device == "cpu" and NATIVE_CPU_FLAGS & _cpu_flags() else "fp32"


def _cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> set[str]:
    """The CPU's feature flags; empty where the system does not list them."""
    if not cpuinfo.is_file():
        return set()
    for line in cpuinfo.read_text().splitlines():
        if line.startswith("flags"):
            return set(line.partition(":")[2].split())
    return set()
