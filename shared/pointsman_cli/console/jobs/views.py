"""What is worked out beside: explanations, examinations, what-if runs. Units are those of `console.views`."""

from pointsman.contracts.decisions import MigrationRefused
from pointsman.contracts.requests import RequestArrived, RequestAttemptFailed
from pointsman_cli.console.views import RequestView, RunState, View
from pointsman_cli.explain.candidates import ListedDecision
from pointsman_cli.explain.values import GrantRecord


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


class ArrivalView(RequestArrived, frozen=True, kw_only=True, tag=RequestArrived.__name__):
    """Without the keys. `blocks`: how many they are."""

    keys: bytes = b""
    blocks: int


class RefusedMoveView(MigrationRefused, frozen=True, kw_only=True, tag=MigrationRefused.__name__):
    sequence: int


class TimelineView(View, frozen=True, kw_only=True):
    """What `pointsman explain` knows of one request. `cause`: a code of `explain.causes.Cause`. `verdict`: one sentence.
    `reasons`: three to seven sentences; `details`: the rest. `arrival`, `decisions`, `grants`,
    `failed_attempts` and `refused_moves` are encoded as in `pointsman explain --json`."""

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
    predicted_ttft_upper: float | None
    phases: list[PhaseView]
    arrival: ArrivalView | None
    decisions: list[ListedDecision]
    grants: list[GrantRecord]
    failed_attempts: list[RequestAttemptFailed]
    refused_moves: list[RefusedMoveView]
    events: list[EventView]


class RequestPageView(View, frozen=True, kw_only=True):
    """`row`: what the console itself knows, at once. `timeline`: once it was worked out (`state` done). `absent`: the log was
    read, and does not have it."""

    request: str
    row: RequestView | None
    state: RunState
    timeline: TimelineView | None
    problem: str = ""
    absent: bool = False


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
    notes: list[str] = []
    """What the simulation leaves out of this record."""
    problem: str = ""
    requests: int = 0


class WhatIfView(View, frozen=True, kw_only=True):
    """Newest first. The choices are those of `pointsman what-if`."""

    runs: list[WhatIfRun]
    policies: list[str]
    orders: list[str]
    admissions: list[str]
    busy: bool
