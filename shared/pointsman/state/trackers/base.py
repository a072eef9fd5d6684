"""The moments of a request and of an instance that a memory may take note of."""

from pointsman.contracts.requests import RequestFinished
from pointsman.primitives import InstanceId, Seconds
from pointsman.state.workload import Request


class Tracker:
    """Takes note of what it needs; everything else is a no-op. Called by State alone, at the event's time `at`.

    A request passes `arrived`, `placed` (again after each `unplaced`), `granted`, `handed_over` where another instance
    decodes it, `first_token` and `ended`, and may end or be unplaced at any point. At `ended` its fields are those of its last placement.
    """

    def arrived(self, request: Request, at: Seconds) -> None:
        """A valid request reached the leader; it is placed nowhere yet."""

    def placed(self, request: Request, at: Seconds) -> None:
        """It waits in the queue of `request.instance`, first or again."""

    def unplaced(self, request: Request, at: Seconds) -> None:
        """It leaves `request.instance` before its end: migrated, or its engine failed."""

    def granted(self, request: Request, at: Seconds) -> None:
        """It was sent to the engine."""

    def handed_over(self, request: Request, at: Seconds) -> None:
        """Its prefill at `request.prefilled_by` is over, and it is with `request.instance` now, which will decode it. Its
        first token is still to come."""

    def first_token(self, request: Request, at: Seconds) -> None:
        """Its prefill is over; `request.granted_at` says when it began to wait for that inside the engine."""

    def refused(self, request: Request, at: Seconds, reason: str) -> None:
        """It is placed nowhere, and its end follows at once. `reason`: that of RequestRejected."""

    def ended(self, request: Request, at: Seconds, finished: RequestFinished | None) -> None:
        """It is gone. `finished` where it was answered whole, None for every other end."""

    def joined(self, instance: InstanceId, at: Seconds) -> None:
        """An instance is new, or began a new epoch."""

    def left(self, instance: InstanceId, at: Seconds) -> None:
        """An instance is gone."""
