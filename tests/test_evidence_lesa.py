"""The study of LESA's networks, on a tiny Llama."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from opt_deus.evidence import COLUMNS, Subject
from opt_deus.evidence.lesa import measure, spectrum, spread
from opt_deus.methods import Base, Heads, Parents
from opt_deus.methods.lesa import factorise, lesa
from opt_deus.models.blocks import LLAMA
from opt_deus.models.surgery import layer_tensors
from opt_deus.plan import insert_after

LAYERS = 6
MATRICES = [weight.name for weight in LLAMA.weights if weight.columns is not None]
Q = "self_attn.q_proj.weight"


def tiny(layers: int = LAYERS) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=32,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def subject(model: LlamaForCausalLM, gaps: tuple[int, ...] = (2, 3)) -> Subject:
    plan = insert_after(model.config.num_hidden_layers, list(gaps))
    nothing = {name: None for name in Subject.__dataclass_fields__}
    return Subject(**{**nothing, "model": model, "block": LLAMA, "plan": plan, "seed": 0})


@pytest.fixture(scope="module")
def study():
    model = tiny()
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    finding = measure(subject(model), seeds=[0, 1], epochs_long=3, long_seeds=1, spectra=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    return model, finding


def value(finding, quantity: str, site: str = Q, item: str | None = None) -> float:
    rows = finding.rows[(finding.rows.quantity == quantity) & (finding.rows.site == site)]
    return rows[rows["item"] == item].value.item() if item else rows.value.mean()


def summary(finding, quantity: str, site: str) -> dict:
    return next(each for each in finding.summary if (each["quantity"], each["site"]) == (quantity, site))


def test_rows_and_summary_have_the_form_that_the_report_reads(study):
    _, finding = study
    assert list(finding.rows.columns) == COLUMNS and np.isfinite(finding.rows.value).all()
    assert not finding.rows.duplicated(["quantity", "site", "gap", "item"]).any()
    assert set(finding.rows.site) == set(MATRICES)
    assert set(finding.rows.gap) == {-1, 2, 3}
    keys = {"quantity", "site", "gap", "estimate", "low", "high", "n", "items"}
    assert all(set(each) == keys for each in finding.summary)
    released = summary(finding, "released: r2", "all")
    assert released["n"] == 2 and released["items"] == "seeds" and released["low"] <= released["estimate"]
    assert summary(finding, "3 epochs: r2", Q)["n"] == 1
    assert summary(finding, "neighbours' mean: r2", Q)["n"] == LAYERS - 2
    assert summary(finding, "neighbours' mean: r2", Q)["items"] == "layers"
    assert summary(finding, "3 epochs, left out: r2", Q)["estimate"] < 1


def test_its_networks_are_the_methods_own(study):
    model, finding = study
    layers = [layer_tensors(model, index) for index in range(LAYERS)]
    base = Base(LAYERS, lambda layer, name: layers[layer][name], None, seed=1)
    made, diagnostics = lesa(Parents(layers[2], layers[3], LLAMA, Heads(4, 2, 4), "here", base=base, layer=2))
    for name in MATRICES:
        rows = finding.rows[(finding.rows.quantity == "released: r2") & (finding.rows.site == name)]
        ours = rows[rows["item"].str.startswith("seed1/")].value.mean()
        assert ours == pytest.approx(diagnostics[name]["training_r2"], rel=1e-4), name
        size, rank = spectrum(made[name])
        parents = [spectrum(layers[layer][name])[0] for layer in (2, 3)]
        place = (finding.rows.site == name) & (finding.rows.gap == 2) & (finding.rows["item"] == "seed1")
        found = finding.rows[place].set_index("quantity").value
        assert found["released, new layer: stable rank"] == pytest.approx(rank, rel=1e-3), name
        assert found["released, new layer: spectral norm ratio"] == pytest.approx(size / np.mean(parents), rel=1e-3)


def test_baselines_are_what_they_say(study):
    model, finding = study
    layers = [layer_tensors(model, index)[Q] for index in range(LAYERS)]
    factors = factorise(Base(LAYERS, lambda layer, name: layers[layer], None), Q, "cpu")
    rights = torch.stack([factors.right(layer) for layer in layers])
    middle, mean = rights[1:-1], (rights[:-2] + rights[2:]) / 2
    square = ((mean - middle) ** 2).mean().item()
    error = 1 - ((mean - middle) ** 2).sum() / (middle**2).sum()
    assert value(finding, "neighbours' mean: r2") == pytest.approx(error.item(), rel=1e-4)
    assert value(finding, "neighbours' mean: mean square x 1e6") == pytest.approx(1e6 * square, rel=1e-4)
    factors = torch.linspace(-1, 1, 20_001, dtype=torch.float64)
    best = max((1 - ((f * mean - middle) ** 2).sum() / (middle**2).sum()).item() for f in factors)
    assert value(finding, "scaled neighbours' mean: r2") == pytest.approx(best, abs=1e-6)
    assert 0 <= best < 0.2  # random layers


def test_the_losss_terms_before_training(study):
    _, finding = study
    for name, columns in ((Q, 16), ("mlp.down_proj.weight", 24)):
        assert value(finding, "zero: mean square x 1e6", name) == pytest.approx(1e6 / LAYERS / columns, rel=1e-5)
        assert value(finding, "zero: norm term x 1e6", name) == pytest.approx(500.0 * 64 / LAYERS, rel=1e-5)
        assert 0 < value(finding, "untrained: norm term's share", name, "seed0") < 1
    without = finding.rows[finding.rows.quantity == "no norm term: norm ratio"].value.mean()
    assert without < finding.rows[finding.rows.quantity == "released: norm ratio"].value.mean()


def test_spectrum_is_torchs_own():
    generator = torch.Generator().manual_seed(0)
    for shape in ((5, 9), (9, 5)):
        matrix = torch.randn(shape, generator=generator)
        size, rank = spectrum(matrix)
        values = torch.linalg.svdvals(matrix.double())
        assert size == pytest.approx(values[0].item()) and rank == pytest.approx((values**2).sum().item() / size**2)
    assert spectrum(torch.outer(torch.ones(3), torch.arange(4.0)))[1] == pytest.approx(1)
    assert spectrum(torch.zeros(3, 4)) == (0.0, 0.0)


def test_spread_takes_first_and_last():
    assert spread(range(1, 29), 4) == [1, 10, 19, 28] and spread([5, 6], 4) == [5, 6] and spread([], 4) == []


def test_a_plan_without_gaps_and_refusals():
    finding = measure(subject(tiny(3), ()), seeds=[0], epochs_long=1, spectra=1)
    assert set(finding.rows.gap) == {-1}
    assert not finding.rows.quantity.str.contains("left out").any()  # too few layers to leave one out
    with pytest.raises(ValueError, match=r"evidence.seeds=\[\]"):
        measure(subject(tiny(3)), seeds=[])
    with pytest.raises(ValueError, match="2 base layers"):
        measure(subject(tiny(2), (0,)))


def test_the_choice_states_all_its_knobs():
    path = Path(__file__).parents[1] / "conf" / "evidence" / "lesa.yaml"
    choice = yaml.safe_load(path.read_text())
    assert choice.pop("name") == "lesa" and choice.pop("measure") == "opt_deus.evidence.lesa:measure"
    assert choice.pop("seeded") is False
    for every in ("tokens", "length"):  # of every study: this one reads no text
        choice.pop(every, None)
    _, *knobs = inspect.signature(measure).parameters.values()
    assert choice == {
        knob.name: list(knob.default) if isinstance(knob.default, tuple) else knob.default for knob in knobs
    }
