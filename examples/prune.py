"""Pruning with transport plans: drop the layer that its neighbour below replaces best.

    python -m opt_deus.expand align=ot_structured position=top num_new_layers=29 save_plans=plans   # every pair of 30
    python examples/prune.py CHECKPOINT_DIR plans pruned

The score of a pair is the squared distance that is left between the upper layer's matrices and the lower one's brought
into its order, over their squared norms (0: equal, 1: nothing in common). The best pair's upper layer is dropped. With
--check TEXT_FILE every single layer is dropped in turn and the loss on the text printed beside the score, so that one
sees whether weight distance was a good guide.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path

import torch
from scipy.stats import spearmanr
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from opt_deus.evidence.unit_maps import as_matrix, maps_on
from opt_deus.methods import Heads
from opt_deus.models.blocks import block_for
from opt_deus.transport import load_maps


def score(model: PreTrainedModel, plans: Path, pair: dict) -> float:
    """What of the upper layer the aligned lower one does not explain: 0 equal, 1 or more nothing in common."""
    maps, _ = load_maps(plans / pair["file"])
    block, config = block_for(model.config.model_type), model.config
    heads = Heads.of(config)
    lower, upper = (model.model.layers[pair[side]].state_dict() for side in ("lower", "upper"))
    apart = total = 0.0
    for name, each in maps.items():
        above, moved = upper[name].double(), each.on_rows(lower[name].double())
        axis = block.weight(name).columns
        if axis in ("mlp", "attention"):  # inputs are units that have moved too
            along = [as_matrix(one).double() for one in maps_on(axis, maps, block, heads).values()]
            moved = sum(moved @ one.T for one in along) / len(along)
        apart += (moved - above).square().sum().item()
        total += moved.square().sum().item() + above.square().sum().item()
    return apart / total


def without(model: PreTrainedModel, dropped: int) -> PreTrainedModel:
    """A copy without one layer, the others renumbered, so that the cache works."""
    shorter = copy.deepcopy(model)
    del shorter.model.layers[dropped]
    for index, layer in enumerate(shorter.model.layers):
        layer.self_attn.layer_idx = index
    shorter.config.num_hidden_layers -= 1
    if getattr(shorter.config, "layer_types", None):
        del shorter.config.layer_types[dropped]
    return shorter


@torch.no_grad()
def loss(model: PreTrainedModel, ids: torch.Tensor) -> float:
    return model(input_ids=ids, labels=ids).loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("plans", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--check", type=Path, help="text to measure every single drop on")
    arguments = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(arguments.checkpoint, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.checkpoint)
    pairs = json.loads((arguments.plans / "plans.json").read_text())["pairs"]
    scores = {pair["upper"]: score(model, arguments.plans, pair) for pair in pairs}
    best = min(scores, key=scores.get)
    print(f"dropping layer {best}: its lower neighbour leaves {scores[best]:.3f} of the pair unexplained")
    if arguments.check:
        text = arguments.check.read_text()
        ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=2048)["input_ids"]
        losses = {layer: loss(without(model, layer), ids) for layer in scores}
        print(f"intact: {loss(model, ids):.3f} nats per token")
        for layer in sorted(scores, key=scores.get):
            print(f"layer {layer:3d}  score {scores[layer]:.3f}  without it {losses[layer]:.3f}")
        rank = sorted(losses, key=losses.get).index(best) + 1
        agreement = spearmanr(list(scores.values()), [losses[layer] for layer in scores])
        print(f"the chosen drop is the {rank}. best of {len(losses)}; Spearman of score and loss {agreement[0]:+.2f}")
    without(model, best).save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)


if __name__ == "__main__":
    main()
