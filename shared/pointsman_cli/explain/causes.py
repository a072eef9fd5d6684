"""Why a request was slow or was not served: the enumerated cause, its one line, and the sentences behind it."""

from dataclasses import dataclass
from enum import StrEnum

from pointsman.analysis.lateness_rules import HALF, NOTICED_SECONDS
from pointsman.contracts.reasons import RejectReason
from pointsman.primitives import EngineSeconds


class Cause(StrEnum):
    """Values are in `explain --json` and in the console's API."""

    NOTHING = "nothing"
    """In time, and most of the wait was the work of its own prompt."""
    LONG_PROMPT = "long_prompt"
    """Its own prompt alone takes longer than its objective."""
    LONG_PROMPT_AHEAD = "long_prompt_ahead"
    HOT_PREFIX = "hot_prefix"
    """It waited behind requests with the same prefix."""
    OVERLOAD = "overload"
    """Every instance had a queue."""
    BUSY_INSTANCE = "busy_instance"
    """Its instance had a queue, another had not."""
    OVERTAKEN = "overtaken"
    """Requests that came later went first: priorities, fairness, deadlines."""
    ENGINE_FULL = "engine_full"
    """All places of the engine were taken by requests that decode."""
    SLOW_ENGINE = "slow_engine"
    LOG_SLOW = "log_slow"
    """Its leader learned late what engines had finished, so it waited for room that was there."""
    STALE_INDEX = "stale_index"
    """The engine did not hold what the index said it held."""
    EVICTED = "evicted"
    """Tokens expected in the cache were gone, or not there yet, when it was granted."""
    FAILED_ATTEMPTS = "failed_attempts"
    MOVED = "moved"
    """It waited at an instance and was moved to another."""
    NO_SCHEDULER = "no_scheduler"
    NO_INSTANCE = "no_instance"
    TRANSPORT = "transport"
    """Between the processes."""
    KV_TRANSFER = "kv_transfer"
    SLOW_DECODE = "slow_decode"
    WHOLE_ANSWER = "whole_answer"
    """It was not streamed, so its first token came with its last."""
    CLIENT_GONE = "client_gone"
    REJECTED = "rejected"
    LIMIT = "limit"
    """Beyond its tenant's limit."""
    FAILED = "failed"
    CANCELLED = "cancelled"
    NOT_ENDED = "not_ended"
    UNKNOWN = "unknown"
    """The log does not say."""


REFUSALS: dict[str, Cause] = {
    RejectReason.SLO_UNREACHABLE: Cause.LONG_PROMPT,
    RejectReason.BEST_EFFORT_FULL: Cause.OVERLOAD,
    RejectReason.NO_INSTANCE: Cause.NO_INSTANCE,
    RejectReason.SLO_TPOT: Cause.SLOW_DECODE,
}
"""Where the reason says it all."""


@dataclass(frozen=True, slots=True)
class Verdict:
    cause: Cause
    sentence: str


@dataclass(frozen=True, slots=True)
class Reason:
    """`seconds` of the wait that it explains; 0: background. `because`: a clause for the verdict."""

    cause: Cause
    seconds: EngineSeconds
    sentence: str
    because: str = ""


def cause_alone(
    reason: str, *, queue: EngineSeconds, predicted_ttft: EngineSeconds, objective: EngineSeconds
) -> Cause | None:
    """Of a rejection where the soonest engine had no queue (`queue`, `predicted_ttft`: there): no load was too much. Its
    prompt alone takes too long, or its objective was used up before."""
    if reason != RejectReason.SLO_TTFT or queue >= NOTICED_SECONDS:
        return None
    return Cause.LONG_PROMPT if predicted_ttft > objective else Cause.TRANSPORT


def cause_ahead(
    *, longest: EngineSeconds, ahead: EngineSeconds, objective: EngineSeconds, less_busy: bool, hot: bool, alike: float
) -> Cause:
    """Of a wait for requests ahead, the longest of which took `longest` of its `ahead` seconds. `less_busy`: whether another
    engine was. `alike`: share of them that began with the same prefix, which was `hot` or not."""
    if longest > HALF * max(objective, ahead):
        return Cause.LONG_PROMPT_AHEAD
    if not less_busy:
        return Cause.OVERLOAD
    return Cause.HOT_PREFIX if hot and alike >= HALF else Cause.BUSY_INSTANCE
