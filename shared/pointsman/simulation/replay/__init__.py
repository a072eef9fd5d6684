"""The same State and the same policies over a recorded log: what was known then, and whether deciding again agrees.

`fold` gives the state as of any entry, in log order. `verify` rebuilds the leader's own order and lets the Dispatcher
decide everything again. Both take entries and give values; where a log is kept is no matter of theirs.
"""

from pointsman.simulation.replay.folding import BaseState, apply_entry, fold, pool_settings
from pointsman.simulation.replay.verdict import Difference, Recomputed, TermSummary, Verdict
from pointsman.simulation.replay.verification import verify

__all__ = [
    "BaseState",
    "Difference",
    "Recomputed",
    "TermSummary",
    "Verdict",
    "apply_entry",
    "fold",
    "pool_settings",
    "verify",
]
