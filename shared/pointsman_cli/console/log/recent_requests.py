"""The newest requests of the log, one record each, in bounded memory. In: request events that count. Out: records, newest
arrival first."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from pointsman.analysis.client_faults import tells_of_fleet
from pointsman.analysis.placed_alone import is_told_again
from pointsman.contracts import decisions, requests
from pointsman.contracts.codec import LogEvent
from pointsman.primitives import EngineSeconds, RequestId, Sequence, Tokens
from pointsman.state.workload import UNGRANTED, Stage
from pointsman_cli.console.views import Lateness

REQUESTS_MAX = 10_000
EARLY_MAX = 1_000
FINISHED, FAILED, CANCELLED, REJECTED = "finished", "failed", "cancelled", "rejected"
STAGES = (*(str(stage) for stage in Stage), FINISHED, FAILED, CANCELLED, REJECTED)
UNSERVED = frozenset({FAILED, CANCELLED, REJECTED})


@dataclass(slots=True, eq=False)
class RecentRequest:
    """Engine times, by the leader's clock. `sequence`, `ended_sequence`: of its first entry and its end. `unannounced`:
    its ingress granted it without a scheduler, and the log has no arrival yet."""

    id: RequestId
    sequence: Sequence
    arrived_at: EngineSeconds
    client_request_id: str = ""
    tenant: str = ""
    priority: str = "standard"
    adapter: str = ""
    instance: str = ""
    stage: str = Stage.ARRIVED.value
    prompt_tokens: Tokens = 0
    cached_tokens: Tokens = -1
    predicted_cached_tokens: Tokens = -1
    output_tokens: Tokens = -1
    slo_ttft: EngineSeconds = 0.0
    predicted_ttft: EngineSeconds = 0.0
    granted_at: EngineSeconds = 0.0
    ttft: EngineSeconds | None = None
    e2e: EngineSeconds | None = None
    moves: int = 0
    attempts: int = 1
    reason: str = ""
    ended_sequence: Sequence = 0
    unannounced: bool = False
    clock_offset: EngineSeconds = 0.0
    end: decisions.RequestEnd | None = None

    def takes(self, event: requests.RequestEvent) -> bool:
        return self.end is None or decisions.counts_as_end(event, self.end)

    @property
    def judged(self) -> bool:
        return self.end is not None and tells_of_fleet(self.end)

    @property
    def waited(self) -> EngineSeconds | None:
        """For its first token, or without one until its end."""
        return self.ttft if self.ttft is not None or self.end is None or self.e2e is None else max(0.0, self.e2e)

    @property
    def lateness(self) -> Lateness:
        if self.stage in UNSERVED:
            return "unserved" if self.judged else "left out"
        if self.ttft is None:
            return "open"
        return "late" if self.slo_ttft > 0 and self.ttft > self.slo_ttft else "in time"


@dataclass(slots=True)
class RecentRequests:
    block_tokens: Tokens
    requests_max: int = REQUESTS_MAX
    _records: OrderedDict[RequestId, RecentRequest] = field(default_factory=OrderedDict)
    _early: OrderedDict[RequestId, list[tuple[requests.RequestEvent, Sequence]]] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._records)

    def get(self, request: str) -> RecentRequest | None:
        return self._records.get(RequestId(request))

    def newest_first(self) -> Iterator[RecentRequest]:
        return reversed(self._records.values())

    def named(self, text: str) -> list[RecentRequest]:
        """Those with this id, an end of it, or this id of their client."""
        exact = self._records.get(RequestId(text))
        if exact is not None:
            return [exact]
        return [
            known
            for known in self.newest_first()
            if known.client_request_id == text or known.id.endswith(text) or known.id.startswith(text)
        ]

    def apply(self, event: LogEvent, sequence: Sequence) -> RecentRequest | None:
        """Returns the record that the event changed."""
        if not isinstance(event, requests.RequestEvent):
            return None
        known = self._records.get(event.request)
        if isinstance(event, requests.RequestArrived):
            return known if known is not None and not known.unannounced else self._arrived(known, event, sequence)
        if known is None and isinstance(event, decisions.RequestGranted) and event.stamp is None:
            known = self._add(
                RecentRequest(
                    event.request, sequence, event.at, tenant=event.tenant, adapter=event.adapter, unannounced=True
                )
            )
        if known is None:
            self._keep_early(event, sequence)
        if known is None or not known.takes(event):
            return None
        self._change(known, event, sequence)
        return known

    def _arrived(
        self, known: RecentRequest | None, event: requests.RequestArrived, sequence: Sequence
    ) -> RecentRequest:
        record = known or self._add(RecentRequest(event.request, sequence, event.arrived_at))
        self._records.move_to_end(event.request)
        record.unannounced = False
        record.clock_offset = event.clock_offset
        record.arrived_at = event.arrived_at + event.clock_offset
        record.client_request_id = event.client_request_id
        record.tenant, record.priority = event.tenant, event.priority
        record.adapter = event.adapter or event.alias
        record.prompt_tokens = max(record.prompt_tokens, event.prompt_tokens)
        record.slo_ttft = event.slo_ttft
        for early, its_sequence in self._early.pop(event.request, ()):
            if record.takes(early):
                self._change(record, early, its_sequence)
        return record

    def _keep_early(self, event: requests.RequestEvent, sequence: Sequence) -> None:
        """An ingress's event may be written before the leader's arrival."""
        if isinstance(
            event,
            requests.PrefillFinished | requests.RequestFinished | requests.RequestFailed | requests.RequestCancelled,
        ):
            self._early.setdefault(event.request, []).append((event, sequence))
            if len(self._early) > EARLY_MAX:
                self._early.popitem(last=False)

    def _add(self, record: RecentRequest) -> RecentRequest:
        self._records[record.id] = record
        if len(self._records) > self.requests_max:
            self._records.popitem(last=False)
        return record

    def _change(self, known: RecentRequest, event: requests.RequestEvent, sequence: Sequence) -> None:
        known.end = event if isinstance(event, decisions.RequestEnd) else None
        match event:
            case decisions.RequestPlaced():
                known.stage, known.instance, known.attempts = Stage.PENDING.value, event.instance, event.attempt
                known.predicted_ttft = event.predicted_ttft
                known.predicted_cached_tokens = min(known.prompt_tokens, event.hit_blocks * self.block_tokens)
            case decisions.RequestMigrated():
                known.stage, known.instance, known.moves = Stage.PENDING.value, event.instance, known.moves + 1
                known.predicted_ttft = event.predicted_ttft
                known.predicted_cached_tokens = min(known.prompt_tokens, event.hit_blocks * self.block_tokens)
            case decisions.RequestGranted() | decisions.RequestHandedOver() if (
                known.stage not in UNGRANTED and is_told_again(event, known.instance)
            ):
                pass
            case decisions.RequestGranted():
                known.stage, known.instance, known.granted_at = Stage.PREFILL.value, event.instance, event.at
            case decisions.RequestHandedOver():
                known.stage, known.instance = Stage.HANDED_OVER.value, event.instance
            case decisions.HandOverRefused():
                known.reason = event.reason
            case requests.PrefillFinished():
                known.stage, known.instance = Stage.DECODING.value, event.instance
                known.ttft = event.ttft if event.stamp is None else known.ttft  # a leader's is assumed
            case requests.RequestFinished():
                known.stage, known.instance = FINISHED, event.instance
                known.ttft, known.e2e, known.reason = event.ttft, event.e2e, ""
                known.prompt_tokens = max(known.prompt_tokens, event.prompt_tokens)
                known.cached_tokens, known.output_tokens = event.cached_tokens, event.completion_tokens
                known.predicted_cached_tokens = max(event.predicted_cached_tokens, known.predicted_cached_tokens)
                known.ended_sequence = sequence
            case requests.RequestFailed() | requests.RequestCancelled():
                known.stage = FAILED if isinstance(event, requests.RequestFailed) else CANCELLED
                known.reason, known.output_tokens = event.reason, event.output_tokens
                at = event.at if event.stamp is not None else event.at + known.clock_offset
                known.e2e, known.ended_sequence = at - known.arrived_at, sequence
            case decisions.RequestRejected():
                known.stage, known.reason = (
                    REJECTED,
                    f"{event.reason}: {event.detail}" if event.detail else event.reason,
                )
                known.e2e, known.ended_sequence = event.at - known.arrived_at, sequence
            case _:
                pass
