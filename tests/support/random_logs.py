"""Logs as a pool would write them, drawn at random: caches, reports, requests, restarts, leaders that come and go."""

from collections.abc import Callable, Iterator
from random import Random

import msgspec

from pointsman.contracts.block_keys import pack_keys
from pointsman.contracts.cache import CacheCleared, CacheGap, CacheSnapshot, Run
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import LeaderElected, RequestGranted, Settings
from pointsman.contracts.fleet import InstanceLeft, InstanceProbed
from pointsman.contracts.requests import RequestAttemptFailed, RequestCancelled, RequestFailed
from pointsman.policies.admission import ADMISSION_POLICIES, AdmissionPolicy
from pointsman.policies.dispatch import Dispatcher
from pointsman.policies.ordering import ORDERING_POLICIES, OrderingPolicy
from pointsman.policies.policy_set import policy_set
from pointsman.policies.routing import ROUTING_POLICIES, RoutingPolicy
from pointsman.primitives import BlockKey, Epoch, InstanceId, RequestId, Tenant, Term
from pointsman.state.state import PoolSettings, State
from pointsman.state.trackers.base import Tracker
from pointsman.state.workload import Stage
from tests.support.events import finished, first_token, joined, removed, reported, route, stored
from tests.support.recorded_log import PRIORITIES, random_policies

ENGINES = ("a", "b", "c")
OUTLIERS: Settings = {"outlier.consecutive_failures": 1, "outlier.base_ejection_seconds": 1.0}
STEMS = [[100 * stem + depth for depth in range(1, 9)] for stem in range(1, 6)]


def every_tracker() -> tuple[Tracker, ...]:
    """What all policies together would have State remember."""
    policies: tuple[RoutingPolicy | AdmissionPolicy | OrderingPolicy, ...] = (
        *(policy_set(routing=name).routing for name in ROUTING_POLICIES),
        *(policy_set(admission=name).admission for name in ADMISSION_POLICIES),
        *(policy_set(ordering=name).ordering for name in ORDERING_POLICIES),
    )
    return tuple(memory for policy in policies for memory in policy.trackers())


def fresh_state() -> State:
    return State(PoolSettings(), every_tracker())


def random_log(seed: int, steps: int) -> list[LogEvent]:
    """The log that a leader's decisions and the events of its pool make, in an order that could be."""
    return list(_RandomPool(Random(seed)).steps(steps))


class _RandomPool:
    def __init__(self, chance: Random) -> None:
        self._chance = chance
        self._now = 0.0
        self._state = fresh_state()
        self._term = 0
        self._requests = 0
        self._epochs: dict[str, int] = {}
        self._sequences: dict[str, int] = {}
        self._late: list[LogEvent] = []
        """Decisions that reach the log later than what happened after them."""

    def steps(self, count: int) -> Iterator[LogEvent]:
        yield from self._elect()
        for engine in ENGINES:
            yield from self._join(engine)
        moves = (self._route, self._route, self._route, self._store, self._remove, self._report, self._first_token,
                 self._finish, self._finish, self._other_end, self._join_again, self._oddity, self._elect_seldom, self._fail,
                 self._eject, self._set_tenant_policies)  # fmt: skip
        for _ in range(count):
            self._now += self._chance.expovariate(20)
            yield from self._chance.choice(moves)()
            if self._chance.random() < 0.7:
                yield from self._settle_late()
        yield from self._settle_late()

    def _settle_late(self) -> list[LogEvent]:
        late, self._late = self._late, []
        return late

    def _seen(self, event: LogEvent) -> list[LogEvent]:
        self._state.apply(event)
        return [event]

    def _elect(self) -> Iterator[LogEvent]:
        yield from self._settle_late()
        self._term += 1
        self._dispatcher = Dispatcher(
            self._state, policy_set(prefill_window_tokens=400, settings=OUTLIERS), term=Term(self._term)
        )
        yield from self._seen(LeaderElected(at=self._now, term=Term(self._term), scheduler="s", as_of=0))

    def _elect_seldom(self) -> Iterator[LogEvent]:
        if self._chance.random() < 0.2:
            yield from self._elect()

    def _join(self, engine: str) -> list[LogEvent]:
        self._epochs[engine] = self._epochs.get(engine, 0) + 1
        self._sequences[engine] = 0
        return self._seen(joined(engine, at=self._now, epoch=self._epochs[engine]))

    def _join_again(self) -> list[LogEvent]:
        engine = self._engine()
        return self._join(engine) if InstanceId(engine) not in self._state.fleet or self._chance.random() < 0.05 else []

    def _engine(self) -> str:
        return self._chance.choice(ENGINES)

    def _next(self, engine: str) -> int:
        self._sequences[engine] += 2 if self._chance.random() < 0.1 else 1
        return self._sequences[engine]

    def _store(self) -> list[LogEvent]:
        engine, stem = self._engine(), self._chance.choice(STEMS)
        start = self._chance.randrange(len(stem)) if self._chance.random() < 0.5 else 0
        keys = stem[start : start + self._chance.randint(1, 8)]
        parent = stem[start - 1] if start else 0
        event = stored(engine, self._next(engine), keys, parent=parent, epoch=self._epochs[engine], at=self._now)
        return self._seen(event)

    def _remove(self) -> list[LogEvent]:
        engine, stem = self._engine(), self._chance.choice(STEMS)
        keys = self._chance.sample(stem, self._chance.randint(1, 4))
        return self._seen(removed(engine, self._next(engine), keys, epoch=self._epochs[engine], at=self._now))

    def _oddity(self) -> list[LogEvent]:
        name = self._engine()
        engine, epoch, at = InstanceId(name), Epoch(self._epochs[name]), self._now
        run = Run(pack_keys([BlockKey(key) for key in self._chance.choice(STEMS)]))
        events: list[Callable[[], LogEvent]] = [
            lambda: CacheGap(at=at, instance=engine, epoch=epoch, sequence=self._next(name), missed=1, reason="x"),
            lambda: CacheCleared(at=at, instance=engine, epoch=epoch, sequence=self._next(name)),
            lambda: CacheSnapshot(at=at, instance=engine, epoch=epoch, sequence=self._next(name), runs=[run]),
            lambda: InstanceProbed(at=at, instance=engine, epoch=epoch, parity=True),
            lambda: InstanceLeft(at=at, instance=engine, epoch=epoch, reason="x"),
        ]
        return self._seen(self._chance.choice(events)())

    def _report(self) -> list[LogEvent]:
        name = self._engine()
        sequence, epoch = self._sequences[name], self._epochs[name]
        return self._seen(
            reported(name, sequence, [1], epoch=epoch, at=self._now, serving=self._chance.random() < 0.95)
        )

    def _route(self) -> list[LogEvent]:
        self._requests += 1
        stem = self._chance.choice(STEMS)
        command = route(
            f"r{self._requests}",
            [*stem[: self._chance.randint(1, 8)], 10_000 + self._requests],
            arrived_at=self._now,
            session=f"s{self._chance.randrange(5)}",
            tenant=Tenant(f"t{self._chance.randrange(3)}"),
            streaming=self._chance.random() < 0.7,
            priority=self._chance.choice(PRIORITIES),
        )
        self._late += self._dispatcher.route(command, self._now)
        if self._chance.random() < 0.1:
            again = msgspec.structs.replace(command, attempt=2, excluded=[InstanceId(self._engine())])
            self._late += self._dispatcher.route(again, self._now)
        return []

    def _running(self, *stages: Stage) -> tuple[str, str] | None:
        found = [r for r in self._state.workload.requests.values() if r.stage in stages]
        if not found:
            return None
        request = self._chance.choice(found)
        return request.id, request.instance

    def _first_token(self) -> Iterator[LogEvent]:
        running = self._running(Stage.PREFILL)
        if running:
            yield from self._settle_late()
            yield from self._seen(first_token(*running, at=self._now))
            self._late += self._dispatcher.grant_waiting(InstanceId(running[1]), self._now)

    def _finish(self) -> Iterator[LogEvent]:
        running = self._running(Stage.DECODING, Stage.PREFILL)
        if running:
            yield from self._settle_late()
            yield from self._seen(finished(*running, at=self._now))
            self._late += self._dispatcher.relocate_pending(self._now)

    def _fail(self) -> Iterator[LogEvent]:
        running = self._running(Stage.PREFILL, Stage.DECODING)
        if running:
            yield from self._settle_late()
            request, instance = RequestId(running[0]), InstanceId(running[1])
            yield from self._seen(
                RequestAttemptFailed(at=self._now, request=request, instance=instance, failure="http_5xx", status=500)
            )

    def _set_tenant_policies(self) -> list[LogEvent]:
        if self._chance.random() < 0.1:
            policies = random_policies(self._chance, ["t0", "t1", "t2"])
            self._late += self._dispatcher.set_tenant_policies(policies, self._now, by="alice")
        return []

    def _eject(self) -> list[LogEvent]:
        self._late += self._dispatcher.eject_outliers(self._now)
        return []

    def _other_end(self) -> Iterator[LogEvent]:
        running = self._running(*Stage)
        if running is None:
            return
        yield from self._settle_late()
        request, instance = RequestId(running[0]), InstanceId(self._engine())
        events: list[LogEvent] = [
            RequestFailed(at=self._now, request=request, reason="x", status=502, instance=instance),
            RequestCancelled(at=self._now, request=request, reason="x"),
            RequestGranted(at=self._now, request=request, instance=instance, attempt=2),
        ]
        yield from self._seen(self._chance.choice(events))
