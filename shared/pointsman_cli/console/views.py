"""What the API answers and the templates get. Times are Unix seconds of the wall clock, durations engine seconds; -1, None
and empty text mean unknown. Numbers are rounded, so that a value that is shown alike is equal and is not sent again. Names
of requests, tenants, engines and reasons come from the log: nobody vouches for their content."""

from typing import Literal

import msgspec

from pointsman.analysis.shadow import ShadowSummary
from pointsman.primitives import EngineSeconds, wall_time_of
from pointsman_cli.terminal import UNIX_SECONDS_MAX

Health = Literal["starting", "catching up", "live", "disconnected", "recorded"]
Lateness = Literal["in time", "late", "open", "unserved", "left out"]
RunState = Literal["waiting", "running", "done", "failed", "cancelled"]


def unix_seconds(at: EngineSeconds, speed: float) -> float:
    """0 stays 0: no moment."""
    return round(min(max(0.0, wall_time_of(at, speed)), UNIX_SECONDS_MAX), 3) if at else 0.0


class View(msgspec.Struct, frozen=True, kw_only=True): ...


class StatusView(View, frozen=True, kw_only=True):
    """`origin`: which log this is, in words. `until`: the newest entry that a log had when reading began, for progress.
    `silent_seconds`: since the newest entry came, if that is too long for a log that workers write to; else 0."""

    pool: str
    origin: str
    health: Health
    sequence: int
    until: int
    first: int
    at: float
    term: int
    scheduler: str
    policy: str
    admission: str
    ordering: str
    speed: float
    block_tokens: int
    problems: list[str]
    silent_seconds: int
    can_act: bool
    """The console may act on the fleet for people who show the admin token."""
    pools: list[str] = []


class FleetTotals(View, frozen=True, kw_only=True):
    """Of the last minute of the log, where it is not a count of now. `goodput`: share of the ended requests that were
    served in time. `hit_rate`: cached of prompt tokens as engines delivered; `predicted_hit_rate`: as decided."""

    instances: int
    ready: int
    pending: int
    in_prefill: int
    decoding: int
    exact: int
    requests_per_second: float
    ended: int
    goodput: float | None
    hit_rate: float | None
    predicted_hit_rate: float | None
    ttft_p50: float | None
    ttft_p95: float | None
    rejected: int
    failed: int
    placed_alone: int
    """By their ingresses, without a scheduler."""


class InstanceView(View, frozen=True, kw_only=True):
    """`status`: as the State has it, or half-open. `queue_seconds`: prefill work ahead of a new request. `pace`: real prefill
    time over that of the cost model. `hit_rate`, `goodput`, `ttft_p50` and `ended`: last minute."""

    instance: str
    url: str
    model: str
    role: str
    since: float
    status: str
    status_reason: str
    knowledge: str
    knowledge_reason: str
    knowledge_since: float
    pending: int
    in_prefill: int
    decoding: int
    queue_tokens: int
    queue_seconds: float
    kv_usage: float
    blocks: int
    blocks_max: int
    pace: float
    prediction_error: float
    hit_rate: float | None
    goodput: float | None
    ttft_p50: float | None
    ended: int


class FleetView(View, frozen=True, kw_only=True):
    at: float
    sequence: int
    totals: FleetTotals
    instances: list[InstanceView]
    unregistered: list[str] = []
    """Instances that report but never joined."""
    lost: list[str] = []
    """Instances that a leader gave up in the last ten minutes."""
    moments: list["MomentView"] = []
    """Earlier moments that can be shown, oldest first."""


class MomentView(View, frozen=True, kw_only=True):
    sequence: int
    at: float


class RequestView(View, frozen=True, kw_only=True):
    """`stage`: pending, prefill, handed over, decoding, or how it ended (finished, failed, cancelled, rejected). `instance`:
    where it is or was last. `lateness`: of the first token against its SLO; open until it is known; left out if its end says
    nothing of the pool, as when its client left."""

    request: str
    client_request_id: str
    arrived_at: float
    tenant: str
    priority: str
    adapter: str
    instance: str
    stage: str
    lateness: Lateness
    prompt_tokens: int
    cached_tokens: int
    predicted_cached_tokens: int
    output_tokens: int
    slo_ttft: float
    predicted_ttft: float
    queue_seconds: float
    """Until its grant."""
    ttft: float | None
    e2e: float | None
    moves: int
    attempts: int
    reason: str
    """Of a rejection, failure or cancellation."""


class RequestsView(View, frozen=True, kw_only=True):
    """Newest arrival first, or longest wait if the slowest were asked for. `kept`: requests in memory, of which
    `matching` fit the filter. `requests` are a page of them."""

    requests: list[RequestView]
    kept: int
    kept_max: int
    matching: int
    tenants: list[str]
    instances: list[str]


class ScaleView(View, frozen=True, kw_only=True):
    """A decision about the pool's size. `applied_at` 0: not yet. `prefill`, `decode`: of a split pool."""

    sequence: int
    at: float
    policy: str
    by: str
    current: int
    wanted: int
    reason: str
    applied_at: float = 0.0
    applied_detail: str = ""
    prefill: int = 0
    decode: int = 0


class MoveView(View, frozen=True, kw_only=True):
    """A request that was moved to another queue, or whose move was refused (`refusal`). `rebound`: out of an engine."""

    sequence: int
    at: float
    request: str
    source: str
    instance: str
    cause: str
    policy: str
    reason: str
    benefit: float
    rebound: bool
    refusal: str = ""


class FleetEventView(View, frozen=True, kw_only=True):
    """`kind`: joined, left, suspected, draining, undrained, role (it changed its role), ejected, unejected, leader, writes lost."""

    sequence: int
    at: float
    kind: str
    instance: str
    detail: str


class SizeView(View, frozen=True, kw_only=True):
    """Instances over time, for a chart."""

    at: float
    ready: int
    wanted: int
    pending: int


class HistoryView(View, frozen=True, kw_only=True):
    """Newest first, except `sizes`."""

    wanted: int | None
    ready: int
    scaling: list[ScaleView]
    moves: list[MoveView]
    moved: int
    refused: int
    events: list[FleetEventView]
    sizes: list[SizeView]


class TenantView(View, frozen=True, kw_only=True):
    """Counted over the entries that this console read. `share`: of all prompt tokens."""

    tenant: str
    priority: str
    weight: float
    cache_group: str
    in_flight: int
    arrived: int
    finished: int
    in_time: int
    late: int
    rejected: int
    failed: int
    cancelled: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    share: float
    hit_rate: float | None
    goodput: float | None
    ttft_p50: float | None
    ttft_p95: float | None
    limits: list[str]
    """Its limits in words."""


class TenantsView(View, frozen=True, kw_only=True):
    """Most prompt tokens first; beyond a bound tenants are counted together as `other`."""

    tenants: list[TenantView]
    policies: bool


class RungView(View, frozen=True, kw_only=True):
    """`share` of prompt tokens that are or could have been cached; `lost`: the gap below the rung above, never below 0;
    gaps add up to all that was lost."""

    rung: str
    title: str
    tokens: int
    share: float | None
    lost: float | None
    why: str = ""
    advice: str = ""


class LadderGroupView(View, frozen=True, kw_only=True):
    """`kind`: pool, tenant or hour."""

    kind: str
    name: str
    requests: int
    prompt_tokens: int
    rungs: list[RungView]


class LadderView(View, frozen=True, kw_only=True):
    """`cause`: of the largest loss; `nothing` if all together is little."""

    pool: LadderGroupView | None
    tenants: list[LadderGroupView]
    hours: list[LadderGroupView]
    verdict: str = ""
    cause: str = ""
    note: str = ""


class ShadowsView(View, frozen=True, kw_only=True):
    """`policy`: in force. Times in the summary are engine seconds."""

    policy: str
    summary: ShadowSummary | None = None
    """None: no other policy decides along."""


class ProblemView(View, frozen=True, kw_only=True):
    status: int
    error: str
    detail: str = ""


class ActionView(View, frozen=True, kw_only=True):
    """What came of an action: `done` or a refusal in `detail`."""

    done: bool
    detail: str


class Session(View, frozen=True, kw_only=True):
    """Who looks: `acts` after the admin token was shown, `reads` unless a reader's token is needed and was not. `csrf` goes
    into each form and, as `x-csrf-token`, with each request that changes something."""

    reads: bool = True
    acts: bool = False
    csrf: str = ""
