"""Several choices with one context in one sequence: the context is computed once instead of once a choice.

A context of 20 tokens with four choices of 11 takes 60 positions instead of 120. A token sees its context and its own
choice only, at the positions that it has alone; so the numbers are those of lm-eval's separate requests up to the
rounding of float32, which `agrees` checks on the longest document of every run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

Request = tuple[object, list[int], list[int]]  # lm-eval's: (strings, context tokens, continuation tokens)
Answer = tuple[float, bool]  # log p(continuation | context), whether it is what greedy decoding gives
MAX_CHOICES = 8  # in one sequence: documents without a context (BLiMP) would otherwise all share one
TOLERANCE = 1e-3  # absolute and relative, of summed logarithms; a mask that a model ignores is off by whole units


@dataclass(frozen=True)
class Packed:
    """One context and its choices. Branch 0 is the context, branch j + 1 the choice j without its last token."""

    requests: list[int]  # index of each choice's request
    context: list[int]
    choices: list[list[int]]

    @property
    def length(self) -> int:
        return len(self.context) + sum(len(choice) - 1 for choice in self.choices)

    def layout(self) -> tuple[list[int], list[int], list[int]]:
        """Tokens, positions and branches, each of `length`."""
        tokens, positions, branches = list(self.context), list(range(len(self.context))), [0] * len(self.context)
        for branch, choice in enumerate(self.choices, start=1):
            tokens += choice[:-1]
            positions += range(len(self.context), len(self.context) + len(choice) - 1)
            branches += [branch] * (len(choice) - 1)
        return tokens, positions, branches

    def sources(self) -> Iterator[list[int]]:
        """For each choice, the index of the position that predicts each of its tokens."""
        start = len(self.context)
        for choice in self.choices:
            yield [len(self.context) - 1, *range(start, start + len(choice) - 1)]
            start += len(choice) - 1


def pack(requests: list[Request]) -> list[Packed]:
    """Requests by context, the longest first, so that a batch has little padding."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, (_, context, _) in enumerate(requests):
        groups.setdefault(tuple(context), []).append(index)
    packed = []
    for context, members in groups.items():
        for start in range(0, len(members), MAX_CHOICES):
            part = members[start : start + MAX_CHOICES]
            packed.append(Packed(part, list(context), [requests[index][2] for index in part]))
    return sorted(packed, key=lambda one: (one.length, one.context, one.choices), reverse=True)


def score(model: torch.nn.Module, batch: list[Packed], autocast: torch.autocast) -> dict[int, Answer]:
    """Request index -> answer for one batch. Padding stands right, where no token sees it."""
    tokens, positions, branches = (
        _padded(rows, model.device) for rows in zip(*(one.layout() for one in batch), strict=True)
    )
    earlier = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool, device=model.device).tril()
    own = (branches[:, None, :] == 0) | (branches[:, None, :] == branches[:, :, None])  # [batch, query, key]
    unused = min(len(one.context) for one in batch) - 1  # leading positions that predict nothing
    with torch.no_grad(), autocast:
        logits = model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=(own & earlier)[:, None],
            logits_to_keep=tokens.shape[1] - unused,
        ).logits
    return {
        index: answer for row, one in zip(logits, batch, strict=True) for index, answer in _answers(row, one, unused)
    }


def _padded(rows: tuple[list[int], ...], device: torch.device) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True).to(device)


def _answers(logits: torch.Tensor, one: Packed, unused: int) -> Iterator[tuple[int, Answer]]:
    for index, choice, sources in zip(one.requests, one.choices, one.sources(), strict=True):
        own = logits[[source - unused for source in sources]].float()  # [tokens of the choice, vocabulary]
        targets = torch.tensor(choice, device=own.device)
        value = -torch.nn.functional.cross_entropy(own, targets, reduction="sum").item()
        yield index, (value, bool((own.argmax(-1) == targets).all()))


def agrees(model: torch.nn.Module, longest: Packed) -> bool:
    """Whether this model follows the mask: its packed answers are those of the choices one by one.

    Without autocast, whose rounding would hide the answer: one arm must not be scored in another way than the next.
    """
    autocast = torch.autocast(model.device.type, enabled=False)
    alone = [
        Packed([index], longest.context, [choice])
        for index, choice in zip(longest.requests, longest.choices, strict=True)
    ]
    together = score(model, [longest], autocast)
    return all(
        math.isclose(together[index][0], plain(model, one, autocast), rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        for one in alone
        for index in one.requests
    )


def plain(model: torch.nn.Module, one: Packed, autocast: torch.autocast) -> float:
    """A single choice by an ordinary causal forward pass without mask or positions."""
    tokens = torch.tensor([one.context + one.choices[0][:-1]], device=model.device)
    with torch.no_grad(), autocast:
        logits = model(input_ids=tokens).logits[0]
    return next(iter(_answers(logits, one, 0)))[1][0]
