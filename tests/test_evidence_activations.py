"""Activation correlation and the swap: known answers on a model whose layers are relabelled copies of each other."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from opt_deus.config import EvidenceConfig
from opt_deus.evidence import COLUMNS, Subject, Text
from opt_deus.evidence import activation_correlation as study
from opt_deus.evidence.partners import Pairing, batches, best_partner, method_pairings, same_index
from opt_deus.evidence.substitutes import RELABELLINGS, Substitute, chosen_units, fit, substitutes_at
from opt_deus.evidence.swap import Swapper
from opt_deus.evidence.swap import measure as swap
from opt_deus.evidence.unit_maps import as_matrix, maps_on, sites
from opt_deus.methods import Heads, Parents
from opt_deus.methods.aligned import Flow
from opt_deus.methods.symmetry import Symmetry, random_symmetry
from opt_deus.models.activations import correlations
from opt_deus.models.blocks import LLAMA
from opt_deus.models.surgery import layer_tensors
from opt_deus.plan import insert_after
from opt_deus.transport import Assignment, DensePlan, LinearMap

VOCABULARY, HIDDEN, MLP, HEADS = 61, 32, 48, Heads(num_query=4, num_kv=2, head_dim=8)
OUTPUTS = {"attention": "self_attn.o_proj.weight", "mlp": "mlp.down_proj.weight"}
ROOT = Path(__file__).parents[1]


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def in_blocks(values: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
    return list(values.split(lengths))


def corrcoef(x: torch.Tensor, y: torch.Tensor) -> np.ndarray:
    """Unit by unit."""
    return np.array([np.corrcoef(a, b)[0, 1] for a, b in zip(x.double().T.numpy(), y.double().T.numpy(), strict=True)])


# ---------------------------------------------------------------- the statistics


def test_block_sums_give_numpys_correlations_of_any_resample():
    lengths = [7, 12, 9]
    lower = noise(28, 6) * torch.tensor([1.0, 100, 0.01, 1, 5, 1]) + 40
    order = torch.tensor([3, 0, 5, 1, 2, 4])
    upper = lower[:, order] + torch.linspace(0.1, 30, 6) * noise(28, 6, seed=1)
    sums = study.block_sums(Pairing(partner=order), in_blocks(lower, lengths), in_blocks(upper, lengths))
    assert sums.correlations(np.ones((1, 3)))[0] == pytest.approx(corrcoef(lower[:, order], upper), abs=1e-5)
    drawn = torch.cat([torch.arange(0, 7), torch.arange(0, 7), torch.arange(19, 28)])  # blocks 0, 0 and 2
    expected = corrcoef(lower[drawn][:, order], upper[drawn])
    assert sums.correlations(np.array([[2.0, 0.0, 1.0]]))[0] == pytest.approx(expected, abs=1e-5)


def test_soft_plans_three_numbers_and_the_random_reference_by_their_definitions():
    lower, upper, plan = noise(40, 5) * torch.arange(1, 6) + 3, noise(40, 5, seed=1) + 0.2, noise(5, 5, seed=2).exp()
    upper = upper + lower.flip(1)
    pairings = method_pairings({"": DensePlan(plan / plan.sum(), "some")})
    pairings["random"] = Pairing(mixture=torch.ones(1, 5), of_scores=True)
    every = np.corrcoef(lower.double().numpy().T, upper.double().numpy().T)[:5, 5:]
    shares = (plan / plan.sum(0)).numpy()
    expected = {
        "barycentric": corrcoef(lower @ torch.from_numpy(shares), upper),
        "argmax": every[shares.argmax(0), range(5)],
        "weighted": (shares * every).sum(0),
        "random": every.mean(0),
    }
    for name, values in expected.items():
        sums = study.block_sums(pairings[name], in_blocks(lower, [25, 15]), in_blocks(upper, [25, 15]))
        assert sums.correlations(np.ones((1, 2)))[0] == pytest.approx(values, abs=1e-5), name


def test_a_soft_plan_that_is_an_assignment_gives_its_number_three_times():
    lower, upper = noise(60, 8), noise(60, 8, seed=1)
    partner = torch.randperm(8, generator=torch.Generator().manual_seed(3))
    hard = torch.zeros(8, 8, dtype=torch.float64)
    hard[partner, torch.arange(8)] = 1 / 8
    soft = method_pairings({"": DensePlan(hard, "some")})
    exact = method_pairings({"": Assignment(partner)})
    assert set(soft) == {"barycentric", "argmax", "weighted"} and set(exact) == {"barycentric"}
    blocks = in_blocks(lower, [30, 30]), in_blocks(upper, [30, 30])
    expected = study.block_sums(exact["barycentric"], *blocks).correlations(np.ones((1, 2)))
    assert expected[0] == pytest.approx(corrcoef(lower[:, partner], upper), abs=1e-5)
    for name, pairing in soft.items():
        assert study.block_sums(pairing, *blocks).correlations(np.ones((1, 2))) == pytest.approx(expected, abs=1e-5), (
            name
        )


def test_units_that_never_vary_are_left_out_and_counted():
    lower, upper = noise(40, 6), noise(40, 6, seed=1)
    lower[:, 2] = 7.3
    upper[:, 4] = -0.1
    blocks = in_blocks(lower, [20, 20]), in_blocks(upper, [20, 20])
    assert study.block_sums(same_index(6), *blocks).live.tolist() == [True, True, False, True, False, True]
    every = Pairing(mixture=torch.ones(1, 6), of_scores=True)
    sums = study.block_sums(every, *blocks)
    kept = [0, 1, 3, 4, 5]
    expected = np.corrcoef(lower[:, kept].T, upper[:, 0])[-1, :-1].mean()  # the constant unit is no candidate
    assert sums.live.tolist() == [True, True, True, True, False, True]
    assert sums.correlations(np.ones((1, 2)))[0, 0] == pytest.approx(expected, abs=1e-5)
    empty = method_pairings({"": DensePlan(torch.zeros(6, 6, dtype=torch.float64), "underflown", rescaled=False)})
    assert not any(study.block_sums(pairing, *blocks).live.any() for pairing in empty.values())


def test_the_ceiling_is_chosen_on_one_half_and_measured_on_the_other():
    """Of independent noise the chosen half shows large correlations; honest ones are about 0, like random's."""
    lengths = [40] * 8
    lower, upper = (in_blocks(noise(320, 60, seed=seed), lengths) for seed in (0, 1))
    found = study.pairings_at((lower, upper), {}, 4)
    means = {}
    for half, part in {"chosen": slice(0, 4), "measured": slice(4, 8)}.items():
        for name, pairing in found.items():
            means[half, name] = study.block_sums(pairing, lower[part], upper[part]).correlations(np.ones((1, 4))).mean()
    for name in (study.CEILING, study.CEILING_SIGNED):
        assert means["chosen", name] > 0.1
        assert abs(means["measured", name]) < 0.03
    assert abs(means["measured", "random"]) < 0.01 and abs(means["measured", "same_index"]) < 0.04
    # whatever the second half says, the partners stay
    other = study.pairings_at((lower[:4] + lower[:4], upper[:4] + upper[4:]), {}, 4)
    assert torch.equal(other[study.CEILING].partner, found[study.CEILING].partner)


def test_the_ceiling_finds_planted_partners_and_signs():
    lower = noise(400, 20)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(1))
    sign = torch.tensor([1.0, -1.0]).repeat(10)
    upper = lower[:, order] * sign + 0.5 * noise(400, 20, seed=2)
    best = best_partner(correlations(lower, upper), signed=True)
    assert torch.equal(best.partner, order) and torch.equal(best.factor, sign)
    plain = best_partner(correlations(lower, upper))
    assert torch.equal(plain.partner[::2], order[::2]) and plain.factor is None


def test_intervals_cover_the_mean_over_all_texts_and_units():
    """Correlations differ by unit and by text block: neither may be taken as fixed."""
    generator = np.random.default_rng(0)
    units, blocks, tokens, simulations = 15, 12, 30, 200
    estimates, covered, widths = [], 0, []
    for simulation in range(simulations):
        wanted = (
            0.2 + 0.12 * generator.standard_normal((1, 1, units)) + 0.08 * generator.standard_normal((blocks, 1, 1))
        )
        wanted = wanted.clip(-0.95, 0.95)
        x, e = generator.standard_normal((2, blocks, tokens, units))
        y = wanted * x + np.sqrt(1 - wanted**2) * e
        lower, upper = ([torch.from_numpy(block).float() for block in side] for side in (x, y))
        sums = study.block_sums(same_index(units), lower, upper)
        values = study.bootstrap(sums, *study.draws(blocks, units, 200, [simulation]))
        low, high = np.quantile(values[1:], [0.025, 0.975])
        estimates.append(values[0])
        covered += low <= 0.2 <= high
        widths.append(high - low)
    assert 0.90 <= covered / simulations <= 0.995
    ideal = 2 * 1.96 * np.std(estimates)
    assert 0.8 * ideal < np.mean(widths) < 1.4 * ideal


def test_block_values_are_the_estimate_in_the_mean_and_follow_their_block():
    lower, upper = noise(400, 10), noise(400, 10, seed=1)
    upper[:40] += 2 * lower[:40]  # block 0 alone is correlated
    sums = study.block_sums(same_index(10), in_blocks(lower, [40] * 10), in_blocks(upper, [40] * 10))
    values = study.block_values(sums)
    estimate = sums.correlations(np.ones((1, 10))).mean()
    assert values.mean() == pytest.approx(estimate, abs=0.02)
    assert values[0] > 5 * np.abs(values[1:]).max()


# ---------------------------------------------------------------- a method's maps as maps of units


def test_heads_outputs_follow_the_value_rows_as_the_papers_flow_does():
    weight = noise(HIDDEN, 32).double()
    partner = torch.randperm(16, generator=torch.Generator().manual_seed(1))
    matrix = torch.rand(16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    query = Assignment(torch.randperm(32, generator=torch.Generator().manual_seed(3)))
    for plan in (Assignment(partner), DensePlan(matrix / matrix.sum(), "some")):
        flow = Flow(LLAMA, HEADS, "tmf")
        flow.plans["value"].append(plan)
        maps = {"self_attn.q_proj.weight": query, "self_attn.v_proj.weight": plan}
        found = maps_on("attention", maps, LLAMA, HEADS)
        assert set(found) == {""} and type(found[""]) is type(plan)
        assert torch.allclose(found[""].on_columns(weight), flow.pre_align(weight, "attention"))
        assert found[""].mass == pytest.approx(1)


@pytest.mark.parametrize("turned", [False, True])
def test_heads_outputs_follow_the_query_heads_that_a_method_relabels(turned):
    layer = {name: noise(*shape, seed=7) for name, shape in tensor_shapes().items()}
    symmetry = random_symmetry(Parents(layer, layer, LLAMA, HEADS, "layer 0", seed=5))
    if turned:
        symmetry = replace(symmetry, value=torch.linalg.qr(noise(2, 8, 8).double())[0])
    maps = {w.name: symmetry.rows(w, len(layer[w.name])) for w in LLAMA.weights if w.columns is not None}
    found = maps_on("attention", maps, LLAMA, HEADS)[""]
    assert isinstance(found, LinearMap if turned else Assignment)
    weight = layer["self_attn.o_proj.weight"].double()
    moved = symmetry(LLAMA.weight("self_attn.o_proj.weight"), weight)  # how its columns go with the heads' outputs
    assert torch.allclose(moved, weight @ as_matrix(found).T) and not torch.allclose(moved, weight)


def test_maps_that_agree_are_reported_once_and_others_by_weight():
    gate, up = Assignment(torch.tensor([1, 0, 2])), Assignment(torch.tensor([1, 2, 0]))
    names = ("mlp.gate_proj.weight", "mlp.up_proj.weight")
    agreeing = maps_on("mlp", dict.fromkeys(names, gate), LLAMA, HEADS)
    assert list(agreeing) == [""] and torch.equal(agreeing[""].partner, gate.partner)
    assert set(maps_on("mlp", dict(zip(names, (gate, up), strict=True)), LLAMA, HEADS)) == set(names)
    assert maps_on("mlp", {}, LLAMA, HEADS) == {} and maps_on("attention", {}, LLAMA, HEADS) == {}
    assert set(method_pairings({names[0]: gate})) == {f"barycentric[{names[0]}]"}


def test_gaps_are_taken_together_as_long_as_their_layers_fit():
    assert batches([0, 1, 2, 5, 6, 9], 3) == [[0, 1], [2], [5, 6], [9]]
    assert batches([0, 1, 2], 0) == [[0], [1], [2]]


# ---------------------------------------------------------------- both studies on a model


def tensor_shapes() -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in layer_tensors(new_model(), 0).items()}


def new_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=MLP, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=VOCABULARY, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def relabelled_subject() -> Subject:
    """Layers 1 and 3 are relabelled copies of 0 and 2, which add nothing to the stream; so their units are the same.

    Layer 1's attention adds nothing either: its MLP sees what layer 0's sees. Layer 3's does: there heads do work.
    """
    model = new_model()
    maps = {}
    for gap in (0, 2):
        lower = {name: tensor.clone() for name, tensor in layer_tensors(model, gap).items()}
        neurons = torch.randperm(MLP, generator=torch.Generator().manual_seed(gap))
        symmetry = Symmetry(HEADS, neurons, groups=torch.tensor([1, 0]), heads=torch.tensor([3, 2, 0, 1]))
        upper = {weight.name: symmetry(weight, lower[weight.name]) for weight in LLAMA.weights if weight.name in lower}
        if gap == 0:
            upper[OUTPUTS["attention"]] = torch.zeros_like(upper[OUTPUTS["attention"]])
        lower |= {name: torch.zeros_like(lower[name]) for name in OUTPUTS.values()}
        model.model.layers[gap].load_state_dict(lower)
        model.model.layers[gap + 1].load_state_dict(upper)
        maps[gap] = {w.name: symmetry.rows(w, len(lower[w.name])) for w in LLAMA.weights if w.columns is not None}
    ids = torch.randint(VOCABULARY, (24, 1), generator=torch.Generator().manual_seed(4))
    for _ in range(19):  # text that the model expects, so that a change of it costs
        likely = model(input_ids=ids).logits[:, -1].softmax(-1)
        ids = torch.cat([ids, torch.multinomial(likely, 1, generator=torch.Generator().manual_seed(5))], 1)
    evaluation = Text([row[None] for row in ids[:12]], ids[:12])
    plan = insert_after(4, [0, 2])
    return Subject(
        model, None, LLAMA, HEADS, plan, "some", 0, evaluation, Text([], ids[12:]), None, maps.get, None, None, None
    )


@pytest.fixture(scope="module")
def subject() -> Subject:
    return relabelled_subject()


def lines(finding) -> dict[tuple, dict]:
    return {(line["quantity"], line["site"], line["gap"]): line for line in finding.summary}


def test_the_true_relabelling_correlates_fully_and_the_same_index_does_not(subject):
    finding = study.measure(subject, resamples=100)
    found = lines(finding)
    for axis in ("query", "key", "value", "attention"):
        for gap in (0, 2, None):
            assert found["barycentric", axis, gap]["estimate"] == pytest.approx(1, abs=1e-4)
            assert found["same_index", axis, gap]["estimate"] < 0.8
            assert found["attainable", axis, gap]["estimate"] > 0.99
            assert found["share_of_attainable.barycentric", axis, gap]["estimate"] == pytest.approx(1, abs=0.02)
    assert found["barycentric", "mlp", 0]["estimate"] == pytest.approx(1, abs=1e-4)
    assert found["barycentric", "mlp", 2]["estimate"] < 0.99  # layer 3's attention has changed what its MLP sees
    assert found["same_index", "mlp", 0]["estimate"] < 0.2
    line = found["barycentric", "query", None]
    assert line["low"] <= line["estimate"] <= line["high"] and line["n"] == 6 and line["items"] == "text blocks"
    assert found["excluded_units.same_index", "mlp_output", 0]["estimate"] == HIDDEN  # layer 0 gives nothing
    assert ("barycentric", "mlp_output", 0) not in found

    assert list(finding.rows.columns) == COLUMNS
    assert set(finding.rows["site"]) <= set(sites(LLAMA)) and len(sites(LLAMA)) == 7
    rows = finding.rows.query("quantity == 'barycentric' and site == 'mlp' and gap == 2")
    assert list(rows["item"]) == [f"block {index}" for index in range(6, 12)]
    assert rows["value"].mean() == pytest.approx(found["barycentric", "mlp", 2]["estimate"], abs=0.02)


def test_pooled_lines_are_means_over_gaps_and_shares_are_ratios_of_them(subject):
    found = lines(study.measure(subject, resamples=50))
    for name in ("barycentric", "same_index", "random", "attainable"):
        gaps = [found[name, "mlp", gap]["estimate"] for gap in (0, 2)]
        assert found[name, "mlp", None]["estimate"] == pytest.approx(np.mean(gaps))
    own, floor, top = (found[name, "mlp", None]["estimate"] for name in ("same_index", "random", "attainable"))
    share = found["share_of_attainable.same_index", "mlp", None]["estimate"]
    assert share == pytest.approx((own - floor) / (top - floor))


def test_the_true_partner_does_the_units_work_and_others_do_not(subject):
    finding = swap(subject, every=1, draws=3)
    found = lines(finding)
    for axis, gap in (("mlp", 0), ("attention", 2)):
        costs = {name: found[name, axis, gap]["estimate"] for name in ("partner", "same_index", "random", "mean")}
        assert abs(costs.pop("partner")) < 1e-4
        assert abs(found["attainable", axis, gap]["estimate"]) < 1e-3
        assert min(costs.values()) > 0.01, costs
        assert found["share_of_attainable.partner", axis, gap]["estimate"] == pytest.approx(1, abs=0.01)
        gain = found["gain.same_index", axis, gap]["estimate"]
        assert gain == pytest.approx(costs["random"] - costs["same_index"])
    assert abs(found["mean", "attention", 0]["estimate"]) < 1e-5  # layer 1's attention does nothing
    assert found["mean", "mlp", 0]["n"] == 12 and found["mean", "mlp", 0]["items"] == "documents"
    assert list(finding.rows.columns) == COLUMNS and set(finding.rows["gap"]) == {0, 2}


def test_the_model_is_left_as_it_was(subject):
    ids = subject.evaluation.blocks[:2]
    with torch.no_grad():
        before = subject.model(input_ids=ids).logits
        swap(subject, every=1, documents=2)
        study.measure(subject, resamples=10)
        assert torch.equal(subject.model(input_ids=ids).logits, before)


def test_a_swap_is_what_a_hand_made_hook_does_and_spares_sinks(subject):
    model = new_model()
    with torch.no_grad():
        model.model.embed_tokens.weight[5] *= 200  # a position whose state is far larger than the others'
    ids = torch.tensor([[3, 5, 17, 40, 2, 9, 30, 31]])
    units = torch.zeros(MLP)
    nothing = Substitute(same_index(MLP), units, units)
    chosen = chosen_units(MLP, 1, 0.5, 1, [0])
    swapper = Swapper(model, LLAMA, ids, [1])
    cost = swapper.cost(1, "mlp", [nothing], chosen)

    def silence(_module, inputs):
        silenced = inputs[0].clone()
        silenced[:, [0, *range(2, 8)]] *= (~chosen).float()
        return (silenced,)

    with torch.no_grad():
        intact = model(input_ids=ids, labels=ids).loss.item()
        handle = model.model.layers[2].mlp.down_proj.register_forward_pre_hook(silence)
        silenced = model(input_ids=ids, labels=ids).loss.item()
        handle.remove()
    assert cost[0] == pytest.approx(silenced - intact, abs=1e-5) and abs(cost[0]) > 1e-3


def test_substitutes_are_fitted_by_least_squares_or_to_the_units_deviation():
    lower = noise(500, 4) * torch.tensor([1.0, 3.0, 0.1, 1.0]) + 2
    upper = torch.stack(
        [2 * lower[:, 1] - 5, -lower[:, 0], 4 * lower[:, 2] + noise(500, seed=1), noise(500, seed=2)], 1
    )
    pairing = Pairing(partner=torch.tensor([1, 0, 2, 3]))
    exact = fit(pairing, lower, upper, "least_squares")
    assert torch.allclose(exact(lower)[:, :2], upper[:, :2], atol=1e-3)
    slope, offset = np.polyfit(lower[:, 2].numpy(), upper[:, 2].numpy(), 1)
    assert exact.slope[2] == pytest.approx(slope, rel=1e-3) and exact.offset[2] == pytest.approx(offset, abs=1e-3)
    spread = fit(pairing, lower, upper, "deviation")(lower)
    assert torch.allclose(spread.std(0), upper.std(0), rtol=1e-3) and torch.allclose(
        spread.mean(0), upper.mean(0), 1e-3
    )
    assert spread[:, 1] @ upper[:, 1] < exact(lower)[:, 1] @ upper[:, 1]  # its sign is the partner's own


def test_units_are_drawn_whole_and_again_the_same():
    heads = chosen_units(32, 8, 0.25, 3, [1, 2])
    assert heads.shape == (3, 32) and (heads.sum(1) == 8).all()
    assert (heads.unflatten(1, (4, 8)).float().mean(2) % 1 == 0).all()
    assert torch.equal(heads, chosen_units(32, 8, 0.25, 3, [1, 2]))
    assert chosen_units(32, 8, 0.01, 1, [0]).sum() == 8  # at least one


def test_documents_take_random_partners_in_turn_whole_heads_together():
    sides = [noise(60, 32)], [noise(60, 32, seed=1)]
    found = substitutes_at(sides, {}, "least_squares", 8, [0])
    assert {name: len(each) for name, each in found.items()} == {
        "same_index": 1, "attainable": 1, "mean": 1, "random": RELABELLINGS,
    }  # fmt: skip
    orders = torch.stack([each.pairing.partner for each in found["random"]]).unflatten(1, (4, 8))
    assert (orders % 8 == torch.arange(8)).all() and len(orders[:, :, 0].unique(dim=0)) > 5
    assert torch.allclose(found["mean"][0](sides[0][0]), sides[1][0].mean(0).expand(60, -1))


@pytest.mark.parametrize(
    ("measure", "knobs", "message"),
    [
        (swap, {"scale": "none"}, "evidence.scale=none: .*deviation"),
        (swap, {"fraction": 0.0}, "evidence.fraction=0.0"),
        (swap, {"draws": 0}, "evidence.draws=0"),
    ],
)
def test_bad_knobs_are_refused(subject, measure, knobs, message):
    with pytest.raises(ValueError, match=message):
        measure(subject, **knobs)


def test_too_little_text_is_refused(subject):
    short = replace(subject, evaluation=Text([], subject.evaluation.blocks[:3]))
    with pytest.raises(ValueError, match="evidence.tokens: 3 blocks"):
        study.measure(short)


@pytest.mark.parametrize("name", ["activation_correlation", "swap"])
def test_the_choice_states_all_knobs(name):
    choice = yaml.safe_load((ROOT / "conf" / "evidence" / f"{name}.yaml").read_text())
    assert choice["name"] == name
    module, function = choice["measure"].split(":")
    choice = {key: value for key, value in choice.items() if key not in {each.name for each in fields(EvidenceConfig)}}
    _, *knobs = inspect.signature(getattr(importlib.import_module(module), function)).parameters.values()
    assert choice == {knob.name: knob.default for knob in knobs}
