"""Pure: matched rows in, comparisons out. See `compare` for notebooks and `significance` for a whole grid."""

from opt_deus.stats.contrasts import against_controls
from opt_deus.stats.effects import compare, effects
from opt_deus.stats.estimates import LEVELS, Estimate
from opt_deus.stats.means import arm_means, seed_means
from opt_deus.stats.rows import COLUMNS
from opt_deus.stats.significance import Comparison, significance, stages_of
from opt_deus.stats.studies import study_contrasts

__all__ = [
    "COLUMNS",
    "LEVELS",
    "Comparison",
    "Estimate",
    "against_controls",
    "arm_means",
    "compare",
    "effects",
    "seed_means",
    "significance",
    "stages_of",
    "study_contrasts",
]
