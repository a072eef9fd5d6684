"""Which instances fit their pool, and which of them may serve a request: decided in the fold, alike for everybody."""

import random
from collections.abc import Sequence
from itertools import chain
from typing import Any

import pytest

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import (
    MigrationRefused,
    RequestGranted,
    RequestHandedOver,
    RequestMigrated,
    RequestPlaced,
    RequestRejected,
)
from pointsman.contracts.envelope import Stamp
from pointsman.contracts.fleet import InstanceDraining, InstanceLeft
from pointsman.policies.dispatch import Dispatcher
from pointsman.policies.policy_set import policy_set, rebalancing_policy
from pointsman.policies.rebalancing.base import Migration, MigrationPlan
from pointsman.policies.routing import ROUTING_POLICIES
from pointsman.primitives import Epoch, InstanceId, RequestId, Term
from pointsman.state.checkpoint import decode_state, encode_state
from pointsman.state.fleet import Status
from pointsman.state.state import PoolSettings, State
from tests.support.events import joined, reported, route


def folded(*events: LogEvent, fold_version: int = 2) -> State:
    state = State(PoolSettings(fold_version=fold_version), policy_set().trackers())
    for number, event in enumerate(events, 1):
        state.apply(event, number)
    return state


def left(instance: str, epoch: int = 1) -> InstanceLeft:
    return InstanceLeft(at=9.0, instance=InstanceId(instance), epoch=Epoch(epoch), reason="stopped")


def leading(*events: LogEvent, routing: str = "pointsman") -> Dispatcher:
    policies = policy_set(routing=routing, running_max=1)
    state = State(PoolSettings(), policies.trackers())
    for number, event in enumerate(events, 1):
        state.apply(event, number)
    return Dispatcher(state, policies, term=Term(1))


def place_of(events: Sequence[LogEvent]) -> InstanceId | None:
    return next((event.instance for event in events if isinstance(event, RequestPlaced)), None)


def test_who_has_never_served_does_not_decide_what_the_pool_serves() -> None:
    liars = [joined(name, model="other") for name in ("x", "y", "z")]
    state = folded(joined("a"), reported("a", 0, []), *liars, *(reported(x, 0, [], serving=False) for x in "xyz"))

    assert state.fleet.ready == ("a",)
    state.apply(joined("a", epoch=2), 20)  # it starts again, and has served before
    assert state.fleet.model == "m"


def test_an_instance_with_another_model_is_set_apart_and_says_why() -> None:
    state = folded(joined("a"), joined("b"), joined("liar", model="other"))

    assert state.fleet.ready == ("a", "b")
    assert state.fleet[InstanceId("liar")].status is Status.UNSCHEDULABLE
    assert state.fleet[InstanceId("liar")].unschedulable == "it serves the model 'other', the pool 'm'"
    assert [state.fleet[InstanceId(name)].unschedulable for name in "ab"] == ["", ""]


def test_the_model_is_that_of_most_and_of_several_that_of_who_has_served_it_longest() -> None:
    liar, a, b = joined("liar", model="other", epoch=1), joined("a", epoch=2), joined("b", epoch=3)
    first_alone = folded(liar)
    one_each = folded(liar, a)
    outvoted = folded(liar, a, b)
    restarted = folded(a, b, joined("a", model="other", epoch=4))
    as_it_was = folded(a, joined("b", model="other", epoch=3), joined("a", epoch=4))
    alone_again = folded(a, b, joined("a", model="other", epoch=4), left("b", 3))

    assert (first_alone.fleet.model, first_alone.fleet.ready) == ("other", ("liar",))
    assert (one_each.fleet.model, one_each.fleet.ready) == ("other", ("liar",))
    assert (outvoted.fleet.model, outvoted.fleet.ready) == ("m", ("a", "b"))
    assert (restarted.fleet.model, restarted.fleet.ready) == ("m", ("b",))
    assert (as_it_was.fleet.model, as_it_was.fleet.ready) == ("m", ("a",))
    assert (alone_again.fleet.model, alone_again.fleet.ready) == ("other", ("a",))


def test_the_leader_who_applies_its_decisions_at_once_and_its_followers_agree_on_the_model() -> None:
    """The leader lets go of `a`; what comes to stand in the log before that decision, it reads after it."""
    first = [joined("a", epoch=1), joined("b", model="other", epoch=2)]
    for meanwhile in (joined("c", epoch=3), joined("a", epoch=3), joined("a", model="third", epoch=3)):
        gone = InstanceLeft(
            at=9.0,
            instance=InstanceId("a"),
            epoch=Epoch(1),
            reason="silent",
            stamp=Stamp(term=Term(1), number=1, as_of=2),
        )
        leader, follower = folded(*first), folded(*first, meanwhile, gone)
        leader.apply(gone)
        leader.apply(meanwhile, 3)

        assert leader.fleet.model == follower.fleet.model == "other"
        assert leader.fleet.ready == follower.fleet.ready == ("b",)


def test_a_log_of_the_first_fold_knows_no_misfit() -> None:
    state = folded(joined("a"), joined("b"), joined("liar", model="other"), fold_version=1)

    assert state.fleet.ready == ("a", "b", "liar")


def test_whoever_comes_and_goes_those_are_ready_that_serve_what_most_do() -> None:
    chance = random.Random(5)
    for _ in range(200):
        fleet: dict[str, tuple[str, int]] = {}
        state = State(PoolSettings())
        for epoch in range(1, 15):
            name, model = chance.choice("abcde"), chance.choice(["m", "other", "third"])
            if name in fleet and chance.random() < 0.4:
                state.apply(left(name, state.fleet[InstanceId(name)].epoch), epoch)
                del fleet[name]
            else:
                stays = name in fleet and fleet[name][0] == model
                fleet[name] = fleet[name] if stays else (model, epoch)
                state.apply(joined(name, model=model, epoch=epoch), epoch)
            served = [said for said, _ in fleet.values()]
            most = max(map(served.count, served), default=0)
            oldest = sorted((since, said) for said, since in fleet.values() if served.count(said) == most)
            assert list(state.fleet.ready) == sorted(i for i, (said, _) in fleet.items() if said == oldest[0][1])
        assert decode_state(encode_state(state)).fleet.ready == state.fleet.ready


def test_a_prefill_only_instance_that_does_not_fit_splits_no_pool() -> None:
    state = folded(joined("a"), joined("b"), joined("liar", model="other", role="prefill"))

    assert not state.fleet.split


def test_what_waits_for_an_instance_that_comes_back_with_another_model_goes_elsewhere_and_is_not_granted_there() -> (
    None
):
    dispatcher = leading(joined("a"), joined("b"), joined("c"))
    for number in range(12):
        dispatcher.route(route(f"r{number}", [number], slo_ttft=100.0), 0.0)
    waiting = set(dispatcher.state.workload.queue(InstanceId("c")).pending)
    dispatcher.state.apply(joined("c", model="other", epoch=2, at=1.0), 20)

    events = dispatcher.relocate_pending(1.0)

    moved = {event.request: event.instance for event in events if isinstance(event, RequestMigrated)}
    assert waiting
    assert set(moved) == waiting
    assert set(moved.values()) <= {"a", "b"}
    assert not [event for event in events if isinstance(event, RequestGranted) and event.instance == "c"]


@pytest.mark.parametrize("routing", sorted(ROUTING_POLICIES))
def test_every_policy_places_a_request_only_where_it_has_room_its_name_and_its_model(routing: str) -> None:
    dispatcher = leading(
        joined("one", max_model_len=1),
        joined("long", max_model_len=4000, aliases=["m-latest"]),
        joined("short", max_model_len=1000),
        joined("unsaid", max_model_len=0),
        joined("liar", model="other", max_model_len=10**9, aliases=["m-latest"]),
        routing=routing,
    )
    wanted = {"t2": 2, "t1000": 1000, "t1001": 1001, "t4000": 4000, "t4001": 4001}
    placed: dict[str, set[InstanceId | None]] = {}
    for name, tokens in wanted.items():
        asked = [route(f"{name}-{n}", [n], context_tokens=tokens) for n in range(12)]
        placed[name] = {place_of(dispatcher.route(command, 0.0)) for command in asked}
    named = {place_of(dispatcher.route(route(f"n-{n}", [n], alias="m-latest"), 0.0)) for n in range(6)}

    assert placed["t2"] <= {"long", "short", "unsaid"}
    assert placed["t1000"] <= {"long", "short", "unsaid"}
    assert placed["t1001"] <= {"long", "unsaid"}
    assert placed["t4000"] <= {"long", "unsaid"}
    assert placed["t4001"] == {"unsaid"}
    assert named == {"long"}


def test_a_request_for_which_nobody_has_room_or_the_name_is_refused_with_that_reason() -> None:
    dispatcher = leading(joined("a", max_model_len=1000))

    (_, too_long) = dispatcher.route(route("r1", [1], context_tokens=1001), 0.0)
    (_, unnamed) = dispatcher.route(route("r2", [1], alias="m-latest"), 0.0)

    assert isinstance(too_long, RequestRejected)
    assert isinstance(unnamed, RequestRejected)
    assert too_long.detail == "no instance with room for 1001 tokens is ready"
    assert unnamed.detail == "no instance that answers to m-latest is ready"


def test_a_decode_instance_without_room_decodes_nothing_long() -> None:
    dispatcher = leading(
        joined("p", role="prefill"),
        joined("d1", role="decode", max_model_len=100),
        joined("d2", role="decode", max_model_len=1000),
    )
    events = list(
        chain.from_iterable(
            dispatcher.route(route(f"r{n}", [n], context_tokens=500), float(n)) for n in range(4)
        )
    )  # fmt: skip

    assert {event.decode for event in events if isinstance(event, RequestPlaced)} == {"d2"}
    assert not [event for event in events if isinstance(event, RequestHandedOver)]


NEEDS: list[dict[str, Any]] = [{"context_tokens": 500}, {"alias": "m-latest"}, {"adapter": "poet"}]


def waiting_at_a(needs: dict[str, Any]) -> Dispatcher:
    """Requests wait for `a`, which drains. `b` is idle and has none of what `a` has."""
    dispatcher = leading(joined("a", max_model_len=1000, aliases=["m-latest"], adapters=["poet"]))
    for number in range(4):
        dispatcher.route(route(f"r{number}", [number], slo_ttft=100.0, **needs), 0.0)
    dispatcher.state.apply(joined("b", max_model_len=100), 2)
    dispatcher.state.apply(InstanceDraining(at=0.0, instance=InstanceId("a"), epoch=Epoch(1)), 3)
    return dispatcher


@pytest.mark.parametrize("policy", ["dualmap_pair", "global"])
def test_no_plan_moves_a_request_to_where_it_has_no_room_or_no_name(policy: str) -> None:
    able = rebalancing_policy(policy).plan(waiting_at_a({}).state, 1.0)
    unable = [rebalancing_policy(policy).plan(waiting_at_a(needs).state, 1.0).migrations for needs in NEEDS]

    assert {move.target for move in able.migrations} == {"b"}
    assert unable == [(), (), ()]


@pytest.mark.parametrize("needs", NEEDS)
def test_a_move_to_where_a_request_has_no_room_or_no_name_is_refused(needs: dict[str, Any]) -> None:
    dispatcher = waiting_at_a(needs)
    waiting = list(dispatcher.state.workload.queue(InstanceId("a")).pending)
    by_hand = tuple(Migration(request, InstanceId("a"), InstanceId("b"), 1.0, "test") for request in waiting)

    answered = dispatcher.migrate(MigrationPlan(0, by_hand), 1.0)
    relocated = dispatcher.relocate_pending(1.0)

    assert len(waiting) == 3
    assert [event.reason for event in answered if isinstance(event, MigrationRefused)] == ["target_unavailable"] * 3
    assert not [event for event in relocated if isinstance(event, RequestMigrated)]


def test_an_unschedulable_instance_is_a_target_of_no_move() -> None:
    dispatcher = leading(joined("a"))
    for number in range(4):
        dispatcher.route(route(f"r{number}", [number], slo_ttft=100.0), 0.0)
    dispatcher.state.apply(joined("liar", model="other"), 2)
    (moved, *_) = dispatcher.state.workload.queue(InstanceId("a")).pending

    (refused,) = dispatcher.migrate(
        MigrationPlan(0, (Migration(RequestId(moved), InstanceId("a"), InstanceId("liar"), 1.0, "test"),)), 1.0
    )

    assert isinstance(refused, MigrationRefused)
    assert refused.reason == "target_unavailable"
