"""Question-answer pairs from docstrings: short, of three kinds, made without a model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from opt_deus.data.pydocs import Docstring

MAX_SIGNATURE = 80
MAX_ANSWER = 240  # both in characters
# numpydoc: "name : type", then the description, indented
PARAMETER = re.compile(r"^(\w+) ?: ?[^\n]+\n((?: {2,}\S[^\n]*\n?)+)", re.MULTILINE)


def summary(text: str) -> str:
    """First paragraph on one line; empty where the docstring begins with a heading or markup."""
    first = " ".join(re.split(r"\n\s*\n|\n[-=]{3,}|\n\s*\w+:\n", text.strip(), maxsplit=1)[0].split())
    return first if re.match(r"[A-Z][a-z]", first) else ""


def call(docstring: Docstring) -> str:
    """Qualified name with its signature, cut where it is long."""
    signature = docstring.signature
    return docstring.name + (signature if len(signature) <= MAX_SIGNATURE else signature[:MAX_SIGNATURE] + "...)")


def pairs(docstrings: Iterable[Docstring]) -> Iterator[dict[str, str]]:
    """Of public objects: what one does, which one does it, and what a parameter means."""
    for docstring in docstrings:
        if not docstring.is_public or not docstring.signature:
            continue
        answer = summary(docstring.text)
        if answer and len(answer) <= MAX_ANSWER:
            yield _pair(f"What does `{call(docstring)}` do?", answer)
            package = docstring.package
            yield _pair(f"Which object of {package} has this description: {answer}", f"`{call(docstring)}`")
        for name, description in PARAMETER.findall(docstring.text)[:2]:
            meaning = " ".join(description.split())
            if 20 <= len(meaning) <= MAX_ANSWER and name in docstring.signature:
                yield _pair(f"What is the parameter `{name}` of `{docstring.name}`?", meaning)


def _pair(question: str, answer: str) -> dict[str, str]:
    return {"prompt": question, "completion": answer}
