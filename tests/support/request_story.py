"""The log of a small pool that a test tells step by step: requests with prompts of so many tokens, and what becomes of
them."""

from dataclasses import dataclass, field
from typing import Any

from pointsman.contracts.reasons import CancelCause
from pointsman.contracts.requests import (
    AttemptFailure,
    PrefillFinished,
    RequestAttemptFailed,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
)
from pointsman.policies.policy_set import PolicySet, policy_set
from pointsman.primitives import InstanceId, RequestId
from tests.support.events import joined, route
from tests.support.logged_leader import LoggedLeader


@dataclass
class RequestStory(LoggedLeader):
    """Engines `a`, `b`, ... compute a token in a millisecond. `now` is the clock."""

    engines: str = "ab"
    policies: PolicySet = field(default_factory=lambda: policy_set(routing="round_robin", admission="none"))
    now: float = 100.0
    prompts: int = 0

    def __post_init__(self) -> None:
        self.lead(self.policies, at=self.now)
        for engine in self.engines:
            self.joins(engine)

    def joins(self, engine: str, **fields: Any) -> None:
        self.happens(joined(engine, at=self.now, **fields))
        self.decides(self.dispatcher.place_held(self.now))

    def later(self, seconds: float) -> None:
        self.now += seconds

    def asks(self, request: str, blocks: int = 4, *, waited: float = 0.0, **fields: Any) -> str:
        """A prompt that no other begins like. `waited` since it arrived at the ingress. Where it is placed."""
        self.prompts += 1
        keys = [1_000_000 * self.prompts + block for block in range(blocks)]
        command = route(request, keys, arrived_at=self.now - waited, **fields)
        self.decides(self.dispatcher.route(command, self.now))
        return self.where(request)

    def again(self, request: str, *, attempt: int, excluded: str) -> str:
        known = self.state.workload.requests[RequestId(request)]
        command = route(
            request, [int(key) for key in known.keys], arrived_at=known.arrived_at, attempt=attempt,
            excluded=[InstanceId(name) for name in excluded],
        )  # fmt: skip
        self.decides(self.dispatcher.route(command, self.now))
        return self.where(request)

    def where(self, request: str) -> str:
        known = self.state.workload.requests.get(RequestId(request))
        return known.instance if known is not None else ""

    def begins(self, request: str) -> None:
        """Its first token comes."""
        known = self.state.workload.requests[RequestId(request)]
        self.happens(
            PrefillFinished(
                at=self.now, request=known.id, instance=known.instance, ttft=self.now - known.arrived_at,
                prefill=self.now - known.granted_at,
            )
        )  # fmt: skip
        self.decides(self.dispatcher.grant_waiting(known.instance, self.now))

    def ends(
        self, request: str, *, ttft: float | None = None, cached: int = 0, tokens: int = 10, tpot: float = 0.02
    ) -> None:
        known = self.state.workload.requests[RequestId(request)]
        e2e = self.now - known.arrived_at
        self.happens(
            RequestFinished(
                at=self.now, request=known.id, instance=known.instance, e2e=e2e, prompt_tokens=known.prompt_tokens,
                completion_tokens=tokens, cached_tokens=cached, ttft=e2e if ttft is None else ttft, tpot=tpot,
            )
        )  # fmt: skip
        self.decides(self.dispatcher.grant_waiting(known.instance, self.now))

    def answers(self, request: str, *, after: float) -> None:
        """First token after so many seconds, and the end with it."""
        self.later(after)
        self.begins(request)
        self.ends(request)

    def attempt_fails(self, request: str, failure: AttemptFailure, *, attempt: int = 1) -> None:
        self.happens(
            RequestAttemptFailed(
                at=self.now, request=RequestId(request), instance=InstanceId(self.where(request)), attempt=attempt,
                failure=failure, status=500 if failure == "http_5xx" else 0, detail="CUDA error",
            )
        )  # fmt: skip

    def fails(self, request: str) -> None:
        self.happens(RequestFailed(at=self.now, request=RequestId(request), reason="engine_failed", status=502))

    def is_cancelled(self, request: str, cause: CancelCause) -> None:
        known = self.state.workload.requests[RequestId(request)]
        self.happens(
            RequestCancelled(
                at=self.now, request=known.id, instance=known.instance, reason=cause.value, cause=cause
            )
        )  # fmt: skip
