"""The events of requests and instances that a tracker may observe."""

from abc import abstractmethod

from typing_extensions import override

from pointsman.contracts.reasons import RejectReason
from pointsman.contracts.requests import RequestFinished
from pointsman.primitives import InstanceId, Seconds
from pointsman.state.workload import Request, Stage


class Tracker:
    """Overrides what it needs. Called by State alone, at the event's time `at`.

    A request passes `arrived`, `placed` (again after each `unplaced`), `granted`, perhaps `handed_over`, `first_token` and
    `ended`; it may end or be unplaced at any point. At `ended` its fields are those of its last placement.
    """

    def arrived(self, request: Request, at: Seconds) -> None:
        """It reached the leader and is not placed yet."""

    def placed(self, request: Request, at: Seconds) -> None:
        """It waits in the queue of `request.instance`."""

    def unplaced(self, request: Request, at: Seconds) -> None:
        """It leaves `request.instance` before its end."""

    def granted(self, request: Request, at: Seconds) -> None:
        """It was sent to the engine."""

    def handed_over(self, request: Request, at: Seconds) -> None:
        """Prefilled at `request.prefilled_by`, to be decoded at `request.instance`; no first token yet."""

    def first_token(self, request: Request, at: Seconds) -> None:
        """Its prefill is over, begun at `request.granted_at`."""

    def refused(self, request: Request, at: Seconds, reason: str) -> None:
        """Rejected; `ended` follows at once."""

    def ended(self, request: Request, at: Seconds, finished: RequestFinished | None) -> None:
        """`finished`: None unless it was answered whole."""

    def joined(self, instance: InstanceId, at: Seconds) -> None:
        """A new instance or epoch."""

    def left(self, instance: InstanceId, at: Seconds) -> None:
        """An instance is gone."""


class OutcomeTracker(Tracker):
    """Observes *outcomes*: a first token, on time or late; a rejection, unless no instance could meet the SLO even when
    idle; or another end after the deadline of a request that waited."""

    @abstractmethod
    def outcome(self, request: Request, at: Seconds, *, on_time: bool, refused: bool = False) -> None: ...

    @override
    def first_token(self, request: Request, at: Seconds) -> None:
        self.outcome(request, at, on_time=at <= request.deadline)

    @override
    def refused(self, request: Request, at: Seconds, reason: str) -> None:
        if reason != RejectReason.SLO_UNREACHABLE:
            self.outcome(request, at, on_time=False, refused=True)

    @override
    def ended(self, request: Request, at: Seconds, finished: RequestFinished | None) -> None:
        waited = request.stage in (Stage.PENDING, Stage.PREFILL, Stage.HANDED_OVER)
        if waited and finished is None and at > request.deadline:
            self.outcome(request, at, on_time=False)
