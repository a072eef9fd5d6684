"""How long a part of a wait must be to count as its cause: `explain` names the cause of one late request by these rules, and
`doctor` those of many."""

from pointsman.primitives import EngineSeconds

SLOW_FACTOR_MIN = 1.5
"""Prefill time over that of the other instances: below, an engine is as slow as engines are."""
USUAL_MAX = 2.0
"""Prefills among those who decode take that long. Beyond, all engines are slow."""
STALL_FACTOR = 3.0
"""A stalled prefill takes this many times what the cost model says."""
HALF = 0.5
"""Of a wait or an objective: what makes up more than this is its cause."""
LESS_BUSY_SHARE_MAX = 0.25
"""Of the queue at the chosen engine: another with at most this was much less busy."""
NOTICED_SECONDS: EngineSeconds = 0.05
"""Less is no wait, and an engine with less work is idle."""
HOT_ARRIVALS_MIN = 24
HOT_IN_FAIR_SHARES = 1.0
"""A hot prefix has more than one instance's even share of the arrivals (as in `state.hotness`)."""


def is_hot(arrivals: int, window: int, ready: int) -> bool:
    """A prefix with so many of the `window` arrivals, in a pool of `ready` instances."""
    if window < HOT_ARRIVALS_MIN or ready < 2:
        return False
    return arrivals / window * ready > HOT_IN_FAIR_SHARES


def is_less_busy(queue: EngineSeconds, chosen: EngineSeconds, *, in_time: bool) -> bool:
    """Whether an engine had a much shorter queue than the chosen one, and was predicted to be in time, or idle."""
    return queue <= LESS_BUSY_SHARE_MAX * chosen and (in_time or queue < NOTICED_SECONDS)
