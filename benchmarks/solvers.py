"""Transport solvers on the real blocks of one layer pair, as `align=ot` meets them (pre-aligned, epsilon 0.06).

    python benchmarks/solvers.py CHECKPOINT_DIR [--gap 20] [--rounds 3] [--no-log-domain]

Prints two markdown tables. Times are CPU seconds on one thread, median of the rounds; the solvers alternate within a
round, so that what else the machine does meets all alike. What carries over to other machines are ratios of one run.

- exact: our assignment (SciPy on reduced costs), as in align=ot_exact.
- scipy: SciPy's assignment alone; simplex: POT's network simplex; both on the same costs, with the same result.
- stabilised: our Sinkhorn (epsilon scaling, absorption, float64), marginal error <= 1e-4 in L1, as in align=ot.
- log-domain: POT's sinkhorn_log, once, until its own (weaker, L2) error is below 1e-4 or after 1,000 iterations.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import ot as pot
import pandas as pd
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from opt_deus.methods import Heads, Parents
from opt_deus.methods.aligned import align_with
from opt_deus.models import layer_tensors, load, shape_of
from opt_deus.models.blocks import block_for
from opt_deus.transport import cost, solve_exact, solve_sinkhorn

EPSILON = 0.06


def seconds(solve: Callable[[], object]) -> float:
    start = time.process_time()
    solve()
    return time.process_time() - start


def network_simplex(costs: Tensor) -> None:
    uniform = [np.full(count, 1 / count) for count in costs.shape]
    pot.emd(*uniform, costs.numpy(), numItermax=10_000_000)


def log_domain(costs: Tensor) -> None:
    uniform = [np.full(count, 1 / count) for count in costs.shape]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # not converged within 1,000 iterations: the time is then a lower bound
        pot.sinkhorn(*uniform, costs.numpy(), EPSILON, method="sinkhorn_log", stopThr=1e-4, numItermax=1_000)


def parents_of(folder: Path, gap: int) -> Parents:
    model, _ = load(folder)
    numbers = shape_of(folder)
    heads = Heads(numbers["num_attention_heads"], numbers["num_key_value_heads"], numbers["head_dim"])
    lower, upper = (layer_tensors(model, index) for index in (gap, gap + 1))
    return Parents(lower, upper, block_for(numbers["model_type"]), heads, f"gap {gap}")


def measure(parents: Parents, rounds: int, with_log_domain: bool) -> pd.DataFrame:
    """One row per block: its size and the seconds of every solver."""
    rows = []

    def solve(where: str, below: Tensor, above: Tensor):
        costs = cost(below, above)
        repeated = {
            "exact": lambda: solve_exact(costs),
            "scipy": lambda: linear_sum_assignment(costs.numpy()),
            "simplex": lambda: network_simplex(costs),
            "stabilised": lambda: solve_sinkhorn(costs, EPSILON),
        }
        taken = [{name: seconds(run) for name, run in repeated.items()} for _ in range(rounds)]
        row = {name: statistics.median(round_[name] for round_ in taken) for name in repeated}
        if with_log_domain:
            row["log-domain"] = seconds(lambda: log_domain(costs))
        rows.append({"block": where.split(", ")[1], "rows": len(costs), **row})
        print(f"{where}: " + ", ".join(f"{name} {value:.3f} s" for name, value in row.items()), file=sys.stderr)
        return solve_sinkhorn(costs, EPSILON), {}

    align_with(parents, "tmf", solve)
    return pd.DataFrame(rows)


def report(table: pd.DataFrame) -> str:
    """The seconds per block, then how often as long as the exact assignment each solver takes."""
    solvers = [name for name in ("scipy", "simplex", "stabilised", "log-domain") if name in table]
    lines = [table.to_markdown(index=False, floatfmt=".3f"), ""]
    ratios = pd.DataFrame({name: table[name] / table["exact"] for name in solvers})
    spread = ratios.quantile([0, 0.25, 0.5, 0.75, 1]).T
    spread.columns = ["lowest", "quarter", "median", "three quarters", "highest"]
    spread["all blocks"] = [table[name].sum() / table["exact"].sum() for name in solvers]
    spread.index.name = "seconds / seconds of the exact assignment"
    return "\n".join([*lines, spread.to_markdown(floatfmt=".2f")])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--gap", type=int, default=20, help="the pair of layers gap, gap + 1")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-log-domain", action="store_true", help="leave out the slow one (minutes)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(
        report(measure(parents_of(arguments.checkpoint, arguments.gap), arguments.rounds, not arguments.no_log_domain))
    )


if __name__ == "__main__":
    main()
