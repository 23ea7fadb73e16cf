"""The model card of an exported checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opt_deus.models.sources import Base
    from opt_deus.plan import Plan


def model_card(base: Base, plan: Plan, method: str) -> str:
    """README.md of a deeper model: licence, base, plan, and the method in the caller's words."""
    lines = ["---", "library_name: transformers", "tags: [depth-up-scaling, opt-deus]"]
    if base.license:
        lines.append(f"license: {base.license}")
    lines += ["---", f"# {base.name}, {plan.base_layers} + {len(plan.inserted)} layers", ""]
    lines += [
        f"- Base: {base.name} (weights' fingerprint {base.fingerprint}), {plan.base_layers} layers.",
        f"- Licence: {base.license or 'that of the base model; its folder states none'}.",
        f"- New layers at output indices {', '.join(map(str, plan.inserted)) or 'none'}.",
        f"- Parents (base layers below and above): {', '.join(map(_pair, plan.parents)) or 'none'}.",
        f"- Method: {method}.",
    ]
    if base.caveat:
        lines.append(f"- Caveat: {base.caveat}.")
    lines += ["", "The new layers are untrained unless the method says otherwise. Made by opt_deus.", ""]
    return "\n".join(lines)


def _pair(parents: list[int | None]) -> str:
    lower, upper = parents
    return f"{lower}" if upper is None else f"{lower}-{upper}"
