"""The plan of a cell: which rule of plan.py its method and position ask for. Imports no torch."""

from __future__ import annotations

from opt_deus import plan
from opt_deus.config import Cell


def plan_of(cell: Cell, num_layers: int) -> plan.Plan:
    """The cell's plan (contract, position)."""
    if cell.align.name == "none":
        return plan.Plan(num_layers, tuple(plan.Slot(layer) for layer in range(num_layers)))
    if cell.align.name == "solar":
        return plan.solar(num_layers, num_layers // 2 if cell.num_new_layers is None else cell.num_new_layers)
    makers = [align for align in (cell.align, cell.reference) if align is not None]
    two_parents = any(align.parents in ("both", "upper") for align in makers)
    gaps = plan.positions(num_layers, cell.num_new_layers, cell.position, two_parents)
    return plan.insert_after(num_layers, gaps)


def round_sizes(total: int, rounds: int) -> list[int]:
    """How many new layers each round of growth adds: as even as can be, the larger ones first."""
    return [total // rounds + (number < total % rounds) for number in range(rounds)]
