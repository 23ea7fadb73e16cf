"""The evaluation room: lm-eval's numbers, per document, the same at any time; bad tasks and files refused by name."""

from __future__ import annotations

import json
import math
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from opt_deus import evaluation
from opt_deus.config import DataConfig, EvalConfig
from opt_deus.data import Corpus, content_hash, split_of
from opt_deus.evaluation import definitions, held_out, packing, scoring, summaries
from opt_deus.models import end_of_text, new_model, train_tokenizer

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 400,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}
WORDS = [
    "mean",
    "median",
    "mode",
    "array",
    "axis",
    "value",
    "matrix",
    "vector",
    "plan",
    "cost",
    "layer",
    "model",
    "token",
    "number",
    "index",
]
DATA = DataConfig(name="text", source="text", path="unused")


def prose(seed: int, length: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=length))


def items(task: str) -> list[dict]:
    return [
        {
            "id": f"{task} {n}",
            "context": prose(n, 3 + n % 5),
            "choices": [prose(9 * n + k, 1 + (n + k) % 4) for k in range(4)],
            "label": n % 4,
        }
        for n in range(12)
    ]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([prose(seed, 50) for seed in range(20)], 400)


@pytest.fixture(scope="module")
def model(tokenizer):
    return new_model(SIZES, tokenizer, seed=0)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    texts = [prose(100 + n, 5 + 7 * (n % 9)) for n in range(30)]
    return Corpus("text", "0" * 16, texts, [prose(7, 9)], documents=lambda seed: iter(()), items=items)


def configuration(**changes) -> EvalConfig:
    return EvalConfig(
        **{
            "name": "pydocs",
            "tasks": ["pydocs_summary", "pydocs_continuation"],
            "limit": 8,
            "batch_size": 4,
            "max_length": 128,
            "perplexity_tokens": 300,
            "perplexity_length": 32,
            **changes,
        }
    )


def naive(model, context: list[int], continuation: list[int]) -> float:
    with torch.no_grad():
        logits = model(torch.tensor([context + continuation])).logits[0, len(context) - 1 : -1]
    return logits.log_softmax(-1)[range(len(continuation)), continuation].sum().item()


@pytest.fixture(scope="module")
def rows(model, tokenizer, corpus) -> pd.DataFrame:
    return evaluation.evaluate(model, tokenizer, configuration(), corpus)


def test_rows(rows, corpus):
    assert list(rows.columns) == ["task", "split", "doc_id", "doc_hash", "metric", "value"]
    assert set(rows["task"]) == {"heldout", "pydocs_summary", "pydocs_continuation"}
    one = rows[rows["task"] == "pydocs_summary"]
    assert set(one["metric"]) == {"acc", "acc_norm"} and len(one) == 16
    assert one["doc_hash"].nunique() == 8
    assert all(rows["split"] == [split_of(document) for document in rows["doc_hash"]])


def test_answers_are_those_of_separate_requests(rows, model, tokenizer):
    """acc and acc_norm as lm-eval defines them, from one forward pass for each choice."""
    for task in ("pydocs_summary", "pydocs_continuation"):
        for number, item in enumerate(items(task)[:8]):
            context = tokenizer(item["context"])["input_ids"]
            whole = [tokenizer(f"{item['context']} {choice}")["input_ids"] for choice in item["choices"]]
            values = [naive(model, context, tokens[len(context) :]) for tokens in whole]
            lengths = [len(choice.encode()) for choice in item["choices"]]
            expected = {
                "acc": float(np.argmax(values) == item["label"]),
                "acc_norm": float(np.argmax(np.array(values) / lengths) == item["label"]),
            }
            own = rows[(rows["task"] == task) & (rows["doc_id"] == number)]
            assert dict(zip(own["metric"], own["value"], strict=True)) == expected


def requests(model, tokenizer, choices: int = 5) -> list[packing.Request]:
    found = []
    for number in range(6):
        context = tokenizer(prose(number, 2 + 3 * number))["input_ids"]
        for choice in range(choices):
            found.append((("", ""), context, tokenizer(" " + prose(50 * number + choice, 1 + choice % 3))["input_ids"]))
    random.Random(0).shuffle(found)
    return found


def test_packed_choices_do_not_see_each_other(model, tokenizer):
    asked = requests(model, tokenizer)
    packed = packing.pack(asked)
    assert sorted(index for one in packed for index in one.requests) == list(range(len(asked)))
    assert max(len(one.requests) for one in packed) == 5
    answers = packing.score(model, packed, torch.autocast("cpu", enabled=False))
    for index, (_, context, continuation) in enumerate(asked):
        assert answers[index][0] == pytest.approx(naive(model, context, continuation), abs=1e-4)
        with torch.no_grad():
            greedy = model(torch.tensor([context + continuation])).logits[0, len(context) - 1 : -1].argmax(-1)
        assert answers[index][1] == (greedy.tolist() == continuation)


def test_long_and_shared_contexts(model, tokenizer):
    """A sequence takes few choices, and what does not fit goes lm-eval's way, with the same numbers."""
    asked = requests(model, tokenizer, choices=11)
    assert sorted({len(one.requests) for one in packing.pack(asked)}) == [3, 8]
    scorer = scoring._Scorer(
        pretrained=model, tokenizer=tokenizer, batch_size=4, max_length=24, softmax_dtype="float32"
    )
    assert 0 < len(scorer._packed(asked)) < len(packing.pack(asked))
    for (value, _), (_, context, continuation) in zip(scorer._loglikelihood_tokens(asked), asked, strict=True):
        assert value == pytest.approx(naive(model, context, continuation), abs=1e-4)
    assert scorer._packed([(None, *rest) for _, *rest in asked]) == []


def test_packed_sequence_is_shorter():
    one = packing.Packed([0, 1], [1, 2, 3], [[4, 5], [6, 7, 8]])
    assert one.length == 6
    assert one.layout() == ([1, 2, 3, 4, 6, 7], [0, 1, 2, 3, 3, 4], [0, 0, 0, 1, 2, 2])
    assert list(one.sources()) == [[2, 3], [2, 4, 5]]


def test_a_model_that_ignores_the_mask_is_not_packed(rows, model, tokenizer, corpus, monkeypatch):
    honest = model.forward

    def deaf(*args, attention_mask=None, position_ids=None, **kwargs):
        return honest(*args, **kwargs)

    longest = packing.pack(requests(model, tokenizer))[0]
    assert packing.agrees(model, longest)
    monkeypatch.setattr(model, "forward", deaf)
    assert not packing.agrees(model, longest)
    again = scoring.score(model, tokenizer, configuration(), corpus)  # lm-eval's own requests serve it
    assert again.equals(rows[rows["task"] != "heldout"].reset_index(drop=True))


def test_heldout_is_the_chain_rule(rows, model, tokenizer, corpus):
    own = rows[rows["task"] == "heldout"]
    documents = own.pivot(index="doc_hash", columns="metric", values="value")
    texts = {content_hash(text): text for text in corpus.evaluation}
    for identity, row in documents.iterrows():
        tokens = tokenizer(texts[identity])["input_ids"][:32]
        assert row["tokens"] == len(tokens)
        assert row["words"] == len(tokenizer.decode(tokens).split())
        assert row["loglikelihood"] == pytest.approx(naive(model, [end_of_text(tokenizer)], tokens), abs=1e-3)
    assert evaluation.perplexity(rows) == pytest.approx(
        math.exp(-documents["loglikelihood"].sum() / documents["tokens"].sum())
    )


def test_a_smaller_budget_is_a_part_of_a_larger_one(tokenizer, corpus):
    small = held_out.selected(tokenizer, configuration(perplexity_tokens=100), corpus)
    large = held_out.selected(tokenizer, configuration(perplexity_tokens=400), corpus)
    assert small == large[: len(small)] and len(small) < len(large)
    assert sum(len(tokens) for _, tokens in small[:-1]) < 100 <= sum(len(tokens) for _, tokens in small)


def test_batches_do_not_matter_in_float32(rows, model, tokenizer, corpus, monkeypatch):
    monkeypatch.setattr(held_out, "BATCH_TOKENS", 1)
    again = evaluation.evaluate(model, tokenizer, configuration(batch_size=3), corpus)
    assert again.drop(columns="value").equals(rows.drop(columns="value"))
    np.testing.assert_allclose(again["value"], rows["value"], atol=1e-4)


def test_nothing_is_disturbed(model, tokenizer, corpus):
    model.train()
    padding, cached = tokenizer.pad_token, model.config.use_cache
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    expected = torch.rand(3), random.random(), np.random.rand()
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    evaluation.evaluate(model, tokenizer, configuration(), corpus)
    assert torch.equal(torch.rand(3), expected[0])
    assert (random.random(), np.random.rand()) == expected[1:]
    assert model.training and model.config.use_cache == cached and tokenizer.pad_token == padding
    model.eval()


def test_answers_follow_the_weights_not_the_name(rows, model, tokenizer, corpus):
    """Two models under one name, one after the other in one process: no cache answers for the second."""
    other = new_model(SIZES, tokenizer, seed=1)
    assert other.name_or_path == model.name_or_path
    second = evaluation.evaluate(other, tokenizer, configuration(), corpus)
    assert not second["value"].equals(rows["value"])
    assert evaluation.evaluate(model, tokenizer, configuration(), corpus).equals(rows)


def test_bfloat16_is_autocast(rows, model, tokenizer, corpus):
    half = evaluation.evaluate(model, tokenizer, configuration(dtype="bfloat16"), corpus)
    assert next(model.parameters()).dtype == torch.float32
    values, exact = (each[each["metric"] == "loglikelihood"]["value"].to_numpy() for each in (half, rows))
    assert not np.array_equal(values, exact)
    np.testing.assert_allclose(values, exact, rtol=0.05)


def test_not_finite_is_refused(tokenizer, corpus):
    broken = new_model(SIZES, tokenizer, seed=0)
    broken.model.norm.weight.data[0] = float("nan")
    with pytest.raises(RuntimeError, match="not finite"):
        evaluation.heldout(broken, tokenizer, configuration(), corpus)


def test_summaries_by_hand():
    columns = ["task", "split", "doc_id", "doc_hash", "metric", "value"]
    frame = pd.DataFrame(
        [("t", "select", 0, "a", "acc", 1.0), ("t", "select", 1, "b", "acc", 0.0), ("t", "confirm", 2, "c", "acc", 1.0)]
        + [("heldout", "select", 0, "d", m, v) for m, v in (("loglikelihood", -6.0), ("tokens", 3.0), ("words", 2.0))]
        + [("heldout", "confirm", 1, "e", m, v) for m, v in (("loglikelihood", -2.0), ("tokens", 1.0), ("words", 1.0))],
        columns=columns,
    )
    scores = evaluation.summarise(frame)
    assert scores["t"]["all"]["acc"] == pytest.approx(2 / 3) and scores["t"]["all"]["n"] == 3
    assert scores["t"]["all"]["stderr"] == pytest.approx(1 / 3)  # sd 0.577 / sqrt(3)
    assert scores["t"]["select"] == {"acc": 0.5, "acc_stderr": 0.5, "stderr": 0.5, "n": 2}
    assert scores["t"]["confirm"]["stderr"] is None  # one document
    assert scores["heldout"]["all"]["perplexity"] == pytest.approx(math.exp(2))
    assert scores["heldout"]["all"]["word_perplexity"] == pytest.approx(math.exp(8 / 3))
    assert scores["heldout"]["all"]["perplexity_stderr"] == pytest.approx(0)  # both documents have rate 2
    assert evaluation.perplexity(frame) == pytest.approx(math.exp(2))
    assert json.loads(json.dumps(scores)) == scores


def piqa_lines(count: int = 20) -> str:
    lines = (
        {"goal": prose(n, 6), "sol1": prose(n + 50, 4), "sol2": prose(n + 90, 4), "label": n % 2} for n in range(count)
    )
    return "".join(json.dumps(line) + "\n" for line in lines)


def local_configuration(path: Path, task: str = "piqa") -> EvalConfig:
    return configuration(name="local", tasks=[task], data={task: str(path)}, limit=None, max_length=512)


def test_registered_task_on_a_local_file(model, tokenizer, corpus, tmp_path):
    path = tmp_path / "a=b piqa.jsonl"
    path.write_text(piqa_lines())
    cfg = local_configuration(path)
    evaluation.check(cfg, DATA, offline=True)
    first = scoring.score(model, tokenizer, cfg, corpus)
    assert first["doc_id"].nunique() == 20
    item = json.loads(piqa_lines().splitlines()[0])
    context = tokenizer(f"Question: {item['goal']}\nAnswer:")["input_ids"]  # lm-eval's own template
    values = [
        naive(model, context, tokenizer(f"Question: {item['goal']}\nAnswer: {item[one]}")["input_ids"][len(context) :])
        for one in ("sol1", "sol2")
    ]
    assert first.loc[(first["doc_id"] == 0) & (first["metric"] == "acc"), "value"].item() == float(
        np.argmax(values) == 0
    )
    lines = piqa_lines().splitlines()
    path.write_text("\n".join(lines[10:]))  # another file under the same name is read again
    second = scoring.score(model, tokenizer, cfg, corpus)
    assert set(second["doc_hash"]) == set(first[first["doc_id"] >= 10]["doc_hash"])


def test_group_members_carry_the_groups_name():
    results = {
        "group_subtasks": {"mmlu": ["mmlu_stem"], "mmlu_stem": ["mmlu_a", "mmlu_b"], "mmlu_a": [], "mmlu_b": []},
        "samples": {
            task: [{"doc_hash": task, "doc_id": 0, "filter": "none", "metrics": ["acc"], "acc": value}]
            for task, value in (("mmlu_a", 1.0), ("mmlu_b", 0.0))
        },
    }
    found = scoring._rows(results, ["mmlu"])
    assert list(found["task"]) == ["mmlu", "mmlu"] and evaluation.summarise(found)["mmlu"]["all"]["acc"] == 0.5


def test_rolling_samples_give_words():
    sample = {
        "filter": "none",
        "metrics": ["word_perplexity", "byte_perplexity", "bits_per_byte"],
        "word_perplexity": (-8.0, 4),
        "byte_perplexity": (-8.0, 16),
        "bits_per_byte": (-8.0, 16),
    }
    assert scoring._values(sample) == {"loglikelihood": -8.0, "words": 4.0, "bytes": 16.0}


@pytest.mark.parametrize(
    "task, file",
    [("piqa", "benchmarks/piqa"), ("arc_easy", "benchmarks/arc_easy"), ("blimp_transitive", "blimp/transitive")],
)
def test_shared_benchmarks(model, tokenizer, corpus, shared, tmp_path, task, file):
    path = tmp_path / "data.jsonl"
    path.write_text("".join((shared / "data" / f"{file}.jsonl").open().readlines()[:6]))
    cfg = local_configuration(path, task)
    evaluation.check(cfg, DATA, offline=True)
    found = scoring.score(model, tokenizer, cfg, corpus)
    assert found["doc_id"].nunique() == 6 and set(found["value"]) <= {0.0, 1.0}


def test_check_passes():
    evaluation.check(configuration(), DATA, offline=True)
    evaluation.check(configuration(tasks=["heldout"]), DATA, offline=True)


@pytest.mark.parametrize(
    "tasks, message",
    [
        (["pydoc_summary"], "'pydoc_summary' is unknown.*pydocs_summary"),
        (["piqaa"], "'piqaa' is unknown.*piqa"),
        (["qqqqqqqq"], "'qqqqqqqq' is unknown.*pydocs_summary"),
        (["arc_easy"], "arc_easy.*hub.*closed"),
        ([], "eval.tasks is empty"),
    ],
)
def test_refused_tasks(tasks, message):
    with pytest.raises(ValueError, match=message):
        evaluation.check(configuration(tasks=tasks), DATA, offline=True)


def test_hub_tasks_with_an_open_hub(monkeypatch):
    cfg = configuration(
        tasks=["arc_easy", "mmlu", "wikitext", "boolq", "logiqa", "winogrande", "commonsense_qa", "piqa"]
    )
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    evaluation.check(cfg, DATA, offline=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE"):
        evaluation.check(cfg, DATA, offline=False)


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "no file"),
        (b"", "empty"),
        (b" \n\n", "empty"),
        (b'{"goal": 1}\n{"goal"\n', "line 2"),
        (b"[1, 2]\n", "line 1"),
        ('{"goal": "caf\xe9"}\n'.encode("latin-1"), "not UTF-8"),
        (b'{"question": "of another task"}\n', "fields"),
    ],
)
def test_refused_files(tmp_path, content, message):
    path = tmp_path / "items.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        evaluation.check(local_configuration(path), DATA, offline=True)
    assert "piqa" in str(error.value) and "items.jsonl" in str(error.value)


def test_data_for_a_group(tmp_path):
    path = tmp_path / "items.jsonl"
    path.write_text(piqa_lines())
    with pytest.raises(ValueError, match=r"mmlu.*not a group"):
        evaluation.check(local_configuration(path, "mmlu"), DATA, offline=True)


def test_data_for_a_task_that_is_not_asked(tmp_path):
    path = tmp_path / "items.jsonl"
    path.write_text(piqa_lines())
    with pytest.raises(ValueError, match=r"'piqa', which is not in eval\.tasks"):
        evaluation.check(configuration(data={"piqa": str(path)}), DATA, offline=True)
    with pytest.raises(ValueError, match="take the file out"):
        evaluation.check(configuration(data={"pydocs_summary": str(path)}), DATA, offline=True)


def test_fingerprint(corpus, tmp_path):
    def of(**changes) -> dict:
        return evaluation.fingerprint(configuration(**changes), corpus)

    assert of() == of(stages=["initial"], metric="acc_norm", name="other")
    for changes in (
        {"limit": 7},
        {"dtype": "bfloat16"},
        {"batch_size": 8},
        {"perplexity_length": 16},
        {"tasks": ["heldout"]},
    ):
        assert of(**changes) != of(), changes
    path = tmp_path / "piqa.jsonl"
    path.write_text(piqa_lines())
    first = evaluation.fingerprint(local_configuration(path), corpus)
    moved = shutil.copy(path, tmp_path / "elsewhere.jsonl")
    assert evaluation.fingerprint(local_configuration(moved), corpus) == first
    path.write_text(piqa_lines(19))
    assert evaluation.fingerprint(local_configuration(path), corpus) != first
    assert json.loads(json.dumps(first)) == first


def test_checking_needs_neither_torch_nor_lm_eval():
    code = (
        "import sys; from opt_deus import evaluation; from opt_deus.config import *;"
        "evaluation.check(EvalConfig('p', tasks=['pydocs_summary']), DataConfig('d', 'text'), True);"
        "sys.exit(any(name in sys.modules for name in ('torch', 'lm_eval', 'pandas')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_every_paper_task_is_registered():
    assert {"arc_easy", "mmlu", "mmlu_anatomy", "blimp_wh_island", "wikitext"} <= set(definitions.registered())
    assert summaries.UNITS.keys() >= set(scoring.ROLLING_UNITS.values())
