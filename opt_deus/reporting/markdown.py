"""A document as GitHub Markdown."""

from __future__ import annotations

from opt_deus.reporting.document import Block, Bullets, Cell, Document, Figure, Link, Table


def render(document: Document) -> str:
    parts = [f"# {escape(document.title)}"]
    for section in document.sections:
        parts.append(f"## {escape(section.title)}")
        parts += [_block(block) for block in section.blocks]
    return "\n\n".join(parts) + "\n"


def escape(text: str) -> str:
    """Text that cannot become markup, a link or a table's border."""
    text = " ".join(text.split())
    for character, safe in (("&", "&amp;"), ("<", "&lt;"), ("|", "\\|"), ("`", "\\`"), ("*", "\\*"), ("](", "]\\(")):
        text = text.replace(character, safe)
    return text


def _block(block: Block) -> str:
    if isinstance(block, Bullets):
        return "\n".join(f"- {escape(item)}" for item in block.items)
    if isinstance(block, Table):
        lines = [block.headers, ["---"] * len(block.headers), *([_cell(cell) for cell in row] for row in block.rows)]
        table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return f"{escape(block.caption)}\n\n{table}"
    if isinstance(block, Figure):
        return f"![{escape(block.caption)}](figures/{block.name}.svg)"
    return escape(block)


def _cell(cell: Cell) -> str:
    return f"[{escape(cell.text)}]({cell.target})" if isinstance(cell, Link) else escape(cell)
