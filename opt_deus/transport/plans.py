"""What a solver returns, what may be done with it, and the check that no bad plan passes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

NOTHING = 1e-9  # of an even share: solvers leave such crumbs where nothing moves


class PlanError(RuntimeError):
    """A solver's plan is not a transport plan; the message names layer, weight and residual."""


@dataclass(frozen=True)
class DensePlan:
    """A plan as a matrix (lower, upper) of total mass 1.

    rescaled: the map makes every upper neuron a weighted mean of lower ones (weights that sum to 1, as in weight-space
    transport); False is the released code's T^T W, whose weights sum to 1 / upper. every_neuron: False for a relaxed
    plan, of any mass: an upper neuron that receives next to nothing takes the lower one of its own index.
    """

    matrix: Tensor
    solver: str
    rescaled: bool = True
    every_neuron: bool = True

    @property
    def mass(self) -> float:
        return self.matrix.sum().item()

    @property
    def marginal_error(self) -> float:
        """L1 distance of both marginals from uniform, added up."""
        rows, columns = self.matrix.sum(1), self.matrix.sum(0)
        return ((rows - 1 / len(rows)).abs().sum() + (columns - 1 / len(columns)).abs().sum()).item()

    @property
    def effective_support(self) -> float | None:
        """exp of the entropy of a row's distribution, mean over rows: to how many neurons one is spread."""
        rows = self.matrix.sum(1, keepdim=True)
        if not (rows > 0).all():
            return None
        shares = self.matrix / rows
        return torch.special.entr(shares).sum(1).exp().mean().item()

    def cost(self, costs: Tensor) -> float:
        return (self.matrix * costs).sum().item()

    def weights(self) -> Tensor:
        """The map (upper, lower): its row j says which lower neurons make upper neuron j."""
        if not self.rescaled:
            return self.matrix.T
        received = self.matrix.sum(0, keepdim=True)
        if self.every_neuron:
            return (self.matrix / received).T
        left_out = received < NOTHING / len(self.matrix)
        same = torch.eye(len(self.matrix), dtype=self.matrix.dtype, device=self.matrix.device)
        return torch.where(left_out, same, self.matrix / received.clamp(min=NOTHING / len(self.matrix))).T

    def on_rows(self, weight: Tensor) -> Tensor:
        """The lower weight (lower, inputs), or vector (lower,), in the upper layer's order of neurons."""
        return self.weights() @ weight

    def on_columns(self, weight: Tensor) -> Tensor:
        """The lower weight (outputs, lower) reading the upper layer's neurons."""
        return weight @ self.weights().T


@dataclass(frozen=True)
class Assignment:
    """A one-to-one plan: upper neuron j is matched with lower neuron partner[j]."""

    partner: Tensor
    solver: str = "exact"

    mass = 1.0
    marginal_error = 0.0
    effective_support = 1.0

    def cost(self, costs: Tensor) -> float:
        return costs[self.partner, torch.arange(len(self.partner), device=costs.device)].mean().item()

    def on_rows(self, weight: Tensor) -> Tensor:
        return weight[self.partner]

    def on_columns(self, weight: Tensor) -> Tensor:
        return weight[:, self.partner]


@dataclass(frozen=True)
class LinearMap:
    """A map that is no transport plan, e.g. a rotation inside heads: matrix (upper, lower), applied to rows."""

    matrix: Tensor

    solver = "turn"

    def on_rows(self, weight: Tensor) -> Tensor:
        return self.matrix @ weight

    def on_columns(self, weight: Tensor) -> Tensor:
        return weight @ self.matrix.T


Plan = DensePlan | Assignment
Map = DensePlan | Assignment | LinearMap


def check_plan(plan: Plan, where: str, tolerance: float = 1e-4) -> dict[str, float]:
    """The plan's mass and marginal error; where names layer and weight.

    PlanError unless the plan is finite, not negative, of mass 1, and its marginals are within tolerance in L1.
    """
    if isinstance(plan, Assignment):
        counts = torch.bincount(plan.partner, minlength=len(plan.partner))
        if len(counts) != len(plan.partner) or not (counts == 1).all():
            raise PlanError(f"{where}: {plan.solver} returned an assignment that is not one-to-one.")
        return {"mass": plan.mass, "marginal_error": plan.marginal_error}
    mass, residual = plan.mass, plan.marginal_error
    if not math.isfinite(mass) or not torch.isfinite(plan.matrix).all():
        raise PlanError(f"{where}: {plan.solver} returned a plan that is not finite (residual {residual}).")
    if (plan.matrix < 0).any():
        raise PlanError(f"{where}: {plan.solver} returned a plan with negative entries (residual {residual:.3g}).")
    if residual > tolerance or abs(mass - 1) > tolerance:
        raise PlanError(
            f"{where}: {plan.solver} returned a plan of mass {mass:.6g} whose marginals miss uniform by a residual of "
            f"{residual:.3g} in L1 (tolerance {tolerance:g}); raise align.max_iterations or align.epsilon."
        )
    return {"mass": mass, "marginal_error": residual}
