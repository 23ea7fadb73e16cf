"""A document as one self-contained HTML file: no network, dark and light, readable on a phone."""

from __future__ import annotations

import base64
import re
from html import escape
from pathlib import Path

from opt_deus.reporting.document import Block, Bullets, Cell, Document, Figure, Link, Section, Table

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #ffffff; --soft: #f2f4f7; --line: #d0d7de; --link: #0550ae; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --paper: #0d1117; --soft: #161b22; --line: #30363d; --link: #79c0ff; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 76rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.25rem; margin-top: 2.2rem; border-bottom: 1px solid var(--line); }
a { color: var(--link); }
nav ul { padding-left: 1.2rem; columns: 16rem; }
.table { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .9rem; }
caption { text-align: left; padding: .3rem 0; font-weight: 600; }
th, td { border-bottom: 1px solid var(--line); padding: .3rem .6rem; text-align: left; white-space: nowrap; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
thead th { background: var(--soft); }
figure { margin: 1rem 0; } figcaption { font-size: .9rem; }
figure img { width: 100%; max-width: 48rem; height: auto; background: #fff; border-radius: 6px; padding: .4rem; }
section.first { background: var(--soft); padding: .2rem 1rem; border-radius: 6px; }
"""


def render(document: Document, figures: Path) -> str:
    """`figures`: the folder with <name>.svg, embedded as data."""
    title = escape(document.title)
    links = "".join(
        f'<li><a href="#{_anchor(section.title)}">{escape(section.title)}</a></li>' for section in document.sections
    )
    body = "\n".join(_section(section, number, figures) for number, section in enumerate(document.sections))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n'
        f"<body>\n<h1>{title}</h1>\n<nav><ul>{links}</ul></nav>\n{body}\n</body>\n</html>\n"
    )


def _section(section: Section, number: int, figures: Path) -> str:
    blocks = "\n".join(_block(block, figures) for block in section.blocks)
    first = ' class="first"' if number == 0 else ""
    return f'<section{first} id="{_anchor(section.title)}">\n<h2>{escape(section.title)}</h2>\n{blocks}\n</section>'


def _block(block: Block, figures: Path) -> str:
    if isinstance(block, Bullets):
        return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in block.items) + "</ul>"
    if isinstance(block, Table):
        return _table(block)
    if isinstance(block, Figure):
        data = base64.b64encode((figures / f"{block.name}.svg").read_bytes()).decode()
        caption = escape(block.caption)
        image = f'<img alt="{caption}" src="data:image/svg+xml;base64,{data}">'
        return f"<figure>{image}<figcaption>{caption}</figcaption></figure>"
    return f"<p>{escape(block)}</p>"


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(header)}</th>' for header in table.headers)
    rows = "\n".join("<tr>" + "".join(_cell(cell) for cell in row) + "</tr>" for row in table.rows)
    caption = f"<caption>{escape(table.caption)}</caption>"
    return f'<div class="table"><table>{caption}<thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table></div>'


def _cell(cell: Cell) -> str:
    if isinstance(cell, Link):
        return f'<td><a href="{escape(cell.target)}">{escape(cell.text)}</a></td>'
    numeric = re.fullmatch(r"[-+<]?[\d,.]+(e[+-]?\d+)?%?|-", cell)
    return f"<td{' class=number' if numeric else ''}>{escape(cell)}</td>"


def _anchor(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
