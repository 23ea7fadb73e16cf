"""Pure: number of layers and position policy -> where every layer of the deeper model comes from.

Gap i follows base layer i (0-based). Inner gaps 0 .. n-2 have two parents; gap n-1, after the last layer, has one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from opt_deus.config import PositionConfig

POSITIONS = ("top", "bottom", "middle", "top_bottom", "even", "fraction", "single", "explicit")


@dataclass(frozen=True)
class Slot:
    """One layer of the deeper model: a base layer kept in place, or a new one with its parents."""

    lower: int
    upper: int | None = None
    new: bool = False


@dataclass(frozen=True)
class Plan:
    base_layers: int
    slots: tuple[Slot, ...]

    @property
    def layers(self) -> int:
        return len(self.slots)

    @property
    def inserted(self) -> list[int]:
        """Output indices of the new layers."""
        return [index for index, slot in enumerate(self.slots) if slot.new]

    @property
    def kept(self) -> dict[int, int]:
        """Output index -> base layer, for layers kept in place."""
        return {index: slot.lower for index, slot in enumerate(self.slots) if not slot.new}

    @property
    def parents(self) -> list[list[int | None]]:
        return [[slot.lower, slot.upper] for slot in self.slots if slot.new]


def insert_after(num_layers: int, gaps: list[int]) -> Plan:
    """One new layer in each gap."""
    slots: list[Slot] = []
    for layer in range(num_layers):
        slots.append(Slot(layer))
        if layer in gaps:
            upper = layer + 1 if layer + 1 < num_layers else None
            slots.append(Slot(layer, upper, new=True))
    return Plan(num_layers, tuple(slots))


def solar(num_layers: int, num_new: int) -> Plan:
    """SOLAR (arXiv 2312.15166): the first floor((n+k)/2) layers, then the last ceil((n+k)/2); second copies are new."""
    if not 0 < num_new <= num_layers:
        raise ValueError(
            f"num_new_layers={num_new}: align=solar repeats layers of the base once, so choose 1 to {num_layers}."
        )
    first = (num_layers + num_new) // 2
    last = num_layers + num_new - first
    head = [Slot(layer) for layer in range(first)]
    tail = [Slot(layer, None, new=layer < first) for layer in range(num_layers - last, num_layers)]
    return Plan(num_layers, tuple(head + tail))


def positions(num_layers: int, num_new: int | None, position: PositionConfig, two_parents: bool) -> list[int]:
    """The gaps that a position policy chooses (contract, keys), sorted."""
    n, inner = num_layers, num_layers - 1
    if position.name == "explicit":
        return _explicit(n, num_new, position.after, two_parents)
    if position.name == "single":
        return _single(n, num_new, position.gap, two_parents)
    k = n // 2 if num_new is None else num_new
    most = n if position.name == "even" else inner
    if k < 1 or k > most:
        raise ValueError(
            f"num_new_layers={k}: position={position.name} in a base of {n} layers takes 1 to {most} new layers."
        )
    if position.name == "top":
        return list(range(inner - k, inner))
    if position.name == "bottom":
        return list(range(k))
    if position.name == "middle":
        start = (inner - k) // 2
        return list(range(start, start + k))
    if position.name == "top_bottom":
        low = k // 2
        return list(range(low)) + list(range(inner - (k - low), inner))
    if position.name == "even":
        return _even(n, k, two_parents)
    if position.name == "fraction":
        return _fraction(inner, k, position.start, position.stop)
    raise ValueError(f"position={position.name}: unknown; choose one of {', '.join(POSITIONS)}.")


def _explicit(n: int, num_new: int | None, after: list[int] | None, two_parents: bool) -> list[int]:
    last = n - 2 if two_parents else n - 1
    if not after:
        raise ValueError("position.after=[]: position=explicit needs at least one gap, e.g. position.after=[1,3].")
    for gap in after:
        if gap < 0 or gap > last:
            why = " (this method needs a layer on both sides)" if two_parents and gap == n - 1 else ""
            raise ValueError(f"position.after={after}: gap {gap} is out of range; choose from 0 to {last}{why}.")
    if len(set(after)) != len(after):
        raise ValueError(f"position.after={after}: a gap is named twice; name each gap once.")
    if num_new is not None and num_new != len(after):
        raise ValueError(f"num_new_layers={num_new}: position.after names {len(after)} gaps; leave num_new_layers out.")
    return sorted(after)


def _single(n: int, num_new: int | None, gap: int | None, two_parents: bool) -> list[int]:
    last = n - 2 if two_parents else n - 1
    if gap is None or not 0 <= gap <= last:
        raise ValueError(f"position.gap={gap}: position=single needs one gap from 0 to {last}, e.g. position.gap=0.")
    if num_new not in (None, 1):
        raise ValueError(f"num_new_layers={num_new}: position=single adds one layer; leave num_new_layers out.")
    return [gap]


def _even(n: int, k: int, two_parents: bool) -> list[int]:
    gaps = [(j + 1) * n // k - 1 for j in range(k)]
    if two_parents and gaps[-1] == n - 1:
        if n - 2 in gaps or n < 2:
            raise ValueError(
                f"num_new_layers={k}: position=even needs the gap after the last layer, where this method has no upper "
                f"parent, and gap {n - 2} is taken; choose fewer layers or align=copy."
            )
        gaps[-1] = n - 2
    return gaps


def _fraction(inner: int, k: int, start: float | None, stop: float | None) -> list[int]:
    """k inner gaps spread evenly over [start, stop] of the depth; gap i lies at (i + 1) / n, n = inner + 1."""
    if start is None or stop is None or not 0 <= start < stop <= 1:
        raise ValueError(
            f"position.start={start}, position.stop={stop}: give two numbers with 0 <= start < stop <= 1, "
            "e.g. position.start=0.5 position.stop=1.0."
        )
    window = [gap for gap in range(inner) if start <= (gap + 1) / (inner + 1) <= stop]
    if k > len(window):
        raise ValueError(
            f"num_new_layers={k}: the window [{start}, {stop}] holds {len(window)} inner gaps; widen it or add fewer."
        )
    return [window[math.floor((j + 0.5) * len(window) / k)] for j in range(k)]
