"""Judges the decisions of each term by separate rules. In comes the history of a log, in each leader's order
(`replay.leader_order`); `decision_rules` judges each decision on the pool model, and after each turn no request may
wait at an engine with room. Uses nothing of `pointsman.policies`: which instance a policy prefers is not judged."""

from collections.abc import Callable, Collection, Iterator

from pointsman.contracts.decisions import LeaderElected, RequestHandedOver, RequestPlaced, RequestRejected
from pointsman.contracts.fleet import InstanceUnejected
from pointsman.contracts.requests import RequestEvent
from pointsman.primitives import EngineSeconds, InstanceId, Sequence
from pointsman.simulation.replay.leader_order import Kind, LeaderOrder
from pointsman_lab.torture.decision_rules import DecisionRules
from pointsman_lab.torture.limits_model import LimitsModel
from pointsman_lab.torture.network import Stored
from pointsman_lab.torture.pool_model import PoolModel
from pointsman_lab.torture.pool_records import ARRIVED

RETURN_SECONDS_MAX: EngineSeconds = 4.0
"""Virtual seconds within which an active leader ends an expired ejection."""
PASSED_SECONDS_MAX: EngineSeconds = 1.0
"""Bounds the time counted between two decisions: the leader may have been paused."""


def audit(
    history: list[Stored], new_model: Callable[[], PoolModel], *, lapses: Collection[tuple[str, Sequence]] = ()
) -> Iterator[str]:
    """What is wrong with the decisions of all terms. `lapses`: by scheduler, entries that it read without a valid
    lease."""
    for stored in history:
        if isinstance(stored.event, LeaderElected) and not stored.duplicate:
            model, limits = new_model(), LimitsModel()
            for before in history[: stored.sequence]:
                if model.apply(before.event, before.sequence) and before.event is not None:
                    limits.apply(before.event)
            yield from _Term(stored.event, model, limits, lapses).judge(history[stored.sequence :])


class _Term(DecisionRules):
    def __init__(
        self,
        elected: LeaderElected,
        model: PoolModel,
        limits: LimitsModel,
        lapses: Collection[tuple[str, Sequence]],
    ) -> None:
        super().__init__(elected, model)
        self._limits = limits
        self._lapses = lapses
        self._overdue: dict[InstanceId, EngineSeconds] = {}
        self._speed = float(elected.pool.get("speed", 1.0))
        self._decided_at: tuple[EngineSeconds, EngineSeconds] = (0.0, 0.0)
        """When the log had the last decision, and when its leader took it."""
        self._touched: dict[InstanceId, None] = {}
        """Instances at which the current turn placed, freed or granted a request."""

    def judge(self, entries: list[Stored]) -> Iterator[str]:
        order: LeaderOrder[Stored] = LeaderOrder(self._term)
        read: list[Stored] = []
        for stored in entries:
            own = stored.stamp is not None and stored.stamp.term == self._term
            for step in order.feed(stored) if not (own and stored.duplicate) else ():
                if step.kind is Kind.DECIDED:
                    yield from self._decided(step.entry, read)
                    read.clear()
                elif step.kind is Kind.READ:
                    read.append(step.entry)
            if order.hole:
                return

    def _decided(self, stored: Stored, read: list[Stored]) -> Iterator[str]:
        event, stamp = stored.event, stored.stamp
        assert event is not None
        assert stamp is not None
        if self._displaced is not None and not (
            isinstance(event, RequestPlaced) and event.request == self._displaced.displaced_by
        ):
            self._apply_displaced()
        if (event.at, stamp.as_of) != self._moment:
            yield from self._conclude_turn(f"before decision {stamp.number} of term {self._term}")
            self._moment = (event.at, stamp.as_of)
        for entry in read:
            yield from self._read(entry)
        for problem in (*self._problems(stored), *self._overdue_returns(stored)):
            yield f"{type(event).__name__} at {stored.sequence}, {stamp.number} of term {self._term}: {problem}"
        if problem := self._limits.apply(event):
            yield f"limits at {stored.sequence}, {stamp.number} of term {self._term}: {problem}"
        self._touch(event)
        if isinstance(event, RequestRejected) and event.displaced_by:
            self._displaced = event
            return
        self._apply_displaced()
        self._model.apply(event)
        if not isinstance(event, RequestHandedOver):  # makes no room for those that wait where it goes
            self._touch(event)

    def _apply_displaced(self) -> None:
        if self._displaced is not None:
            self._model.apply(self._displaced)
            self._displaced = None

    def _read(self, stored: Stored) -> Iterator[str]:
        yield from self._conclude_turn(f"before entry {stored.sequence}, in term {self._term}")
        if stored.stamp is None or stored.stamp.term != self._term:
            if (self._leader, stored.sequence) not in self._lapses:
                self._touch(stored.event)
            if self._model.apply(stored.event, stored.sequence) and stored.event is not None:
                self._limits.apply(stored.event)

    def _touch(self, event: object) -> None:
        if isinstance(event, RequestEvent):
            request = self._model.requests.get(event.request)
            if request is not None and request.instance and request.stage != ARRIVED:
                self._touched[request.instance] = None

    def _conclude_turn(self, when: str) -> Iterator[str]:
        for instance in self._touched:
            first, known = self._first(instance), self._model.instances.get(instance)
            waits = first is not None and known is not None and known.status in ("ready", "draining")
            if waits and first is not None and not self._model.on_trial(instance) and self._fits(first):
                yield f"{when}: {first.id} waits for {instance}, which has room for its {first.uncached} tokens"
        self._touched.clear()

    def _overdue_returns(self, stored: Stored) -> Iterator[str]:
        assert stored.event is not None
        before, self._decided_at = self._decided_at, (stored.at, stored.event.at / self._speed)
        stored_since, decided_since = stored.at - before[0], self._decided_at[1] - before[1]
        passed = max(
            0.0, min(stored_since, decided_since, PASSED_SECONDS_MAX)
        )  # a slow log stores at once what took seconds
        for name, known in self._model.instances.items():
            if not known.ejected or self._ejections.overdue(name, stored.event.at) <= 0:
                self._overdue.pop(name, None)
                continue
            self._overdue[name] = self._overdue.get(name, 0.0) + passed
            if self._overdue[name] > RETURN_SECONDS_MAX and not isinstance(stored.event, InstanceUnejected):
                yield f"{name} is still ejected, {self._overdue[name]:.1f} s after its ejection was over"
