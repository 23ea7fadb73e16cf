"""opt_deus.evidence.geometry: known distances, surrogates with the norms asked for, chance told from signal."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from subjects import subject_of, tiny_llama

from opt_deus.evidence.geometry import measure, neuron_costs, relative_distance, surrogate
from opt_deus.methods import average
from opt_deus.methods.structured import ot_structured
from opt_deus.methods.symmetry import random_symmetry
from opt_deus.models.surgery import layers_of

ROWS_MOVE = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"]


def estimates(finding, quantity: str) -> dict:
    """Over all gaps, by site."""
    return {
        line["site"]: line["estimate"]
        for line in finding.summary
        if line["quantity"] == quantity and line["gap"] is None
    }


@pytest.fixture(scope="module")
def related():
    """Layers 1 to 3 are relabelled copies of layer 0."""
    model = tiny_llama(kv_heads=4)
    first = dict(layers_of(model)[0].state_dict())
    for index in (1, 2, 3):
        own = replace(subject_of(model, average.avg, [0]).parents(0), lower=first, upper=None, seed=10 + index)
        symmetry = random_symmetry(own)
        layers_of(model)[index].load_state_dict({w.name: symmetry(w, first[w.name]) for w in own.weights})
    return model


def test_relative_distance():
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(96, 64, generator=generator) for _ in range(2))
    assert relative_distance(first, first) == 0
    assert relative_distance(first, second) == pytest.approx(math.sqrt(2), abs=0.03)
    assert relative_distance(first, 5 * second) == pytest.approx(math.sqrt(2), abs=0.03)  # whatever their sizes
    assert relative_distance(first, -first) == pytest.approx(2)
    assert relative_distance(torch.zeros(2, 2), torch.zeros(2, 2)) == 0


def test_a_surrogate_has_the_row_and_column_norms():
    generator = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-1, 1, 40).double()[:, None] * torch.logspace(0.5, -0.5, 24).double()
    matrix = torch.randn(40, 24, generator=generator, dtype=torch.float64) * sizes
    matrix[:5] = matrix[0]  # structure that a surrogate must not keep
    first, second = (surrogate(matrix, generator) for _ in range(2))
    for drawn in (first, second):
        assert torch.allclose(drawn.norm(dim=1), matrix.norm(dim=1), rtol=1e-4)
        assert torch.allclose(drawn.norm(dim=0), matrix.norm(dim=0), rtol=1e-4)
    assert relative_distance(first, second) > 1
    cosine = torch.nn.functional.cosine_similarity
    assert cosine(matrix[0], matrix[1], dim=0) > 0.999 and cosine(first[0], first[1], dim=0).abs() < 0.9


def test_a_relabelled_copy_is_found_and_is_no_chance(related):
    finding = measure(subject_of(related, ot_structured, [0, 1, 2]), distances=[1, 2], pairs=3)
    before, after = estimates(finding, "relative_distance"), estimates(finding, "relative_distance_aligned")
    for name in (f"{part}.weight" for part in ROWS_MOVE):
        assert before[name] > 0.5 and after[name] < 1e-3, name
        assert estimates(finding, "matched_ratio")[name] < 1e-6
        assert estimates(finding, "matched_ratio_exact")[name] < 1e-6
    for distance in (1, 2):
        site = f"neurons, distance {distance}"
        assert estimates(finding, "matched_ratio_exact")[site] < 1e-6
        assert 0.3 < estimates(finding, "matched_ratio_chance")[site] < 1
        assert estimates(finding, "beyond_chance")[site] > 0.3


def test_unrelated_layers_gain_by_matching_what_chance_gives():
    model = tiny_llama(layers=5)
    finding = measure(subject_of(model, ot_structured, [0, 1, 2, 3]), distances=[1, 2, 9], pairs=4, draws=3)
    for site, value in estimates(finding, "relative_distance").items():
        assert value == pytest.approx(math.sqrt(2), abs=0.1), site
    assert estimates(finding, "matched_ratio_exact")["mlp.gate_proj.weight"] < 0.9  # there is a gain
    gains = estimates(finding, "beyond_chance")
    assert len(gains) == 7 + 2  # nothing lies 9 layers apart
    for site, gain in gains.items():
        assert abs(gain) < 0.05, site  # and none of it is signal


def test_a_method_that_moves_nothing_gains_nothing(related):
    finding = measure(subject_of(related, average.avg, [0, 1]), distances=[], draws=1)
    assert estimates(finding, "relative_distance_aligned") == estimates(finding, "relative_distance")
    assert set(estimates(finding, "matched_ratio").values()) == {1.0}
    rows = finding.rows
    assert not rows.duplicated(["quantity", "site", "gap", "item"]).any() and rows["value"].notna().all()
    assert set(rows["gap"]) == {0, 1}


def test_a_method_without_maps_still_has_its_base_measured(related):
    finding = measure(subject_of(related, average.half, [0]), distances=[], draws=1)
    assert not estimates(finding, "matched_ratio") and len(estimates(finding, "relative_distance")) == 7


def test_costs_of_neurons_are_those_of_all_their_weights():
    parents = subject_of(tiny_llama(), average.avg, [0]).parents(0)
    costs = neuron_costs(parents)
    names = ("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight")
    apart = sum((parents.lower[name] - parents.upper[name]).double().square().sum().item() for name in names)
    assert costs[:, 1].sum() == pytest.approx(apart, rel=1e-6)
    assert costs[:, 0].sum() < costs[:, 1].sum()
