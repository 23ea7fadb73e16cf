"""Merging two models of different depth from one base, with transport plans.

    python -m opt_deus.expand align=ot zero_init=true out=deep save_plans=plans     # then train `deep`, and a `shallow`
    python examples/merge.py deep shallow plans merged

`deep` has new layers between the base's; `shallow` is the base's depth, fine-tuned on something else. The plans say how
a new layer came from its two parents, so `shallow` is brought to the same depth by the same plans (no transport is
solved again; their outputs are zeroed, so its function stays), and the two are averaged weight by weight.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from opt_deus import models
from opt_deus.methods import Heads, Parents
from opt_deus.methods.aligned import align_with
from opt_deus.models.blocks import block_for
from opt_deus.plan import insert_after
from opt_deus.transport import load_maps


def lifted(shallow: torch.nn.Module, plans: Path) -> torch.nn.Module:
    """The shallow model with the plans' new layers, outputs zeroed: deeper, the same function."""
    config, content = shallow.config, json.loads((plans / "plans.json").read_text())
    block = block_for(config.model_type)
    heads = Heads.of(config)
    plan = insert_after(config.num_hidden_layers, [pair["lower"] for pair in content["pairs"]])
    made = {}
    for index, pair in zip(plan.inserted, content["pairs"], strict=True):
        maps, about = load_maps(plans / pair["file"])
        lower, upper = (models.layer_tensors(shallow, pair[side]) for side in ("lower", "upper"))
        parents = Parents(lower, upper, block, heads, pair["file"])

        def known(where: str, below: torch.Tensor, above: torch.Tensor, maps: dict = maps) -> tuple:
            return maps[where.rpartition(", ")[2]], {}

        flow = "release" if about["align"] == "ot_release" else about.get("flow", "tmf")
        tensors, _ = align_with(parents, flow, known)
        made[index] = models.zero_outputs(block, tensors)
    return models.deepen(shallow, plan, made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("deep", "shallow", "plans", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--weight", type=float, default=0.5, help="of the deep model")
    arguments = parser.parse_args()
    deep, shallow = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for folder in (arguments.deep, arguments.shallow)
    )
    raised = lifted(shallow, arguments.plans)
    if raised.config.num_hidden_layers != deep.config.num_hidden_layers:
        parser.error(f"{arguments.plans} brings {arguments.shallow} to {raised.config.num_hidden_layers} layers, "
                     f"{arguments.deep} has {deep.config.num_hidden_layers}: plans of another expansion")  # fmt: skip
    others = dict(raised.named_parameters())
    with torch.no_grad():
        for name, parameter in deep.named_parameters():
            parameter.lerp_(others[name], 1 - arguments.weight)
    deep.save_pretrained(arguments.out)
    AutoTokenizer.from_pretrained(arguments.deep).save_pretrained(arguments.out)
    print(f"written: {arguments.out}")


if __name__ == "__main__":
    main()
