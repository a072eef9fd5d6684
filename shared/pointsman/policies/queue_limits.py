"""Defaults of how much may be inside an engine, and how many requests may wait."""

from pointsman.primitives import Tokens

PREFILL_WINDOW_TOKENS: Tokens = 16_384
"""Uncached prompt tokens inside one engine before their first token."""
RUNNING_MAX = 256
"""Requests inside one engine: its --max-num-seqs."""
PENDING_MAX = 10_000
"""Requests that wait in the whole pool."""
HOLD_MAX = 1_000
"""Requests that wait while no instance is ready."""
