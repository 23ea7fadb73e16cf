"""OpT-DeUS (arXiv 2508.08011): neuron-wise transport of the lower layer onto the upper one, weight by weight.

Every matrix is a set of neurons, its rows. In forward order each is pre-aligned on its input side by the transport
found before (the paper's transport matrix flow), transported onto the rows of the layer above, and averaged with it.
Row-wise transport ignores which rows of different matrices belong together; opt_deus.methods.structured does not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from opt_deus import transport
from opt_deus.methods import Diagnostics, Heads, Layer, Parents, diagnose, mean_of, norm_ratio
from opt_deus.models.blocks import Block
from opt_deus.transport.plans import Plan

FLOWS = ("tmf", "release", "none")
SCALES: dict[str, Callable[[Tensor], float]] = {
    "absolute": lambda costs: 1.0,
    "max": lambda costs: costs.max().item(),
    "median": lambda costs: costs.median().item(),
    "mean": lambda costs: costs.mean().item(),
}


@dataclass
class Flow:
    """The transport matrix flow: which plans align a weight's inputs (method.md, section 2).

    kind: tmf (the paper's table), release (only gate and up are pre-aligned, by o_proj's plan without its mean with the
    identity) or none.
    """

    block: Block
    heads: Heads
    kind: str
    plans: dict[str, list[Plan]] = field(default_factory=lambda: defaultdict(list))  # by the rows' axis

    def __post_init__(self) -> None:
        if self.kind not in FLOWS:
            raise ValueError(f"align.flow={self.kind}: unknown; choose one of {', '.join(FLOWS)}.")
        self._derived = {derived.axis: derived for derived in self.block.derived}

    def pre_align(self, tensor: Tensor, axis: str) -> Tensor:
        """The tensor with its last axis in the upper layer's order; a vector (of a norm) is aligned like a row."""
        plans = self._plans_for(axis, vector=tensor.ndim == 1)
        if not plans:
            return tensor
        repeated = axis in self._derived and self._derived[axis].repeated
        rows = tensor.reshape(-1, tensor.shape[-1])
        rows = self._to_source(rows) if repeated else rows
        carried = sum(rows if plan is None else plan.on_columns(rows) for plan in plans) / len(plans)
        return (self._from_source(carried) if repeated else carried).reshape(tensor.shape)

    def _plans_for(self, axis: str, vector: bool) -> list[Plan | None]:
        """The plans whose mean aligns an axis; None stands for the identity, and an empty list for nothing to do."""
        derived = self._derived.get(axis)
        plans: list[Plan | None] = list(self.plans.get(derived.source if derived else axis, ()))
        through_residual = derived is not None and derived.identity
        if self.kind == "none" or not plans or (self.kind == "release" and not through_residual):
            return []
        # the released code takes the mean with the identity for the norm, and then passes on the plan without it
        return plans + [None] if through_residual and (self.kind == "tmf" or vector) else plans

    def _to_source(self, rows: Tensor) -> Tensor:
        """(n, query heads x width) -> (n x heads per group, KV heads x width): a row for every repeat of the source."""
        heads = self.heads
        return rows.reshape(-1, heads.num_kv, heads.per_group, heads.head_dim).transpose(1, 2).flatten(2).flatten(0, 1)

    def _from_source(self, rows: Tensor) -> Tensor:
        heads = self.heads
        return rows.reshape(-1, heads.per_group, heads.num_kv, heads.head_dim).transpose(1, 2).flatten(1)


Solver = Callable[[str, Tensor, Tensor], tuple[Plan, dict]]  # where, pre-aligned lower, upper -> plan, diagnostics


def ot(
    parents: Parents,
    solver: str = "sinkhorn",
    epsilon: float = 0.06,
    epsilon_scale: str = "absolute",
    flow: str = "tmf",
    cost: str = "euclidean",
    bias: bool = False,
    mass: float = 0.8,
    penalty: float = 1.0,
    tolerance: float = 1e-4,
    max_iterations: int = 50_000,
) -> tuple[Layer, Diagnostics]:
    """The paper's formulas, done right: float64, plans that are checked, maps rescaled to weighted means.

    epsilon: entropic regularisation in units of epsilon_scale of the cost (absolute: of the raw distance, as in the
    paper; max is what 0.06 meant in its source, Imfeld et al. 2024). bias: appended to its neuron's row before
    distances are taken. mass: the share that solver=partial moves. penalty: of the marginals in solver=unbalanced, in
    the units of epsilon. tolerance: marginal error in L1. PlanError names layer and weight if a solution misses it.
    """
    if epsilon_scale not in SCALES:
        raise ValueError(f"align.epsilon_scale={epsilon_scale}: unknown; choose one of {', '.join(SCALES)}.")

    def entropic(costs: Tensor) -> Plan:
        unit = SCALES[epsilon_scale](costs) or 1.0
        if solver == "unbalanced":
            return transport.solve_unbalanced(costs, epsilon * unit, penalty * unit, max_iterations)
        return transport.solve_sinkhorn(costs, epsilon * unit, tolerance, max_iterations)

    solvers: dict[str, Callable[[Tensor], Plan]] = {
        "sinkhorn": entropic,
        "exact": transport.solve_exact,
        "unbalanced": entropic,
        "partial": lambda costs: transport.solve_partial(costs, mass),
    }
    if solver not in solvers:
        raise ValueError(f"align.solver={solver}: unknown; choose one of {', '.join(solvers)}.")

    def solve(where: str, below: Tensor, above: Tensor) -> tuple[Plan, dict]:
        costs = transport.cost(below, above, cost)
        plan = solvers[solver](costs)
        if solver in ("unbalanced", "partial"):
            asked = mass if solver == "partial" else None
            numbers = transport.check_relaxed_plan(plan, where, asked, tolerance)
            return plan, numbers | _costs(plan, costs) | {"cost_plan": plan.cost(costs) / plan.mass}
        return plan, transport.check_plan(plan, where, tolerance) | _costs(plan, costs)

    return align_with(parents, flow, solve, bias)


def ot_exact(parents: Parents, flow: str = "tmf", cost: str = "euclidean") -> tuple[Layer, Diagnostics]:
    """As ot, with the exact one-to-one assignment in place of the entropic plan."""
    return ot(parents, solver="exact", flow=flow, cost=cost)


def ot_release(parents: Parents, epsilon: float = 0.06) -> tuple[Layer, Diagnostics]:
    """The released code's arithmetic, faithfully: float32 Sinkhorn, T^T W not rescaled, its own flow; never checked.

    Where the solver underflows the plan has mass 0 and the made weight is W_{i+1} / 2. POT's warnings are recorded.
    """

    def solve(where: str, below: Tensor, above: Tensor) -> tuple[Plan, dict]:
        plan, messages = transport.solve_release(below, above, epsilon)
        numbers = {"mass": plan.mass, "marginal_error": plan.marginal_error, "warnings": messages}
        return plan, numbers | _costs(plan, transport.cost(below, above))

    return align_with(parents, "release", solve)


def _costs(plan: Plan, costs: Tensor) -> dict[str, float | None]:
    """Mean distance of same-index neurons, and under the plan."""
    return {
        "cost_identity": costs.diagonal().mean().item(),
        "cost_plan": plan.cost(costs),
        "effective_support": plan.effective_support,
    }


def align_with(parents: Parents, flow: str, solve: Solver, bias: bool = False) -> tuple[Layer, Diagnostics]:
    """The common walk along the table, with any solver: pre-align, solve, map, average.

    solve is given "layer, weight" for messages, the pre-aligned lower matrix and the upper one (with bias: their biases
    as a last column, where they have any); it returns the plan and what to record of it.
    """
    biases = _biases(parents) if bias else {}
    stream = Flow(parents.block, parents.heads, flow)
    layer, diagnostics = {}, {}
    plan = None
    for weight in parents.weights:
        below, above = parents.pair(weight.name)
        if weight.norm:
            aligned = stream.pre_align(below, weight.rows)
        elif weight.columns is None:
            aligned = plan.on_rows(below)  # a bias follows its weight, the matrix before it in the table
        else:
            moved = stream.pre_align(below, weight.columns)
            points = [moved, above]
            if weight.name in biases:
                pair = zip(points, parents.pair(biases[weight.name]), strict=True)
                points = [torch.cat([rows, last[:, None]], 1) for rows, last in pair]
            plan, numbers = solve(f"{parents.where}, {weight.name}", *points)
            stream.plans[weight.rows].append(plan)
            parents.maps[weight.name] = plan
            aligned = plan.on_rows(moved)
            diagnostics[weight.name] = diagnose(plan.solver, **numbers, aligned_norm_ratio=norm_ratio(aligned, below))
        layer[weight.name] = mean_of(aligned, parents, weight.name)
    return layer, diagnostics


def _biases(parents: Parents) -> dict[str, str]:
    """Matrix -> its bias, which follows it in the table."""
    found, matrix = {}, None
    for weight in parents.weights:
        if weight.columns is not None:
            matrix = weight.name
        elif not weight.norm:
            found[matrix] = weight.name
    return found
