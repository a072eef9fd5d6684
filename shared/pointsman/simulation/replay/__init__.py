"""Replay of recorded logs with production State and policies. `fold` gives the state as of any entry; `verify`
recomputes every decision in its leader's order."""

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
