"""Taking a request out of its engine before its first token: when it is planned, what the leader makes of it, and where the
log says the request is when the engine was quicker after all."""

from typing import Any

import msgspec
import pytest
from typing_extensions import override

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import MigrationRefused, RequestGranted, RequestMigrated
from pointsman.contracts.fleet import InstanceDraining, InstanceEjected, InstanceSuspected
from pointsman.contracts.requests import PrefillFinished, RequestCancelled
from pointsman.policies.dispatch import Dispatcher
from pointsman.policies.policy_set import policy_set
from pointsman.policies.rebalancing import redispatch
from pointsman.policies.rebalancing.base import Migration, MigrationPlan
from pointsman.policies.rebalancing.redispatch import (
    GAIN_SECONDS_MIN,
    REBOUND_MAX,
    Redispatching,
    Window,
)
from pointsman.policies.stall_detection import ABORT_STALL_SECONDS, stalled_seconds
from pointsman.ports import LogEntry
from pointsman.primitives import Epoch, InstanceId, RequestId
from pointsman.simulation.replay import verify
from pointsman.state.outliers import OVERDUE_SECONDS
from pointsman.state.state import PoolSettings, State
from pointsman.state.workload import Request, Stage
from tests.support.events import finished, first_token, joined, route, stored
from tests.support.leading import leader_of
from tests.support.recorded_log import RecordedFleet

A, B = InstanceId("a"), InstanceId("b")
PREFILL = 0.641
"""Seconds of a prompt of ten blocks and a token."""


def leader(*instances: str, rebind: bool = True, **settings: Any) -> Dispatcher:
    policies = policy_set(routing="min_ttft", admission="none", ordering="fcfs", rebind=rebind, **settings)
    return leader_of(instances or ("a", "b"), policies)


def place(dispatcher: Dispatcher, request: str, now: float = 0.0, **fields: Any) -> list[LogEvent]:
    number = int(request[1:])
    keys = list(range(1000 * number + 1, 1000 * number + 11))
    return dispatcher.route(route(request, keys, arrived_at=now, **fields), now)


def known(dispatcher: Dispatcher, request: str) -> Request:
    return dispatcher.state.workload.requests[RequestId(request)]


def planned(dispatcher: Dispatcher, now: float) -> list[Migration]:
    return Redispatching(dispatcher.state, now, Window()).plan()


def carried_out(dispatcher: Dispatcher, now: float, *moves: Migration) -> list[LogEvent]:
    plan = MigrationPlan(dispatcher.state.sequence, moves or tuple(planned(dispatcher, now)), "p.1", "by_hand")
    return dispatcher.migrate(plan, now)


def move_of(request: str, source: str = "a", target: str = "b") -> Migration:
    return Migration(RequestId(request), InstanceId(source), InstanceId(target), 1.0, "by hand", rebind=True)


def refusals(events: list[LogEvent]) -> list[str]:
    return [event.reason for event in events if isinstance(event, MigrationRefused)]


def at_a(dispatcher: Dispatcher) -> Dispatcher:
    """One request in the engine of `a`, which then says nothing."""
    place(dispatcher, "r1")
    assert known(dispatcher, "r1").instance == A
    return dispatcher


def test_what_is_overdue_starts_again_elsewhere_and_its_lost_work_is_counted() -> None:
    dispatcher = at_a(leader())
    sure = PREFILL + OVERDUE_SECONDS
    assert planned(dispatcher, PREFILL + 1.0) == []
    assert planned(dispatcher, sure) == []

    now = sure + 0.5
    (move,) = planned(dispatcher, now)
    migrated, granted = carried_out(dispatcher, now, move)

    assert (move.source, move.target, move.rebind) == (A, B, True)
    assert move.benefit == pytest.approx(now - PREFILL - 2 * PREFILL)
    assert isinstance(migrated, RequestMigrated)
    assert migrated.rebound
    assert migrated.wasted == pytest.approx(PREFILL)
    assert isinstance(granted, RequestGranted)
    assert (granted.instance, granted.rebind) == (B, False)
    request, lines = known(dispatcher, "r1"), dispatcher.state.workload.queues
    assert (request.stage, request.instance, request.rebound_from) == (Stage.PREFILL, B, A)
    assert (list(lines[A].prefill), list(lines[B].prefill)) == ([], ["r1"])
    assert dispatcher.state.promises.blocks(A) == 0


def test_what_starts_again_elsewhere_fetches_nothing() -> None:
    """Its ingress goes on with the exchange."""
    dispatcher = leader()
    for name in (A, B):
        dispatcher.state.apply(joined(name, epoch=2, fetches=True, transfer_tokens_per_s=1e6))
    keys = list(range(1, 11))
    dispatcher.state.apply(stored(A, 1, keys, epoch=2))
    dispatcher.route(route("r1", [*keys, *range(500, 502)]), 0.0)
    assert known(dispatcher, "r1").instance == A

    migrated, granted = carried_out(dispatcher, 30.0)

    assert isinstance(migrated, RequestMigrated)
    assert isinstance(granted, RequestGranted)
    assert (granted.instance, granted.fetch_from) == (B, "")
    assert migrated.predicted_ttft > 0.5  # all twelve blocks and a token are computed
    assert not known(dispatcher, "r1").fetching


def test_lost_work_is_waited_out() -> None:
    """A prompt of 6.4 s that should be done: it is worth it only once it is as late as two of its prefills and a second."""
    dispatcher = leader()
    keys = list(range(1, 101))
    dispatcher.route(route("r1", keys), 0.0)
    prefill = 6.401

    assert planned(dispatcher, 3 * prefill + GAIN_SECONDS_MIN - 0.1) == []
    assert len(planned(dispatcher, 3 * prefill + GAIN_SECONDS_MIN + 0.1)) == 1


def test_behind_a_prefill_that_does_not_end_nothing_is_lost_by_leaving() -> None:
    dispatcher = leader("a")
    for number in (1, 2, 3):
        place(dispatcher, f"r{number}")
    dispatcher.state.apply(joined("b"))
    now = 3 * PREFILL + OVERDUE_SECONDS + 0.1
    (move,) = planned(dispatcher, now)
    (migrated, _) = carried_out(dispatcher, now, move)

    assert move.request == "r2"  # r1 is later, but its work is lost; r3 is not overdue by enough to be worth more
    assert isinstance(migrated, RequestMigrated)
    assert migrated.wasted == 0.0


def test_of_an_instance_that_does_not_answer_being_overdue_at_all_will_do() -> None:
    dispatcher = at_a(leader())
    now = PREFILL + 2 * PREFILL + GAIN_SECONDS_MIN + 0.05
    assert planned(dispatcher, now) == []

    dispatcher.state.apply(InstanceSuspected(at=now, instance=A, epoch=Epoch(1), silent_seconds=3.0))

    assert len(planned(dispatcher, now)) == 1
    assert planned(dispatcher, PREFILL) == []


@pytest.mark.parametrize(
    ("why", "reason"),
    [
        ("ended", "not_waiting"),
        ("first token", "not_waiting"),
        ("from elsewhere", "elsewhere"),
        ("target drains", "target_unavailable"),
        ("target has failed it", "target_unavailable"),
        ("target is full", "target_full"),
        ("not late", "not_overdue"),
        ("late, and too much lost", "no_gain"),
    ],
)
def test_the_leader_looks_again(why: str, reason: str) -> None:
    dispatcher, now = at_a(leader(prefill_window_tokens=700)), PREFILL + 60.0
    state, move = dispatcher.state, move_of("r1")
    match why:
        case "ended":
            state.apply(finished("r1", "a", at=1.0))
        case "first token":
            state.apply(first_token("r1", "a", at=1.0))
        case "from elsewhere":
            move = move_of("r1", "b", "a")
        case "target drains":
            state.apply(InstanceDraining(at=1.0, instance=B, epoch=Epoch(1)))
        case "target has failed it":
            known(dispatcher, "r1").excluded = (B,)
        case "target is full":
            place(dispatcher, "r2", now, excluded=[A])
            assert known(dispatcher, "r2").instance == B
        case "not late":
            now = PREFILL + OVERDUE_SECONDS - 0.1
        case _:
            known(dispatcher, "r1").prefill_seconds = 40.0  # all of it done, and to be done again
            known(dispatcher, "r1").engine_seconds = 40.0

    events = carried_out(dispatcher, now, move)

    assert refusals(events) == [reason]
    assert [event.rebind for event in events if isinstance(event, MigrationRefused)] == [True]
    assert not any(isinstance(event, RequestMigrated) for event in events)


def test_once_is_enough_and_only_so_many_at_a_time() -> None:
    dispatcher = leader("a")
    for number in range(1, REBOUND_MAX + 3):
        place(dispatcher, f"r{number}")
    dispatcher.state.apply(joined("b"))
    moves = [move_of(f"r{number}") for number in range(1, REBOUND_MAX + 2)]
    events = carried_out(dispatcher, 100.0, *moves, move_of("r1", "b", "a"))

    assert sum(isinstance(event, RequestMigrated) for event in events) == REBOUND_MAX
    assert refusals(events) == ["too_many_rebound", "rebound_before"]
    assert planned(dispatcher, 100.0) == []
    place(dispatcher, "r1", 101.0, attempt=2, excluded=[B])
    assert (known(dispatcher, "r1").instance, known(dispatcher, "r1").rebind) == (A, False)
    assert refusals(carried_out(dispatcher, 200.0, move_of("r1"))) == ["rebound_before"]


def test_an_engine_that_was_left_counts_as_stalled_until_it_gives_a_first_token_or_some_time_is_over() -> None:
    """Else its empty line would draw whatever comes next, the one re-binding that others have included."""
    dispatcher, now = at_a(leader()), PREFILL + OVERDUE_SECONDS + 1.0
    line = dispatcher.state.workload.queues[A]
    carried_out(dispatcher, now)

    assert stalled_seconds(line, now + ABORT_STALL_SECONDS) == pytest.approx(now + ABORT_STALL_SECONDS)
    assert stalled_seconds(line, now + ABORT_STALL_SECONDS + 0.1) == 0.0
    place(dispatcher, "r2", now, excluded=[B])
    assert stalled_seconds(line, now) == pytest.approx(now)
    dispatcher.state.apply(first_token("r2", "a", at=now + 1))
    assert stalled_seconds(line, now + 1) == 0.0


def taken_out(dispatcher: Dispatcher, number: int) -> float:
    """A request that gets no first token from `a`, and then goes to `b`; returns when."""
    placed = 10.0 * number
    place(dispatcher, f"r{number}", placed, excluded=[B])
    known(dispatcher, f"r{number}").excluded = ()
    now = placed + PREFILL + OVERDUE_SECONDS + 1.0
    carried_out(dispatcher, now)
    assert known(dispatcher, f"r{number}").instance == B
    return now


def ejected(dispatcher: Dispatcher, now: float) -> list[str]:
    return [event.instance for event in dispatcher.eject_outliers(now) if isinstance(event, InstanceEjected)]


def test_an_engine_that_is_silent_is_ejected_although_its_requests_are_taken_out_in_time() -> None:
    dispatcher = leader(settings={"outlier.interval_seconds": 60.0})
    now, ejections = 0.0, list[list[str]]()
    for number in range(1, 6):
        now = taken_out(dispatcher, number) + 0.1
        ejections.append(ejected(dispatcher, now))
        dispatcher.state.apply(first_token(f"r{number}", "b", at=now))

    assert ejections == [[]] * 5
    assert ejected(dispatcher, now) == [A]


def test_what_its_engine_answered_after_all_or_no_other_did_is_not_held_against_it() -> None:
    dispatcher = leader(settings={"outlier.interval_seconds": 60.0, "outlier.consecutive_failures": 1})
    now = taken_out(dispatcher, 1) + 0.1
    dispatcher.state.apply(first_token("r1", "a", at=now))
    now = taken_out(dispatcher, 2) + 0.1
    dispatcher.state.apply(RequestCancelled(at=now, request=RequestId("r2"), reason="client_gone", instance=B))

    assert ejected(dispatcher, now) == []


def test_being_a_little_late_at_an_instance_that_does_not_answer_is_no_failure_of_its_engine() -> None:
    dispatcher = at_a(leader(settings={"outlier.consecutive_failures": 1}))
    now = PREFILL + 2 * PREFILL + GAIN_SECONDS_MIN + 0.05
    dispatcher.state.apply(InstanceSuspected(at=now, instance=A, epoch=Epoch(1), silent_seconds=3.0))
    (migrated, _) = carried_out(dispatcher, now)
    dispatcher.state.apply(first_token("r1", "b", at=now + 1))

    assert isinstance(migrated, RequestMigrated)
    assert migrated.overdue == pytest.approx(now - PREFILL)
    assert not dispatcher.state.outliers.record(A).in_a_row


def test_nothing_is_said_or_done_about_it_where_nobody_asked_for_it() -> None:
    dispatcher = leader(rebind=False)
    events = place(dispatcher, "r1")

    assert "rebind" not in dispatcher.policies.settings
    assert [event.rebind for event in events if isinstance(event, RequestGranted)] == [False]
    assert planned(dispatcher, 100.0) == []
    assert refusals(carried_out(dispatcher, 100.0, move_of("r1"))) == ["rebind_off"]


def test_an_ingress_that_will_not_ask_is_let_be() -> None:
    dispatcher = leader()
    place(dispatcher, "r1")
    dispatcher.state.apply(RequestGranted(at=1.0, request=RequestId("r1"), instance=B))

    assert known(dispatcher, "r1").instance == B
    assert planned(dispatcher, 100.0) == []
    assert refusals(carried_out(dispatcher, 100.0, move_of("r1", "b", "a"))) == ["bound"]


@pytest.mark.parametrize("leader_first", [True, False])
def test_a_first_token_that_was_quicker_says_where_the_request_is(leader_first: bool) -> None:
    """The leader knows of its decision before it hears of the token, the log has them the other way round."""
    dispatcher, now = at_a(leader()), PREFILL + OVERDUE_SECONDS + 1.0
    follower = State(PoolSettings())
    for instance in ("a", "b"):
        follower.apply(joined(instance))
    for event in place(leader(), "r1"):
        follower.apply(event)
    token = first_token("r1", "a", at=now)
    decided = carried_out(dispatcher, now)
    dispatcher.state.apply(token)
    for event in [*decided, token] if leader_first else [token, *decided]:
        follower.apply(event)

    for state in (dispatcher.state, follower):
        request, lines = state.workload.requests[RequestId("r1")], state.workload.queues
        assert (request.stage, request.instance) == (Stage.DECODING, A)
        assert list(lines[A].decoding) == ["r1"]
        assert not (lines[B].prefill if B in lines else {})
        assert state.promises.blocks(B) == 0
        state.apply(finished("r1", "a", at=now + 1))
        assert not any(line.requests for line in lines.values())


def test_a_whole_answer_from_the_engine_before_ends_it() -> None:
    dispatcher, now = at_a(leader()), PREFILL + OVERDUE_SECONDS + 1.0
    carried_out(dispatcher, now)
    dispatcher.state.apply(finished("r1", "a", at=now))

    assert not dispatcher.state.workload.requests
    assert dispatcher.state.promises.blocks(B) == 0


def test_where_the_ingress_says_it_is_counts() -> None:
    """A new leader learns from the ingress, which had not heard of the move, or had, and the log had not."""
    dispatcher, now = at_a(leader()), PREFILL + OVERDUE_SECONDS + 1.0
    carried_out(dispatcher, now)
    dispatcher.state.apply(RequestGranted(at=now, request=RequestId("r1"), instance=A, rebind=True))

    request = known(dispatcher, "r1")
    assert (request.instance, request.stage, request.rebound_from, request.rebind) == (A, Stage.PREFILL, "", True)
    assert not dispatcher.state.workload.queues[B].requests


class RebindingFleet(RecordedFleet):
    """A log with many re-bound requests, some of whose first tokens come from the engine before."""

    @override
    def _migrate(self) -> None:
        super()._migrate()
        moves = [
            Migration(request.id, request.instance, self._random.choice(self._engines), 1.0, "by chance", rebind=True)
            for request in list(self._state.workload.requests.values())
            if request.stage is Stage.PREFILL and self._random.random() < 0.5
        ]
        self._decided(self._leader.migrate(MigrationPlan(self._state.sequence, tuple(moves), "p"), self._now))

    @override
    def _first_token(self) -> None:
        request = self._one(Stage.PREFILL)
        if request is not None and request.rebound_from and request.streaming:
            at = request.rebound_from
            self._append(PrefillFinished(at=self._now, request=request.id, instance=at, ttft=1.0, prefill=0.5))
        else:
            super()._first_token()


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is asked to be re-bound seems worth it."""
    monkeypatch.setattr(redispatch, "OVERDUE_SECONDS", -100.0)
    monkeypatch.setattr(redispatch, "GAIN_SECONDS_MIN", -100.0)


def recorded(seed: int, *, rebind: bool = True) -> tuple[list[LogEntry], list[RequestMigrated]]:
    """A log across a takeover, and what was re-bound in it."""
    policies = policy_set(admission="none", prefill_window_tokens=900, rebind=rebind)
    fleet = RebindingFleet(policies, seed=seed).live(900)
    fleet.take_over()
    fleet.live(900).write_all()
    return fleet.entries, [e.event for e in fleet.entries if isinstance(e.event, RequestMigrated) and e.event.rebound]


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("seed", [1, 2, 3, 4, 5, 7])
def test_re_bound_requests_are_decided_again_bit_for_bit_across_a_takeover(seed: int) -> None:
    entries, moved = recorded(seed, rebind=seed != 5)

    verdict = verify(entries)

    assert (verdict.different, verdict.problems) == (0, [])
    assert verdict.identical == verdict.decisions
    assert bool(moved) == (seed != 5)


@pytest.mark.usefixtures("eager")
def test_a_log_of_before_that_does_not_say_by_how_much_they_were_overdue_is_decided_again_as_well() -> None:
    entries, moved = recorded(1)
    before = [
        msgspec.structs.replace(entry, event=msgspec.structs.replace(entry.event, overdue=0.0))
        if isinstance(entry.event, RequestMigrated)
        else entry
        for entry in entries
    ]

    verdict = verify(before)

    assert any(event.overdue for event in moved)
    assert (verdict.identical, verdict.problems) == (verdict.decisions, [])


@pytest.mark.usefixtures("eager")
def test_what_re_binding_throws_away_is_counted() -> None:
    moved = [event for seed in range(5) for event in recorded(seed)[1]]

    assert any(event.wasted > 0 for event in moved)
    assert all(event.wasted >= 0 for event in moved)
