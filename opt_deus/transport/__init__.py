"""Pure optimal transport between the rows of two matrices: costs, solvers, checked plans.

Convention everywhere: a plan has shape (lower, upper); its rows belong to the layer below, its columns to the layer
above, and both marginals are uniform. POT is imported in this room only.
"""

from __future__ import annotations

from opt_deus.transport.costs import COSTS, cost
from opt_deus.transport.exact import solve_exact
from opt_deus.transport.files import load_maps, save_maps
from opt_deus.transport.plans import Assignment, DensePlan, LinearMap, Map, PlanError, check_plan
from opt_deus.transport.relaxed import check_relaxed_plan, solve_partial, solve_unbalanced
from opt_deus.transport.release import solve_release
from opt_deus.transport.sinkhorn import solve_sinkhorn

__all__ = [
    "COSTS",
    "Assignment",
    "DensePlan",
    "LinearMap",
    "Map",
    "PlanError",
    "check_plan",
    "check_relaxed_plan",
    "cost",
    "load_maps",
    "save_maps",
    "solve_exact",
    "solve_partial",
    "solve_release",
    "solve_sinkhorn",
    "solve_unbalanced",
]
