"""Commands: what one service asks of another over core NATS. Not logged; the effects are.

Every command may arrive twice: the second time is answered like the first.
"""

import msgspec

from pointsman.contracts.fleet import ANY_RANK, Role
from pointsman.primitives import Epoch, InstanceId, RequestId, Seconds, Sequence, SessionId, Tenant, Term, Tokens


class Command(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag=True):
    pass


class RouteRequest(Command, frozen=True, kw_only=True):
    """`cmd.route`: place this request and answer once it may be sent. The ingress repeats it while it waits;
    the same `request` and `attempt` asked again means "still here". A higher `attempt` with the failed
    instances in `excluded` asks for another place after an engine failed before its first byte. Only instances that have
    the LoRA adapter `adapter` may serve it; empty where it asks for none."""

    request: RequestId
    ingress: str
    arrived_at: Seconds
    tenant: Tenant
    keys: bytes
    prompt_tokens: Tokens
    max_output_tokens: Tokens
    slo_ttft: Seconds
    slo_tpot: Seconds
    session: SessionId = SessionId("")
    exact: bool = True
    streaming: bool = True
    attempt: int = 1
    excluded: list[InstanceId] = []
    adapter: str = ""


class RouteGranted(Command, frozen=True, kw_only=True):
    """Send it there now."""

    request: RequestId
    attempt: int
    instance: InstanceId
    url: str
    hit_tokens: Tokens
    predicted_ttft: Seconds
    knowledge: str
    term: Term = Term(0)
    """Of the leader that granted it; 0 where nobody leads. One of an earlier term than the newest known is void."""
    decode: InstanceId = InstanceId("")
    """Where to send it after its prefill at `instance`, unless `cmd.handover` is answered otherwise; empty where
    `instance` does all of it."""
    decode_url: str = ""
    prefilled_by: InstanceId = InstanceId("")
    """In an answer to `cmd.handover`: `instance` decodes what this one has prefilled."""
    dp_rank: int = ANY_RANK
    """Which of the engine's data-parallel ranks is to serve it."""
    rebind: bool = False
    """Until the engine answers, ask by `cmd.follow` whether it is to go elsewhere."""


class RouteRejected(Command, frozen=True, kw_only=True):
    """Refused; tell the client `status`, `reason` and `retry_after`."""

    request: RequestId
    attempt: int
    status: int
    reason: str
    detail: str
    retry_after: Seconds
    term: Term = Term(0)
    """Of the leader that refused it, as in RouteGranted."""


class HandOverRequest(Command, frozen=True, kw_only=True):
    """`cmd.handover`: `instance` has prefilled this request, `prefill` seconds after it was sent there; where shall it be
    decoded? Answered with a RouteGranted whose `prefilled_by` is set, or with a RouteRejected."""

    request: RequestId
    attempt: int
    instance: InstanceId
    prefill: Seconds


class SentRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request that was sent to an engine which has not answered yet."""

    request: RequestId
    attempt: int
    instance: InstanceId


class FollowRequests(Command, frozen=True, kw_only=True):
    """`cmd.follow`: which of these requests, all granted with `rebind`, are to go elsewhere? Repeated while they wait."""

    requests: list[SentRequest]


class FollowAnswered(Command, frozen=True, kw_only=True):
    """Where those are to go that were re-bound; all others stay. `term`: as in RouteGranted."""

    rebound: list[RouteGranted] = []
    term: Term = Term(0)


class CancelRequest(Command, frozen=True, kw_only=True):
    """`cmd.cancel`: the client has gone."""

    request: RequestId
    reason: str


class CancelAnswered(Command, frozen=True, kw_only=True):
    """`ended` true: the leader wrote the end. False: the request was granted already (the ingress writes the
    end), or is not known."""

    request: RequestId
    ended: bool


class ResyncCache(Command, frozen=True, kw_only=True):
    """`cmd.resync.<instance>`: publish a CacheSnapshot; with `rejoin`, join again under a new epoch first, one above
    `above`: a worker whose clock was set back does not know that it was here under a later one. With `distrust`, the engine
    has contradicted its own events under the epoch `above`: begin another one, whose contents are unknown."""

    instance: InstanceId
    reason: str
    rejoin: bool = False
    above: Epoch = Epoch(0)
    distrust: bool = False


class ResyncAnswered(Command, frozen=True, kw_only=True):
    instance: InstanceId
    accepted: bool
    detail: str = ""


class PlannedMove(msgspec.Struct, frozen=True, kw_only=True):
    """One waiting request that should wait elsewhere. `benefit`: seconds by which its first token is expected sooner.

    `rebind`: it is in the engine of `source` and has no first token; it should be aborted there and start again at `target`.
    `benefit` is then what is left after the work that is lost by it.
    """

    request: RequestId
    source: InstanceId
    target: InstanceId
    benefit: Seconds
    reason: str
    rebind: bool = False


class MigrateRequests(Command, frozen=True, kw_only=True):
    """`cmd.migrate`: carry out this plan of a rebalancer, in this order, as far as it still holds.

    `plan` is its id, unlike that of any other plan ever. `term` and `as_of` say what was known when it was made.
    """

    plan: str
    policy: str
    term: Term
    as_of: Sequence
    moves: list[PlannedMove]


class MoveAnswered(msgspec.Struct, frozen=True, kw_only=True):
    """`refusal` says why the request was not moved; empty where it was."""

    request: RequestId
    refusal: str = ""


class MigrationAnswered(Command, frozen=True, kw_only=True):
    """What became of a plan. With `refusal` it was refused whole and `moves` is empty.

    Who has read the log beyond `as_of`, and the decisions of `term` up to number `decided`, knows what the leader knew.
    """

    plan: str
    term: Term
    as_of: Sequence
    decided: int
    moves: list[MoveAnswered] = []
    refusal: str = ""
    detail: str = ""


class DrainInstance(Command, frozen=True, kw_only=True):
    """`cmd.drain`: place nothing there any more and move what waits for it; what its engine has, finishes there.

    `leaving`: who asks will stop the instance as soon as it is idle.
    """

    instance: InstanceId
    reason: str
    leaving: bool = False


class UndrainInstance(Command, frozen=True, kw_only=True):
    """`cmd.drain`: let it take requests again."""

    instance: InstanceId


class DrainAnswered(Command, frozen=True, kw_only=True):
    """What became of either. `requests` are those that the instance still has; with `refusal` nothing was done."""

    instance: InstanceId
    draining: bool
    requests: int = 0
    refusal: str = ""


class ScalePool(Command, frozen=True, kw_only=True):
    """`cmd.scale`: have so many instances; without `wanted`, say how things are. `asker` is who wants it, for the log."""

    wanted: int | None = None
    asker: str = ""


class ScaleAnswered(Command, frozen=True, kw_only=True):
    """The scaler's view: its newest decision (`number` 0: none yet), and what is there. With `refusal` nothing was decided.

    `ready` take requests and have answered, `coming` were started and have not, `leaving` are being drained to be
    stopped. `applied`: whether the newest decision is carried out.
    """

    number: int
    wanted: int
    ready: int
    coming: int
    leaving: int
    applied: bool
    policy: str
    provider: str
    lowest: int
    highest: int
    reason: str = ""
    trouble: str = ""
    refusal: str = ""


class DescribeFleet(Command, frozen=True, kw_only=True):
    """`cmd.fleet`: what the leader knows of its pool, for people. Answered with a FleetDescribed."""


class InstanceDescribed(msgspec.Struct, frozen=True, kw_only=True):
    instance: InstanceId
    url: str
    epoch: Epoch
    status: str
    knowledge: str
    pending: int
    in_prefill: int
    decoding: int
    cached_blocks: int
    digest: int = 0
    doubt: str = ""
    correction: float = 1.0
    role: Role = "both"
    prediction_error: float = -1.0
    """Median absolute error of the newest prefill predictions, as a share; -1 before there was one."""
    knowledge_reason: str = ""
    """Why its cache is not known exactly; empty where it is."""
    knowledge_since: Seconds = 0.0
    """Since when `knowledge` is what it is, engine time."""


class FleetDescribed(Command, frozen=True, kw_only=True):
    """The leader's view. `as_of` is the last log sequence in it."""

    instances: list[InstanceDescribed]
    pool: str
    policy: str
    admission: str
    ordering: str
    scheduler: str
    term: Term
    as_of: Sequence
    speed: float
