"""Decisions of the leader and the scaler. Fields: docs/events.md. Each event, with the LeaderElected of its term, holds
all that is needed to recompute it: policy, settings, the nearest candidates with their numbers, and the stamp."""

from typing import Annotated, TypeGuard

import msgspec
from msgspec import Meta

from pointsman.contracts.cache import SlowerTier
from pointsman.contracts.envelope import Event
from pointsman.contracts.reasons import CancelCause, MoveCause, RejectReason, recorded_move_cause
from pointsman.contracts.requests import RequestCancelled, RequestEvent, RequestFailed, RequestFinished, is_given_up
from pointsman.primitives import (
    BLOCK_TOKENS_MAX,
    NO_SECONDS,
    SPEED_MIN,
    Count,
    EngineSeconds,
    InstanceId,
    Listed,
    Name,
    Number,
    RequestId,
    Sequence,
    Tenant,
    Term,
    Text,
    Tokens,
)

SettingValue = bool | Number | Text
Settings = Annotated[dict[Name, SettingValue], Meta(max_length=256)]


class TierTokens(msgspec.Struct, frozen=True):
    tier: SlowerTier
    tokens: Tokens


Loads = Annotated[list[TierTokens], Meta(max_length=3)]
"""Prompt tokens that an engine loads back from slower tiers. Part of the hit: they are not computed."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An instance as the policy saw it. Predicted TTFT counts from now and includes the learned correction."""

    instance: InstanceId
    hit_blocks: Count
    uncached_tokens: Tokens
    queue_seconds: EngineSeconds
    prefill_seconds: EngineSeconds
    predicted_ttft: EngineSeconds
    fetch_from: InstanceId = InstanceId("")
    fetched_tokens: Tokens = 0
    transfer_seconds: EngineSeconds = NO_SECONDS
    loaded_tokens: Tokens = 0


class DecodeCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """`requests` decode there or will, each for every answer that it has (`n`); `predicted_tpot` includes this one
    (None: unknown); `free_tokens` of its KV cache (-1: unknown)."""

    instance: InstanceId
    requests: Count
    predicted_tpot: EngineSeconds | None
    free_tokens: Tokens
    transfer_tokens: Tokens
    transfer_seconds: EngineSeconds


class RequestPlaced(RequestEvent, frozen=True, kw_only=True):
    """The request waits in this instance's queue. Its blocks count as held there."""

    instance: InstanceId
    hit_blocks: Count
    uncached_tokens: Tokens
    queue_seconds: EngineSeconds
    prefill_seconds: EngineSeconds
    predicted_ttft: EngineSeconds
    policy: Name
    settings: Settings
    """Empty: those of the term."""
    reason: Text
    candidates: Annotated[list[Candidate], Listed]
    others: Count = 0
    """Candidates that were weighed too and are not recorded."""
    attempt: Count = 1
    excluded: Annotated[list[InstanceId], Listed] = []
    decode: InstanceId = InstanceId("")
    decode_reason: Text = ""
    decode_candidates: Annotated[list[DecodeCandidate], Listed] = []
    decode_others: Count = 0
    transfer_seconds: EngineSeconds = NO_SECONDS
    """Of the KV cache: to the decode instance, or of the prefix from `fetch_from`."""
    predicted_ttft_upper: EngineSeconds = NO_SECONDS
    """Nine of ten first tokens come within it; 0: unknown."""
    lost_seconds: EngineSeconds = NO_SECONDS
    """Time held without a scheduler or lost at a failed engine; extends its TTFT budget."""
    best_effort: bool = False
    """Admitted although no instance could meet its TTFT SLO even with an empty queue."""
    fetch_from: InstanceId = InstanceId("")
    """Plan: fetch `fetched_tokens` beyond the hit from there; `uncached_tokens` are computed. Decided at the grant."""
    fetched_tokens: Tokens = 0
    loads: Loads = []
    load_seconds: EngineSeconds = NO_SECONDS


class RequestGranted(RequestEvent, frozen=True, kw_only=True):
    """The ingress may send the request, after it had `instance` fetch the first `fetch_blocks` blocks of the prompt from
    `fetch_from`. After the first token it has `copy_to` fetch the first `copy_blocks` from `instance`. Unstamped: the
    ingress reports the location, because no scheduler answered or a new leader may not have the grant. `tenant`,
    `adapter`: of a request that no scheduler saw, which has no RequestArrived."""

    instance: InstanceId
    attempt: Count = 1
    decode: InstanceId = InstanceId("")
    rebind: bool = False
    tenant: Tenant = Tenant("")
    adapter: Name = ""
    fetch_from: InstanceId = InstanceId("")
    fetch_blocks: Count = 0
    fetched_tokens: Tokens = 0
    fetch_seconds: EngineSeconds = NO_SECONDS
    """Predicted."""
    copy_to: InstanceId = InstanceId("")
    copy_blocks: Count = 0
    copy_seconds: EngineSeconds = NO_SECONDS
    """Predicted."""


class RequestHandedOver(RequestEvent, frozen=True, kw_only=True):
    """Prefilled at `source`; `instance` fetches the KV cache and decodes. Unstamped: reported by an ingress. `prefill`:
    seconds since it was sent; 0: unknown or not sent."""

    source: InstanceId
    instance: InstanceId
    attempt: Count = 1
    prefill: EngineSeconds = NO_SECONDS
    reason: Text = ""
    candidates: Annotated[list[DecodeCandidate], Listed] = []
    others: Count = 0


class HandOverRefused(RequestEvent, frozen=True, kw_only=True):
    """Prefilled at `source`, and no decode instance can take it. Not an end: its ingress writes that."""

    source: InstanceId
    attempt: Count
    reason: Text
    detail: Text
    retry_after: EngineSeconds
    prefill: EngineSeconds = NO_SECONDS
    candidates: Annotated[list[DecodeCandidate], Listed] = []
    others: Count = 0


class RequestMigrated(RequestEvent, frozen=True, kw_only=True):
    """A pending request moved to another queue, or, with `rebound`, one without a first token leaves its engine.
    `plan`, `policy`, `planned_as_of` and `benefit` are a rebalancer's; empty if the leader moved it."""

    source: InstanceId
    instance: InstanceId
    hit_blocks: Count
    uncached_tokens: Tokens
    prefill_seconds: EngineSeconds
    predicted_ttft: EngineSeconds
    reason: Text
    plan: Name = ""
    policy: Name = ""
    planned_as_of: Sequence = 0
    benefit: EngineSeconds = NO_SECONDS
    decode: InstanceId = InstanceId("")
    rebound: bool = False
    fetch_from: InstanceId = InstanceId("")
    """As in RequestPlaced."""
    wasted: EngineSeconds = NO_SECONDS
    """With `rebound`: prefill seconds probably done at `source`; `benefit` is net of them."""
    overdue: EngineSeconds = NO_SECONDS
    """With `rebound`: since when its first token was due at `source`; earlier logs lack it."""
    cause: MoveCause = MoveCause.UNKNOWN
    loads: Loads = []
    load_seconds: EngineSeconds = NO_SECONDS

    def __post_init__(self) -> None:
        if not self.cause:
            cause = recorded_move_cause(self.reason, self.source, rebound=self.rebound)
            msgspec.structs.force_setattr(self, "cause", cause)


class MigrationRefused(RequestEvent, frozen=True, kw_only=True):
    source: InstanceId
    instance: InstanceId
    reason: Text
    detail: Text
    plan: Name
    policy: Name
    planned_as_of: Sequence
    benefit: EngineSeconds
    rebind: bool = False


class RequestRejected(RequestEvent, frozen=True, kw_only=True):
    reason: Text
    detail: Text
    retry_after: EngineSeconds
    policy: Name
    settings: Settings
    candidates: Annotated[list[Candidate], Listed]
    others: Count = 0
    attempt: Count = 1
    excluded: Annotated[list[InstanceId], Listed] = []
    decode_candidates: Annotated[list[DecodeCandidate], Listed] = []
    decode_others: Count = 0
    displaced_by: RequestId = RequestId("")
    """The request that took its place in a full queue."""


RequestEnd = RequestFinished | RequestFailed | RequestCancelled | RequestRejected


def counts_as_end(event: object, earlier: RequestEnd | None) -> TypeGuard[RequestEnd]:
    """Whether `event` is how its request ended, after `earlier`: the first end counts, and instead of a leader's give-up
    the end by the ingress."""
    return isinstance(event, RequestEnd) and (earlier is None or (is_given_up(earlier) and event.stamp is None))


def is_final_end(event: object) -> TypeGuard[RequestEnd]:
    """Whether no later end can count instead of this one."""
    return isinstance(event, RequestEnd) and not is_given_up(event)


def may_come_again(end: RequestEnd) -> bool:
    """Whether its ingress may ask again, under another id: its leader gave it up, or no instance was left to take it."""
    if isinstance(end, RequestRejected):
        return end.reason == RejectReason.NO_INSTANCE
    return is_given_up(end) or (isinstance(end, RequestCancelled) and end.cause is CancelCause.GRANT_UNHEARD)


class LeaderElected(Event, frozen=True, kw_only=True):
    """A scheduler took over with state folded up to `as_of`. Subject `pm.<pool>.leader`. `pool` are the fold's settings
    (`PoolSettings`), `policy` and `settings` those of the term, `wire` its WIRE_VERSION."""

    term: Term
    scheduler: Name
    as_of: Sequence
    pool: Settings = {}
    policy: Name = ""
    settings: Settings = {}
    wire: Count = 0

    def __post_init__(self) -> None:
        """Checked here, since every reader of the log makes a State of `pool`."""
        for name, value in self.pool.items():
            if isinstance(value, str) or value < 0 or (name == "speed" and value < SPEED_MIN):
                raise ValueError(f"the pool's setting {name[:40]} is out of bounds")
        blocks = self.pool.get("block_tokens", 1)
        if isinstance(blocks, str) or not 1 <= blocks <= BLOCK_TOKENS_MAX or blocks % 1:
            raise ValueError(f"block_tokens is no whole number from 1 to {BLOCK_TOKENS_MAX}")


class WritesLost(Event, frozen=True, kw_only=True):
    """Events that could not be written: a gap in the log. Subject `pm.<pool>.lost`."""

    writer: Name
    count: Count
    reason: Text


class RequestsRefused(Event, frozen=True, kw_only=True):
    """Requests that a leader turned away from `since` to `at` without a record of each, because the log or it
    itself did not keep up. Subject `pm.<pool>.lost`."""

    scheduler: Name
    count: Count
    since: EngineSeconds
    reason: Name
    detail: Text = ""


class ScaleDecided(Event, frozen=True, kw_only=True):
    """Desired size of the pool. Subject `pm.<pool>.scale`, written by the scaler. Of two with one `number` the first
    counts. `prefill`, `decode`: of `wanted`, in these roles; of a pool that is to sleep, those for when it wakes; both 0: roles
    are not sized."""

    policy: Name
    settings: Settings
    current: Count
    wanted: Count
    reason: Text
    number: Count = 0
    scaler: Name = ""
    by: Name = ""
    """The operator who asked for it."""
    prefill: Count = 0
    decode: Count = 0


class ScaleApplied(Event, frozen=True, kw_only=True):
    current: Count
    wanted: Count
    detail: Text
    number: Count = 0
    scaler: Name = ""


RequestDecision = (
    RequestPlaced
    | RequestGranted
    | RequestHandedOver
    | HandOverRefused
    | RequestMigrated
    | MigrationRefused
    | RequestRejected
)
PoolDecision = LeaderElected | RequestsRefused | WritesLost | ScaleDecided | ScaleApplied
