"""Plans on disk: one safetensors file per pair of layers; to read it needs nothing of this project.

Per weight one tensor: `<weight>|assignment` (int64, for every upper neuron its lower partner), `<weight>|plan`
(float64, lower x upper, mass 1 unless relaxed) or `<weight>|map` (float64, upper x lower). Metadata: per weight the
solver.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file

from opt_deus.transport.plans import Assignment, DensePlan, LinearMap, Map

KINDS = {Assignment: ("assignment", "partner"), DensePlan: ("plan", "matrix"), LinearMap: ("map", "matrix")}


def save_maps(maps: dict[str, Map], path: Path, metadata: dict[str, Any]) -> None:
    """Write maps by weight name; metadata: JSON-able facts about the pair of layers."""
    tensors, facts = {}, {}
    for weight, each in maps.items():
        kind, field = KINDS[type(each)]
        tensors[f"{weight}|{kind}"] = getattr(each, field).cpu().contiguous()
        known = ("solver", "rescaled", "every_neuron")
        facts[weight] = {name: getattr(each, name) for name in known if hasattr(each, name)}
    save_file(tensors, path, metadata={"weights": json.dumps(facts), "about": json.dumps(metadata)})


def load_maps(path: Path) -> tuple[dict[str, Map], dict[str, Any]]:
    """Maps by weight name, and the facts that were saved with them."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        facts = json.loads(metadata["weights"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    classes = {kind: (each, field) for each, (kind, field) in KINDS.items()}
    maps = {}
    for name, tensor in tensors.items():
        weight, _, kind = name.rpartition("|")
        made, field = classes[kind]
        own = {key: value for key, value in facts[weight].items() if key in made.__dataclass_fields__}
        maps[weight] = made(**{field: tensor}, **own)
    return maps, json.loads(metadata["about"])
