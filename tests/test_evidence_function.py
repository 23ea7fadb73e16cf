"""Studies of what made layers compute: likelihood, scale, renumbering, first step."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from subjects import markov_documents, subject_of, tiny_llama

from opt_deus.config import EvidenceConfig
from opt_deus.evidence import COLUMNS, first_step, likelihood, renumbering, scale
from opt_deus.evidence.likelihood import Reference, losses
from opt_deus.evidence.splicing import layer_module, losses_after, one_pass, spliced
from opt_deus.methods import aligned, average, copy
from opt_deus.methods.structured import ot_structured, random_symmetric
from opt_deus.models.blocks import LLAMA
from opt_deus.models.surgery import layer_tensors, layers_of, zero_outputs
from opt_deus.models.updates import Updates, streams

GAPS = [1, 2]
CONF = Path(__file__).parents[1] / "conf" / "evidence"


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


@pytest.fixture(scope="module")
def learner():
    """Hardly trained on the chain that the documents come from: much is left to learn."""
    model = tiny_llama(seed=3, initializer_range=0.05)
    text = torch.cat([ids[:, :38] for ids in markov_documents(64, seed=5)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(20):
        optimizer.zero_grad()
        batch = text[16 * (step % 4) : 16 * (step % 4) + 16]
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return model.eval()


def line(finding, quantity: str, site: str, gap: int | None = None) -> dict:
    found = [each for each in finding.summary if (each["quantity"], each["site"], each["gap"]) == (quantity, site, gap)]
    assert len(found) == 1, (quantity, site, gap)
    return found[0]


def check_form(finding):
    assert list(finding.rows.columns) == COLUMNS
    assert not finding.rows.duplicated(COLUMNS[:-1]).any() and np.isfinite(finding.rows["value"]).all()
    for each in finding.summary:
        assert set(each) == {"quantity", "site", "gap", "estimate", "low", "high", "n", "items"}
        assert np.isfinite(each["estimate"])


# --- likelihood


def test_perplexity_is_hugging_faces_loss(model, monkeypatch):
    documents = markov_documents(4)
    own = [model(input_ids=ids, labels=ids).loss.item() * (ids.shape[1] - 1) for ids in documents]
    scores = Reference(model, documents).score()
    assert scores.nll == pytest.approx(own, rel=1e-5)
    assert scores.perplexity()["estimate"] == pytest.approx(np.exp(sum(own) / scores.tokens.sum()), rel=1e-5)
    monkeypatch.setattr(likelihood, "POSITIONS", 7)  # however many positions are held at once
    assert losses(model, documents) == pytest.approx(own, rel=1e-5)


def test_divergence_is_zero_for_the_same_model_and_positive_else(model):
    documents, other = markov_documents(4), tiny_llama(seed=1)
    reference = Reference(model, documents)
    assert np.abs(reference.score(tiny_llama()).kl).max() < 1e-4
    scores = reference.score(other)
    with torch.no_grad():
        pairs = [(each(input_ids=documents[0][:, :-1]).logits[0].log_softmax(-1)) for each in (model, other)]
    literal = (pairs[0].exp() * (pairs[0] - pairs[1])).sum().item()
    assert scores.kl[0] == pytest.approx(literal, rel=1e-4) and (scores.kl > 1).all()
    assert scores.divergence()["low"] > 0


def test_spliced_layers_make_the_deeper_model_and_leave_no_trace(model):
    subject = subject_of(model, average.avg, GAPS)
    made, documents = {gap: subject.made(gap) for gap in GAPS}, markov_documents(3)
    before = losses(model, documents)
    with spliced(model, {gap: layer_module(model, tensors) for gap, tensors in made.items()}):
        inside = losses(model, documents)
    assert inside == pytest.approx(losses(subject.deeper(made), documents), rel=1e-5)
    below = [streams(model, ids[:, :-1], [1])[1].states[0] for ids in documents]
    layers = {gap: layer_module(model, tensors) for gap, tensors in made.items()}
    assert losses_after(model, layers, documents, below) == pytest.approx(inside, rel=1e-5)
    assert np.abs(inside - before).max() > 0.1
    assert np.array_equal(losses(model, documents), before)


def test_no_document_to_predict_is_refused():
    with pytest.raises(ValueError, match=r"evidence.documents=0"):
        likelihood.first_documents(markov_documents(2), 0)
    with pytest.raises(ValueError, match="no document of two tokens"):
        likelihood.first_documents([torch.tensor([[1]])], 3)


# --- scale


def test_a_copy_moves_the_stream_as_its_parent_does(model):
    for make, same, other in ((copy.lower, "lower", "upper"), (copy.upper, "upper", "lower")):
        finding = scale.measure(subject_of(model, make, GAPS))
        check_form(finding)
        for gap in (*GAPS, None):
            assert line(finding, "update_cosine", f"{same} parent", gap)["estimate"] == pytest.approx(1, abs=1e-5)
            assert line(finding, "update_cosine", f"{other} parent", gap)["estimate"] < 0.9
            norms = [line(finding, "update_norm", site, gap)["estimate"] for site in ("made", f"{same} parent")]
            assert norms[0] == pytest.approx(norms[1], rel=1e-5)
        assert line(finding, "kl", "deeper")["low"] > 0 and line(finding, "kl", "base")["estimate"] == 0


def test_scale_agrees_with_the_norm_that_update_match_equalises(model):
    subject = subject_of(model, average.half, GAPS)
    reference = subject_of(model, average.avg, GAPS)
    found = streams(model, subject.evaluation.blocks, GAPS)
    updates = {gap: Updates(model, found[gap]) for gap in GAPS}
    wanted = {gap: updates[gap].norm(reference.made(gap)) for gap in GAPS}
    plain, other = (scale.measure(each, blocks=24) for each in (subject, reference))
    matched = {gap: updates[gap].matched(subject.made(gap), LLAMA.zeroed, wanted[gap]) for gap in GAPS}
    object.__setattr__(subject, "made", matched.__getitem__)
    equal = scale.measure(subject, blocks=24)
    for gap in GAPS:
        target = line(other, "update_norm", "made", gap)["estimate"]
        assert target == pytest.approx(wanted[gap], rel=1e-5)
        assert line(equal, "update_norm", "made", gap)["estimate"] == pytest.approx(target, rel=1e-3)
        assert abs(line(plain, "update_norm", "made", gap)["estimate"] / target - 1) > 0.05


def test_scale_of_a_layer_after_the_last_has_no_upper_parent(model):
    finding = scale.measure(subject_of(model, copy.lower, [2, 3]))
    sites = {each["site"] for each in finding.summary if each["gap"] == 3}
    assert sites == {"made", "lower parent"} and line(finding, "update_norm", "made")["n"] == 8


# --- renumbering


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_a_relabelled_base_is_other_weights_and_the_same_function(kv_heads):
    model = tiny_llama(kv_heads=kv_heads)
    relabelled = renumbering.Relabelled(subject_of(model, average.avg, GAPS), 0)
    assert relabelled.logit_difference(markov_documents(1)[0]) < 1e-5
    names = [weight.name for weight in LLAMA.weights if weight.columns is not None]
    moved = [name for name in names if not torch.equal(relabelled.layer(1)[name], layer_tensors(model, 1)[name])]
    assert len(moved) >= 5
    assert not torch.equal(relabelled.symmetry(1).neurons, relabelled.symmetry(2).neurons)  # each layer its own


def test_a_relabelling_that_changes_the_function_is_an_error(model, monkeypatch):
    relabelled = renumbering.Relabelled(subject_of(model, average.avg, GAPS), 0)
    broken = {**relabelled.layer(1), "mlp.up_proj.weight": layer_tensors(model, 1)["mlp.up_proj.weight"]}
    whole = relabelled.layer
    monkeypatch.setattr(relabelled, "layer", lambda index: broken if index == 1 else whole(index))
    with pytest.raises(RuntimeError, match="evidence=renumbering"):
        relabelled.logit_difference(markov_documents(1)[0])


def test_structured_does_not_mind_the_numbers_and_avg_does(model):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    spread = {}
    for make in (ot_structured, average.avg):
        finding = renumbering.measure(subject_of(model, make, GAPS), draws=4, shares=[])
        check_form(finding)
        draws = finding.rows.query("quantity == 'kl' and site == 'renumbered'")["value"]
        own = line(finding, "kl", "as numbered")["estimate"]
        spread[make] = np.abs(draws / own - 1).max()
        assert line(finding, "kl_sd", "renumbered")["estimate"] == pytest.approx(draws.std(ddof=0), rel=1e-6, abs=1e-9)
        assert line(finding, "kl_min", "renumbered")["estimate"] == draws.min()
        if make is ot_structured:
            assert line(finding, "perplexity_share_above", "as numbered")["estimate"] == 0.5
            assert abs(line(finding, "nll_difference", "as numbered - renumbered")["estimate"]) < 1e-4
    assert spread[ot_structured] < 1e-4 < 1e-2 < spread[average.avg]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(("kv_heads", "invariant"), [(4, True), (2, False)])
def test_exact_row_transport_minds_the_order_of_heads_inside_a_group(kv_heads, invariant):
    """The flow carries the plan of v to o by a head's place in its group, which is arbitrary."""
    subject = subject_of(tiny_llama(kv_heads=kv_heads), aligned.ot_exact, GAPS)
    finding = renumbering.measure(subject, draws=3, shares=[])
    relative = line(finding, "kl_sd", "renumbered")["estimate"] / line(finding, "kl", "renumbered")["estimate"]
    assert (relative < 1e-4) == invariant


def test_methods_that_ask_the_base_are_given_the_relabelled_one(model):
    """What a method reads of the whole base fits its parents, and what it keeps for all slots is the draw's own."""
    subject = subject_of(model, average.avg, GAPS)
    signal = torch.arange(48.0)[None]
    object.__setattr__(subject.parents(1).base, "activations", lambda layer, axis: signal)
    relabelled = renumbering.Relabelled(subject, 0)
    parents = [relabelled.parents(gap) for gap in GAPS]
    up = "mlp.up_proj.weight"
    assert torch.equal(parents[0].base.weight(2, up), parents[0].upper[up])
    assert torch.equal(parents[0].base.activations(1, "mlp")[0], signal[0][relabelled.symmetry(1).neurons])
    assert parents[0].base is parents[1].base and parents[0].base.memo is not subject.parents(1).base.memo
    assert renumbering.Relabelled(subject, 1).parents(1).base.memo is not parents[0].base.memo


def test_a_planted_permutation_is_what_it_says(model):
    parents = subject_of(model, average.avg, GAPS).parents(1)
    gate, lower = "mlp.gate_proj.weight", parents.lower
    assert torch.equal(renumbering.planted(parents, 0.0, 0.0).upper[gate], lower[gate])
    for share in (0.25, 1.0):
        upper = renumbering.planted(parents, share, 0.0).upper
        assert (upper[gate] != lower[gate]).any(1).float().mean().item() == pytest.approx(share)
        assert torch.equal(upper["self_attn.q_proj.weight"], lower["self_attn.q_proj.weight"])
        update = Updates(model, streams(model, markov_documents(1)[0], [1])[1])
        assert update.norm(upper) == pytest.approx(update.norm(dict(lower)), rel=1e-5)  # the same function
    noisy = renumbering.planted(parents, 0.0, 0.5).upper
    cosine = torch.nn.functional.cosine_similarity(noisy[gate].flatten(), lower[gate].flatten(), dim=0)
    assert cosine.item() == pytest.approx(0.75**0.5, abs=0.05)


def test_the_power_curve_sees_a_dependence_where_there_is_one(model):
    shares, found = [0.0, 0.5, 1.0], {}
    for make in (average.avg, ot_structured):
        finding = renumbering.measure(subject_of(model, make, GAPS), draws=0, shares=shares, noise=0.3)
        check_form(finding)
        found[make] = [line(finding, "distance", f"planted, share {share:g}")["estimate"] for share in shares]
        response = line(finding, "response", "planted")
        assert (abs(response["estimate"]) < 1e-4) == (make is ot_structured)
    low, middle, high = found[average.avg]
    assert low < 0.2 < middle - 0.1 < high - 0.2
    assert np.ptp(found[ot_structured]) < 0.02 and found[ot_structured][2] < 0.2


def test_share_above_counts_ties_by_half():
    assert renumbering.share_above(1.0, np.array([0.5, 2.0, 3.0, 1.00001])) == pytest.approx(2.5 / 4)


# --- first step


def test_gradients_are_the_hand_computed_ones(model):
    subject = subject_of(model, average.avg, GAPS)
    zeroed = [LLAMA.weight(name) for name in LLAMA.zeroed if "bias" not in name]
    layers = {gap: layer_module(model, zero_outputs(LLAMA, subject.made(gap))) for gap in GAPS}
    ids = markov_documents(1)[0]
    found = one_pass(model, layers, zeroed, ids)
    tokens = ids.shape[1] - 1
    for (gap, name), gradient in found.gradients.items():
        by_hand = found.targets[gap].T @ found.features[gap, name] / tokens
        assert gradient.norm() > 0 and torch.allclose(gradient, by_hand, rtol=1e-3, atol=1e-6)
    # and the loss moves as they say, in the model that has the layers for good
    direction = found.gradients[1, "mlp.down_proj.weight"]
    step = 1e-2 / direction.norm()
    made = {gap: zero_outputs(LLAMA, subject.made(gap)) for gap in GAPS}
    before = losses(subject.deeper(made), [ids])[0] / tokens
    assert before == pytest.approx(losses(model, [ids])[0] / tokens, abs=1e-6)  # step 0 is the base
    made[1]["mlp.down_proj.weight"] = -step * direction
    after = losses(subject.deeper(made), [ids])[0] / tokens
    assert (before - after) == pytest.approx((step * direction.square().sum()).item(), rel=0.1)
    expected = dict(streams(model, ids[:, :-1], GAPS))
    assert torch.allclose(found.states[2], expected[2].states[0], atol=1e-5)


def test_ridge_recovers_a_planted_map_and_shrinks_with_its_ridge():
    generator = torch.Generator().manual_seed(0)
    features, planted = (torch.randn(size, generator=generator).double() for size in ((200, 12), (5, 12)))
    targets = features @ planted.T + 0.01 * torch.randn(200, 5, generator=generator)
    sharp, middle, blunt = first_step.ridge_fits(features, targets, [1e-8, 0.1, 100.0])
    assert (sharp - planted).abs().max() < 0.01
    assert planted.norm() > middle.norm() > blunt.norm() > 0
    unit = (features.T @ features).diagonal().mean()
    stationary = (features @ middle.T - targets).T @ features + 0.1 * unit * middle
    assert stationary.abs().max() < 1e-8


def test_the_step_lowers_the_loss_of_held_out_text(learner):
    model, subject = learner, subject_of(learner, average.avg, GAPS, length=160)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    finding = first_step.measure(subject, calibration=24)
    check_form(finding)
    for gap in GAPS:
        assert line(finding, "loss_drop", "layer", gap)["low"] > 0
        assert line(finding, "gradient_explained", "layer", gap)["low"] > 0
    assert line(finding, "loss_drop", "all layers")["low"] > 0.02
    assert line(finding, "gradient", "mlp.down_proj.weight")["low"] > 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(layer._forward_hooks for layer in layers_of(model))


def test_the_drop_is_that_of_the_fit_and_of_nothing_else(model):
    """The features' scale is the method's own business: what can be learnt is the same, the gradients are not."""

    def weak(parents):
        made, diagnostics = average.avg(parents)
        made["mlp.up_proj.weight"] = made["mlp.up_proj.weight"] / 8
        return made, diagnostics

    plain, scaled = (first_step.measure(subject_of(model, make, [1])) for make in (average.avg, weak))
    drops = [line(each, "loss_drop", "layer", 1)["estimate"] for each in (plain, scaled)]
    assert drops[0] == pytest.approx(drops[1], rel=1e-3)
    down = "mlp.down_proj.weight"
    gradients = [line(each, "gradient", down, 1)["estimate"] for each in (plain, scaled)]
    relative = [line(each, "gradient_per_feature", down, 1)["estimate"] for each in (plain, scaled)]
    assert gradients[0] == pytest.approx(8 * gradients[1], rel=1e-3)
    assert relative[0] == pytest.approx(relative[1], rel=1e-3)


def test_where_no_step_helps_none_is_taken(model):
    study = first_step.Study(subject_of(model, average.avg, [1]), markov_documents(4))
    fit = study.fit(1, [0.1])
    worse = first_step.Fit({name: -weight for name, weight in fit.weights.items()}, fit.energy)
    assert study.line_search({1: fit}, [0.01, 0.03]) > 0 == study.line_search({1: worse}, [0.01, 0.03])
    with pytest.raises(ValueError, match="evidence.calibration"):
        first_step.Study(subject_of(model, average.avg, [1]), markov_documents(1))


def test_the_ridge_is_the_one_whose_direction_helps_most_on_other_text(learner):
    study = first_step.Study(subject_of(learner, average.avg, [1], length=160), markov_documents(4, 160))
    single = [study.fit(1, [ridge]) for ridge in (1e-6, 1.0)]
    slopes = [study.odd.drops(study.stepped({1: fit}, 1e-3)).sum() for fit in single]
    assert slopes[1] > 1.5 * slopes[0]  # 80 features of 318 tokens: a sharp fit is overfitted
    chosen = study.fit(1, [1e-6, 1.0])
    assert all(torch.equal(weight, single[1].weights[name]) for name, weight in chosen.weights.items())


# --- all of them


def test_random_relabelling_is_the_same_layer_at_every_call(model):
    """`random` draws from the parents' seed and place: a study that makes a layer again gets the cell's."""
    subject = subject_of(model, random_symmetric, GAPS)
    again = subject.remake(subject.parents(1))
    assert all(torch.equal(tensor, again[name]) for name, tensor in subject.made(1).items())


@pytest.mark.parametrize("name", ["geometry", "renumbering", "first_step", "scale"])
def test_every_choice_states_its_function_and_all_its_knobs(name):
    choice = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    assert choice["name"] == name
    module, function = choice["measure"].split(":")
    choice = {key: value for key, value in choice.items() if key not in {each.name for each in fields(EvidenceConfig)}}
    _, *knobs = inspect.signature(getattr(importlib.import_module(module), function)).parameters.values()
    defaults = {knob.name: list(knob.default) if isinstance(knob.default, tuple) else knob.default for knob in knobs}
    assert choice == defaults
