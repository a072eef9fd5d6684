"""The fold: order, duplicates, epochs, doubts and promises."""

from typing import Any

import msgspec
import pytest

from pointsman.contracts.block_keys import pack_keys
from pointsman.contracts.cache import CacheCleared, CacheGap, CacheSnapshot, Run
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import RequestGranted
from pointsman.contracts.envelope import Stamp
from pointsman.contracts.fleet import InstanceLeft, InstanceProbed, InstanceSuspected
from pointsman.contracts.reasons import CancelCause
from pointsman.contracts.requests import RequestCancelled
from pointsman.policies.dispatch import Dispatcher
from pointsman.policies.policy_set import policy_set
from pointsman.primitives import BlockKey, Epoch, InstanceId, RequestId, Term
from pointsman.state import state as state_module
from pointsman.state import workload
from pointsman.state.fleet import Knowledge, NoDemand, Status
from pointsman.state.fold_versions import CLOCKS_DIFFER, SETTLED_AT_INTERVALS
from pointsman.state.holdings import CONFIRMATION_WALL_SECONDS, DELIVERED_WALL_SECONDS
from pointsman.state.reported_hits import SETTLING_WALL_SECONDS, ReportedHits
from pointsman.state.state import PoolSettings, State
from pointsman.state.workload import Stage
from tests.support.events import BLOCK, finished, first_token, joined, removed, reported, route, stored

A = InstanceId("a")


def state_with(*events: object) -> State:
    state = State(PoolSettings(), policy_set().trackers())
    for sequence, event in enumerate(events, start=1):
        state.apply(event, sequence)  # type: ignore[arg-type]
    return state


def keys(*numbers: int) -> list[BlockKey]:
    return [BlockKey(number) for number in numbers]


def test_a_cache_event_that_comes_twice_counts_once() -> None:
    state = state_with(joined("a"), stored("a", 1, [1, 2]), removed("a", 2, [2]), stored("a", 1, [1, 2]))

    assert state.hits(keys(1, 2)) == {A: 1}
    assert state.fleet[A].doubt == ""


def test_a_removed_block_ends_what_an_earlier_epoch_had_computed_and_holds_no_other_up() -> None:
    """Promises end in their order: one with a later date, of an instance that has restarted since, kept those behind it."""
    state = state_with(joined("a"), joined("b"), joined("a", epoch=2), stored("a", 1, [1], epoch=2))
    state.promises.promise(InstanceId("b"), keys(7))
    state.promises.unconfirmed.append((12.0, A, Epoch(1), keys(1)))
    state.promises.unconfirmed.append((7.0, InstanceId("b"), Epoch(1), keys(7)))

    state.apply(removed("a", 2, [1], epoch=2), 5)
    state.settle(8.0)

    assert state.promises.blocks(InstanceId("b")) == 0


def test_a_gap_leaves_a_doubt_that_an_equal_digest_heals() -> None:
    state = state_with(joined("a"), stored("a", 1, [1]), stored("a", 3, [2], parent=1))
    doubted = state.fleet[A].doubt
    state.apply(reported("a", 3, [1, 2]))

    assert doubted == "cache events 2 to 2 are missing"
    assert state.fleet[A].doubt == ""


def test_a_gap_that_the_worker_tells_of_is_doubted_and_no_longer_exact() -> None:
    state = state_with(joined("a"), stored("a", 1, [1, 2]), reported("a", 1, [1, 2]))
    state.apply(InstanceProbed(at=1.0, instance=InstanceId("a"), epoch=Epoch(1), parity=True))
    before = state.fleet[InstanceId("a")].knowledge

    gap = CacheGap(at=1.0, instance=InstanceId("a"), epoch=Epoch(1), sequence=2, missed=3, reason="left the buffer")
    state.apply(gap)

    assert (before, state.fleet[InstanceId("a")].knowledge) == (Knowledge.EXACT, Knowledge.DEGRADED)
    assert "left the buffer" in state.fleet[InstanceId("a")].doubt


def test_a_digest_that_differs_is_doubted_until_a_snapshot_replaces_all() -> None:
    state = state_with(joined("a"), stored("a", 1, [1, 2]), reported("a", 1, [1, 3]))
    doubted = state.fleet[A].doubt
    run = Run(pack_keys(keys(1, 3)))
    state.apply(CacheSnapshot(at=0.0, instance=A, epoch=Epoch(1), sequence=2, runs=[run]))

    assert "the engine holds 2 blocks" in doubted
    assert state.fleet[A].doubt == ""
    assert state.index.keys(A) == {1, 3}


def test_a_report_ahead_of_the_events_is_doubted() -> None:
    state = state_with(joined("a"), stored("a", 1, [1]), reported("a", 2, [1, 2]))

    assert state.fleet[A].doubt == "cache events up to 2 are missing"


def test_a_new_epoch_has_the_adapters_that_it_joins_with_and_none_of_the_epoch_before() -> None:
    before = msgspec.structs.replace(reported("a", 0, []), adapters=["poet"], aliases=["m-latest"])
    silent = state_with(joined("a"), before, joined("a", epoch=2))
    saying = state_with(joined("a"), before, joined("a", epoch=2, adapters=["critic"], aliases=["m-new"]))

    assert (silent.fleet[A].adapters, silent.fleet[A].aliases) == ((), ())
    assert (saying.fleet[A].adapters, saying.fleet[A].aliases) == (("critic",), ("m-new",))


def test_a_new_epoch_starts_empty_and_the_old_one_is_not_listened_to() -> None:
    state = state_with(
        joined("a", epoch=1),
        stored("a", 1, [1], epoch=1),
        joined("a", epoch=2),
        stored("a", 2, [2], parent=1, epoch=1),
        joined("a", epoch=1),
        InstanceLeft(at=0.0, instance=A, epoch=Epoch(1), reason="late"),
    )

    assert state.fleet[A].epoch == 2
    assert state.index.keys(A) == frozenset()


def test_knowledge_is_exact_only_after_a_probe_agreed() -> None:
    state = state_with(joined("a"), joined("b", cache="no_events"), joined("c", cache="unknown"))
    before = state.fleet[A].knowledge
    for name in ("a", "b", "c"):
        state.apply(InstanceProbed(at=0.0, instance=InstanceId(name), epoch=Epoch(1), parity=True))

    assert before is Knowledge.DEGRADED
    assert [i.knowledge for i in state.fleet.instances] == [Knowledge.EXACT, Knowledge.BLIND, Knowledge.DEGRADED]


def test_a_placed_prompt_counts_as_held_until_it_is_confirmed_or_its_time_is_up() -> None:
    state = state_with(joined("a"))
    dispatcher = Dispatcher(state, policy_set(), term=Term(1))
    dispatcher.route(route("r", [1, 2, 3]), now=0.0)
    placed = state.hits(keys(1, 2, 3))
    state.apply(first_token("r", "a", at=1.0))
    state.apply(stored("a", 1, [1, 2], at=1.1))
    state.apply(reported("a", 1, [1, 2], at=10.0))
    assert state.hits(keys(1, 2, 3)) == {A: 3}, "the worker's clock may be wrong"
    dispatcher.route(route("other", [9]), now=1.0 + float(CONFIRMATION_WALL_SECONDS) + 0.1)

    assert placed == {A: 3}
    assert state.hits(keys(1, 2, 3)) == {A: 2}
    assert state.promises.blocks(A) == 1, "of the other"


@pytest.mark.parametrize("step", [-7200.0, 7200.0])
def test_an_ingress_whose_clock_is_set_ends_no_promise_of_another(step: float) -> None:
    state = state_with(joined("a"))
    dispatcher = Dispatcher(state, policy_set(), term=Term(1))
    dispatcher.route(route("r", [1, 2, 3], arrived_at=9000.0, sent_at=9000.0), now=9000.0)
    dispatcher.route(route("other", [9], arrived_at=9000.0, sent_at=9000.0), now=9000.0)
    state.apply(first_token("r", "a", at=9001.0))
    state.apply(first_token("other", "a", at=9001.1 + step))
    dispatcher.route(route("next", [8], arrived_at=9001.2, sent_at=9001.2), now=9001.2)

    assert state.hits(keys(1, 2, 3)) == {A: 3}


def test_nothing_is_promised_at_an_instance_whose_join_was_lost() -> None:
    """A power cut may lose it, while the decisions behind it are written again."""
    decided = Dispatcher(state_with(joined("a")), policy_set(), term=Term(1)).route(route("r", [1, 2]), now=0.0)
    state = state_with(*decided)
    placed = state.promises.blocks(A)
    state.apply(RequestCancelled(at=1.0, request=RequestId("r"), reason="asked"))

    assert (placed, state.promises.blocks(A)) == (0, 0)


def test_a_request_of_before_an_instance_left_releases_nothing_of_one_after_its_return() -> None:
    dispatcher = Dispatcher(state_with(joined("a")), policy_set(), term=Term(1))
    early = dispatcher.route(route("early", [1, 2]), now=0.0)
    late = dispatcher.route(route("late", [1, 2]), now=0.0)
    state = state_with(joined("a"), *early, InstanceLeft(at=0.5, instance=A, epoch=Epoch(1), reason="asked"), *late)
    left = state.promises.blocks(A)
    state.apply(joined("a", epoch=2))
    Dispatcher(state, policy_set(), term=Term(2)).route(route("new", [1, 2]), now=1.0)
    for request in ("early", "late"):
        state.apply(RequestCancelled(at=1.0, request=RequestId(request), reason="asked"))

    assert (left, state.promises.blocks(A)) == (0, 2)


def test_a_block_that_is_evicted_soon_after_its_prompt_was_computed_does_not_stay_promised() -> None:
    state = state_with(joined("a"))
    Dispatcher(state, policy_set(), term=Term(1)).route(route("r", [1, 2, 3]), now=0.0)
    state.apply(first_token("r", "a", at=1.0))
    state.apply(stored("a", 1, [1, 2, 3], at=1.0))
    state.apply(removed("a", 2, [3], at=1.1))

    assert state.hits(keys(1, 2, 3)) == {A: 2}
    assert state.promises.blocks(A) == 0


def test_a_cleared_cache_takes_with_it_what_was_computed_but_not_what_is_still_to_be() -> None:
    state = state_with(joined("a"), joined("b"))
    dispatcher = Dispatcher(state, policy_set(), term=Term(1))
    for request, prompt in (("computed", [1, 2]), ("to be computed", [8, 9])):
        dispatcher.route(route(request, prompt), now=0.0)
    placed = {
        request: state.workload.requests[RequestId(request)].instance for request in ("computed", "to be computed")
    }
    instance = placed["computed"]
    state.apply(first_token("computed", instance, at=1.0))
    state.apply(stored(instance, 1, [1, 2], at=1.0))
    state.apply(CacheCleared(at=1.1, instance=instance, epoch=Epoch(1), sequence=2))

    assert state.hits(keys(1, 2)) == {}
    assert state.hits(keys(8, 9)) == {placed["to be computed"]: 2}


def test_a_request_that_is_cancelled_takes_its_promise_back() -> None:
    state = state_with(joined("a"))
    dispatcher = Dispatcher(state, policy_set(prefill_window_tokens=1), term=Term(1))
    dispatcher.route(route("running", [9]), now=0.0)
    dispatcher.route(route("waiting", [1, 2]), now=0.0)
    dispatcher.cancel_ungranted(RequestId("waiting"), CancelCause.CLIENT_GONE, now=0.1)

    assert state.hits(keys(1, 2)) == {}
    assert state.hits(keys(9)) == {A: 1}
    assert state.workload.queues[A].pending_tokens == 0


def test_the_second_end_of_a_request_changes_nothing() -> None:
    state = state_with(joined("a"))
    Dispatcher(state, policy_set(), term=Term(1)).route(route("r", [1]), now=0.0)
    state.apply(first_token("r", "a", at=0.1))
    state.apply(finished("r", "a", at=0.2))
    state.apply(finished("r", "a", at=0.2))

    assert state.workload.requests == {}
    assert state.workload.queues[A].requests == 0
    assert state.workload.end_of(RequestId("r")) == "RequestFinished"


def test_of_many_requests_that_were_rejected_the_newest_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "ENDED_REMEMBERED_MAX", 2)
    state = state_with()
    dispatcher = Dispatcher(state, policy_set(), term=Term(1))
    for number in range(4):
        dispatcher.route(route(f"r{number}", [1], arrived_at=float(number)), now=float(number))

    told = [
        state.workload.rejection_of(RequestId(f"r{number}"), arrived_at=float(number), attempt=1) for number in range(4)
    ]
    assert [rejection and rejection.reason for rejection in told] == [None, None, "no_instance", "no_instance"]
    assert state.workload.rejection_of(RequestId("r3"), arrived_at=3.0, attempt=2) is None


def test_slow_prefills_teach_a_correction_of_the_prediction() -> None:
    state = state_with(joined("a"))
    dispatcher = Dispatcher(state, policy_set(admission="none"), term=Term(1))
    now = 0.0
    for number in range(60):
        dispatcher.route(route(f"r{number}", [number + 1]), now=now)
        now += 2 * 0.065
        state.apply(first_token(f"r{number}", "a", at=now))

    assert 1.7 < state.latency.correction(A) < 2.1


def test_a_request_is_pending_then_in_prefill_then_decoding() -> None:
    state = state_with(joined("a"))
    dispatcher = Dispatcher(state, policy_set(prefill_window_tokens=10), term=Term(1))
    dispatcher.route(route("first", [1]), now=0.0)
    dispatcher.route(route("second", [2]), now=0.0)
    stages = [state.workload.requests[RequestId(name)].stage for name in ("first", "second")]
    state.apply(first_token("first", "a", at=0.1))
    granted = dispatcher.grant_waiting(A, now=0.1)

    assert stages == [Stage.PREFILL, Stage.PENDING]
    assert [type(event).__name__ for event in granted] == ["RequestGranted"]
    assert state.workload.requests[RequestId("first")].stage is Stage.DECODING


def test_a_prefill_that_nobody_sees_end_leaves_the_window_when_it_must_be_over() -> None:
    state = state_with(joined("a"))
    dispatcher = Dispatcher(state, policy_set(prefill_window_tokens=10), term=Term(1))
    dispatcher.route(route("first", [1], streaming=False), now=0.0)
    dispatcher.route(route("second", [2]), now=0.0)
    early = dispatcher.grant_waiting(A, now=0.06)
    late = dispatcher.grant_waiting(A, now=0.07)

    assert early == []
    assert [type(event).__name__ for event in late] == ["PrefillFinished", "RequestGranted"]
    assert state.latency.correction(A) == 1.0


def test_an_answer_that_is_not_streamed_may_be_tried_elsewhere_though_its_prefill_was_assumed_over() -> None:
    state = state_with(joined("a"), joined("b"))
    dispatcher = Dispatcher(state, policy_set(), term=Term(1))
    dispatcher.route(route("r", [1, 2], streaming=False), now=0.0)
    first = state.workload.requests[RequestId("r")].instance
    dispatcher.grant_waiting(first, now=1.0)
    again = dispatcher.route(route("r", [1, 2], streaming=False, attempt=2, excluded=[first]), now=1.0)
    dispatcher.route(route("later", [9]), now=10.0)

    assert [type(event).__name__ for event in again] == ["RequestPlaced", "RequestGranted"]
    assert state.workload.queues[first].requests == 0
    assert state.hits(keys(1, 2)) == {state.workload.requests[RequestId("r")].instance: 2}


def test_a_request_that_an_ingress_sent_by_itself_waits_in_no_queue() -> None:
    state = state_with(joined("a"), joined("b"))
    dispatcher = Dispatcher(state, policy_set(routing="round_robin", prefill_window_tokens=10), term=Term(1))
    for name in ("one", "two", "three"):
        dispatcher.route(route(name, [1]), now=0.0)
    state.apply(RequestGranted(at=1.0, request=RequestId("three"), instance=InstanceId("b")))

    three = state.workload.requests[RequestId("three")]
    assert (three.stage, three.instance) == (Stage.PREFILL, "b")
    assert not state.workload.queues[A].pending


def test_when_a_worker_was_heard_follows_its_clock_back_and_an_old_copy_does_not_count() -> None:
    state = state_with(joined("a"), reported("a", 0, [], at=3600.0))
    state.apply(reported("a", 0, [], at=20.0), 7)
    assert state.fleet[A].heard_at == 20.0
    state.apply(reported("a", 0, [], at=19.0), 8)
    assert state.fleet[A].heard_at == 20.0


def test_a_report_that_the_leader_had_not_read_ends_the_suspicion_that_stands_behind_it() -> None:
    def suspected(as_of: int) -> InstanceSuspected:
        stamp = Stamp(term=Term(1), number=as_of, as_of=as_of)
        return InstanceSuspected(at=3.0, stamp=stamp, instance=A, epoch=Epoch(1), silent_seconds=3.0)

    state = state_with(joined("a"))
    state.apply(reported("a", 0, [], at=3.0), 5)
    state.apply(suspected(4), 6)
    assert state.fleet[A].status is Status.READY
    state.apply(suspected(5), 7)
    assert state.fleet[A].status is Status.SUSPECTED


def test_who_reports_without_having_joined_is_a_stranger_until_it_joins() -> None:
    state = state_with(
        joined("a"), InstanceLeft(at=0.0, instance=A, epoch=Epoch(1), reason="silent"), reported("a", 0, [])
    )
    strangers = dict(state.unregistered)
    state.apply(joined("a", epoch=2))

    assert strangers == {"a": 0.0}
    assert state.unregistered == {}


def test_a_late_copy_of_a_join_brings_nobody_back_where_the_log_began_after_it() -> None:
    left = InstanceLeft(at=0.0, instance=A, epoch=Epoch(1), reason="stopped")
    state = state_with(left, joined("a"))
    before = [instance.id for instance in state.fleet.instances]
    state.apply(joined("a", epoch=2))

    assert before == []
    assert state.fleet[A].epoch == 2


def test_a_forged_end_far_ahead_keeps_nobody_out() -> None:
    forged = InstanceLeft(at=0.0, instance=A, epoch=Epoch(2**62), reason="forged")
    state = state_with(forged, joined("a"))

    assert state.dead_letters.count == 1
    assert A in state.fleet


def test_a_placement_that_is_said_again_does_not_take_a_request_out_of_its_engine() -> None:
    state = state_with(joined("a"))
    events = Dispatcher(state, policy_set(), term=Term(1)).route(route("r", [1, 2]), 0.0)
    (placed,) = [event for event in events if type(event).__name__ == "RequestPlaced"]
    state.apply(placed, 50)

    assert state.workload.requests[RequestId("r")].stage is Stage.PREFILL


def test_an_end_that_stands_before_the_arrival_leaves_nothing_behind() -> None:
    events = Dispatcher(state_with(joined("a")), policy_set(), term=Term(1)).route(route("r", [1, 2]), 0.0)
    state = state_with(joined("a"), finished("r", "a", at=1.0), *events)

    assert state.workload.requests == {}
    assert state.promises.blocks(A) == 0


def test_a_request_that_is_cancelled_before_it_comes_is_refused_when_it_comes() -> None:
    state = state_with(joined("a"))
    dispatcher = Dispatcher(state, policy_set(), term=Term(1))
    (ended,) = dispatcher.cancel_ungranted(RequestId("r"), CancelCause.CLIENT_GONE, 0.0)

    assert type(ended).__name__ == "RequestCancelled"
    assert dispatcher.route(route("r", [1]), 1.0) == []
    assert dispatcher.cancel_ungranted(RequestId("r"), CancelCause.CLIENT_GONE, 2.0) == []


def test_a_worker_that_was_set_back_in_time_is_a_stranger_once_its_later_life_has_left() -> None:
    state = state_with(joined("a", epoch=9), joined("a", epoch=3), reported("a", 0, [], epoch=3, at=1.0))
    while_there = dict(state.unregistered)
    state.apply(InstanceLeft(at=2.0, instance=A, epoch=Epoch(9), reason="silent"))
    state.apply(reported("a", 0, [], epoch=3, at=3.0))

    assert while_there == {}
    assert state.unregistered == {A: 3.0}
    assert state.newest_epoch(A) == Epoch(9)


def test_of_many_instances_that_came_and_went_the_newest_epochs_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "EPOCHS_REMEMBERED_MAX", 5)
    state = state_with(joined("stays", epoch=7), joined("early", epoch=7))
    for number in range(8):
        name = InstanceId(f"pod-{number}")
        state.apply(joined(name))
        state.apply(InstanceLeft(at=0.0, instance=name, epoch=Epoch(1), reason="stopped"))
    state.apply(InstanceLeft(at=0.0, instance=InstanceId("early"), epoch=Epoch(7), reason="stopped"))
    state.apply(InstanceLeft(at=0.0, instance=InstanceId("never-joined"), epoch=Epoch(3), reason="stopped"))
    state.apply(joined("early", epoch=6))

    assert list(state.epochs) == ["stays", "pod-6", "pod-7", "early", "never-joined"]
    assert [instance.id for instance in state.fleet.instances] == ["stays"]
    assert state.dead_letters.count == 0


# What engines deliver


class Served:
    """Instance a, probed, with these blocks in its cache by its own events; prompts are placed there and finished."""

    def __init__(self, *held: int, fold_version: int = 2, **joins: Any) -> None:
        self.state = State(PoolSettings(fold_version=fold_version), policy_set().trackers())
        self.dispatcher = Dispatcher(self.state, policy_set(), term=Term(1))
        self.apply(joined("a", engine_block_tokens=16, **joins))
        self.apply(InstanceProbed(at=0.0, instance=A, epoch=Epoch(1), parity=True))
        if held:
            self.apply(stored("a", 1, list(held)))

    def apply(self, event: LogEvent) -> None:
        self.state.apply(event, self.state.sequence + 1)

    def place(self, request: str, prompt: list[int]) -> None:
        assert self.dispatcher.route(route(request, prompt), now=0.0)

    def deliver(
        self,
        request: str,
        prompt: list[int],
        cached: int,
        *,
        predicted: int = 0,
        counted: int = 0,
        at: str = "a",
    ) -> None:
        """`cached` tokens of the prompt come from the engine's cache; `counted`: as many tokens it says that there are, where not
        as many as we do."""
        if RequestId(request) not in self.state.workload.requests:
            self.place(request, prompt)
        self.apply(first_token(request, "a", at=1.0))
        end = finished(request, at, at=1.0)
        tokens = {
            "cached_tokens": cached,
            "predicted_cached_tokens": predicted,
            "prompt_tokens": counted or len(prompt) * BLOCK + 1,
        }
        self.apply(msgspec.structs.replace(end, **tokens))

    def report(self, sequence: int, held: list[int], *, at: float) -> None:
        self.apply(reported("a", sequence, held, at=at))

    @property
    def contradicted(self) -> str:
        return self.state.fleet[A].contradicted


HELD = [1, 2, 3, 4]
SETTLED = 1.0 + SETTLING_WALL_SECONDS


@pytest.mark.parametrize("cache", ["no_events", "unknown"])
def test_a_prefix_that_was_delivered_counts_as_held_for_a_while_where_events_do_not_tell(cache: str) -> None:
    served = Served(cache=cache)
    served.deliver("r", [1, 2, 3], 128)
    served.report(0, [], at=1.0 + float(CONFIRMATION_WALL_SECONDS))
    taught = served.state.hits(keys(1, 2, 3))
    served.report(0, [], at=1.0 + float(DELIVERED_WALL_SECONDS))

    assert taught == {A: 2}
    assert served.state.hits(keys(1, 2, 3)) == {}


@pytest.mark.parametrize(
    ("version", "expected"),
    [(SETTLED_AT_INTERVALS, [1.0, 1.3, 1.2, 1.5]), (SETTLED_AT_INTERVALS - 1, [1.0, 1.1, 1.2, 1.3, 1.2, 1.5, 1.56])],
)
def test_decisions_do_not_each_look_for_what_has_ended(
    version: int, expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[float] = []
    monkeypatch.setattr(ReportedHits, "settle", lambda _self, now: looked.append(now))
    state = State(PoolSettings(fold_version=version))
    for now in (1.0, 1.1, 1.2, 1.3, 1.2, 1.5, 1.56):
        state.settle(now)

    assert looked == expected


def test_what_was_delivered_is_not_held_once_it_is_removed_but_is_if_it_only_expired() -> None:
    served = Served(1, 2, 3, cache="unknown")
    served.deliver("r", [1, 2, 3, 4], 192)
    served.apply(msgspec.structs.replace(removed("a", 2, [1, 2, 3]), expired=True, at=4.0))
    expired = served.state.hits(keys(1, 2, 3))
    served.apply(removed("a", 3, [2], at=4.0))

    assert expired == {A: 3}
    assert served.state.hits(keys(1, 2, 3)) == {A: 1}


@pytest.mark.parametrize(
    "ends",
    [CacheCleared(at=2.0, instance=A, epoch=Epoch(1), sequence=1), joined("a", epoch=2, cache="unknown", at=2.0)],
    ids=["cleared", "began_anew"],
)
def test_what_was_delivered_is_forgotten_with_the_cache(ends: LogEvent) -> None:
    served = Served(cache="unknown")
    served.deliver("r", [1, 2, 3], 128)
    served.apply(ends)
    served.apply(reported("b", 0, [], at=2.0 + float(CONFIRMATION_WALL_SECONDS)))

    assert served.state.hits(keys(1, 2, 3)) == {}


def test_nothing_is_learned_from_guessed_tokens_or_from_another_instance() -> None:
    served = Served(cache="unknown")
    served.apply(joined("b", cache="unknown"))
    assert served.dispatcher.route(route("guessed", [1, 2, 3], exact=False), now=0.0)
    served.deliver("guessed", [1, 2, 3], 128)
    served.deliver("elsewhere", [4, 5, 6], 128, at="c")
    served.apply(reported("a", 0, [], at=2.0 + float(CONFIRMATION_WALL_SECONDS)))

    assert served.state.delivered.keys(A) | served.state.delivered.keys(InstanceId("b")) == frozenset()


@pytest.mark.parametrize(("fold_version", "is_suspected"), [(4, True), (5, False)])
def test_a_placement_does_not_rely_on_blocks_stored_after_what_it_was_decided_from(
    fold_version: int, is_suspected: bool
) -> None:
    """As a fold reads it that is not the leader's, after the log stalled."""
    leader, reader = Served(fold_version=fold_version), Served(fold_version=fold_version)
    decided = {name: leader.dispatcher.route(route(name, HELD), now=0.0) for name in ("first", "second")}
    reader.apply(stored("a", 1, HELD))
    for events in decided.values():
        for event in events:
            reader.apply(event)
    for name in decided:
        reader.deliver(name, HELD, 0)
    for at in (1.0, SETTLED):
        reader.report(1, HELD, at=at)

    assert bool(reader.contradicted) is is_suspected


def test_two_deliveries_that_events_do_not_explain_degrade_an_instance_and_one_does_not() -> None:
    served = Served(*HELD)
    served.deliver("first", HELD, 0)
    for at in (1.0, SETTLED):
        served.report(1, HELD, at=at)
    once = served.state.fleet[A].knowledge
    served.deliver("second", HELD, 64)
    served.report(1, HELD, at=SETTLED + 0.1)
    too_soon = served.contradicted
    served.report(1, HELD, at=SETTLED + 0.1 + SETTLING_WALL_SECONDS)

    assert (once, too_soon) == (Knowledge.EXACT, "")
    assert served.contradicted == "the engine had 64 tokens of a prompt cached, its events tell of 256"
    assert served.state.fleet[A].knowledge is Knowledge.DEGRADED


def test_an_engine_that_delivers_what_its_events_never_told_of_is_degraded_too() -> None:
    served = Served()
    for request in ("first", "second"):
        served.deliver(request, HELD, 256)
    taught = served.state.hits(keys(*HELD))
    for at in (1.0, SETTLED):
        served.report(0, [], at=at)

    assert taught == {A: 4}
    assert served.contradicted == "the engine had 256 tokens of a prompt cached, its events tell of 0"


def gone_and_back(sequence: int) -> list[LogEvent]:
    return [removed("a", sequence, [3, 4]), stored("a", sequence + 1, [3, 4], parent=2)]


def test_a_block_that_was_evicted_before_its_prefill_and_computed_by_it_contradicts_nothing() -> None:
    served = Served(*HELD)
    for number in range(3):
        served.place(f"r{number}", HELD)
    for event in gone_and_back(2):
        served.apply(event)
    for number in range(3):
        served.deliver(f"r{number}", HELD, 128)
    for at in (1.0, SETTLED):
        served.report(3, HELD, at=at)

    assert served.contradicted == ""


@pytest.mark.parametrize(
    "late",
    [gone_and_back(2), [CacheCleared(at=0.0, instance=A, epoch=Epoch(1), sequence=2), stored("a", 3, HELD)]],
    ids=["evicted", "cleared"],
)
def test_an_event_that_explains_a_delivery_may_come_after_its_end(late: list[LogEvent]) -> None:
    served = Served(*HELD)
    for number in range(3):
        served.deliver(f"r{number}", HELD, 0 if isinstance(late[0], CacheCleared) else 128)
    served.report(1, HELD, at=1.0)
    for event in late:
        served.apply(event)
    served.report(3, HELD, at=SETTLED)

    assert served.contradicted == ""


def test_a_new_life_answers_for_nothing_that_the_one_before_has_delivered() -> None:
    served = Served(*HELD)
    for number in range(3):
        served.deliver(f"r{number}", HELD, 0)
    served.apply(joined("a", epoch=2))
    served.apply(stored("a", 1, HELD, epoch=2))
    for at in (1.0, SETTLED):
        served.apply(reported("a", 1, HELD, at=at, epoch=2))

    assert served.contradicted == ""


@pytest.mark.parametrize(
    ("prompt", "cached", "fields"),
    [(HELD, 192, {}), (HELD, -1, {}), (HELD, 0, {"predicted": -1}), ([9, 8, 7], 0, {}), (HELD, 0, {"counted": 300})],
    ids=["one_block_short", "not_said", "several_prompts", "nothing_held", "other_tokens"],
)
def test_what_proves_nothing_is_no_contradiction(prompt: list[int], cached: int, fields: dict[str, Any]) -> None:
    served = Served(*HELD)
    for number in range(3):
        served.deliver(f"r{number}", prompt, cached, **fields)
    for at in (1.0, SETTLED):
        served.report(1, HELD, at=at)

    assert served.contradicted == ""


@pytest.mark.parametrize(("version", "arrived_at"), [(CLOCKS_DIFFER - 1, 107.0), (CLOCKS_DIFFER, 7.0)])
def test_an_earlier_release_does_not_know_when_a_command_was_sent(version: int, arrived_at: float) -> None:
    """It may lead again after this one: its log holds what this one wrote."""
    command = route("r", [1], arrived_at=107.0, sent_at=108.0)
    events = Dispatcher(state_with(joined("a")), policy_set(), term=Term(1)).route(command, now=8.0)
    state = State(PoolSettings(fold_version=version))
    for event in (joined("a"), *events):
        state.apply(event)

    assert state.workload.requests[RequestId("r")].arrived_at == arrived_at


def test_a_log_of_the_first_version_is_folded_without_looking_at_deliveries() -> None:
    served = Served(*HELD, fold_version=1)
    for number in range(3):
        served.deliver(f"r{number}", HELD, 0)
        served.deliver(f"s{number}", [5, 6, 7], 192)
    for at in (1.0, 1.0 + max(SETTLING_WALL_SECONDS, float(CONFIRMATION_WALL_SECONDS))):
        served.report(1, HELD, at=at)

    assert served.contradicted == ""
    assert served.state.hits(keys(5, 6, 7)) == {}


def test_the_log_tells_why_a_cache_is_not_known_and_since_when() -> None:
    state = state_with(joined("a", cache="unknown", cache_detail="events were lost", at=1.0))
    state.apply(InstanceProbed(at=2.0, instance=A, epoch=Epoch(1), parity=True))
    unknown = state.fleet[A].knowledge_reason, state.fleet[A].known_since
    state.apply(CacheCleared(at=3.0, instance=A, epoch=Epoch(1), sequence=1))
    cleared = state.fleet[A].knowledge, state.fleet[A].knowledge_reason, state.fleet[A].known_since
    state.apply(msgspec.structs.replace(reported("a", 1, [], at=4.0), certain=False))

    assert unknown == ("events were lost", 1.0)
    assert cleared == (Knowledge.EXACT, "", 3.0)
    assert "cannot be had again" in state.fleet[A].knowledge_reason
    assert state.fleet[A].known_since == 4.0


def test_a_probe_of_an_earlier_life_says_nothing_of_the_present_one() -> None:
    state = state_with(joined("a"), joined("a", epoch=2, at=1.0))
    state.apply(InstanceProbed(at=1.0, instance=A, epoch=Epoch(1), parity=True))

    assert state.fleet[A].knowledge is Knowledge.DEGRADED


def test_a_hit_saves_whole_blocks_of_the_engine_and_never_the_last_token() -> None:
    instance = state_with(joined("a")).fleet[A]

    def saved(hit_blocks: int, prompt_tokens: int) -> int:
        return state_with(joined("a")).latency.cached_tokens(instance, hit_blocks, prompt_tokens)

    assert [saved(2, 129), saved(2, 128), saved(3, 200), saved(0, 200), saved(1, 1)] == [128, 64, 192, 0, 0]


def test_events_that_its_worker_did_not_write_leave_an_instance_in_doubt_and_an_old_report_does_not() -> None:
    state = state_with(joined("a"), stored("a", 1, [1]), stored("a", 2, [2]), reported("a", 2, [1, 2], at=9.0))
    state.apply(reported("a", 1, [1], at=8.0))  # written before, and stored once more
    assert not state.fleet[A].doubt

    state.apply(reported("a", 1, [1], at=10.0))
    assert state.fleet[A].forged
    assert state.fleet[A].doubt


def test_nobody_can_have_written_so_many_cache_events() -> None:
    state = state_with(joined("a"), stored("a", 1, [1]))
    state.apply(stored("a", 2**53, [2]), 7)

    assert state.fleet[A].sequence == 1
    assert [letter.sequence for letter in state.dead_letters.newest] == [7]


def test_only_who_has_the_adapter_takes_requests_for_it() -> None:
    fleet = state_with(joined("a", adapters=["lora"]), joined("b")).fleet

    assert fleet.ready_for(NoDemand(adapter="lora")) == ("a",)
    assert fleet.ready_for(NoDemand()) == ("a", "b")
    assert fleet.ready_for(NoDemand(adapter="other")) == ()


def test_who_was_to_decode_expects_nothing_any_more_once_the_first_token_came_from_elsewhere() -> None:
    policies = policy_set(admission="none")
    state = State(PoolSettings(), policies.trackers())
    state.apply(joined("a", role="prefill"))
    state.apply(joined("b", role="decode"))
    Dispatcher(state, policies, term=Term(1)).route(route("r", [1, 2]), 0.0)
    before = list(state.workload.queues[InstanceId("b")].expected)
    state.apply(first_token("r", "a", at=1.0))

    assert (before, list(state.workload.queues[InstanceId("b")].expected)) == (["r"], [])
    assert state.workload.requests[RequestId("r")].decode == ""
