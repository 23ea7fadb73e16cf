"""Tables as LaTeX with booktabs."""

from __future__ import annotations

from opt_deus.reporting.document import Cell, Link, Table

_SPECIAL = {character: "\\" + character for character in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
}


def render(tables: list[Table]) -> str:
    """One table environment each; needs \\usepackage{booktabs}."""
    return "% needs \\usepackage{booktabs}\n" + "\n".join(_table(table) for table in tables)


def escape(text: str) -> str:
    return "".join(_SPECIAL.get(character, character) for character in text)


def _table(table: Table) -> str:
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{escape(table.caption)}}}",
        rf"\begin{{tabular}}{{{'l' * len(table.headers)}}}",
        r"\toprule",
        _row(table.headers),
        r"\midrule",
        *(_row(row) for row in table.rows),
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _row(cells: list[Cell]) -> str:
    # {} keeps a row that starts with "[" from being read as the optional argument of the line break before it.
    texts = [escape(cell.text if isinstance(cell, Link) else cell) for cell in cells]
    return "{}" + " & ".join(texts) + r" \\"
