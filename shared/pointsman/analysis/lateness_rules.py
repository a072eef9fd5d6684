"""From when on a part of a wait counts: the thresholds by which `explain` names the cause of one late request, and `doctor`
those of many."""

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
