"""A pool of two engines under random traffic of tenants with limits, as its leader sees it: `log` has the events in the order
in which the leader applied them."""

from random import Random
from typing import Any

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.reasons import CancelCause
from pointsman.contracts.requests import RequestCancelled, RequestFailed, RequestFinished
from pointsman.contracts.tenants import TenantPolicies
from pointsman.policies.dispatch import Dispatcher
from pointsman.policies.policy_set import policy_set
from pointsman.primitives import RequestId, Term
from pointsman.state.checkpoint import decode_state, encode_state
from pointsman.state.state import FOLD_VERSION, PoolSettings, State
from pointsman.state.workload import Request, Stage
from tests.support.events import first_token, joined, route
from tests.support.recorded_log import PRIORITIES, random_policies

TENANTS = ["a", "b", "c", "d"]
DAY = 86_400.0


class LimitedPool:
    def __init__(
        self,
        seed: int,
        *,
        start: float = 0.0,
        admission: str = "none",
        fold_version: int = FOLD_VERSION,
        **settings: Any,
    ) -> None:
        self.chance = Random(seed)
        self.now = start
        self.policies = policy_set(admission=admission, prefill_window_tokens=900, **settings)
        self.state = State(PoolSettings(fold_version=fold_version), self.policies.trackers())
        self.log: list[LogEvent] = []
        self.term = 1
        self.leader = Dispatcher(self.state, self.policies, term=Term(1))
        self.numbers = 0
        self.asked: list[Any] = []
        for engine in ("e1", "e2"):
            self.seen(joined(engine, at=self.now, kv_capacity_tokens=20_000))

    def seen(self, event: LogEvent) -> None:
        self.state.apply(event)
        self.log.append(event)

    def decided(self, events: list[LogEvent]) -> list[LogEvent]:
        self.log += events
        return events

    def set_policies(self, policies: TenantPolicies) -> None:
        self.decided(self.leader.set_tenant_policies(policies, self.now, by="alice"))

    def arrive(self, tenant: str, *, blocks: int = 4, **fields: Any) -> list[LogEvent]:
        self.numbers += 1
        keys = [*range(1, blocks), 10_000 + self.numbers] if blocks else []
        known = {"tenant": tenant, "max_output_tokens": self.chance.choice((1, 50, 2_000))} | fields
        command = route(f"r{self.numbers}", keys, arrived_at=self.now, slo_ttft=1e6, **known)
        self.asked.append(command)
        return self.decided(self.leader.route(command, self.now))

    def live(self, steps: int, *, rate: float = 20.0, policies: bool = True) -> "LimitedPool":
        moves = [self._arrive] * 8 + [self._first_token] * 6 + [self._finish] * 5 + [self._break_off, self._repeat]
        moves += [self._retry, self._lose, self._take_over] + ([self._set_policies] if policies else [])
        for _ in range(steps):
            self.now += self.chance.expovariate(rate)
            self.chance.choice(moves)()
        return self

    def end_all(self) -> None:
        while self.state.workload.requests:
            self.now += 1.0
            for request in list(self.state.workload.requests.values()):
                if request.stage is Stage.PREFILL:
                    self.seen(first_token(request.id, request.instance, at=self.now))
                elif request.stage is Stage.DECODING:
                    self.finish(request)
            for engine in list(self.state.workload.queues):
                self.decided(self.leader.grant_waiting(engine, self.now))

    def finish(self, request: Request) -> None:
        instance = request.instance
        self.seen(
            RequestFinished(
                at=self.now, request=request.id, instance=instance, e2e=1.0, prompt_tokens=request.prompt_tokens,
                completion_tokens=self.chance.choice((-1, 1, 300, 3_000)),
                cached_tokens=self.chance.choice((-1, 0, request.prompt_tokens // 2)), ttft=1.0, tpot=0.01,
            )
        )  # fmt: skip
        self.decided(self.leader.grant_waiting(instance, self.now))

    def _arrive(self) -> None:
        self.arrive(
            self.chance.choice(TENANTS),
            blocks=self.chance.randint(0, 12),
            priority=self.chance.choice(PRIORITIES),
            answers=self.chance.choice((1, 1, 3)),
        )

    def _one(self, *stages: Stage) -> Request | None:
        found = [request for request in self.state.workload.requests.values() if request.stage in stages]
        return self.chance.choice(found) if found else None

    def _first_token(self) -> None:
        if request := self._one(Stage.PREFILL):
            self.seen(first_token(request.id, request.instance, at=self.now))
            self.decided(self.leader.grant_waiting(request.instance, self.now))

    def _finish(self) -> None:
        if request := self._one(Stage.DECODING):
            self.finish(request)

    def _break_off(self) -> None:
        if request := self._one(*Stage):
            end = RequestFailed if self.chance.random() < 0.5 else RequestCancelled
            got = self.chance.choice((-1, 0, 1, 300, 3_000))
            if request.stage is Stage.PENDING:
                self.decided(self.leader.cancel_ungranted(request.id, CancelCause.CLIENT_GONE, self.now))
            elif end is RequestFailed:
                self.seen(RequestFailed(at=self.now, request=request.id, reason="x", status=502, output_tokens=got))
            else:
                self.seen(RequestCancelled(at=self.now, request=request.id, reason="x", output_tokens=got))

    def _repeat(self) -> None:
        if self.asked:
            self.decided(self.leader.route(self.chance.choice(self.asked), self.now))

    def _retry(self) -> None:
        if request := self._one(Stage.PREFILL):
            command = route(request.id, [], attempt=request.attempt + 1, excluded=[request.instance])
            self.decided(self.leader.route(command, self.now))

    def _lose(self) -> None:
        """Its leader gives a request up, and its ingress asks for it again, now and then as another tenant's."""
        if request := self._one(*Stage):
            lost = self.decided(self.leader.cancel_any(request.id, CancelCause.GRANT_UNHEARD, self.now))
            assert ended(lost, request.id)
            tenant = request.tenant if self.chance.random() < 0.8 else self.chance.choice(TENANTS)
            self.arrive(tenant, instead_of=request.id)

    def _set_policies(self) -> None:
        if self.chance.random() < 0.3:
            self.set_policies(random_policies(self.chance, TENANTS))

    def _take_over(self) -> None:
        """A leader that has folded the log, or begins with a checkpoint of it."""
        if self.chance.random() > 0.3:
            return
        self.term += 1
        if self.chance.random() < 0.5:
            self.state = decode_state(encode_state(self.state))
        else:
            self.state = State(PoolSettings(), self.policies.trackers())
            for event in self.log:
                self.state.apply(event)
        self.leader = Dispatcher(self.state, self.policies, term=Term(self.term))


def ended(events: list[LogEvent], request: str) -> LogEvent | None:
    return next((event for event in events if getattr(event, "request", "") == RequestId(request)), None)
