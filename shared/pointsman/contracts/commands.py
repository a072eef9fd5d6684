"""Commands: requests between services over core NATS, not logged. Each may arrive twice and is answered the same.
Fields: docs/events.md."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from pointsman.contracts.access import ApiKey, KeyAction
from pointsman.contracts.block_keys import check_key, check_packed
from pointsman.contracts.fleet import ANY_RANK, InstanceReported, Role
from pointsman.contracts.reasons import CommandRefusal
from pointsman.contracts.tenants import Priority, RateLimits, TenantPolicies
from pointsman.contracts.wire import WIRE_VERSION
from pointsman.primitives import (
    Answers,
    Count,
    Digest,
    EngineSeconds,
    Epoch,
    InstanceId,
    Listed,
    Moment,
    Name,
    Number,
    Objective,
    PackedKeys,
    Rank,
    RequestId,
    Sequence,
    SessionId,
    Tenant,
    Term,
    Text,
    Tokens,
)


class Command(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag=True):
    """`wire`: the lowest WIRE_VERSION that keeps its meaning; who has a lower one refuses it. 0: any."""

    wire: Count = 0


class CommandRefused(Command, frozen=True, kw_only=True):
    """Answer of whoever serves a subject to a command that it cannot read; nothing was done. `reason` is a
    CommandRefusal. `reads`: WIRE_VERSION of who refuses."""

    reason: Text
    detail: Text
    reads: Count = 0


class RouteRequest(Command, frozen=True, kw_only=True):
    """`cmd.route`, answered once the request may be sent. The ingress repeats it as a heartbeat. A higher `attempt`
    asks for another instance, none of `excluded`. Empty or 0 `adapter`, `alias`, `context_tokens`: any instance."""

    request: RequestId
    ingress: Name
    arrived_at: Moment
    tenant: Tenant
    keys: PackedKeys
    prompt_tokens: Tokens
    max_output_tokens: Tokens
    slo_ttft: Objective
    slo_tpot: Objective
    session: SessionId = SessionId("")
    exact: bool = True
    streaming: bool = True
    attempt: Count = 1
    excluded: Annotated[list[InstanceId], Listed] = []
    adapter: Name = ""
    alias: Name = ""
    context_tokens: Tokens = 0
    followed: bool = False
    """Whether the ingress lists it in `cmd.follow`; if it is no longer listed, the ingress has lost it."""
    held_up: EngineSeconds = 0.0
    sent_at: Moment = 0.0
    """When its ingress sent this command, by its clock; 0: not told."""
    cache_group: Name = ""
    priority: Priority = "standard"
    client_request_id: Name = ""
    traceparent: Name = ""
    """Of the ingress's span if the request is traced; not in the log."""
    answers: Answers = 1
    instead_of: RequestId = RequestId("")
    """The id under which it came before, until its leader ended that."""

    def __post_init__(self) -> None:
        check_packed(self.keys)


class NoteHeartbeat(Command, frozen=True, kw_only=True):
    """`cmd.heartbeat.<instance>`, from its worker once a second: what it would report."""

    report: InstanceReported


class HeartbeatNoted(Command, frozen=True, kw_only=True):
    """`log`: the worker is to report to the log, too, because the fold would learn from it. A worker without an answer
    does so unasked. `flush`: least wall seconds for which it gathers cache changes. `replaced_by`: URL of the engine that a
    later epoch of this instance is for; empty: there is none."""

    log: bool = False
    flush: Number = 0.0
    replaced_by: Name = ""


class PrefixFetch(msgspec.Struct, frozen=True, kw_only=True):
    """`prefix_tokens`: leading prompt tokens that the instance has or fetches from `source`; `seconds`: predicted."""

    source: InstanceId
    url: Name
    prefix_tokens: Tokens
    seconds: EngineSeconds
    dp_rank: Rank = ANY_RANK


class PrefixCopy(msgspec.Struct, frozen=True, kw_only=True):
    """`target` fetches the first `prefix_tokens` prompt tokens from the request's instance; `seconds`: predicted."""

    target: InstanceId
    url: Name
    prefix_tokens: Tokens
    seconds: EngineSeconds
    dp_rank: Rank = ANY_RANK


class RouteGranted(Command, frozen=True, kw_only=True):
    request: RequestId
    attempt: Count
    instance: InstanceId
    url: Name
    hit_tokens: Tokens
    predicted_ttft: EngineSeconds
    knowledge: Name
    term: Term = Term(0)
    """Of the granting leader; 0 without one. Grants of an earlier term than the newest known are void."""
    decode: InstanceId = InstanceId("")
    """Decode instance unless `cmd.handover` is answered otherwise; empty if `instance` decodes too."""
    decode_url: Name = ""
    prefilled_by: InstanceId = InstanceId("")
    """In an answer to `cmd.handover`: the instance that has the KV cache."""
    dp_rank: Rank = ANY_RANK
    rebind: bool = False
    """Whether to poll `cmd.follow` for a re-binding until the engine answers."""
    expected_seconds: EngineSeconds = 0.0
    """Engine seconds from the grant to the first token; 0: unknown."""
    predicted_ttft_upper: EngineSeconds = 0.0
    """Nine of ten first tokens come within it; 0: unknown."""
    limits: RateLimits | None = None
    fetch: PrefixFetch | None = None
    """To be made before the request is sent."""
    copy: PrefixCopy | None = None
    """To be made after its first token."""
    best_effort: bool = False
    """Late even alone; `predicted_ttft` says how late."""


class RouteRejected(Command, frozen=True, kw_only=True):
    request: RequestId
    attempt: Count
    status: Count
    reason: Text
    detail: Text
    retry_after: EngineSeconds
    term: Term = Term(0)
    limits: RateLimits | None = None


class HandOverRequest(Command, frozen=True, kw_only=True):
    """`cmd.handover`: `instance` has prefilled this request, `prefill` seconds after it was sent. Answered with
    RouteGranted (`prefilled_by` set) or RouteRejected."""

    request: RequestId
    attempt: Count
    instance: InstanceId
    prefill: EngineSeconds


class SentRequest(msgspec.Struct, frozen=True, kw_only=True):
    request: RequestId
    attempt: Count
    instance: InstanceId


class FollowRequests(Command, frozen=True, kw_only=True):
    """`cmd.follow`, about once a second: all requests of an ingress. The leader ends those no longer listed. `answered`: had
    their first token, which the log has not confirmed; some may have ended. `ingress`, `sent_at`: as in RouteRequest."""

    requests: Annotated[list[SentRequest], Listed]
    waiting: Annotated[list[RequestId], Listed] = []
    answered: Annotated[list[SentRequest], Listed] = []
    ingress: Name = ""
    sent_at: Moment = 0.0


class FollowAnswered(Command, frozen=True, kw_only=True):
    """`rebound`: new instances of redispatched requests. `given_up`: requests that the leader has ended because their
    engine runs nothing."""

    rebound: Annotated[list[RouteGranted], Listed] = []
    given_up: Annotated[list[RequestId], Listed] = []
    term: Term = Term(0)


class CancelRequest(Command, frozen=True, kw_only=True):
    """`cmd.cancel`: the client is gone. `reason` is a CancelCause."""

    request: RequestId
    reason: Text


class CancelAnswered(Command, frozen=True, kw_only=True):
    """`ended`: the leader wrote the end. False: already granted (the ingress writes the end) or unknown."""

    request: RequestId
    ended: bool


class ResyncCache(Command, frozen=True, kw_only=True):
    """`cmd.resync.<instance>`: publish a CacheSnapshot. `rejoin`: first join under an epoch above `above`. `distrust`:
    the engine contradicted its events in epoch `above`; join with unknown contents. `epoch`: only the worker that reports
    in it is asked; 0: any of the name."""

    instance: InstanceId
    reason: Text
    rejoin: bool = False
    above: Epoch = Epoch(0)
    distrust: bool = False
    epoch: Epoch = Epoch(0)


class ResyncAnswered(Command, frozen=True, kw_only=True):
    instance: InstanceId
    accepted: bool
    detail: Text = ""


class PlannedMove(msgspec.Struct, frozen=True, kw_only=True):
    """Move a request to `target`; with `rebind`, abort it in the engine of `source`. `benefit`: expected seconds saved
    to its first token, less the work lost."""

    request: RequestId
    source: InstanceId
    target: InstanceId
    benefit: EngineSeconds
    reason: Text
    rebind: bool = False


class MigrateRequests(Command, frozen=True, kw_only=True):
    """`cmd.migrate`: a rebalancer's plan, applied in order as far as it is still valid. `plan` is a unique id."""

    plan: Name
    policy: Name
    term: Term
    as_of: Sequence
    moves: Annotated[list[PlannedMove], Listed]


class MoveAnswered(msgspec.Struct, frozen=True, kw_only=True):
    request: RequestId
    refusal: Text = ""


class MigrationAnswered(Command, frozen=True, kw_only=True):
    """`refusal`: the plan was refused whole and `moves` is empty. A reader that has the log beyond `as_of` and the
    decisions of `term` up to `decided` knows what the leader knew."""

    plan: Name
    term: Term
    as_of: Sequence
    decided: Count
    moves: Annotated[list[MoveAnswered], Listed] = []
    refusal: Text = ""
    detail: Text = ""


class DrainInstance(Command, frozen=True, kw_only=True):
    """`cmd.drain.<actor>`: place nothing there and move pending requests. `leaving`: the instance will be stopped once
    idle. `becomes`: the role that it takes then."""

    instance: InstanceId
    reason: Text
    leaving: bool = False
    becomes: Role | Literal[""] = ""


class UndrainInstance(Command, frozen=True, kw_only=True):
    instance: InstanceId


class DrainAnswered(Command, frozen=True, kw_only=True):
    """`requests`: those that the instance still has. With `refusal` nothing was changed. `warning`: what of the pool
    nobody serves any more."""

    instance: InstanceId
    draining: bool
    requests: Count = 0
    refusal: Text = ""
    warning: Text = ""


class ScalePool(Command, frozen=True, kw_only=True):
    """`prefill` and `decode`: of a split pool, instead of `wanted`. `size_read`: of a scaler that only follows: an autoscaler
    reads the size there."""

    wanted: Count | None = None
    asker: Name = ""
    prefill: Count | None = None
    decode: Count | None = None
    size_read: bool = False


class ScaleAnswered(Command, frozen=True, kw_only=True):
    """The scaler's newest decision (`number` 0: none), and instances `ready`, starting (`coming`) and draining
    (`leaving`). `prefill`, `decode`: wanted in a split pool; `switching`: instances that change their role. `by_hand`:
    what people have to do for it, if the provider does nothing. `drained`: by operators; they stay and do not count. With
    `refusal` nothing was decided."""

    number: Count
    wanted: Count
    ready: Count
    coming: Count
    leaving: Count
    applied: bool
    policy: Name
    provider: Name
    lowest: Count
    highest: Count
    reason: Text = ""
    trouble: Text = ""
    refusal: Text = ""
    prefill: Count = 0
    decode: Count = 0
    switching: Count = 0
    by_hand: Text = ""
    drained: Annotated[list[InstanceId], Listed] = []


class SetTenantPolicies(Command, frozen=True, kw_only=True):
    """`cmd.tenants.<actor>`: these policies replace those in force. `revision`: of TenantsDescribed, which they were made
    from; refused if there is a later one. None: whatever is in force."""

    policies: TenantPolicies
    revision: Count | None = None


class TenantPoliciesAnswered(Command, frozen=True, kw_only=True):
    """With `refusal` nothing was changed."""

    refusal: Text = ""


class DescribeTenants(Command, frozen=True, kw_only=True):
    """`cmd.fleet`: the policies in force and what tenants use of their limits."""


class TenantDescribed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`tokens_today`: counted so far (UTC). `limits`: what is left."""

    tenant: Tenant
    in_flight: Count = 0
    tokens_today: Count = 0
    limits: RateLimits | None = None


class TenantsDescribed(Command, frozen=True, kw_only=True):
    """`policies`: None if none were ever set. `tenants`: with limits, most requests in flight first; at most
    TENANTS_DESCRIBED_MAX. `revision`: of the stored policies; 0: none are stored."""

    pool: Name
    policies: TenantPolicies | None = None
    tenants: Annotated[list[TenantDescribed], Listed] = []
    revision: Count | None = None


class ChangeApiKey(Command, frozen=True, kw_only=True):
    """`cmd.keys.<actor>`. `create`: store `key`; the leader sets `created_at` and `created_by`. `rotate`: the key with
    this id has a successor and is valid until `expires_at` at most. `revoke`: it is no longer valid."""

    action: KeyAction
    key: ApiKey
    secret_proof: Annotated[bytes, Meta(max_length=32)] = b""
    """`contracts.access.secret_proof`; a new key that was hashed with another secret would admit nobody."""


class ApiKeyAnswered(Command, frozen=True, kw_only=True):
    """With `refusal` nothing was changed."""

    refusal: Text = ""


class DescribeFleet(Command, frozen=True, kw_only=True): ...


class InstanceDescribed(msgspec.Struct, frozen=True, kw_only=True):
    instance: InstanceId
    url: Name
    epoch: Epoch
    status: Name
    knowledge: Name
    pending: Count
    in_prefill: Count
    decoding: Count
    cached_blocks: Count
    digest: Digest = 0
    doubt: Text = ""
    correction: Number = 1.0
    role: Role = "both"
    prediction_error: Number = -1.0
    """Median absolute error of recent prefill predictions, as a share; -1: none yet."""
    knowledge_reason: Text = ""
    knowledge_since: Moment = 0.0
    becomes: Role | Literal[""] = ""
    """The role that it takes when its drain is over."""

    def __post_init__(self) -> None:
        check_key(self.digest)


class FleetDescribed(Command, frozen=True, kw_only=True):
    instances: Annotated[list[InstanceDescribed], Listed]
    pool: Name
    policy: Name
    admission: Name
    ordering: Name
    scheduler: Name
    term: Term
    as_of: Sequence
    speed: Number
    unconfirmed_writes: Count = 0
    """Of the leader: the log has not confirmed them yet."""
    unconfirmed_seconds: Number = 0.0
    """Wall seconds for which the log has owed the leader a confirmation."""
    checkpoints_overdue: Text = ""
    """What its `/readyz` says of them; empty: none is overdue."""


def refusal_of(command: Command, kinds: tuple[type[Command], ...]) -> CommandRefused | None:
    """Why a service that takes only `kinds` does not take this command; None: it does. A command that could not be read
    comes as its refusal (`Commands.serve`)."""
    if isinstance(command, kinds):
        return None
    if isinstance(command, CommandRefused):
        return command
    detail = f"a {type(command).__name__} is not taken here, only {', '.join(kind.__name__ for kind in kinds)}"
    return CommandRefused(reason=CommandRefusal.UNEXPECTED, detail=detail, reads=WIRE_VERSION)


PoolCommand = (
    RouteRequest
    | RouteGranted
    | RouteRejected
    | HandOverRequest
    | FollowRequests
    | FollowAnswered
    | CancelRequest
    | CancelAnswered
    | ResyncCache
    | ResyncAnswered
    | NoteHeartbeat
    | HeartbeatNoted
    | DescribeFleet
    | FleetDescribed
    | MigrateRequests
    | MigrationAnswered
    | DrainInstance
    | UndrainInstance
    | DrainAnswered
    | ScalePool
    | ScaleAnswered
    | SetTenantPolicies
    | TenantPoliciesAnswered
    | DescribeTenants
    | TenantsDescribed
    | ChangeApiKey
    | ApiKeyAnswered
    | CommandRefused
)
