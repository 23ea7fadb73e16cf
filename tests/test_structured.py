"""The laws of structured alignment, on Hugging Face's own decoder layer (issues 2 and 3)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from opt_deus.methods import Heads, Parents, aligned, average
from opt_deus.methods.structured import ot_structured, random_symmetric
from opt_deus.methods.symmetry import random_symmetry
from opt_deus.models.blocks import LLAMA

HIDDEN, MLP, WIDTH = 64, 96, 8
SHAPES = {"mha": Heads(8, 8, WIDTH), "gqa": Heads(8, 2, WIDTH), "mqa": Heads(8, 1, WIDTH)}
ALL = {"within_head": "procrustes", "rotary": "planes", "signs": True}


class Layer:
    """One decoder layer as a function of its tensors, on states with a residual stream as large as real ones."""

    def __init__(self, heads: Heads, biases: bool):
        self.heads = heads
        config = LlamaConfig(
            hidden_size=HIDDEN, intermediate_size=MLP, num_attention_heads=heads.num_query, vocab_size=8,
            num_key_value_heads=heads.num_kv, head_dim=heads.head_dim, attention_bias=biases, mlp_bias=biases,
            attn_implementation="eager",
        )  # fmt: skip
        torch.manual_seed(0)
        self.module = LlamaDecoderLayer(config, 0).eval()
        self.states = torch.randn(2, 12, HIDDEN) * 5
        self.embedding = LlamaRotaryEmbedding(config)(self.states, torch.arange(12)[None])

    def random(self, seed: int, scale: float = 0.15) -> dict[str, torch.Tensor]:
        """Weights at the scale of real ones: entries of about 0.15, norms' weights near 1."""
        generator = torch.Generator().manual_seed(seed)
        return {
            name: torch.randn(tensor.shape, generator=generator) * scale + (1.0 if "layernorm" in name else 0.0)
            for name, tensor in self.module.state_dict().items()
        }

    @torch.no_grad()
    def update(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """What the layer adds to the residual stream."""
        self.module.load_state_dict(tensors)
        out = self.module(self.states, position_embeddings=self.embedding)
        return (out[0] if isinstance(out, tuple) else out) - self.states

    def error(self, made: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
        """Of the update, relative."""
        wanted = self.update(wanted)
        return ((self.update(made) - wanted).norm() / wanted.norm()).item()

    def parents(self, lower: dict, upper: dict, seed: int = 0, where: str = "layer 3") -> Parents:
        return Parents(lower, upper, LLAMA, self.heads, where, seed)


def orthogonal(generator: torch.Generator) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64))[0]


def rotation(generator: torch.Generator) -> torch.Tensor:
    angle = torch.rand(WIDTH // 2, generator=generator, dtype=torch.float64) * 6.28
    cos, sin = torch.diag(angle.cos()), torch.diag(angle.sin())
    return torch.cat([torch.cat([cos, -sin], 1), torch.cat([sin, cos], 1)])


def copy_by(parents: Parents, seed: int, within_head: str = "none", rotary: str = "none", signs: bool = False) -> dict:
    """The lower layer after a random symmetry of the kinds named."""
    generator = torch.Generator().manual_seed(seed)
    groups = range(parents.heads.num_kv)
    values = {
        "none": None,
        "permutation": [torch.eye(WIDTH).double()[torch.randperm(WIDTH, generator=generator)] for _ in groups],
        "procrustes": [orthogonal(generator) for _ in groups],
    }[within_head]
    symmetry = replace(
        random_symmetry(replace(parents, seed=seed)),
        value=None if values is None else torch.stack(values),
        rotary=torch.stack([rotation(generator) for _ in groups]) if rotary == "planes" else None,
        signs=torch.randint(0, 2, (MLP,), generator=generator).double() * 2 - 1 if signs else None,
    )
    return {weight.name: symmetry(weight, parents.pair(weight.name)[0]).float() for weight in parents.weights}


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("heads", SHAPES.values(), ids=SHAPES)
def test_symmetries_leave_the_function_unchanged(heads, biases):
    layer = Layer(heads, biases)
    lower = layer.random(1)
    copied = copy_by(layer.parents(lower, lower), 5, **ALL)
    assert layer.error(copied, lower) < 1e-5
    changed = [name for name in lower if not torch.allclose(copied[name], lower[name], atol=1e-3)]
    assert len(changed) >= 7  # it is another set of weights
    # and the check can fail: another turn of v than of o is another function
    assert layer.error({**copied, "self_attn.v_proj.weight": lower["self_attn.v_proj.weight"]}, lower) > 0.1


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"down": False},
        {"within_head": "permutation"},
        {"within_head": "procrustes"},
        {"rotary": "planes"},
        {"signs": True},
        ALL,
    ],
    ids=lambda knobs: "-".join(knobs) or "defaults",
)
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("heads", SHAPES.values(), ids=SHAPES)
def test_a_symmetric_copy_is_recovered(heads, biases, knobs):
    layer = Layer(heads, biases)
    lower = layer.random(1)
    kinds = {key: value for key, value in knobs.items() if key != "down"}
    upper = copy_by(layer.parents(lower, lower), 7, **kinds)
    made, diagnostics = ot_structured(layer.parents(lower, upper), **knobs)
    assert layer.error(made, upper) < 1e-5
    assert max(numbers["cost_plan"] for numbers in diagnostics.values()) < 1e-4
    assert max(numbers["cost_identity"] for numbers in diagnostics.values()) > 1  # there was something to recover


def test_a_copy_outside_the_chosen_symmetries_is_not_recovered():
    layer = Layer(SHAPES["gqa"], False)
    lower = layer.random(1)
    upper = copy_by(layer.parents(lower, lower), 7, **ALL)
    assert layer.error(ot_structured(layer.parents(lower, upper))[0], upper) > 0.05
    relabelled = copy_by(layer.parents(lower, lower), 7)
    for knobs in ({"heads": False}, {"mlp": False}):
        assert layer.error(ot_structured(layer.parents(lower, relabelled), **knobs)[0], relabelled) > 0.05


def test_row_wise_transport_breaks_the_law():
    """ot and ot_exact align q and k, v and o, gate and up each for itself: the copy's function is lost."""
    layer = Layer(SHAPES["gqa"], False)
    lower = layer.random(1)
    upper = copy_by(layer.parents(lower, lower), 7, **ALL)
    assert layer.error(ot_structured(layer.parents(lower, upper), **ALL)[0], upper) < 1e-5
    for method in (aligned.ot, aligned.ot_exact):
        assert layer.error(method(layer.parents(lower, upper))[0], upper) > 0.5


def test_a_noisy_turned_copy_is_matched_head_by_head():
    """Heads are matched by what remains after the alignment inside them; before it turned heads look unrelated."""
    layer = Layer(SHAPES["gqa"], False)
    lower = layer.random(1)
    upper = copy_by(layer.parents(lower, lower), 3, **ALL)
    noisy = {name: tensor + 0.03 * torch.randn(tensor.shape) for name, tensor in upper.items()}
    made, diagnostics = ot_structured(layer.parents(lower, noisy), **ALL)
    assert layer.error(made, noisy) < 0.25
    assert all(numbers["cost_plan"] < 0.4 * numbers["cost_identity"] for numbers in diagnostics.values())


@pytest.mark.parametrize("method", [average.avg, aligned.ot_exact, ot_structured])
def test_a_layer_fused_with_itself_is_itself(method):
    layer = Layer(SHAPES["gqa"], True)
    tensors = layer.random(2)
    assert layer.error(method(layer.parents(tensors, tensors))[0], tensors) < 1e-5


def test_random_relabelling_keeps_the_lower_layers_function_and_follows_seed_and_slot():
    layer = Layer(SHAPES["gqa"], True)
    lower, upper = layer.random(1), layer.random(2)
    made, _ = random_symmetric(layer.parents(lower, upper))
    relabelled = {name: 2 * made[name] - upper[name] for name in made}
    assert layer.error(relabelled, lower) < 1e-4
    gate = "mlp.gate_proj.weight"
    assert not torch.allclose(relabelled[gate], lower[gate], atol=1e-2)
    assert torch.equal(random_symmetric(layer.parents(lower, upper))[0][gate], made[gate])
    for other in ({"seed": 1}, {"where": "layer 4"}):
        assert not torch.equal(random_symmetric(layer.parents(lower, upper, **other))[0][gate], made[gate])


def test_structured_is_never_further_away_than_the_identity():
    """Over all free weights together, and every symmetry more brings the layers nearer."""
    layer = Layer(SHAPES["gqa"], False)
    lower, upper = layer.random(1), layer.random(2)
    inputs = layer.parents(lower, upper)

    def distance(made):  # the average is as far from the upper layer as half the aligned one
        return sum(((made[name] - upper[name]).double() ** 2).sum().item() for name in made)

    steps = [average.avg(inputs)[0], ot_structured(inputs)[0]]
    steps += [ot_structured(inputs, within_head=kind)[0] for kind in ("permutation", "procrustes")]
    steps += [ot_structured(inputs, **ALL)[0]]
    far = [distance(made) for made in steps]
    assert all(later < earlier for earlier, later in zip(far, far[1:], strict=False)), far


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"within_head": "svd"}, "align.within_head=svd: .*procrustes"),
        ({"rotary": "free"}, "align.rotary=free: .*planes"),
        ({"heads": False, "within_head": "procrustes"}, "align.heads=false"),
    ],
)
def test_bad_knobs_are_refused(knobs, message):
    layer = Layer(SHAPES["gqa"], False)
    with pytest.raises(ValueError, match=message):
        ot_structured(layer.parents(layer.random(1), layer.random(2)), **knobs)


def test_symmetries_that_an_architecture_lacks_are_refused():
    layer = Layer(SHAPES["gqa"], False)
    unsigned = replace(LLAMA, rotary=None, weights=tuple(replace(weight, signed=False) for weight in LLAMA.weights))
    inputs = replace(layer.parents(layer.random(1), layer.random(2)), block=unsigned)
    ot_structured(inputs)
    for knobs, message in (({"rotary": "planes"}, "align.rotary"), ({"signs": True}, "align.signs")):
        with pytest.raises(ValueError, match=message):
            ot_structured(inputs, **knobs)


def test_groups_and_their_heads_move_together():
    layer = Layer(SHAPES["gqa"], False)
    symmetry = random_symmetry(layer.parents(layer.random(1), layer.random(1), seed=11))
    assert torch.equal(symmetry.heads.reshape(2, 4) // 4, symmetry.groups[:, None].expand(2, 4))
