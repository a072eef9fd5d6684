"""The production State and policies over a recorded log. `fold` gives the state as of any entry, in log order; `verify`
recomputes every decision in its leader's order. Both take entries and return values.
"""

from pointsman.simulation.replay.folding import BaseState, fold, pool_settings
from pointsman.simulation.replay.verdict import Difference, Recomputed, TermSummary, Verdict
from pointsman.simulation.replay.verification import verify

__all__ = [
    "BaseState",
    "Difference",
    "Recomputed",
    "TermSummary",
    "Verdict",
    "fold",
    "pool_settings",
    "verify",
]
