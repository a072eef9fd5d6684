"""Request events, on `pm.<pool>.request.<id>`. Fields: docs/events.md. Each request has exactly one end: Finished,
Failed, Cancelled or (in `decisions`) Rejected. The leader writes it before the grant, the ingress after it; the leader
also ends a granted request that its ingress or engine has lost (`CancelCause`), and State ignores a second end."""

from math import ceil
from typing import Literal, TypeGuard

import msgspec

from pointsman.contracts.block_keys import check_packed
from pointsman.contracts.envelope import Event
from pointsman.contracts.reasons import GIVEN_UP, CancelCause, recorded_cancel_cause
from pointsman.contracts.tenants import Priority
from pointsman.primitives import (
    NO_SECONDS,
    Answers,
    Count,
    EngineSeconds,
    InstanceId,
    Moment,
    Name,
    PackedKeys,
    RequestId,
    SessionId,
    Tenant,
    Text,
    Tokens,
)

OUTPUT_UNBOUNDED: Tokens = 2**31
"""`max_output_tokens` of a request that nothing bounds: neither the client nor a context that is known."""


class RequestEvent(Event, frozen=True, kw_only=True):
    request: RequestId


class RequestArrived(RequestEvent, frozen=True, kw_only=True):
    """Reached the leader at `at` and the ingress at `arrived_at`, from which the SLO counts. `keys`: packed u64 of the
    prompt's whole blocks. `max_output_tokens`: of each answer, at most OUTPUT_UNBOUNDED; 0: it generates none."""

    arrived_at: Moment
    ingress: Name
    tenant: Tenant
    keys: PackedKeys
    prompt_tokens: Tokens
    max_output_tokens: Tokens
    slo_ttft: EngineSeconds
    slo_tpot: EngineSeconds
    session: SessionId = SessionId("")
    exact: bool = True
    """False if the tokens had to be guessed, so keys may differ from the engine's."""
    streaming: bool = True
    adapter: Name = ""
    alias: Name = ""
    context_tokens: Tokens = 0
    """Prompt and demanded output; 0: any instance may serve it."""
    followed: bool = False
    held_up: EngineSeconds = NO_SECONDS
    sent_at: Moment = NO_SECONDS
    """When its ingress sent the command, by its clock (`ClockOffsets`). 0: not known."""
    cache_group: Name = ""
    """Tenants of one group share cached prefixes; empty: cache isolation is off."""
    priority: Priority = "standard"
    client_request_id: Name = ""
    """What the client sent as `x-request-id`; not unique."""
    answers: Answers = 1
    """Each of at most `max_output_tokens`."""
    instead_of: RequestId = RequestId("")
    """The id under which its ingress asked for it before, until its leader ended that; empty: it is new."""

    def __post_init__(self) -> None:
        check_packed(self.keys)

    @property
    def clock_offset(self) -> EngineSeconds:
        """Turns dates of its ingress, `arrived_at` included, into the leader's."""
        return self.at - self.sent_at if self.sent_at else 0.0


class PrefillFinished(RequestEvent, frozen=True, kw_only=True):
    """The first token reached the ingress. `ttft`: seconds since `arrived_at`; `prefill`: since it was sent. Stamped:
    assumed by the leader, for answers that are not streamed."""

    instance: InstanceId
    ttft: EngineSeconds
    prefill: EngineSeconds


class PrefixFetchEnded(RequestEvent, frozen=True, kw_only=True):
    """`instance` has fetched `tokens` leading tokens of the prompt from `source`, or failed to (`failure`), and computes
    them. `seconds`: since the grant; `source_seconds`: of those, until the source gave the blocks."""

    instance: InstanceId
    source: InstanceId
    attempt: Count = 1
    tokens: Tokens = 0
    seconds: EngineSeconds = 0.0
    source_seconds: EngineSeconds = 0.0
    failure: Text = ""


class PrefixCopyEnded(RequestEvent, frozen=True, kw_only=True):
    """`instance` has got `tokens` leading tokens of the prompt from `source`, ahead of requests that need them, or not
    (`failure`). `seconds`: since the first token of the request; it may have ended before."""

    instance: InstanceId
    source: InstanceId
    attempt: Count = 1
    tokens: Tokens = 0
    seconds: EngineSeconds = 0.0
    failure: Text = ""


class RequestFinished(RequestEvent, frozen=True, kw_only=True):
    """Token counts are the engine's; -1 where unknown."""

    instance: InstanceId
    e2e: EngineSeconds
    prompt_tokens: Tokens
    completion_tokens: Tokens
    cached_tokens: Tokens
    ttft: EngineSeconds
    tpot: EngineSeconds
    predicted_cached_tokens: Tokens = -1
    """`cached_tokens` as predicted at the grant; -1 if not comparable."""
    tbt_p90: EngineSeconds = 0.0
    """90th percentile of the gaps between parts of a stream (Mooncake's TBT); 0: not streamed, or fewer than two gaps."""
    without_transfer: bool = False
    """Its prefill engine gave no `kv_transfer_params`: as far as is known, `instance` computed the prompt again."""


def cached_of_keys(event: RequestFinished, answers: Answers) -> Tokens:
    """Cached tokens of the prompt that the log has the keys of; -1 if unknown. Of a request with several answers (`n`) or
    prompts the engine reports a sum, and `keys` are those of the first prompt."""
    return event.cached_tokens if answers == 1 else -1


def tpot_of_each(tpot: EngineSeconds, tokens: Tokens, answers: Answers) -> EngineSeconds:
    """Of each of several answers (`n`), which come side by side: `tpot` divides by the tokens of all. Of one that is what it is,
    and of unknown `tokens`."""
    return tpot if answers == 1 or tokens <= answers else tpot * (tokens - 1) / (ceil(tokens / answers) - 1)


AttemptFailure = Literal["connect_failure", "http_5xx", "stream_reset", "first_byte_timeout", "chunk_timeout"]
"""The first three are named as in Envoy's outlier detection and retry policies."""


WHAT_CHARACTERS_MAX = 600


class RequestAttemptFailed(RequestEvent, frozen=True, kw_only=True):
    """An engine failed this request; it may be retried elsewhere. `status`: the engine's, 0 without one. Client
    disconnects, 4xx and the request's own timeout do not count."""

    instance: InstanceId
    attempt: Count = 1
    failure: AttemptFailure
    status: Count = 0
    detail: Text = ""
    prefilled_by: InstanceId = InstanceId("")
    """Whose KV cache `instance` was to fetch: it may be to blame instead."""

    @property
    def what(self) -> str:
        text = self.detail[:WHAT_CHARACTERS_MAX] or self.failure
        return f"{self.status} {text}" if self.status and str(self.status) not in text else text


class RequestFailed(RequestEvent, frozen=True, kw_only=True):
    reason: Text
    status: Count
    instance: InstanceId = InstanceId("")
    output_tokens: Tokens = -1
    """Delivered of a stream, as its ingress counted; -1: unknown."""


class RequestCancelled(RequestEvent, frozen=True, kw_only=True):
    reason: Text
    instance: InstanceId = InstanceId("")
    cause: CancelCause = CancelCause.UNKNOWN
    output_tokens: Tokens = -1
    """As in RequestFailed."""

    def __post_init__(self) -> None:
        if not self.cause:
            msgspec.structs.force_setattr(self, "cause", recorded_cancel_cause(self.reason))


def is_given_up(event: object) -> TypeGuard[RequestCancelled]:
    """Whether a leader ended a request that its ingress may still serve. An end by the ingress replaces this one."""
    return isinstance(event, RequestCancelled) and event.stamp is not None and event.cause in GIVEN_UP


RequestProgress = (
    RequestArrived
    | PrefillFinished
    | PrefixCopyEnded
    | PrefixFetchEnded
    | RequestAttemptFailed
    | RequestFinished
    | RequestFailed
    | RequestCancelled
)
"""The events of requests but decisions about their place."""
