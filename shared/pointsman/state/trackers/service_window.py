"""Outcomes (as in `attainment`) and placed prefill work of the last `window_s` engine seconds; at most RECORDS_MAX of
each."""

from collections import OrderedDict, deque
from dataclasses import dataclass

from typing_extensions import override

from pointsman.contracts.requests import RequestFinished
from pointsman.primitives import BlockKey, EngineSeconds, InstanceId, RequestId, Tokens
from pointsman.state.trackers.base import OutcomeTracker
from pointsman.state.workload import Request, Stage

RECORDS_MAX = 20_000
PREFIX_BLOCKS = 8


@dataclass(frozen=True, slots=True)
class Outcome:
    at: EngineSeconds
    on_time: bool
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Outcomes:
    total: int = 0
    on_time: int = 0
    refused: int = 0

    @property
    def attainment(self) -> float:
        return self.on_time / self.total if self.total else 1.0


@dataclass(frozen=True, slots=True)
class Prefill:
    """One placed request. `seconds`: by the uncorrected cost model; `prefix`: its family."""

    at: EngineSeconds
    arrived_at: EngineSeconds
    slo_ttft: EngineSeconds
    instance: InstanceId
    seconds: EngineSeconds
    uncached_tokens: Tokens
    prompt_tokens: Tokens
    prefix: BlockKey | None


class ServiceWindow(OutcomeTracker):
    def __init__(self, window_s: EngineSeconds) -> None:
        self._window_s = window_s
        self._outcomes: deque[Outcome] = deque(maxlen=RECORDS_MAX)
        self._prefills: OrderedDict[RequestId, Prefill] = OrderedDict()
        self.last_arrival_at: EngineSeconds = float("-inf")

    def outcomes(self, since: EngineSeconds) -> Outcomes:
        total = on_time = refused = 0
        for outcome in reversed(self._outcomes):
            if outcome.at < since:
                break
            total += 1
            on_time += outcome.on_time
            refused += outcome.refused
        return Outcomes(total, on_time, refused)

    def prefills(self, since: EngineSeconds) -> list[Prefill]:
        """In order, each at its last placement."""
        return [prefill for prefill in self._prefills.values() if prefill.at >= since]

    @override
    def arrived(self, request: Request, at: EngineSeconds) -> None:
        self.last_arrival_at = at

    @override
    def placed(self, request: Request, at: EngineSeconds) -> None:
        keys = request.keys
        self._prefills.pop(request.id, None)
        self._prefills[request.id] = Prefill(
            at=at,
            arrived_at=request.arrived_at,
            slo_ttft=request.slo_ttft,
            instance=request.instance,
            seconds=request.prefill_seconds,
            uncached_tokens=request.uncached_tokens,
            prompt_tokens=request.prompt_tokens,
            prefix=keys[min(len(keys), PREFIX_BLOCKS) - 1] if keys else None,
        )
        while self._prefills:
            oldest = next(iter(self._prefills.values()))
            if oldest.at >= at - self._window_s and len(self._prefills) <= RECORDS_MAX:
                break
            self._prefills.popitem(last=False)

    @override
    def unplaced(self, request: Request, at: EngineSeconds) -> None:
        self._prefills.pop(request.id, None)

    @override
    def ended(self, request: Request, at: EngineSeconds, finished: RequestFinished | None) -> None:
        if request.stage is Stage.PENDING:
            self._prefills.pop(request.id, None)
        super().ended(request, at, finished)

    @override
    def outcome(self, request: Request, at: EngineSeconds, *, on_time: bool, refused: bool = False) -> None:
        outcomes = self._outcomes
        outcomes.append(Outcome(at, on_time, refused))
        while outcomes[0].at < at - self._window_s:
            outcomes.popleft()
