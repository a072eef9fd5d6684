"""Copies of hot prefixes ahead of need: which prefix, from where to where, when not, and what is remembered of them."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.contracts.decisions import RequestGranted
from pointsman.contracts.requests import PrefixCopyEnded
from pointsman.policies.admission.admit_all import AdmitAll
from pointsman.policies.dispatch import Dispatcher
from pointsman.policies.ordering.first_come_first_served import FirstComeFirstServed
from pointsman.policies.policy_set import PolicySet, recorded_policy_set
from pointsman.policies.routing.min_ttft import MinTtft
from pointsman.primitives import BlockKey, InstanceId, RequestId, Term
from pointsman.state.prefix_copies import ARRIVALS_MIN, COPY_WALL_SECONDS, FADE_SECONDS, KEPT_MIN, PrefixDemand
from pointsman.state.state import PoolSettings, State
from tests.support.events import BLOCK, finished, first_token, joined, route, stored
from tests.support.leading import prompt

A, B, C = InstanceId("a"), InstanceId("b"), InstanceId("c")
PREFIX = prompt(1, 16)
LEVEL = 8
"""512 tokens."""
POLICIES = PolicySet(routing=MinTtft(), admission=AdmitAll(), ordering=FirstComeFirstServed(), copies=True)


def pool(policies: PolicySet = POLICIES, rate: float = 100_000.0, **fields: Any) -> Dispatcher:
    """Three instances that fetch from each other; `a` holds the prefix."""
    state = State(PoolSettings(), policies.trackers())
    for name in (A, B, C):
        state.apply(joined(name, **{"fetches": True, "transfer_tokens_per_s": rate} | fields))
    state.apply(stored(A, 1, PREFIX))
    return Dispatcher(state, policies, term=Term(1))


def serve(
    dispatcher: Dispatcher,
    number: int,
    now: float,
    *,
    prefix: list[int] = PREFIX,
    rest: list[int] | None = None,
    **fields: Any,
) -> RequestGranted:
    """A request at `a`, granted, answered, and gone. `rest`: of its prompt."""
    name = f"r{number}"
    rest = [10_000 + number] if rest is None else rest
    events = dispatcher.route(route(name, [*prefix, *rest], arrived_at=now, **{"excluded": [B, C]} | fields), now)
    grant = next(event for event in events if isinstance(event, RequestGranted))
    dispatcher.state.apply(first_token(name, grant.instance, at=now))
    dispatcher.state.apply(finished(name, grant.instance, at=now))
    return grant


def heated(dispatcher: Dispatcher, *, until: float = 10.0, **fields: Any) -> RequestGranted:
    """The grant of the request that makes the prefix hot."""
    for number in range(ARRIVALS_MIN - 1):
        serve(dispatcher, number, until, **fields)
    return serve(dispatcher, 1000, until, **fields)


def ended(request: str, target: InstanceId, at: float, failure: str = "") -> PrefixCopyEnded:
    return PrefixCopyEnded(at=at, request=RequestId(request), instance=target, source=A, failure=failure)


def test_a_hot_prefix_goes_from_the_requests_instance_to_one_that_lacks_it() -> None:
    dispatcher = pool()
    for number in range(ARRIVALS_MIN - 1):
        assert not serve(dispatcher, number, 10.0).copy_to

    hot = serve(dispatcher, 99, 10.0)

    assert (hot.instance, hot.copy_to, hot.copy_blocks) == (A, B, 16)
    assert hot.copy_seconds == pytest.approx(0.001 + 16 * BLOCK / 100_000.0 + 0.001)


def test_a_prompt_of_whole_blocks_only_is_copied_without_its_last_which_needs_a_token_behind_it() -> None:
    dispatcher = pool()
    tokens = len(PREFIX) * BLOCK
    grants = [serve(dispatcher, n, 10.0, rest=[], prompt_tokens=tokens) for n in range(ARRIVALS_MIN)]

    assert (grants[-1].copy_to, grants[-1].copy_blocks) == (B, 15)


@pytest.mark.parametrize("unknown", [{"cache": "no_events"}, {"cache": "unknown"}])
def test_nothing_is_copied_to_where_no_event_would_tell_of_it(unknown: dict[str, Any]) -> None:
    dispatcher = pool()
    for name in (B, C):
        dispatcher.state.apply(joined(name, epoch=2, fetches=True, transfer_tokens_per_s=100_000.0, **unknown))

    assert not heated(dispatcher).copy_to


def test_without_the_setting_nothing_is_copied() -> None:
    assert not heated(pool(replace(POLICIES, copies=False))).copy_to


@pytest.mark.parametrize("unable", [{"rate": 1_000.0}, {"fetches": False}, {"exact": False}])
def test_what_cannot_be_told_or_is_sooner_computed_is_not_copied(unable: dict[str, Any]) -> None:
    of_request = {name: value for name, value in unable.items() if name == "exact"}
    of_pool = {name: value for name, value in unable.items() if name != "exact"}

    assert not heated(pool(**of_pool), **of_request).copy_to


def test_the_instance_with_the_least_work_gets_it() -> None:
    dispatcher = pool()
    dispatcher.route(route("busy", prompt(500, 40), arrived_at=9.0, excluded=[A, C]), 9.0)

    assert heated(dispatcher, until=9.001).copy_to == C


def test_one_that_holds_it_or_will_compute_it_gets_none() -> None:
    dispatcher = pool()
    dispatcher.state.apply(stored(B, 1, PREFIX))
    dispatcher.route(route("computes", [*PREFIX, 700], arrived_at=9.999, excluded=[A, B]), 9.999)

    assert not heated(dispatcher).copy_to


def test_an_instance_gives_or_takes_one_copy_at_a_time() -> None:
    dispatcher = pool()
    first = heated(dispatcher)
    waits = serve(dispatcher, 2000, 10.0)
    dispatcher.state.apply(stored(B, 1, PREFIX))
    dispatcher.state.apply(ended(first.request, B, 10.5))
    second = serve(dispatcher, 2001, 10.5)

    assert (first.copy_to, waits.copy_to, second.copy_to) == (B, "", C)


def test_nor_from_two_sources() -> None:
    dispatcher = pool()
    dispatcher.state.apply(stored(C, 1, PREFIX))

    assert heated(dispatcher).copy_to == B
    assert not serve(dispatcher, 2000, 10.0, excluded=[A, B]).copy_to


def test_a_copy_whose_end_never_came_is_forgotten() -> None:
    dispatcher = pool()
    heated(dispatcher)
    before = serve(dispatcher, 2000, 10.0 + float(COPY_WALL_SECONDS) - 0.1)
    for number in range(ARRIVALS_MIN):
        serve(dispatcher, 3000 + number, 10.0 + float(COPY_WALL_SECONDS) - 0.1)

    assert not before.copy_to
    assert serve(dispatcher, 4000, 10.0 + float(COPY_WALL_SECONDS)).copy_to == B


def test_after_a_failure_the_pair_rests() -> None:
    dispatcher = pool()
    dispatcher.state.apply(ended(heated(dispatcher).request, B, 10.0, "the source refused with status 500"))

    assert serve(dispatcher, 2000, 10.0).copy_to == C


@pytest.mark.parametrize("hours", [-1, 1])
def test_the_pair_rests_by_the_leaders_time_whatever_the_ingress_has(hours: int) -> None:
    dispatcher = pool()
    failed = heated(dispatcher)
    dispatcher.state.apply(ended(failed.request, B, 10.0 + 3600.0 * hours, "the source refused with status 500"))
    resting = [dispatcher.state.transfers.rests(A, B, now) for now in (10.1, 39.9, 40.1)]

    assert resting == [True, True, False]


def test_an_end_that_nobody_expects_changes_nothing() -> None:
    dispatcher = pool()
    dispatcher.state.apply(ended("unknown", B, 10.0, "it failed"))

    assert heated(dispatcher).copy_to == B


def test_nothing_is_copied_any_more_when_the_demand_has_faded() -> None:
    dispatcher = pool()
    heated(dispatcher)

    assert not serve(dispatcher, 2000, 10.0 + 3 * FADE_SECONDS).copy_to


def test_only_whole_levels_that_are_hot_are_copied() -> None:
    dispatcher = pool()
    for number in range(ARRIVALS_MIN - 1):
        serve(dispatcher, number, 10.0, prefix=[*PREFIX[:LEVEL], *prompt(1000 * (number + 2), 12)])

    assert serve(dispatcher, 2000, 10.0).copy_blocks == LEVEL


def test_what_few_of_all_arrivals_share_is_not_hot() -> None:
    dispatcher = pool()
    for number in range(ARRIVALS_MIN):
        for other in range(3):
            serve(dispatcher, 10_000 * (other + 1) + number, 10.0, prefix=prompt(100_000 * (other + 1) + 50 * number))
        assert not serve(dispatcher, number, 10.0).copy_to


def test_records_say_whether_copies_were_on() -> None:
    off = replace(POLICIES, copies=False)

    assert "copies" not in off.settings
    assert not recorded_policy_set("min_ttft", off.settings).copies
    assert recorded_policy_set("min_ttft", POLICIES.settings).copies


Arrivals = list[tuple[int, int, float]]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.floats(0.0, 20.0)), max_size=120), st.integers(1, 6))
def test_hot_blocks_are_those_of_a_count_of_every_arrival(arrivals: Arrivals, instances: int) -> None:
    """The slow twin: every arrival by itself, with its age."""
    demand, now, told = PrefixDemand(level_blocks=2), 0.0, []
    for first, depth, pause in arrivals:
        now += pause
        keys = [BlockKey(100 * first + block + 1) for block in range(2 * depth)]
        demand.arrived(keys, now)
        told.append((keys, now))
    keys = [BlockKey(block + 1) for block in range(7)]

    def weight(prefix: list[BlockKey]) -> float:
        return sum(math.exp((at - now) / FADE_SECONDS) for known, at in told if known[: len(prefix)] == prefix)

    limits = [max(ARRIVALS_MIN, weight([]) / instances)]
    hot = [blocks for blocks in (2, 4, 6) if weight(keys[:blocks]) >= limits[0]]

    near = any(abs(weight(keys[:blocks]) - limits[0]) < 1e-6 for blocks in (2, 4, 6))
    assert near or demand.hot_blocks(keys, instances, now) == max(hot, default=0)


def test_prefixes_that_nobody_asks_for_are_forgotten() -> None:
    demand = PrefixDemand(level_blocks=1)
    for number in range(2 * KEPT_MIN):
        demand.arrived([BlockKey(number + 1)], number * 0.01)

    assert len(demand) <= KEPT_MIN
