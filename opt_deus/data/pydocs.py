"""Docstrings of installed scientific packages: English with mathematics that every machine already has.

The sources are read with `ast` and never imported. Whole modules are held out, so that neighbours of a held-out
docstring, which repeat its words, do not stand in the training text; copies across modules are removed.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from opt_deus.data.corpus import content_hash, share

PARSER_VERSION = 1
CALIBRATION_SHARE = 0.15  # of the held-out modules; the rest is evaluation
NEAR_COPY = 0.5  # a training docstring that shares this part of its long lines with a held-out one is left out
LONG_LINE = 40  # characters, after normalisation; shorter lines are headings and types that everybody repeats


@dataclass(frozen=True)
class Docstring:
    """One docstring. `name` is the public qualified name (private path components left out)."""

    package: str
    module: str
    name: str
    signature: str  # "(a, b, axis=0)", without annotations; empty for modules
    text: str

    @property
    def is_public(self) -> bool:
        """No private or test component in the qualified name."""
        return not any(part.startswith(("_", "test")) for part in self.name.split("."))


def locate(package: str) -> Path:
    """Folder of an installed package, found without importing it."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"data.packages: {package!r} is not an installed package; pip install it or take it out")
    return Path(next(iter(spec.submodule_search_locations)))


def versions(packages: list[str]) -> dict[str, str]:
    """Package -> installed version: the key of the parsed corpus."""
    found = {}
    for package in packages:
        locate(package)
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # its distribution has another name: a slow search
            distributions = importlib.metadata.packages_distributions().get(package, [package])
            found[package] = importlib.metadata.version(distributions[0])
    return found


def read(package: str) -> Iterator[Docstring]:
    """All docstrings of a package, in the order of files and lines."""
    root = locate(package)
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        module = ".".join((package, *(part for part in parts if part != "__init__")))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)  # other people's "\d" in plain strings
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # a package may ship a template that is no Python
            continue
        for name, signature, text in _docstrings(tree, ()):
            yield Docstring(package, module, _public(module, name), signature, text)


def _docstrings(node: ast.AST, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str, str]]:
    text = ast.get_docstring(node, clean=True)  # clean: as inspect.cleandoc
    if text:
        yield path, _signature(node), text.encode("utf-8", "replace").decode()
    for child in node.body:
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _docstrings(child, (*path, child.name))


def _signature(node: ast.AST) -> str:
    if isinstance(node, ast.Module):
        return ""
    if isinstance(node, ast.ClassDef):
        makers = [child for child in node.body if isinstance(child, ast.FunctionDef) and child.name == "__init__"]
        return _signature(makers[0]) if makers else "()"
    arguments = node.args
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    for group in (arguments.posonlyargs, arguments.args):
        if group and group[0].arg in ("self", "cls"):
            del group[0]
            break
    return f"({ast.unparse(arguments)})"


def _public(module: str, name: tuple[str, ...]) -> str:
    return ".".join([part for part in module.split(".") if not part.startswith("_")] + list(name))


def divide(docstrings: Iterable[Docstring], held_out_fraction: float) -> dict[str, list[Docstring]]:
    """Parts "evaluation", "calibration", "training": whole modules by the hash of their name, copies removed.

    Exact copies keep one place, held-out before training; training docstrings that are near copies of a held-out one
    (half of the long lines of either are in the other) are left out.
    """
    parts: dict[str, list[Docstring]] = {"evaluation": [], "calibration": [], "training": []}
    for docstring in docstrings:
        held_out = share("module:" + docstring.module) < held_out_fraction
        calibration = share("calibration:" + docstring.module) < CALIBRATION_SHARE
        parts["training" if not held_out else "calibration" if calibration else "evaluation"].append(docstring)
    seen: set[str] = set()
    near: dict[str, list[int]] = {}  # long line -> held-out documents that hold it
    sizes: list[int] = []
    for name, members in parts.items():
        kept = []
        for docstring in members:
            lines = long_lines(docstring.text)
            if docstring.text in seen or (name != "evaluation" and is_near_copy(lines, near, sizes)):
                continue
            seen.add(docstring.text)
            kept.append(docstring)
            if name != "training":
                for line in lines:
                    near.setdefault(line, []).append(len(sizes))
                sizes.append(len(lines))
        parts[name] = kept
    return parts


def long_lines(text: str) -> set[str]:
    """Lines that say something, as lower-case letters and digits: what a near copy shares."""
    lines = (re.sub(r"[^a-z0-9]+", " ", line.lower()).strip() for line in text.splitlines())
    return {line for line in lines if len(line) >= LONG_LINE}


def is_near_copy(lines: set[str], near: dict[str, list[int]], sizes: list[int]) -> bool:
    """Whether half of these long lines, or half of a held-out document's, are common to the two."""
    common: dict[int, int] = {}
    for line in lines:
        for document in near.get(line, ()):
            common[document] = common.get(document, 0) + 1
    return any(count >= NEAR_COPY * min(len(lines), sizes[document]) for document, count in common.items())


def content(docstrings: list[Docstring]) -> str:
    """Hash of names and texts, in order."""
    return content_hash(
        "\0".join(f"{entry.module}:{entry.name}{entry.signature}\0{entry.text}" for entry in docstrings)
    )
