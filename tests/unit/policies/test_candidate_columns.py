"""Columns (arrays over all instances) against the full scan (an estimate of each instance): the same decisions, bit for
bit, on states that a busy pool comes to. The scan is the slow twin: `PoolView` uses it below COLUMNS_FROM instances."""

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.commands import RouteRequest
from pointsman.contracts.fleet import PrefillCost
from pointsman.policies import candidate_columns, pool_view
from pointsman.policies.candidates import CandidateEstimate
from pointsman.policies.dispatch.recording import Recording
from pointsman.policies.large_pool import prepare_columns
from pointsman.policies.pool_view import PoolView
from pointsman.policies.routing import ROUTING_POLICIES
from pointsman.policies.routing.weighed import Rows, cost, weighed_list
from pointsman.policies.routing.weighed_columns import WeighedColumns
from pointsman.primitives import InstanceId
from pointsman.state.checkpoint import decode_state, encode_state
from pointsman.state.instance_columns import InstanceColumns
from pointsman.state.state import State
from pointsman_lab.traffic import BLOCK_TOKENS
from tests.support.busy_pool import BusyPool
from tests.support.examples import examples
from tests.support.recorded_log import fresh_state, random_log

SCAN_ALWAYS = 10**9


@contextmanager
def columns_from(instances: int) -> Iterator[None]:
    before = pool_view.COLUMNS_FROM
    pool_view.COLUMNS_FROM = instances
    try:
        yield
    finally:
        pool_view.COLUMNS_FROM = before


class VariedPool(BusyPool):
    """With engines of several speeds and sizes, classes of requests, and prompts that are late even alone."""

    def __init__(self, instances: int, policy: str, *, load: float, seed: int) -> None:
        super().__init__(instances, policy, load=load, seed=seed)
        self._varied = Random(seed)
        for number, instance in enumerate(self.state.fleet.instances):
            slow = 1.0 + number % 3
            instance.cost = replace_cost(instance.cost, slow)
            instance.kv_capacity_tokens = (0, 20_000, 60_000)[number % 3]
            instance.engine_block_tokens = (16, 64)[number % 2 * (seed % 2)]

    @override
    def arrive(self) -> RouteRequest:
        command = super().arrive()
        drawn = self._varied.random()
        return msgspec.structs.replace(
            command,
            priority=("interactive", "standard", "batch")[int(3 * drawn)] if drawn < 0.3 else "standard",
            slo_ttft=self._varied.choice((0.05, 0.5, 5.0)),
            slo_tpot=self._varied.choice((0.0, 0.1)),
            exact=drawn > 0.1,
        )


def replace_cost(cost: PrefillCost, slow: float) -> PrefillCost:
    return msgspec.structs.replace(cost, per_token_s=slow * cost.per_token_s)


@pytest.mark.parametrize("policy", sorted(ROUTING_POLICIES))
@given(seed=st.integers(0, 2**32), load=st.sampled_from((0.3, 2.0, 6.0)))
@examples(2)
def test_columns_decide_as_the_full_scan_does(policy: str, seed: int, load: float) -> None:
    fast, slow = (VariedPool(7, policy, load=load, seed=seed) for _ in range(2))
    for pool in (fast, slow):
        pool.dispatcher.recording.rivals = (None, 0, 1, 2, 5)[seed % 5]
    for _ in range(60):
        with columns_from(1):
            decided = _routed(fast)
        with columns_from(SCAN_ALWAYS):
            expected = _routed(slow)

        assert decided == expected


@given(seed=st.integers(0, 2**32), load=st.sampled_from((0.3, 2.0, 6.0)))
@examples(10)
def test_columns_hold_the_numbers_of_each_estimate(seed: int, load: float) -> None:
    pool = VariedPool(7, "pointsman", load=load, seed=seed)
    seen = 0
    with columns_from(1):
        for _ in range(100):
            pool.follow(pool.dispatcher.route(pool.arrive(), pool.now))
            request = next(reversed(pool.state.workload.requests.values()), None)
            if request is None:
                continue
            view = PoolView(pool.state, request, pool.now + 0.01)
            if view.columns is None:
                continue
            seen += 1
            assert view.candidates == [view.candidate(name) for name in view.eligible]
            assert [view.columns.estimate(row) for row in range(7)] == view.candidates
            waits = view.columns.kv_waits(view.expected_output_tokens, 0.05)
            assert ([0.0] * 7 if waits is None else waits.tolist()) == view.kv_waits(view.candidates, 0.05)
            _compare_answers(view, seed)
    assert seen


@given(seed=st.integers(0, 2**32))
@examples(10)
def test_columns_know_transfers_loads_and_work_that_only_lying_events_have(seed: int) -> None:
    pool, chance = VariedPool(9, "pointsman", load=6.0, seed=seed), Random(seed)
    for _ in range(60):
        pool.follow(pool.dispatcher.route(pool.arrive(), pool.now))
    for instance in pool.state.fleet.instances[::3]:
        instance.role = "prefill"
    busy = [queue for queue in pool.state.workload.queues.values() if queue.prefill]
    for queue in busy[:1]:
        next(iter(queue.prefill.values())).prefill_seconds = chance.choice((0.0, -1.0))
        queue.learn_step(0.0)
    pool.state.__dict__["_columns"] = None
    request = next(reversed(pool.state.workload.requests.values()))
    request = replace(request, prompt_tokens=len(request.keys) * BLOCK_TOKENS)  # all of it may be cached
    hits = {name: chance.choice((1, len(request.keys))) for name in pool.state.fleet.ready[1:]}
    for ahead in (-1.0, 0.0, 0.05, 10.0):
        view = PoolView(pool.state, request, pool.now + ahead, transfer_seconds=0.25)
        view.__dict__["_hits"] = hits
        view.__dict__["_loadable"] = {pool.state.fleet.ready[seed % 9]: {"host": 3}}
        with columns_from(1), pytest.MonkeyPatch.context() as patched:
            patched.setattr(pool_view, "ALONE_SHARE", 1.0)
            columns = view.columns
        assert columns is not None
        scan = [view.candidate(name) for name in view.eligible]

        assert columns.estimates == scan
        assert columns.candidates.predicted_ttft.tolist() == [candidate.predicted_ttft for candidate in scan]
        least = min(candidate.predicted_ttft - candidate.queue_seconds for candidate in scan)
        assert columns.is_late_alone() is (view.budget < least)


@given(st.integers(0, 2**32))
@examples(25)
def test_rows_follow_every_change_of_state(seed: int) -> None:
    """Restarts, moves, hand-overs and ends of any kind: rows that were kept are those of columns made anew."""
    state = fresh_state()
    for number, event in enumerate(random_log(seed, 120), start=1):
        state.apply(event, number)
        kept = state.columns

        assert _rows(kept) == _rows(InstanceColumns(state.fleet, state.workload, state.latency))


@given(st.integers(0, 2**32))
@examples(10)
def test_a_state_from_a_checkpoint_makes_its_columns_and_promises_anew(seed: int) -> None:
    log = random_log(seed, 80)
    state = fresh_state()
    for number, event in enumerate(log[:60], start=1):
        state.apply(event, number)
        _ = state.columns
    copy = decode_state(encode_state(state))
    for number, event in enumerate(log[60:], start=61):
        for each in (state, copy):
            each.apply(event, number)

        assert _rows(copy.columns) == _rows(state.columns)
        assert _promised(copy) == _promised(state)


def test_a_pool_of_many_instances_uses_columns_by_itself() -> None:
    pool = BusyPool(pool_view.COLUMNS_FROM, "pointsman")
    command = pool.arrive()
    pool.follow(pool.dispatcher.route(command, pool.now))
    request = pool.state.workload.requests[command.request]

    assert PoolView(pool.state, request, pool.now).columns is not None
    assert PoolView(pool.state, request, pool.now, excluded=[InstanceId("engine-000")]).columns is None


def test_among_many_equals_only_the_chosen_and_the_recorded_are_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle pool: any number of instances cost the same."""
    pool, rivals, estimated = BusyPool(96, "pointsman"), 4, Counter[InstanceId]()
    pool.dispatcher.recording.rivals = rivals
    prepare_columns(pool.state)

    def counting(**fields: Any) -> CandidateEstimate:
        estimated[fields["instance"]] += 1
        return CandidateEstimate(**fields)

    for module in (pool_view, candidate_columns):
        monkeypatch.setattr(module, "CandidateEstimate", counting)
    pool.dispatcher.route(pool.arrive(), pool.now)

    assert len(estimated) <= 1 + rivals
    assert set(estimated.values()) == {1}


def test_no_decision_of_a_prepared_large_pool_makes_its_columns() -> None:
    pool = BusyPool(pool_view.COLUMNS_FROM, "pointsman")
    prepare_columns(pool.state)
    made = pool.state.columns

    pool.follow(pool.dispatcher.route(pool.arrive(), pool.now))

    assert pool.state.columns is made


def test_arrays_are_loaded_for_a_large_pool_alone() -> None:
    script = (
        "import sys\n"
        "from tests.support.busy_pool import BusyPool\n"
        "from pointsman.policies.pool_view import COLUMNS_FROM\n"
        "from pointsman.policies.large_pool import prepare_columns\n"
        "for size in (COLUMNS_FROM - 1, COLUMNS_FROM):\n"
        "    prepare_columns(BusyPool(size, 'pointsman').state)\n"
        "    print('numpy' in sys.modules, 'pointsman.policies.routing.weighed_columns' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert done.stdout.split("\n")[:2] == ["False False", "True True"]


def _compare_answers(view: PoolView, seed: int) -> None:
    """Of all that a policy asks, whatever it asked so far."""
    assert view.columns is not None
    fast, slow = (
        WeighedColumns(view.columns, view.expected_output_tokens, 1.0, 0.05),
        weighed_list(view, view.candidates, 1.0, 0.05),
    )
    assert list(fast) == list(slow)
    chosen = slow[seed % 7].instance
    assert Recording(4).candidates(fast, chosen) == Recording(4).candidates(slow, chosen)
    assert Recording(5).candidates(fast) == Recording(5).candidates(slow)
    assert (fast.least_prefill, fast.longest_queue) == (slow.least_prefill, slow.longest_queue)
    assert fast.shortest() == slow.shortest()
    limit = Random(seed).choice([candidate.queue_seconds for candidate in slow])
    assert fast.demand(view, limit) == slow.demand(view, limit)
    assert fast.costs(0.05).tolist() == [cost(candidate, 0.05) for candidate in slow]
    assert fast.cheapest(None, 0.05) == slow.cheapest(None, 0.05)
    near, near_too = fast.with_queue_within(limit), slow.with_queue_within(limit)
    on_time, on_time_too = fast.on_time(limit + 0.1), slow.on_time(limit + 0.1)
    assert _list(fast.with_queue_within(limit, on_time)) == slow.with_queue_within(limit, on_time_too)
    assert _list(on_time) == on_time_too
    assert fast.waiting(near) == slow.waiting(near_too)
    assert fast.longest(near) == slow.longest(near_too)
    assert fast.cheapest(near, 0.0) == slow.cheapest(near_too, 0.0)
    assert _list(fast.with_cached(640.0, near)) == slow.with_cached(640.0, near_too)


def _list(rows: Rows) -> list[int]:
    assert isinstance(rows, np.ndarray)
    listed: list[int] = rows.tolist()
    return listed


def _routed(pool: BusyPool) -> list[LogEvent]:
    events = pool.dispatcher.route(pool.arrive(), pool.now)
    pool.follow(events)
    return events


def _rows(columns: InstanceColumns) -> dict[InstanceId, list[float]]:
    return {name: columns.row(name) for name in columns.names}


def _promised(state: State) -> list[dict[InstanceId, int]]:
    found = []
    for request in state.workload.requests.values():
        hits: dict[InstanceId, int] = {}
        state.promises.extend_hits(request.keys, hits)
        found.append(hits)
    return found
