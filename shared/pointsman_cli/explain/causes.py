"""Why a request was slow or not served: the enumerated cause, and its one line."""

from dataclasses import dataclass
from enum import StrEnum


class Cause(StrEnum):
    """Values are in `explain --json` and in the console's API."""

    NOTHING = "nothing"
    """In time, and nothing took more than its own prompt needs."""
    LONG_PROMPT = "long_prompt"
    """Its own prompt takes that long to compute."""
    LONG_PROMPT_AHEAD = "long_prompt_ahead"
    HOT_PREFIX = "hot_prefix"
    """It waited behind requests with the same prefix."""
    OVERLOAD = "overload"
    """Every instance had a queue."""
    BUSY_INSTANCE = "busy_instance"
    """Its instance had a queue and another had none."""
    SLOW_ENGINE = "slow_engine"
    STALE_INDEX = "stale_index"
    """Tokens predicted to be cached were not, and had to be computed: its own or those ahead of it."""
    FAILED_ATTEMPTS = "failed_attempts"
    MOVED = "moved"
    """It waited at an instance that it left without being served."""
    NO_SCHEDULER = "no_scheduler"
    HELD = "held"
    """No instance could take it."""
    TRANSPORT = "transport"
    """Between the processes."""
    SLOW_DECODE = "slow_decode"
    CLIENT_GONE = "client_gone"
    REJECTED = "rejected"
    """More load than its objective allows."""
    LIMIT = "limit"
    """Beyond its tenant's limit."""
    FAILED = "failed"
    NOT_ENDED = "not_ended"
    UNKNOWN = "unknown"
    """The log does not say."""


@dataclass(frozen=True, slots=True)
class Verdict:
    cause: Cause
    sentence: str
