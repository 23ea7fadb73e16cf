"""A report as data: sections of paragraphs, lists, tables and figures in plain text. Renderers escape it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Link:
    """Text that leads to a file beside the report."""

    text: str
    target: str  # relative to the report's folder


Cell = str | Link


@dataclass(frozen=True)
class Table:
    caption: str
    headers: list[str]
    rows: list[list[Cell]]


@dataclass(frozen=True)
class Figure:
    """`name`: figures/<name>.svg and .png, drawn by figures.py."""

    name: str
    caption: str


@dataclass(frozen=True)
class Bullets:
    items: list[str]


Block = str | Bullets | Table | Figure


@dataclass(frozen=True)
class Section:
    title: str
    blocks: list[Block] = field(default_factory=list)


@dataclass(frozen=True)
class Document:
    title: str
    sections: list[Section]
