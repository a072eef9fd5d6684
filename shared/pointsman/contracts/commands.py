"""Commands: requests between services over core NATS, not logged. Each may arrive twice and is answered the same.
Fields: docs/events.md."""

from typing import Annotated

import msgspec

from pointsman.contracts.block_keys import check_key, check_packed
from pointsman.contracts.fleet import ANY_RANK, Role
from pointsman.primitives import (
    Count,
    Digest,
    Epoch,
    InstanceId,
    Listed,
    Moment,
    Name,
    Number,
    PackedKeys,
    Rank,
    RequestId,
    Seconds,
    Sequence,
    SessionId,
    Tenant,
    Term,
    Text,
    Tokens,
)


class Command(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag=True):
    pass


class RouteRequest(Command, frozen=True, kw_only=True):
    """`cmd.route`: place this request; answered once it may be sent. The ingress repeats it while it waits; the same
    `attempt` means "still here". A higher one, with the failed instances in `excluded`, asks for another place.
    `adapter`, `alias` and `context_tokens` restrict the instances; empty or 0: any."""

    request: RequestId
    ingress: Name
    arrived_at: Moment
    tenant: Tenant
    keys: PackedKeys
    prompt_tokens: Tokens
    max_output_tokens: Tokens
    slo_ttft: Seconds
    slo_tpot: Seconds
    session: SessionId = SessionId("")
    exact: bool = True
    streaming: bool = True
    attempt: Count = 1
    excluded: Annotated[list[InstanceId], Listed] = []
    adapter: Name = ""
    alias: Name = ""
    context_tokens: Tokens = 0
    followed: bool = False
    """Whether the ingress names it in `cmd.follow` until its end. What an ingress does not name any more has lost it."""
    held_up: Seconds = 0.0
    """How long the ingress has asked for a place in vain, because no scheduler answered."""

    def __post_init__(self) -> None:
        check_packed(self.keys)


class RouteGranted(Command, frozen=True, kw_only=True):
    """Send it there now."""

    request: RequestId
    attempt: Count
    instance: InstanceId
    url: Name
    hit_tokens: Tokens
    predicted_ttft: Seconds
    knowledge: Name
    term: Term = Term(0)
    """Of the leader that granted it; 0 without one. A grant of an earlier term than the newest known is void."""
    decode: InstanceId = InstanceId("")
    """The decode instance, unless `cmd.handover` is answered otherwise; empty where `instance` does both."""
    decode_url: Name = ""
    prefilled_by: InstanceId = InstanceId("")
    """In an answer to `cmd.handover`: `instance` decodes what this one has prefilled."""
    dp_rank: Rank = ANY_RANK
    """Which of the engine's data-parallel ranks is to serve it."""
    rebind: bool = False
    """Until the engine answers, ask by `cmd.follow` whether it is to go elsewhere."""
    expected_seconds: Seconds = 0.0
    """Predicted engine seconds from the grant to the first token; 0: unknown."""


class RouteRejected(Command, frozen=True, kw_only=True):
    """Rejected; `status`, `reason` and `retry_after` are for the client."""

    request: RequestId
    attempt: Count
    status: Count
    reason: Text
    detail: Text
    retry_after: Seconds
    term: Term = Term(0)
    """Of the leader that refused it, as in RouteGranted."""


class HandOverRequest(Command, frozen=True, kw_only=True):
    """`cmd.handover`: `instance` has prefilled this request, `prefill` seconds after it was sent there. Answered with a
    RouteGranted whose `prefilled_by` is set, or with a RouteRejected."""

    request: RequestId
    attempt: Count
    instance: InstanceId
    prefill: Seconds


class SentRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request that was granted, and that its ingress has at `instance`."""

    request: RequestId
    attempt: Count
    instance: InstanceId


class FollowRequests(Command, frozen=True, kw_only=True):
    """`cmd.follow`, about once a second: the requests that an ingress has at engines, and those that wait. The leader
    gives up requests that are no longer named, and answers which should go elsewhere."""

    requests: Annotated[list[SentRequest], Listed]
    waiting: Annotated[list[RequestId], Listed] = []


class FollowAnswered(Command, frozen=True, kw_only=True):
    """`rebound`: where redispatched requests go; all others stay. `given_up`: requests that the leader has ended
    because their engine runs nothing."""

    rebound: Annotated[list[RouteGranted], Listed] = []
    given_up: Annotated[list[RequestId], Listed] = []
    term: Term = Term(0)


class CancelRequest(Command, frozen=True, kw_only=True):
    """`cmd.cancel`: no client waits any more. `reason` is a CancelCause."""

    request: RequestId
    reason: Text


class CancelAnswered(Command, frozen=True, kw_only=True):
    """`ended`: the leader wrote the end. False: the request was granted already (the ingress writes the end) or is
    unknown."""

    request: RequestId
    ended: bool


class ResyncCache(Command, frozen=True, kw_only=True):
    """`cmd.resync.<instance>`: publish a CacheSnapshot. `rejoin`: join under a new epoch first, above `above`.
    `distrust`: the engine contradicted its events in epoch `above`; start another one with unknown contents."""

    instance: InstanceId
    reason: Text
    rejoin: bool = False
    above: Epoch = Epoch(0)
    distrust: bool = False


class ResyncAnswered(Command, frozen=True, kw_only=True):
    instance: InstanceId
    accepted: bool
    detail: Text = ""


class PlannedMove(msgspec.Struct, frozen=True, kw_only=True):
    """One request that should wait at `target`; with `rebind`, one to abort in the engine of `source` and to start
    again. `benefit`: seconds by which its first token is expected sooner, less the work lost."""

    request: RequestId
    source: InstanceId
    target: InstanceId
    benefit: Seconds
    reason: Text
    rebind: bool = False


class MigrateRequests(Command, frozen=True, kw_only=True):
    """`cmd.migrate`: a rebalancer's plan, to be carried out in this order as far as it still holds. `plan` is a unique
    id; `term` and `as_of` are what was known."""

    plan: Name
    policy: Name
    term: Term
    as_of: Sequence
    moves: Annotated[list[PlannedMove], Listed]


class MoveAnswered(msgspec.Struct, frozen=True, kw_only=True):
    """`refusal`: a MoveRefusal; empty where the request was moved."""

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
    """`cmd.drain`: place nothing there and move what waits; running requests finish. `leaving`: the instance will be
    stopped once idle."""

    instance: InstanceId
    reason: Text
    leaving: bool = False


class UndrainInstance(Command, frozen=True, kw_only=True):
    """`cmd.drain`: let it take requests again."""

    instance: InstanceId


class DrainAnswered(Command, frozen=True, kw_only=True):
    """What became of either. `requests` are those that the instance still has; with `refusal` nothing was done."""

    instance: InstanceId
    draining: bool
    requests: Count = 0
    refusal: Text = ""


class ScalePool(Command, frozen=True, kw_only=True):
    """`cmd.scale`: have so many instances; without `wanted`, report. `asker`: for the log."""

    wanted: Count | None = None
    asker: Name = ""


class ScaleAnswered(Command, frozen=True, kw_only=True):
    """The scaler's newest decision (`number` 0: none) and instances `ready`, starting (`coming`) and draining to be
    stopped (`leaving`). With `refusal` nothing was decided."""

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


class DescribeFleet(Command, frozen=True, kw_only=True):
    """`cmd.fleet`: what the leader knows of its pool. Answered with a FleetDescribed."""


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
    """Median absolute error of the newest prefill predictions, as a share; -1 before there was one."""
    knowledge_reason: Text = ""
    """Why its cache is not known exactly; empty where it is."""
    knowledge_since: Moment = 0.0
    """Since when `knowledge` is what it is, engine time."""

    def __post_init__(self) -> None:
        check_key(self.digest)


class FleetDescribed(Command, frozen=True, kw_only=True):
    """The leader's view. `as_of` is the last log sequence in it."""

    instances: Annotated[list[InstanceDescribed], Listed]
    pool: Name
    policy: Name
    admission: Name
    ordering: Name
    scheduler: Name
    term: Term
    as_of: Sequence
    speed: Number
