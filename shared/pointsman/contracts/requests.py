"""Request events, on `pm.<pool>.request.<id>`. Fields: docs/events.md.

Each request has exactly one end: Finished, Failed, Cancelled or (in `decisions`) Rejected. The leader writes it before
the grant, the ingress after it.
"""

from typing import Literal

import msgspec

from pointsman.contracts.block_keys import check_packed
from pointsman.contracts.envelope import Event
from pointsman.contracts.reasons import CancelCause, recorded_cancel_cause
from pointsman.primitives import (
    Count,
    InstanceId,
    Moment,
    Name,
    PackedKeys,
    RequestId,
    Seconds,
    SessionId,
    Tenant,
    Text,
    Tokens,
)


class RequestEvent(Event, frozen=True, kw_only=True):
    request: RequestId


class RequestArrived(RequestEvent, frozen=True, kw_only=True):
    """A valid request reached the leader at `at`, and the ingress at `arrived_at`, from which the SLO counts. `keys`:
    packed u64 of the prompt's whole blocks."""

    arrived_at: Moment
    ingress: Name
    tenant: Tenant
    keys: PackedKeys
    prompt_tokens: Tokens
    max_output_tokens: Tokens
    slo_ttft: Seconds
    slo_tpot: Seconds
    session: SessionId = SessionId("")
    exact: bool = True
    """Whether the keys are known to be the engine's: false where the tokens had to be guessed."""
    streaming: bool = True
    """Whether the first token will be seen when it comes; otherwise the answer comes whole."""
    adapter: Name = ""
    """LoRA adapter that it asks for: only instances that report it may serve it."""
    alias: Name = ""
    """Name that it asks for, where that is neither the model's own nor an adapter's: likewise."""
    context_tokens: Tokens = 0
    """Prompt and demanded output: only instances whose context is as long may serve it. 0: any may."""
    followed: bool = False
    """Whether its ingress names it in `cmd.follow` until its end; then silence about it means that the ingress is gone."""
    held_up: Seconds = 0.0
    """Waited so long because no scheduler answered; extends its TTFT budget for admission."""

    def __post_init__(self) -> None:
        check_packed(self.keys)


class PrefillFinished(RequestEvent, frozen=True, kw_only=True):
    """The first token reached the ingress. `ttft`: seconds since `arrived_at`; `prefill`: since it was sent. With the
    leader's stamp it is assumed: the answer is not streamed, and the prediction is over."""

    instance: InstanceId
    ttft: Seconds
    prefill: Seconds


class RequestFinished(RequestEvent, frozen=True, kw_only=True):
    """The answer was delivered whole. Token counts are the engine's own; -1 where it did not say."""

    instance: InstanceId
    e2e: Seconds
    prompt_tokens: Tokens
    completion_tokens: Tokens
    cached_tokens: Tokens
    ttft: Seconds
    tpot: Seconds
    predicted_cached_tokens: Tokens = -1
    """What `cached_tokens` was expected to be when the request was granted; -1 where the two cannot be compared."""


AttemptFailure = Literal["connect_failure", "http_5xx", "stream_reset", "first_byte_timeout", "chunk_timeout"]
"""How an engine failed a request; the first three named as in Envoy's outlier detection and retry policies."""


WHAT_CHARACTERS_MAX = 600


class RequestAttemptFailed(RequestEvent, frozen=True, kw_only=True):
    """An engine failed this request, which may be tried elsewhere. `status`: the engine's, 0 without one. A client's
    hang-up, a 4xx and the request's own timeout do not count."""

    instance: InstanceId
    attempt: Count = 1
    failure: AttemptFailure
    status: Count = 0
    detail: Text = ""

    @property
    def what(self) -> str:
        """In a few words."""
        text = self.detail[:WHAT_CHARACTERS_MAX] or self.failure
        return f"{self.status} {text}" if self.status and str(self.status) not in text else text


class RequestFailed(RequestEvent, frozen=True, kw_only=True):
    """The request ended in an error. `status`: HTTP, as the client got it."""

    reason: Text
    status: Count
    instance: InstanceId = InstanceId("")


class RequestCancelled(RequestEvent, frozen=True, kw_only=True):
    """The client went away, or no process waits for the answer any more. `reason` is for people."""

    reason: Text
    instance: InstanceId = InstanceId("")
    cause: CancelCause = CancelCause.UNKNOWN
    """Derived from `reason` where the event was written without it."""

    def __post_init__(self) -> None:
        if not self.cause:
            msgspec.structs.force_setattr(self, "cause", recorded_cancel_cause(self.reason))
