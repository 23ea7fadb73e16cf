"""What leaves the house: a deeper checkpoint, and the transport plans of every pair of layers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from opt_deus import models, transport
from opt_deus.config import Cell
from opt_deus.pipeline import stages
from opt_deus.pipeline.bench import Bench, device_of
from opt_deus.pipeline.making import MAPS, Makers


def export_cell(cell: Cell, out: Path) -> None:
    """Builds one deeper model and writes it as a Hugging Face checkpoint in the base checkpoint's dtype."""
    bench = Bench(cell, device_of(cell.device))
    _, state = stages.expand(bench)
    knobs = {
        key: getattr(cell, key) for key in ("zero_init", "zero_weights", "norm_match", "update_match")
    } | cell.align.knobs
    method = f"align={cell.align.name} " + " ".join(f"{key}={value}" for key, value in knobs.items())
    models.export(
        bench.model(state).to("cpu"),
        bench.tokenizer,
        out,
        models.checkpoint_dtype(bench.base.folder),
        models.model_card(bench.base, bench.plan, method),
    )


def export_plans(cell: Cell, out: Path) -> None:
    """Writes layers-<lower>-<upper>.safetensors for every gap of the plan (transport/files.py) and plans.json, which
    names files, method, knobs and diagnostics. RuntimeError where the method aligns nothing.
    """
    bench, out = Bench(cell, device_of(cell.device)), out.expanduser()
    out.mkdir(parents=True, exist_ok=True)
    pairs = []
    with Makers(bench) as makers:
        for lower, upper in bench.plan.parents:
            artefact = makers.maps(lower, upper)
            if not artefact.details["weights"]:
                raise RuntimeError("it aligns nothing, so there are no plans to save; try align=ot")
            file = f"layers-{lower}-{upper}.safetensors"
            shutil.copyfile(artefact.path / MAPS, out / file)
            _, about = transport.load_maps(out / file)
            pairs.append({"file": file, "lower": lower, "upper": upper, "diagnostics": about["diagnostics"]})
    content = {"base": bench.base.fingerprint, "align": {"name": cell.align.name, **cell.align.knobs}, "pairs": pairs}
    (out / "plans.json").write_text(json.dumps(content, indent=1))
