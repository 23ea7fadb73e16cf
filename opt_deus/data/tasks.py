"""Multiple-choice items from held-out docstrings: short, of four choices, the same wherever the packages are.

`pydocs_summary`: the right first sentence for a qualified name and signature.
`pydocs_continuation`: the words that follow the beginning of a paragraph.
Distractors are the answers of other held-out objects of the same package. Items stand in the order of a hash, so that
the first 100 are a fixed sample and a part of the first 1,000.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterable, Iterator
from typing import Any

from opt_deus.data.corpus import content_hash, share
from opt_deus.data.pairs import summary
from opt_deus.data.pydocs import Docstring

NUM_CHOICES = 4
SUMMARY_CHARACTERS = (25, 80)  # 6 to 20 tokens
SIGNATURE_CHARACTERS = 36
CONTEXT_WORDS = 14  # of a continuation; every choice is scored with its whole context, so both are short
CONTINUATION_WORDS = 8
WORD_CHARACTERS = 16  # a longer "word" is a path, a formula or a table

UNDERLINED = re.compile(r"^(?:Parameters|Returns|Attributes|Methods)\n-{3,}\n(?:.+\n?)*|^.+\n[-=~]{3,}\n", re.MULTILINE)
LISTING = re.compile(r"\s*(?:\w+:\s|[-*\[:.>|])")  # "Args: ...", bullets, footnotes, code

Candidate = tuple[Docstring, str, str]  # object, context, true choice


def items(name: str, evaluation: Iterable[Docstring], training: Iterable[Docstring]) -> list[dict[str, Any]]:
    """Items {"id", "context", "choices", "label"} of a task, in the order of their hash."""
    candidates = CANDIDATES[name](evaluation, training)
    pools: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        pools.setdefault(candidate[0].package, []).append(candidate)
    found = [_item(candidate, pools[candidate[0].package]) for candidate in candidates]
    return sorted((item for item in found if item), key=lambda item: content_hash(f"{item['id']} {item['choices']}"))


def _summaries(evaluation: Iterable[Docstring], training: Iterable[Docstring]) -> list[Candidate]:
    """Public objects with a summary that no training docstring has."""
    known = {_plain(summary(docstring.text)) for docstring in training}
    found: dict[str, Candidate] = {}
    for docstring in evaluation:
        answer = summary(docstring.text)
        if (
            docstring.signature
            and docstring.is_public
            and is_prose(answer)
            and SUMMARY_CHARACTERS[0] <= len(answer) <= SUMMARY_CHARACTERS[1]
            and _plain(answer) not in known
        ):
            context = f"{docstring.name}{_short(docstring.signature)}:"
            found.setdefault(_plain(answer), (docstring, context, answer))
    return list(found.values())


def _continuations(evaluation: Iterable[Docstring], training: Iterable[Docstring]) -> list[Candidate]:
    """Paragraphs of prose with a beginning and a continuation that no training docstring has together."""
    known = {_plain(f"{context} {answer}") for _, context, answer in _starts(training)}
    found: dict[str, Candidate] = {}
    for docstring, context, answer in _starts(evaluation):
        if _plain(f"{context} {answer}") not in known:
            found.setdefault(_plain(answer), (docstring, context, answer))
    return list(found.values())


def _starts(docstrings: Iterable[Docstring]) -> Iterator[Candidate]:
    """Beginnings of paragraphs that are long enough to be divided."""
    for docstring in docstrings:
        for paragraph in re.split(r"\n\s*\n", UNDERLINED.sub("", docstring.text)):
            words = paragraph.split()
            if len(words) < CONTEXT_WORDS + CONTINUATION_WORDS or LISTING.match(paragraph):
                continue
            context = " ".join(words[:CONTEXT_WORDS])
            answer = " ".join(words[CONTEXT_WORDS : CONTEXT_WORDS + CONTINUATION_WORDS])
            if is_prose(context) and is_prose(answer):
                yield docstring, context, answer


CANDIDATES = {"pydocs_summary": _summaries, "pydocs_continuation": _continuations}


def _item(candidate: Candidate, pool: list[Candidate]) -> dict[str, Any] | None:
    """Three distractors that another object's answer gives, drawn by hash; None where the package has too few."""
    docstring, context, answer = candidate
    identity = f"{docstring.module}:{docstring.name}"
    last = docstring.name.rsplit(".", 1)[-1]
    shuffled = random.Random(identity + context).sample(pool, len(pool))
    others = (
        other[2] for other in shuffled if other[0].name.rsplit(".", 1)[-1] != last and not _overlap(other[2], answer)
    )
    choices = list(itertools.islice(others, NUM_CHOICES - 1))
    if len(choices) < NUM_CHOICES - 1:
        return None
    label = int(share(identity + context) * NUM_CHOICES)
    choices.insert(label, answer)
    return {"id": identity, "context": context, "choices": choices, "label": label}


def is_prose(text: str) -> bool:
    """English words rather than code, tables or formulas."""
    words = text.split()
    plain = [word for word in words if re.fullmatch(r"[`'\"(]*[A-Za-z][A-Za-z'/-]*[`'\"),.:;]*", word)]
    return bool(words) and len(plain) >= 0.8 * len(words) and max(map(len, words)) <= WORD_CHARACTERS


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()


def _overlap(one: str, other: str) -> bool:
    """One answer begins with the other: both would be right."""
    one, other = sorted((_plain(one), _plain(other)), key=len)
    return other.startswith(one)


def _short(signature: str) -> str:
    """A signature cut at an argument, so that it stays short."""
    if len(signature) <= SIGNATURE_CHARACTERS:
        return signature
    cut = signature[:SIGNATURE_CHARACTERS].rsplit(",", 1)[0]
    return cut + ", ...)" if cut.startswith("(") and len(cut) > 1 else "(...)"
