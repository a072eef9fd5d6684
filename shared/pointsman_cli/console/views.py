"""What the API answers and the templates get. Times are Unix seconds of the wall clock, durations engine seconds; -1, None
and empty text mean unknown. Numbers are rounded, so that a value that is shown alike is equal and is not sent again. Names
of requests, tenants, engines and reasons come from the log: nobody vouches for their content."""

from typing import Any, Literal

import msgspec

from pointsman.analysis.shadow import ShadowSummary

Health = Literal["starting", "catching up", "live", "disconnected", "recorded"]
Lateness = Literal["in time", "late", "open", "unserved"]
RunState = Literal["waiting", "running", "done", "failed", "cancelled"]


class View(msgspec.Struct, frozen=True, kw_only=True): ...


class StatusView(View, frozen=True, kw_only=True):
    """`origin`: which log this is, in words. `until`: the newest entry that a log had when reading began, for progress."""

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
    can_act: bool
    """The console may act on the fleet for people who show the admin token."""
    pools: list[str] = []
    lag_seconds: float = 0.0


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


class InstanceView(View, frozen=True, kw_only=True):
    """`queue_seconds`: prefill work ahead of a new request. `pace`: real prefill time over that of the cost model. `hit_rate`,
    `goodput`, `ttft_p50` and `ended`: last minute."""

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
    moments: list["MomentView"] = []
    """Earlier moments that can be shown, oldest first."""


class MomentView(View, frozen=True, kw_only=True):
    sequence: int
    at: float


class RequestView(View, frozen=True, kw_only=True):
    """`stage`: pending, prefill, handed over, decoding, or how it ended (finished, failed, cancelled, rejected). `instance`:
    where it is or was last. `lateness`: of the first token against its SLO; open until it is known."""

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
    """Newest arrival first. `kept`: requests in memory, of which `matching` fit the filter. `requests` are a page of them."""

    requests: list[RequestView]
    kept: int
    kept_max: int
    matching: int
    tenants: list[str]
    instances: list[str]


class PhaseView(View, frozen=True, kw_only=True):
    """`kind`: way, queue, engine, decoding, gone. `share`: of the whole."""

    kind: str
    name: str
    instance: str
    since_seconds: float
    seconds: float
    since_share: float
    share: float


class EventView(View, frozen=True, kw_only=True):
    sequence: int
    at: float
    after_seconds: float
    kind: str
    text: str
    without_effect: bool


class StoryView(View, frozen=True, kw_only=True):
    """What `pointsman explain` knows of one request. `cause`: a code of `explain.causes.Cause`. `verdict`: one sentence.
    `reasons`: three to seven sentences; `details`: the rest. `decisions`, `grants`, `arrival` and `refused_moves` are the
    objects of `pointsman explain --json`."""

    request: str
    origin: str
    note: str
    """What the log has lost of it."""
    arrived_at: float
    headline: str
    cause: str
    verdict: str
    reasons: list[str]
    details: list[str]
    ttft: float | None
    slo_ttft: float | None
    late: bool
    tenant: str
    instance: str
    prompt_tokens: int
    cached_tokens: int
    predicted_cached_tokens: int
    predicted_ttft: float | None
    phases: list[PhaseView]
    arrival: dict[str, Any] | None
    decisions: list[dict[str, Any]]
    grants: list[dict[str, Any]]
    failed_attempts: list[dict[str, Any]]
    refused_moves: list[dict[str, Any]]
    events: list[EventView]


class RequestPageView(View, frozen=True, kw_only=True):
    """`row`: what the console itself knows, at once. `story`: once it was worked out (`state` done)."""

    request: str
    row: RequestView | None
    state: RunState
    story: StoryView | None
    problem: str = ""


class FindingView(View, frozen=True, kw_only=True):
    severity: str
    area: str
    what: str
    evidence: list[str]
    advice: str


class DoctorView(View, frozen=True, kw_only=True):
    """The last examination of the log. `state` running: a newer one is under way."""

    state: RunState
    at: float
    """When it ended; 0: never."""
    took_seconds: float
    entries: int
    first_at: float
    last_at: float
    verdict: str
    summary: list[str]
    findings: list[FindingView]
    problem: str = ""


class ScaleView(View, frozen=True, kw_only=True):
    """A decision about the pool's size. `applied_at` 0: not yet."""

    sequence: int
    at: float
    policy: str
    by: str
    current: int
    wanted: int
    reason: str
    applied_at: float = 0.0
    applied_detail: str = ""


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
    """`kind`: joined, left, suspected, draining, undrained, ejected, unejected, leader, writes lost."""

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
    """`share` of prompt tokens that are or could have been cached; `lost`: points against the rung above."""

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
    pool: LadderGroupView | None
    tenants: list[LadderGroupView]
    hours: list[LadderGroupView]
    verdict: str = ""
    note: str = ""


class ShadowsView(View, frozen=True, kw_only=True):
    """`policy`: in force. Times in the summary are engine seconds."""

    policy: str
    summary: ShadowSummary | None = None
    """None: no other policy decides along."""


class WhatIfChange(View, frozen=True, kw_only=True):
    """What a run changes; empty: as recorded."""

    policy: str = ""
    settings: list[str] = []
    """As in `--set`: routing.NAME=VALUE."""
    order: str = ""
    admission: str = ""
    instances: int | None = None
    since: str = ""
    until: str = ""


class WhatIfRow(View, frozen=True, kw_only=True):
    """One figure: as recorded, simulated again, changed. `better` None: neither, or the same."""

    name: str
    recorded: str
    again: str
    changed: str
    change: str
    better: bool | None


class WhatIfRun(View, frozen=True, kw_only=True):
    id: int
    state: RunState
    change: WhatIfChange
    text: str
    """The change in words."""
    started_at: float
    took_seconds: float
    progress: str
    rows: list[WhatIfRow] = []
    faithful: bool | None = None
    fidelity: str = ""
    problem: str = ""
    requests: int = 0


class WhatIfView(View, frozen=True, kw_only=True):
    """Newest first. The choices are those of `pointsman what-if`."""

    runs: list[WhatIfRun]
    policies: list[str]
    orders: list[str]
    admissions: list[str]
    busy: bool


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
