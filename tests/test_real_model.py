"""The real command line on the real 135M model: minutes on 2 cores."""

from __future__ import annotations

import pytest

SMALL = ("cpt.tokens=2048", "sft.tokens=512", "sft.batch_size=2", "eval.limit=16", "eval.perplexity_tokens=1500")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_default_grid_on_the_real_model(command):
    run = command("run", "-m", "align=ot,avg", "zero_init=true,false", "seed=0", "name=real", *SMALL, timeout=1800)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    records = {(r["cell"]["align"], r["cell"]["zero_init"]): r for r in command.records("real").values()}
    assert len(records) == 4
    for (_, zero_init), record in records.items():
        assert record["parameters"] == {"base": 134515008, "total": 187616448, "trainable": 53101440}
        assert record["plan"]["inserted"] == list(range(15, 44, 2))
        perplexity = record["perplexity"]
        ratio = perplexity["initial"] / perplexity["base"]
        assert abs(ratio - 1) < 1e-4 if zero_init else ratio > 1.02
        assert perplexity["cpt"] != perplexity["initial"] and perplexity["sft"] != perplexity["cpt"]
        for weights in record["expand"]["blocks"].values():
            for numbers in weights.values():
                assert abs(numbers["mass"] - 1) < 1e-3 and numbers["marginal_error"] <= 1e-4
    # the confound that norm_match and half exist for: a soft plan shrinks the layer and so disturbs less than avg
    assert records["ot", False]["perplexity"]["initial"] < records["avg", False]["perplexity"]["initial"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_export_of_the_real_model_is_a_checkpoint_that_loads(command):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    run = command("expand", "align=avg", "position=top", "zero_init=true", "out=deeper", timeout=1800)
    assert run.returncode == 0, run.stderr[-2000:]
    model = AutoModelForCausalLM.from_pretrained(command.folder / "deeper")
    assert sum(parameter.numel() for parameter in model.parameters()) == 187616448
    assert model.dtype == torch.float32 and (command.folder / "deeper/README.md").is_file()
