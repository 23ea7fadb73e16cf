"""The data room: what is held out never trains, the same on every machine; broken files are refused by name."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from opt_deus import data
from opt_deus.config import DataConfig
from opt_deus.data import hub, pairs, pydocs, pydocs_corpus, tasks
from opt_deus.store import Store

NUM_MODULES = 40
WORDS = [
    "amber",
    "birch",
    "cedar",
    "delta",
    "ember",
    "fjord",
    "grove",
    "heath",
    "islet",
    "joist",
    "karst",
    "lemur",
    "mango",
    "nexus",
    "otter",
    "plume",
    "quartz",
    "ridge",
]


def sentence(seed: int, length: int = 12) -> str:
    """Distinct prose for each seed."""
    return " ".join(random.Random(seed).choices(WORDS, k=length)).capitalize() + "."


def module(number: int) -> str:
    """Source with three documented objects; importing it would fail."""
    return "\n".join(
        [
            f'"""Module {number}. {sentence(number, 40)}"""',
            'raise RuntimeError("imported")',
            f"def solve_{number}(values, axis: int = 0, *, tolerance=1e-3):",
            f'    """Compute the {WORDS[number % 18]} index number {number} of values.',
            "",
            f"    {sentence(1000 + number, 30)}",
            "",
            "    Parameters",
            "    ----------",
            "    axis : int",
            f"        The axis along which {WORDS[number % 18]} values are gathered.",
            '    """',
            f"class Holder_{number}:",
            f'    """Hold the {WORDS[(number * 5) % 18]} state number {number} for later."""',
            "    def __init__(self, size):",
            "        pass",
            f"    def _hidden_{number}(self):",
            f'        """Private {WORDS[number % 18]} matter of holder {number} {sentence(2000 + number, 30)}"""',
        ]
    )


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package of our own, and an empty cache."""
    root = tmp_path / "site" / "probe_package"
    root.mkdir(parents=True)
    (root / "__init__.py").write_text("")
    for number in range(NUM_MODULES):
        (root / f"_part_{number}.py").write_text(module(number))
    metadata = tmp_path / "site" / "probe_package-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: probe-package\nVersion: 1.0\n")
    (metadata / "top_level.txt").write_text("probe_package\n")
    (metadata / "RECORD").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("OPT_DEUS_CACHE", str(tmp_path / "cache"))
    forget()
    yield root
    forget()


def forget() -> None:
    for cached in (pydocs_corpus._open, pydocs_corpus._divided, pydocs_corpus._questions, pydocs_corpus.items):
        cached.cache_clear()


def configuration(**changes) -> DataConfig:
    return DataConfig(
        **{
            "name": "pydocs",
            "source": "pydocs",
            "packages": ["probe_package"],
            "min_characters": 60,
            "held_out_fraction": 0.3,
            **changes,
        }
    )


def test_docstrings_are_read_not_imported(package: Path):
    found = list(pydocs.read("probe_package"))
    assert len(found) == 4 * NUM_MODULES
    one = next(each for each in found if each.name.endswith("solve_7"))
    assert one.name == "probe_package.solve_7"  # the private module is left out of the public name
    assert one.module == "probe_package._part_7"
    assert one.signature == "(values, axis=0, *, tolerance=0.001)"
    assert "\nParameters\n----------\naxis : int\n    The axis" in one.text  # cleaned as inspect.cleandoc does
    assert next(each for each in found if each.name.endswith("Holder_7")).signature == "(size)"
    assert "probe_package" not in sys.modules


def test_whole_modules_are_held_out(package: Path):
    parts = pydocs.divide(list(pydocs.read("probe_package")), 0.3)
    modules = {name: {docstring.module for docstring in members} for name, members in parts.items()}
    assert all(modules.values())
    for one, other in itertools.combinations(modules.values(), 2):
        assert not one & other
    assert 0.1 < len(modules["evaluation"] | modules["calibration"]) / NUM_MODULES < 0.5


def test_copies_of_held_out_text_do_not_train(package: Path):
    before = pydocs.divide(list(pydocs.read("probe_package")), 0.3)
    held_out = next(each for each in before["evaluation"] if "Parameters" in each.text)
    name = next(name for name in map("copy_{}".format, range(99)) if data.share(f"module:probe_package.{name}") > 0.3)
    near = held_out.text.replace("index number", "index no.")
    (package / f"{name}.py").write_text(
        f"def one():\n    {held_out.text!r}\ndef two():\n    {near!r}\ndef three():\n    {sentence(77, 50)!r}\n"
    )
    training = {each.text for each in pydocs.divide(list(pydocs.read("probe_package")), 0.3)["training"]}
    assert held_out.text not in training
    assert near not in training
    assert sentence(77, 50) in training


def test_corpus_is_deterministic_and_disjoint(package: Path):
    first = data.open_corpus(configuration(), True)
    forget()
    second = data.open_corpus(configuration(), True)
    assert (first.fingerprint, first.evaluation, first.calibration) == (
        second.fingerprint,
        second.evaluation,
        second.calibration,
    )
    epoch = first.numbers["training_documents"]
    texts = list(itertools.islice(first.training_documents(0), 2 * epoch))
    assert texts == list(itertools.islice(second.training_documents(0), 2 * epoch))
    assert sorted(texts[:epoch]) == sorted(texts[epoch:])
    assert texts[:epoch] != texts[epoch:]  # another order in every epoch
    assert texts[:epoch] != list(itertools.islice(first.training_documents(1), epoch))
    assert len({*texts, *first.evaluation, *first.calibration}) == epoch + len(first.evaluation) + len(
        first.calibration
    )


def test_fingerprint_follows_content_and_rules(package: Path):
    first = data.open_corpus(configuration(), True).fingerprint
    assert data.open_corpus(configuration(held_out_fraction=0.4), True).fingerprint != first
    assert data.open_corpus(configuration(min_characters=300), True).fingerprint != first
    (package / "_part_0.py").write_text(module(0).replace("Module 0", "Other 0"))
    metadata = package.parent / "probe_package-1.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("Version: 1.0", "Version: 1.1"))
    forget()
    assert data.open_corpus(configuration(), True).fingerprint != first


def test_corrupt_cache_is_parsed_again(package: Path, tmp_path: Path):
    first = data.open_corpus(configuration(), True)
    kept = next((tmp_path / "cache").glob("docstrings-*/*.jsonl"))
    kept.write_text(kept.read_text()[:500])
    forget()
    assert data.open_corpus(configuration(), True).evaluation == first.evaluation


def test_pairs_come_from_training_modules(package: Path):
    corpus = data.open_corpus(configuration(), True)
    found = list(itertools.islice(corpus.training_pairs(3), 200))
    assert found == list(itertools.islice(corpus.training_pairs(3), 200))
    assert all(set(pair) == {"prompt", "completion"} and all(pair.values()) for pair in found)
    kinds = {pair["prompt"].split()[0] + " " + pair["prompt"].split()[1] for pair in found}
    assert kinds == {"What does", "Which object", "What is"}
    assert not any("_hidden" in pair["prompt"] + pair["completion"] for pair in found)
    held_out = {docstring.name for docstring in pydocs_corpus._divided(("probe_package",), 0.3)["evaluation"]}
    assert held_out and not any(name + "`" in pair["prompt"] for name in held_out for pair in found)


def test_items_are_fair(package: Path):
    corpus = data.open_corpus(configuration(), True)
    for name in tasks.CANDIDATES:
        items = corpus.items(name)
        assert len(items) >= 4, name
        assert items == corpus.items(name)
        for item in items:
            assert len(set(item["choices"])) == 4
            assert "_hidden" not in item["id"] or name == "pydocs_continuation"
            assert len(item["context"].split()) <= tasks.CONTEXT_WORDS
    right = {item["choices"][item["label"]] for item in corpus.items("pydocs_summary")}
    assert all("number" in answer for answer in right)
    training = {pairs.summary(each.text) for each in pydocs_corpus._divided(("probe_package",), 0.3)["training"]}
    assert not right & training


def test_overlapping_choices_are_left_out():
    assert tasks._overlap("Return the mean.", "return the mean of values")
    assert not tasks._overlap("Return the mean.", "Return the median.")


@pytest.mark.parametrize(
    "text, prose",
    [
        ("Return the mean of `values`, or nothing.", True),
        ("x = f(a) + g(b) * 3", False),
        ("a_very_long_identifier", False),
    ],
)
def test_prose(text: str, prose: bool):
    assert tasks.is_prose(text) == prose


def test_splits_are_fixed():
    hashes = [data.content_hash(str(number)) for number in range(400)]
    splits = [data.split_of(one) for one in hashes]
    assert splits[:6] == ["select", "confirm", "select", "confirm", "confirm", "select"]  # must never change
    assert 160 < splits.count("select") < 240


def test_missing_package_is_named():
    with pytest.raises(ValueError, match="no_such_package"):
        data.check(configuration(packages=["no_such_package"]), True)


def test_importing_the_room_needs_no_torch():
    code = "import sys, opt_deus.data; sys.exit('torch' in sys.modules or 'datasets' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def text_configuration(path: Path, **changes) -> DataConfig:
    return DataConfig(**{"name": "text", "source": "text", "path": str(path), "min_characters": 40, **changes})


def test_text_file_by_blank_lines(tmp_path: Path):
    path = tmp_path / "book.txt"
    blocks = [f"Chapter {number}\n\n{sentence(number, 30)}" for number in range(30)]
    path.write_text("\n\n\n".join([*blocks, blocks[0]]))
    corpus = data.open_corpus(text_configuration(path), True)
    texts = list(itertools.islice(corpus.training_documents(0), corpus.numbers["training_documents"]))
    assert sorted([*texts, *corpus.evaluation, *corpus.calibration]) == sorted(blocks)  # headings kept, the copy gone
    assert len(corpus.evaluation) == 2 and len(corpus.calibration) == 1
    path.write_text("\n\n".join(reversed(blocks)))
    assert (
        data.open_corpus(text_configuration(path), True).evaluation == corpus.evaluation
    )  # content decides, not order
    path.write_text("\n\n".join(blocks[:-1]))
    assert data.open_corpus(text_configuration(path), True).fingerprint != corpus.fingerprint


def test_jsonl_file(tmp_path: Path):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": sentence(number)}) + "\n" for number in range(20)))
    corpus = data.open_corpus(text_configuration(path), True)
    assert set(itertools.islice(corpus.training_documents(0), 18)) | {*corpus.evaluation, *corpus.calibration} == {
        sentence(number) for number in range(20)
    }
    assert not data.has_pairs(text_configuration(path))
    with pytest.raises(ValueError, match=r"sft\.tokens=null"):
        corpus.training_pairs(0)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("empty.txt", b"", "holds 0 distinct documents"),
        ("blank.txt", b"\n \n\n", "holds 0 distinct documents"),
        ("one.txt", b"A single document of a few words, that is all.", "holds 1 distinct documents"),
        ("latin.txt", "a caf\xe9 \n\n".encode("latin-1") * 9, "not UTF-8"),
        ("broken.jsonl", b'{"text": "a"}\n{"text": \n', "line 2"),
        ("number.jsonl", b'{"text": 3}\n', "line 1"),
        ("keyless.jsonl", b'{"body": "a"}\n', "line 1"),
        ("list.jsonl", b'["text"]\n', "line 1"),
        ("book.pdf", b"%PDF", ".txt or .jsonl"),
    ],
)
def test_broken_text_files_are_named(tmp_path: Path, name: str, content: bytes, message: str):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        data.check(text_configuration(path), True)
    assert name in str(error.value)


def test_missing_text_file(tmp_path: Path):
    with pytest.raises(ValueError, match="nowhere"):
        data.check(text_configuration(tmp_path / "nowhere.txt"), True)
    with pytest.raises(ValueError, match=r"data\.path"):
        data.check(DataConfig(name="text", source="text"), True)


HUB = DataConfig(name="fineweb_edu", source="hub", hub_id="owner/name", hub_config="part", pairs="owner/pairs")


def test_hub_is_refused_offline(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with pytest.raises(ValueError, match="owner/name.*offline=true"):
        data.check(HUB, True)
    data.check(HUB, False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE"):
        data.check(HUB, False)


def test_hub_corpus(monkeypatch: pytest.MonkeyPatch):
    """The logic of streaming, with a data set of our own in place of the hub's."""
    import datasets

    texts = [sentence(number, 20) for number in range(300)]
    rows = [{"instruction": f"Ask {n}", "input": "" if n % 2 else "This", "output": f"Say {n}"} for n in range(5)]

    def load_dataset(path: str, **options):
        if path == "owner/pairs":
            return datasets.Dataset.from_list(rows)
        assert (path, options) == ("owner/name", {"name": "part", "split": "train", "streaming": True})
        return datasets.Dataset.from_dict({"text": texts}).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    hub._held_out.cache_clear()
    corpus = data.open_corpus(HUB, False)
    held_out = {*corpus.evaluation, *corpus.calibration}
    training = list(itertools.islice(corpus.training_documents(0), 2 * (len(texts) - len(held_out))))
    assert held_out and set(training) == set(texts) - held_out
    half = len(training) // 2
    assert training[:half] != training[half:]
    questions = list(itertools.islice(corpus.training_pairs(0), 5))
    assert {"prompt": "Ask 0\n\nThis", "completion": "Say 0"} in questions
    assert {"prompt": "Ask 1", "completion": "Say 1"} in questions
    hub._held_out.cache_clear()


def test_cache_is_a_store_artefact(package: Path, tmp_path: Path):
    data.open_corpus(configuration(), True)
    folders = list(Store(tmp_path / "cache").root.glob("docstrings-*"))
    assert any((folder / "manifest.json").is_file() for folder in folders)


def test_a_continuation_that_a_training_docstring_has_is_no_item():
    def docstring(module: str, text: str) -> pydocs.Docstring:
        return pydocs.Docstring("numpy", module, f"{module}.thing", "(a, b)", text)

    words = "The result is computed from the rows of the first array and then added to the columns of the other one"
    shared = " ".join([words, "in the order in which they are given by the caller of this function"])
    held_out = [docstring("numpy.held", f"Summary of it.\n\n{shared}")]
    assert tasks._continuations(held_out, []) and not tasks._continuations(held_out, [docstring("numpy.train", shared)])
