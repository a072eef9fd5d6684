"""Values about one request, filled by `timeline`, read by `diagnosis` and `page`."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from pointsman.contracts.block_keys import KEY_BYTES
from pointsman.contracts.decisions import MigrationRefused, RequestEnd, RequestGranted, Settings
from pointsman.contracts.fleet import PrefillCost
from pointsman.contracts.reasons import CancelCause
from pointsman.contracts.requests import (
    PrefillFinished,
    PrefixFetchEnded,
    RequestArrived,
    RequestAttemptFailed,
    RequestFinished,
    is_given_up,
)
from pointsman.ports import LogEntry
from pointsman.primitives import Answers, EngineSeconds, InstanceId, RequestId, Sequence, Tenant, Term, Tokens

NOT_KNOWN = "not known"
"""Status of an instance that joined before the log begins."""
UNSUITED = "unsuited"
"""Status of a ready instance that cannot serve the request: it only decodes, or lacks its adapter or length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeighedCandidate:
    """One instance at the decision. Seconds include the learned correction. What is not `recorded` is computed again,
    without what the routing policy adds."""

    instance: InstanceId
    chosen: bool
    weighed: bool
    recorded: bool
    status: str
    knowledge: str
    doubt: str
    why_out: str
    hit_blocks: int
    held_blocks: int
    """Of the hit blocks, those in its cache; the rest is expected from queued prompts."""
    uncached_tokens: Tokens
    queue_seconds: EngineSeconds
    prefill_seconds: EngineSeconds
    predicted_ttft: EngineSeconds
    pending: int
    in_prefill: int
    decoding: int
    correction: float


def soonest(candidates: Iterable[WeighedCandidate]) -> WeighedCandidate | None:
    """Of those that could serve the request."""
    suited = (candidate for candidate in candidates if candidate.status != UNSUITED)
    return min(suited, key=lambda candidate: candidate.predicted_ttft, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedAhead:
    request: RequestId
    tenant: Tenant
    stage: str
    waited_seconds: EngineSeconds
    inside_seconds: EngineSeconds
    answers: Answers
    uncached_tokens: Tokens
    """As predicted. What its engine reported is in `RequestTimeline.delivered`."""
    prefill_seconds: EngineSeconds
    prompt_tokens: Tokens
    same_prefix: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixFacts:
    key: str
    tokens: Tokens
    arrivals: int
    window: int
    ready: int
    holders: list[InstanceId]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRecord:
    """One decision of the leader. Times count from the arrival."""

    kind: str
    sequence: Sequence
    term: Term
    number: int
    as_of: Sequence
    unseen_entries: int
    """Entries before the decision in the log that the leader had not applied."""
    after_seconds: EngineSeconds
    attempt: int
    excluded: list[InstanceId]
    instance: InstanceId
    source: InstanceId
    policy: str
    settings: Settings
    reason: str
    detail: str
    retry_after: EngineSeconds | None
    predicted_ttft: EngineSeconds | None
    predicted_ttft_upper: EngineSeconds | None
    """Nine of ten first tokens come within it; None: unknown."""
    predicted_cached_tokens: Tokens
    budget_seconds: EngineSeconds
    candidates: list[WeighedCandidate]
    ahead_at: InstanceId
    """The chosen instance; of a rejected request the best one."""
    ahead: list[QueuedAhead]
    ahead_seconds: EngineSeconds
    """Work left of `ahead` by the cost model, uncorrected."""
    ahead_tokens: Tokens
    cost: PrefillCost | None
    prefix: PrefixFacts | None
    best_effort: bool = False
    """Admitted although late even alone."""

    @property
    def chosen(self) -> WeighedCandidate | None:
        return next((c for c in self.candidates if c.chosen), None)


@dataclass(slots=True, kw_only=True)
class GrantRecord:
    """The request was sent to an engine. Seconds of work are by the cost model, uncorrected."""

    sequence: Sequence
    after_seconds: EngineSeconds
    instance: InstanceId
    instance_known: bool
    attempt: int
    by_leader: bool
    overtaken_by: list[RequestId]
    overtaken_seconds: EngineSeconds
    overtaken_tokens: Tokens
    in_engine: list[QueuedAhead]
    decoding: int
    work_seconds: EngineSeconds
    """Prefill work in the engine until its first token, its own included."""
    work_tokens: Tokens
    own_seconds: EngineSeconds
    """Of the work, its own."""
    own_tokens: Tokens
    correction: float
    corrections: dict[InstanceId, float]
    held_tokens: Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerPrefills:
    """Prefills on other instances meanwhile. `pace`: median real time over the cost model's."""

    prefills: int
    pace: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """`kind`: way, queue, engine, transfer, decoding, or gone (before the log begins)."""

    kind: str
    name: str
    instance: InstanceId
    since_seconds: EngineSeconds
    seconds: EngineSeconds


@dataclass(slots=True, kw_only=True)
class RequestTimeline:
    """Missing values are None, empty or -1."""

    request: RequestId
    speed: float
    block_tokens: Tokens
    arrived_at: EngineSeconds = 0.0
    note: str = ""
    """What the log has lost of it."""
    arrival: RequestArrived | None = None
    log_begins: Sequence = 0
    log_begins_at: EngineSeconds = 0.0
    entries: list[LogEntry] = field(default_factory=list)
    elected: set[Term] = field(default_factory=set)
    fenced: set[Sequence] = field(default_factory=set)
    passed_over: set[Sequence] = field(default_factory=set)
    """Of its time: `fenced`, and grants and hand-overs that its ingress told a new leader as well."""
    answers: Answers = 1
    """Known with its first decision."""
    decisions: list[DecisionRecord] = field(default_factory=list)
    refused: list[tuple[Sequence, MigrationRefused]] = field(default_factory=list)
    grants: list[GrantRecord] = field(default_factory=list)
    meanwhile: PeerPrefills | None = None
    delivered: dict[RequestId, Tokens] = field(default_factory=dict)
    """Cached tokens, as their engine reported them, of requests that were ahead."""
    failed: list[RequestAttemptFailed] = field(default_factory=list)
    first_token: PrefillFinished | None = None
    fetch: PrefixFetchEnded | None = None
    end: RequestEnd | None = None
    phases: list[Phase] = field(default_factory=list)
    last_at: EngineSeconds = 0.0
    log_slow: EngineSeconds = 0.0
    """Of its wait."""

    @property
    def ttft(self) -> EngineSeconds | None:
        """From arrival to the first token, or to the whole answer if not streamed."""
        if isinstance(self.end, RequestFinished):
            return self.end.ttft
        return self.first_token.ttft if self.first_token else None

    @property
    def is_whole_answer(self) -> bool:
        """Without streaming the first token comes with the last."""
        return self.first_token is None and self.arrival is not None and not self.arrival.streaming

    @property
    def ingress_hung(self) -> bool:
        """Whether its leader had given it up, as its ingress was silent, before its ingress noticed the first token."""
        noticed_at = self.arrived_at + (self.ttft or 0.0)
        told = (entry.event for entry in self.entries if entry.sequence not in self.fenced)
        return any(
            is_given_up(event) and event.cause is CancelCause.INGRESS_SILENT and event.at < noticed_at for event in told
        )

    @property
    def arrived_before_the_log(self) -> bool:
        """An ingress that places a request alone writes no arrival; its grant comes first then."""
        first = self.entries[0].event
        is_whole = self.ttft is not None or (isinstance(first, RequestGranted) and first.stamp is None)
        return self.arrival is None and self.log_begins > 1 and (self.arrived_at < self.log_begins_at or not is_whole)

    @property
    def placement(self) -> DecisionRecord | None:
        return next((d for d in reversed(self.decisions) if d.kind != "rejected"), None)


def blocks_of(arrival: RequestArrived) -> int:
    return len(arrival.keys) // KEY_BYTES
