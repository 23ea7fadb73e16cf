"""Records and samples that follow the contract to the letter, without any model."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pandas as pd

from opt_deus.config import SAMPLE_COLUMNS

STAGES = ("initial", "cpt-0.5", "cpt", "sft")


def make_samples(
    aligns=("ot", "avg"),
    zero_inits=(True, False),
    seeds=(0, 1, 2),
    stages=STAGES,
    num_documents: int = 60,
    effect: float = 0.0,
    seed_noise: float = 0.1,
    generator_seed: int = 0,
    position: str = "top",
) -> pd.DataFrame:
    """`effect`: shift of the latent score of align=ot; documents, seeds and arms are random, all tasks binary."""
    generator = np.random.default_rng(generator_seed)
    rows = []
    easiness = {task: generator.normal(0, 1, num_documents) for task in ("summary", "continuation")}
    tokens = generator.integers(20, 200, num_documents)
    for align in aligns:
        for zero_init in zero_inits:
            own = {task: generator.normal(0, 0.5, num_documents) for task in easiness}
            for seed in seeds:
                arm = f"{align}-{'zero' if zero_init else 'nozero'}-{position}"
                shared = {"arm": arm, "align": align, "zero_init": zero_init, "position": position, "seed": seed}
                shared |= {"cell": f"{arm}-seed{seed}", "overrides": json.dumps({"align": align, "seed": str(seed)})}
                shift = generator.normal(0, seed_noise) + effect * (align == "ot")
                for stage in stages:
                    for task, easy in easiness.items():
                        latent = easy + own[task] + shift + generator.normal(0, 0.3, num_documents)
                        rows += _rows(shared, stage, task, {"acc": (latent > 0).astype(float)})
                    loss = tokens * (3.0 - 0.05 * shift - 0.1 * STAGES.index(stage)) + generator.normal(
                        0, 5, num_documents
                    )
                    rows += _rows(shared, stage, "heldout", {"loglikelihood": -loss, "tokens": tokens, "words": tokens})
    return pd.DataFrame(rows, columns=SAMPLE_COLUMNS)


def _rows(shared: dict, stage: str, task: str, metrics: dict[str, np.ndarray]) -> list[dict]:
    rows = []
    for metric, values in metrics.items():
        for number, value in enumerate(values):
            digest = hashlib.sha256(f"{task} {number}".encode()).hexdigest()
            split = "select" if int(digest[0], 16) < 8 else "confirm"
            document = {"doc_id": number, "doc_hash": digest[:16], "split": split}
            rows.append({**shared, "stage": stage, "task": task, **document, "metric": metric, "value": float(value)})
    return rows


def make_record(shared: dict, samples: pd.DataFrame, status: str = "ok") -> dict:
    """record.json, schema_version 1. `shared`: align, zero_init, position, seed, arm, cell."""
    ok = status == "ok"
    cell = {key: shared[key] for key in ("align", "zero_init", "position", "seed")}
    cell |= {"num_new_layers": 2, "model": "tiny", "arm": shared["arm"], "overrides": {"align": shared["align"]}}
    training = {"tokens": 1024, "steps": 4, "seconds": 2.5, "tokens_per_second": 409.6, "final_loss": 3.1}
    block = {"solver": "sinkhorn", "mass": 1.0, "marginal_error": 1e-5, "cost_identity": 2.0, "cost_plan": 1.5}
    block |= {"effective_support": 3.2, "aligned_norm_ratio": 0.4}
    error = {"type": "RuntimeError", "message": "layer <16> & plan", "traceback": "Traceback ...\nRuntimeError: x"}
    return {
        "schema_version": 1,
        "status": status,
        "reason": "align=none has no zero_init" if status == "skipped" else None,
        "cell": cell,
        "config": {
            "name": "sweep",
            "model": {"name": "tiny", "caveat": "random weights <b>caveat</b>"},
            "eval": {"metric": "acc", "tasks": ["summary", "continuation"]},
            "cpt": {"tokens": 1024},
            "sft": {"tokens": 512},
        },
        "provenance": {
            "git": "abc1234",
            "versions": {"torch": "2.13.0", "transformers": "5.24.0"},
            "platform": "Linux x86_64",
            "threads": 2,
            "dtype": "bf16",
            "base_fingerprint": "0123456789abcdef",
            "data_fingerprint": "fedcba9876543210",
            "started": "2026-11-30T12:00:00+00:00",
            "seconds": 12.5,
        },
        "plan": {"base_layers": 4, "layers": 6, "inserted": [2, 4], "parents": [[1, 2], [2, 3]]} if ok else None,
        "parameters": {"base": 1000, "total": 1500, "trainable": 500} if ok else None,
        "expand": {"seconds": 1.5, "blocks": {"2": {"mlp.down_proj": block}}} if ok else None,
        "perplexity": _perplexities(samples, shared) if ok else None,
        "cpt": training if ok else None,
        "sft": {**training, "tokens": 512} if ok else None,
        "eval": _evaluations(samples) if ok else {},
        "evidence": {},
        "artefacts": {"expand": "expand-1", "cpt": "cpt-1", "sft": "sft-1", "eval": "eval-1", "reused": ["expand"]},
        "error": error if status == "failed" else None,
    }


def _perplexities(samples: pd.DataFrame, shared: dict) -> dict:
    wide = samples[samples["task"] == "heldout"].groupby(["stage", "metric"])["value"].sum().unstack()
    values = np.exp(-wide["loglikelihood"] / wide["tokens"]).to_dict()
    initial = 15.0 if shared["zero_init"] else 30.0
    return {"base": 15.0, "initial": initial, "cpt": values.get("cpt"), "sft": values.get("sft")}


def _evaluations(samples: pd.DataFrame) -> dict:
    result: dict = {}
    for (stage, task), rows in samples[samples["metric"] == "acc"].groupby(["stage", "task"]):
        for split, chosen in [("all", rows), *rows.groupby("split")]:
            value = {"acc": float(chosen["value"].mean()), "stderr": 0.05, "acc_stderr": 0.05, "n": len(chosen)}
            result.setdefault(stage, {}).setdefault(task, {})[split] = value
    return result


def write_sweep(folder: Path, samples: pd.DataFrame, statuses: dict[str, str] | None = None) -> Path:
    """cells/<cell>/record.json, samples.parquet and log.jsonl. statuses: cell -> failed or skipped."""
    for cell, rows in samples.groupby("cell"):
        where = folder / "cells" / str(cell)
        where.mkdir(parents=True)
        status = (statuses or {}).get(str(cell), "ok")
        record = make_record(rows.iloc[0].to_dict() | {"zero_init": bool(rows.iloc[0]["zero_init"])}, rows, status)
        record["cell"]["seed"] = int(rows.iloc[0]["seed"])
        (where / "record.json").write_text(json.dumps(record, indent=1))
        if status != "ok":
            continue
        rows.to_parquet(where / "samples.parquet")
        lines = [
            {"stage": stage, "step": step, "tokens": step * 256, "loss": 4 - 0.2 * step, "lr": 1e-4}
            for stage in ("cpt", "sft")
            for step in range(1, 5)
        ]
        (where / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder
