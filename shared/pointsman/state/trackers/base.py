"""Callbacks of trackers for events of requests and instances."""

from abc import abstractmethod

from typing_extensions import override

from pointsman.contracts.reasons import RejectReason
from pointsman.contracts.requests import RequestFinished
from pointsman.primitives import EngineSeconds, InstanceId
from pointsman.state.fold_versions import FOLD_VERSION, REFUSED_ONCE
from pointsman.state.workload import Request, Stage

LATE_ALONE = (RejectReason.SLO_UNREACHABLE, RejectReason.BEST_EFFORT_FULL)


class Tracker:
    """Override as needed. Called only by State, with the event's time `at`. Order: `arrived`, `placed` (again after
    each `unplaced`), `granted`, `handed_over` if split, `first_token`, `ended`; a request may end or be unplaced at any
    point."""

    fold_version = FOLD_VERSION
    """Set by State."""

    @property
    def history_s(self) -> EngineSeconds:
        """How much of the log tells it all that it keeps."""
        return 0.0

    def resumed(self, at: EngineSeconds) -> None:
        """A fold begins with it at a checkpoint of that time."""

    def arrived(self, request: Request, at: EngineSeconds) -> None: ...

    def placed(self, request: Request, at: EngineSeconds) -> None: ...

    def unplaced(self, request: Request, at: EngineSeconds) -> None: ...

    def granted(self, request: Request, at: EngineSeconds) -> None: ...

    def handed_over(self, request: Request, at: EngineSeconds) -> None: ...

    def first_token(self, request: Request, at: EngineSeconds) -> None: ...

    def refused(self, request: Request, at: EngineSeconds, reason: str) -> None: ...

    def ended(self, request: Request, at: EngineSeconds, finished: RequestFinished | None) -> None:
        """`finished`: None unless it was answered whole."""

    def joined(self, instance: InstanceId, at: EngineSeconds) -> None: ...

    def left(self, instance: InstanceId, at: EngineSeconds) -> None: ...


class OutcomeTracker(Tracker):
    """Observes *outcomes*: a first token, on time or late; a rejection, unless even an idle instance would miss the
    SLO; or another end after the deadline of a waiting request."""

    @abstractmethod
    def outcome(self, request: Request, at: EngineSeconds, *, on_time: bool, refused: bool = False) -> None: ...

    @override
    def first_token(self, request: Request, at: EngineSeconds) -> None:
        if not request.best_effort:
            self.outcome(request, at, on_time=at <= request.deadline)

    @override
    def refused(self, request: Request, at: EngineSeconds, reason: str) -> None:
        if reason not in LATE_ALONE and not (request.best_effort and self.fold_version >= REFUSED_ONCE):
            self.outcome(request, at, on_time=False, refused=True)

    @override
    def ended(self, request: Request, at: EngineSeconds, finished: RequestFinished | None) -> None:
        if request.refused:
            return
        waited = request.stage in (Stage.PENDING, Stage.PREFILL, Stage.HANDED_OVER)
        if waited and finished is None and at > request.deadline and not request.best_effort:
            self.outcome(request, at, on_time=False)
