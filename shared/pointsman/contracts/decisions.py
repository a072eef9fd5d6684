"""Decisions of the leader and the scaler: what was chosen, from what, and why.

An event holds all that is needed to recompute the choice: policy, settings, candidates with their numbers, and the
stamp that says what was known. Fields: docs/events.md.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from pointsman.contracts.envelope import Event
from pointsman.contracts.reasons import MoveCause, recorded_move_cause
from pointsman.contracts.requests import RequestCancelled, RequestEvent, RequestFailed, RequestFinished
from pointsman.primitives import (
    BLOCK_TOKENS_MAX,
    SPEED_MIN,
    Count,
    InstanceId,
    Listed,
    Name,
    Number,
    Seconds,
    Sequence,
    Term,
    Text,
    Tokens,
)

SettingValue = bool | Number | Text
Settings = Annotated[dict[Name, SettingValue], Meta(max_length=256)]


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """An instance as the policy saw it. Predicted TTFT counts from now and includes the learned correction."""

    instance: InstanceId
    hit_blocks: Count
    uncached_tokens: Tokens
    queue_seconds: Seconds
    prefill_seconds: Seconds
    predicted_ttft: Seconds


class DecodeCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """An instance considered for decoding. `requests` decode there or will; `predicted_tpot` with this one more (None:
    unknown); `free_tokens` of its KV cache beside theirs (-1: unknown)."""

    instance: InstanceId
    requests: Count
    predicted_tpot: Seconds | None
    free_tokens: Tokens
    transfer_tokens: Tokens
    transfer_seconds: Seconds


class RequestPlaced(RequestEvent, frozen=True, kw_only=True):
    """The request waits in this instance's queue. Its blocks count as held there until proven otherwise."""

    instance: InstanceId
    hit_blocks: Count
    uncached_tokens: Tokens
    queue_seconds: Seconds
    prefill_seconds: Seconds
    predicted_ttft: Seconds
    policy: Name
    settings: Settings
    reason: Text
    candidates: Annotated[list[Candidate], Listed]
    attempt: Count = 1
    excluded: Annotated[list[InstanceId], Listed] = []
    decode: InstanceId = InstanceId("")
    """Where the answer is to be decoded; empty where that is `instance` itself. So are the next three then."""
    decode_reason: Text = ""
    decode_candidates: Annotated[list[DecodeCandidate], Listed] = []
    transfer_seconds: Seconds = 0.0
    """Of `predicted_ttft`, what fetching the KV cache takes."""
    lost_seconds: Seconds = 0.0
    """Time lost while held or at an engine that failed it; extends its TTFT budget for admission."""


class RequestGranted(RequestEvent, frozen=True, kw_only=True):
    """The ingress may send the request to the engine. Without the leader's stamp the ingress reports where the request
    is: no scheduler answered, or a new leader may not know of an earlier grant."""

    instance: InstanceId
    attempt: Count = 1
    decode: InstanceId = InstanceId("")
    """The decode instance, where an ingress reports a split request."""
    rebind: bool = False
    """Whether its ingress asks, until the engine answers, if it is to go elsewhere: only then may it be re-bound."""


class RequestHandedOver(RequestEvent, frozen=True, kw_only=True):
    """The prefill is over at `source`; `instance` fetches the KV cache and decodes. Without the leader's stamp an
    ingress reports it. `prefill`: seconds since it was sent to `source`; 0: it was not, or unknown."""

    source: InstanceId
    instance: InstanceId
    attempt: Count = 1
    prefill: Seconds = 0.0
    reason: Text = ""
    candidates: Annotated[list[DecodeCandidate], Listed] = []


class HandOverRefused(RequestEvent, frozen=True, kw_only=True):
    """The prefill is over at `source`, and no decode instance can take the request. Not an end: its ingress writes
    that."""

    source: InstanceId
    attempt: Count
    reason: Text
    detail: Text
    retry_after: Seconds
    prefill: Seconds = 0.0
    candidates: Annotated[list[DecodeCandidate], Listed] = []


class RequestMigrated(RequestEvent, frozen=True, kw_only=True):
    """A pending request moved to another queue, or, where `rebound`, one without a first token leaves its engine and is
    granted at the new instance next. `plan`, `policy`, `planned_as_of` and `benefit` are a rebalancer's; empty where
    the leader moved it by itself."""

    source: InstanceId
    instance: InstanceId
    hit_blocks: Count
    uncached_tokens: Tokens
    prefill_seconds: Seconds
    predicted_ttft: Seconds
    reason: Text
    plan: Name = ""
    policy: Name = ""
    planned_as_of: Sequence = 0
    benefit: Seconds = 0.0
    decode: InstanceId = InstanceId("")
    """As in RequestPlaced, for the new instance."""
    rebound: bool = False
    wasted: Seconds = 0.0
    """Where `rebound`: prefill that the engine at `source` is thought to have done for it, in vain now; taken off `benefit`."""
    cause: MoveCause = MoveCause.UNKNOWN
    """Derived from `reason` where the event was written without it."""

    def __post_init__(self) -> None:
        if not self.cause:
            cause = recorded_move_cause(self.reason, self.source, rebound=self.rebound)
            msgspec.structs.force_setattr(self, "cause", cause)


class MigrationRefused(RequestEvent, frozen=True, kw_only=True):
    """A move that a rebalancer planned and the leader, which knew more, did not make. The request stays as it is."""

    source: InstanceId
    instance: InstanceId
    """Where it should have gone."""
    reason: Text
    detail: Text
    plan: Name
    policy: Name
    planned_as_of: Sequence
    benefit: Seconds
    rebind: bool = False
    """Whether it was to be re-bound: taken out of an engine."""


class RequestRejected(RequestEvent, frozen=True, kw_only=True):
    """Rejected before any work was done: an end."""

    reason: Text
    detail: Text
    retry_after: Seconds
    policy: Name
    settings: Settings
    candidates: Annotated[list[Candidate], Listed]
    attempt: Count = 1
    excluded: Annotated[list[InstanceId], Listed] = []
    decode_candidates: Annotated[list[DecodeCandidate], Listed] = []
    """Decode candidates, where prefill and decode are split."""


RequestEnd = RequestFinished | RequestFailed | RequestCancelled | RequestRejected
"""The four ends of a request: each that arrived has exactly one."""


class LeaderElected(Event, frozen=True, kw_only=True):
    """A scheduler took over, with its state folded up to `as_of`. Subject `pm.<pool>.leader`. `pool` are the fold's
    settings (`PoolSettings`), `policy` and `settings` those of the term."""

    term: Term
    scheduler: Name
    as_of: Sequence
    pool: Settings = {}
    policy: Name = ""
    settings: Settings = {}

    def __post_init__(self) -> None:
        """Checked here, since every reader of the log makes a State of `pool`."""
        for name, value in self.pool.items():
            if isinstance(value, str) or value < 0 or (name == "speed" and value < SPEED_MIN):
                msg = f"the pool's setting {name[:40]} is out of bounds"
                raise ValueError(msg)
        blocks = self.pool.get("block_tokens", 1)
        if isinstance(blocks, str) or not 1 <= blocks <= BLOCK_TOKENS_MAX or blocks % 1:
            msg = f"block_tokens is no whole number from 1 to {BLOCK_TOKENS_MAX}"
            raise ValueError(msg)


class WritesLost(Event, frozen=True, kw_only=True):
    """Events that a service could not write for good: the log has a hole here. Subject `pm.<pool>.lost`."""

    writer: Name
    count: Count
    reason: Text


class ScaleDecided(Event, frozen=True, kw_only=True):
    """The pool shall have `wanted` instances. Subject `pm.<pool>.scale`, written by the scaler. Of two decisions with
    one `number` the first in the log counts."""

    policy: Name
    settings: Settings
    current: Count
    wanted: Count
    reason: Text
    number: Count = 0
    scaler: Name = ""


class ScaleApplied(Event, frozen=True, kw_only=True):
    """The decision with this number is carried out: so many instances are there and answer. Subject `pm.<pool>.scale`."""

    current: Count
    wanted: Count
    detail: Text
    number: Count = 0
    scaler: Name = ""
