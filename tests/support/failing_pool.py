"""Engines that fail requests or are slow, the leader that looks after them, and the log of all that."""

from dataclasses import dataclass, field

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.fleet import InstanceEjected
from pointsman.contracts.requests import AttemptFailure, RequestAttemptFailed, RequestFailed
from pointsman.policies.policy_set import PolicySet, policy_set
from pointsman.primitives import InstanceId, RequestId
from pointsman.state.fleet import Status
from tests.support.events import finished, first_token, joined, rejected, route
from tests.support.logged_leader import LoggedLeader

PREFILL = 0.065
"""Seconds of one block and a token by the cost model of `joined`."""


def policies(**settings: float) -> PolicySet:
    named = {f"outlier.{name}": value for name, value in settings.items()}
    return policy_set(routing="round_robin", admission="none", ordering="fcfs", settings=dict(named))


@dataclass
class FailingPool(LoggedLeader):
    """A leader, engines that do what a test says, and the log of all that."""

    engines: str = "abcd"
    policies: PolicySet = field(default_factory=policies)
    now: float = 1000.0
    numbers: int = 0
    clock: float = 0.0
    """How far the ingress's clock is ahead."""

    def __post_init__(self) -> None:
        self.lead(self.policies, at=self.now)
        for engine in self.engines:
            self.happens(joined(engine, at=self.now))

    def later(self, seconds: float) -> None:
        self.now += seconds

    def look(self) -> list[LogEvent]:
        """What the leader decides of outliers now."""
        return self.decides(self.dispatcher.eject_outliers(self.now))

    def asks(self, *, attempt: int = 1, request: str = "", excluded: str = "", instead_of: str = "") -> tuple[str, str]:
        """A request, and where it goes."""
        if not request:
            self.numbers += 1
            request = f"r{self.numbers}"
        command = route(
            request, [self.numbers], arrived_at=self.now + self.clock, sent_at=self.now + self.clock, attempt=attempt,
            excluded=[InstanceId(i) for i in excluded], instead_of=RequestId(instead_of),
        )  # fmt: skip
        self.decides(self.dispatcher.route(command, self.now))
        return request, self.state.workload.requests[RequestId(request)].instance

    def fails(self, request: str, instance: str, failure: AttemptFailure = "http_5xx", *, attempt: int = 1) -> None:
        self.happens(
            RequestAttemptFailed(
                at=self.now + self.clock, request=RequestId(request), instance=InstanceId(instance), attempt=attempt,
                failure=failure, status=500 if failure == "http_5xx" else 0, detail="Internal Server Error",
            )
        )  # fmt: skip

    def at_of(self, request: str) -> InstanceId:
        return self.state.workload.requests[RequestId(request)].instance

    def refuses(self, request: str) -> None:
        """The leader refuses its next attempt."""
        self.happens(rejected(request, "slo_ttft", at=self.now, attempt=2))

    def gives_up(self, request: str) -> None:
        self.happens(RequestFailed(at=self.now + self.clock, request=RequestId(request), reason="engine", status=502))

    def fails_everywhere(self) -> tuple[str, str, str]:
        """A request, and the two engines that failed it before its ingress gave up."""
        request, first = self.asks()
        self.fails(request, first)
        _, second = self.asks(request=request, attempt=2, excluded=first)
        self.fails(request, second, attempt=2)
        self.gives_up(request)
        return request, first, second

    def answers(self, request: str, instance: str, *, after: float = PREFILL) -> None:
        self.later(after)
        granted_at = self.state.workload.requests[RequestId(request)].granted_at
        self.happens(first_token(request, instance, at=self.now + self.clock, prefill=self.now - granted_at))
        self.happens(finished(request, instance, at=self.now + self.clock))

    def serve(self, count: int, *, sick: str = "", slow: float = 1.0) -> list[str]:
        """So many requests, one after the other. `sick` answers 500 to each, and the next engine serves it, or, where
        `slow`, is so many times slower than it should be. Where each went first."""
        went = []
        for _ in range(count):
            request, instance = self.asks()
            went.append(instance)
            if instance == sick and slow == 1.0:
                self.later(0.01)
                self.fails(request, instance)
                _, instance = self.asks(request=request, attempt=2, excluded=instance)
            self.answers(request, instance, after=PREFILL * (slow if instance == sick else 1.0))
            self.look()
        return went

    def visit(self, instance: InstanceId, count: int, *, sick: str = "") -> None:
        """Serve until so many requests went to that engine first."""
        while count:
            count -= self.serve(1, sick=sick) == [instance]

    def status(self, instance: InstanceId) -> tuple[Status, bool]:
        return self.state.fleet[instance].status, self.state.fleet[instance].half_open

    def ejections(self) -> list[InstanceEjected]:
        return [entry.event for entry in self.log if isinstance(entry.event, InstanceEjected)]
