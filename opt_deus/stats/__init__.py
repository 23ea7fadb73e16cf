"""Pure: matched rows in, comparisons out. See `compare` for notebooks and `significance` for a whole grid."""

from opt_deus.stats.effects import arm_means, compare, effects, seed_means
from opt_deus.stats.estimates import LEVELS, Estimate
from opt_deus.stats.significance import COLUMNS, Comparison, significance, stages_of

__all__ = [
    "COLUMNS",
    "LEVELS",
    "Comparison",
    "Estimate",
    "arm_means",
    "compare",
    "effects",
    "seed_means",
    "significance",
    "stages_of",
]
