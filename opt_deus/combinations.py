"""Keys that are right one by one and mean nothing, or nothing possible, together."""

from __future__ import annotations

from opt_deus.config import NO_NEW_CONTENT, Cell


class Meaningless(ValueError):
    """A combination that means nothing: skipped with its reason in a grid that crosses it, refused alone."""


def check_combination(cell: Cell) -> None:
    """Raises Meaningless, or ValueError with key, value and remedy."""
    align = cell.align.name
    if align in NO_NEW_CONTENT:
        for key, value in (
            ("zero_init", cell.zero_init),
            ("norm_match", cell.norm_match),
            ("update_match", cell.update_match),
        ):
            if value:
                raise Meaningless(
                    f"{key}={str(value).lower()} means nothing with align={align}: it makes no new weights."
                )
    if align in NO_NEW_CONTENT and cell.evidence.measure is not None:
        raise Meaningless(f"evidence={cell.evidence.name} means nothing with align={align}: it makes no new weights.")
    if align == "none" and cell.num_new_layers:
        raise Meaningless(f"num_new_layers={cell.num_new_layers} means nothing with align=none, the base itself.")
    if cell.num_new_layers is not None and cell.num_new_layers < 0:
        raise ValueError(f"num_new_layers={cell.num_new_layers}: 1 or more; left out: half the base's layers.")
    if cell.num_new_layers == 0 and align != "none":
        raise ValueError(f"num_new_layers=0 with align={align}: give 1 or more, or align=none for the base itself.")
    _check_rounds(cell)
    if not cell.zero_init and cell.zero_weights != "both":
        raise Meaningless(f"zero_weights={cell.zero_weights} means nothing with zero_init=false: nothing is zeroed.")
    if cell.zero_init and cell.update_match is not None:
        raise Meaningless(f"update_match={cell.update_match} means nothing with zero_init=true: no update, no norm.")
    for stage in ("cpt", "sft"):
        if align == "none" and getattr(cell, stage).trainable == "new":
            raise Meaningless(f"{stage}.trainable=new means nothing with align=none, which adds no layer.")


def _check_rounds(cell: Cell) -> None:
    if cell.rounds < 1:
        raise ValueError(f"rounds={cell.rounds}: 1 or more.")
    if cell.rounds == 1:
        return
    if cell.align.name in NO_NEW_CONTENT:
        raise Meaningless(f"rounds={cell.rounds} means nothing with align={cell.align.name}: it makes no new layers.")
    if cell.position.name in ("single", "explicit"):
        raise ValueError(f"rounds={cell.rounds}: position={cell.position.name} places all layers at once; choose top.")
    step = cell.cpt.block_size * cell.cpt.batch_size * cell.cpt.accumulation
    budget = cell.cpt.steps or (cell.cpt.tokens or 0) // step
    if budget < cell.rounds:
        raise ValueError(f"rounds={cell.rounds}: each needs a step of pre-training; set cpt.tokens or cpt.steps.")
