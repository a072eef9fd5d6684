"""Fetching a prefix from another instance: when it is chosen, what is booked, and what its end changes."""

from typing import Any

import pytest
from msgspec.structs import replace
from typing_extensions import override

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import RequestGranted, RequestPlaced
from pointsman.contracts.fleet import InstanceLeft
from pointsman.contracts.reasons import CancelCause
from pointsman.contracts.requests import PrefixFetchEnded, RequestCancelled
from pointsman.policies.admission.admit_all import AdmitAll
from pointsman.policies.dispatch import Dispatcher
from pointsman.policies.ordering.first_come_first_served import FirstComeFirstServed
from pointsman.policies.policy_set import PolicySet, UnknownPolicyError, policy_set, recorded_policy_set
from pointsman.policies.pool_view import PoolView
from pointsman.policies.routing.base import Choice
from pointsman.policies.routing.min_ttft import MinTtft
from pointsman.primitives import Epoch, InstanceId, RequestId, Term
from pointsman.state.state import FOLD_VERSION, PoolSettings, State
from pointsman.state.workload import Stage
from tests.support.events import BLOCK, finished, first_token, joined, removed, route, stored
from tests.support.leading import place, prompt

A, B = InstanceId("a"), InstanceId("b")
PREFIX = prompt(1, 20)
RATE = 100_000.0
TRANSFER_SECONDS = 0.001 + 20 * BLOCK / RATE + 0.001
"""A step at the source, the tokens, a step at the target."""


class AsAsked(MinTtft):
    """To the instance that a request names as its session, else where the first token comes soonest."""

    @override
    def choose(self, view: PoolView) -> Choice:
        asked_for = [candidate for candidate in view.candidates if str(candidate.instance) == view.request.session]
        return Choice(asked_for[0], "as asked", view.candidates) if asked_for else super().choose(view)


def pool(rate: float = RATE, *, fold_version: int = FOLD_VERSION, **fields: Any) -> Dispatcher:
    """Two instances that fetch from each other; `a` holds the prefix."""
    policies = PolicySet(routing=AsAsked(), admission=AdmitAll(), ordering=FirstComeFirstServed())
    state = State(PoolSettings(fold_version=fold_version), policies.trackers())
    for name in ("a", "b"):
        state.apply(joined(name, **{"fetches": True, "transfer_tokens_per_s": rate} | fields))
    state.apply(stored("a", 1, PREFIX))
    return Dispatcher(state, policies, term=Term(1))


def asked(dispatcher: Dispatcher, request: str, keys: list[int], *, now: float = 0.0, **fields: Any) -> list[LogEvent]:
    return dispatcher.route(route(request, keys, arrived_at=now, **fields), now)


def at_b(dispatcher: Dispatcher, request: str, keys: list[int], *, now: float = 0.0, **fields: Any) -> list[LogEvent]:
    """See `AsAsked`."""
    return asked(dispatcher, request, keys, now=now, session=B, **fields)


def granted(events: list[LogEvent]) -> RequestGranted:
    return next(event for event in events if isinstance(event, RequestGranted))


def ended(request: str, *, at: float, seconds: float = 0.0, source: float = 0.0, failure: str = "") -> PrefixFetchEnded:
    return PrefixFetchEnded(
        at=at, request=RequestId(request), instance=B, source=A, tokens=20 * BLOCK, seconds=seconds or at,
        source_seconds=source, failure=failure,
    )  # fmt: skip


def test_the_placement_says_what_is_fetched_from_where_and_books_only_what_is_left_to_compute() -> None:
    placed = place(pool(), "r", [*PREFIX, 900], session=B)

    assert (placed.instance, placed.hit_blocks, placed.uncached_tokens) == (B, 0, BLOCK + 1)
    assert (placed.fetch_from, placed.fetched_tokens) == (A, 20 * BLOCK)
    assert placed.transfer_seconds == pytest.approx(TRANSFER_SECONDS)
    assert placed.prefill_seconds == pytest.approx(0.065)
    assert placed.predicted_ttft == pytest.approx(TRANSFER_SECONDS + 0.065)


@pytest.mark.parametrize("unable", [{"rate": 1_000.0}, {"fetches": False}, {"role": "decode"}, {"cache": "unknown"}])
def test_what_is_sooner_computed_or_cannot_be_fetched_is_computed(unable: dict[str, Any]) -> None:
    dispatcher = pool(**unable) if "role" not in unable else pool()
    if "role" in unable:
        dispatcher.state.apply(joined("a", epoch=2, fetches=True, role="decode"))
        dispatcher.state.apply(stored("a", 1, PREFIX, epoch=2))

    placed = place(dispatcher, "r", [*PREFIX, 900], session=B)

    assert (placed.fetch_from, placed.transfer_seconds, placed.uncached_tokens) == ("", 0.0, 21 * BLOCK + 1)


@pytest.mark.parametrize(("failed", "source"), [("c", "a"), ("a", "")])
def test_nothing_is_fetched_from_an_engine_that_failed_the_request(failed: str, source: str) -> None:
    dispatcher = pool()
    dispatcher.state.apply(joined("c", fetches=True, transfer_tokens_per_s=RATE))

    events = asked(dispatcher, "r", [*PREFIX, 900], session=B, excluded=[failed])

    assert [e.fetch_from for e in events if isinstance(e, RequestPlaced | RequestGranted)] == [source, source]


def test_prompts_of_guessed_tokens_fetch_nothing() -> None:
    assert not place(pool(), "r", [*PREFIX, 900], session=B, exact=False).fetch_from


def test_the_grant_decides_anew_since_the_source_may_have_evicted_the_prefix() -> None:
    dispatcher = pool()
    dispatcher.state.apply(joined("b", epoch=2, fetches=True, transfer_tokens_per_s=RATE))
    first = granted(at_b(dispatcher, "first", prompt(500, 300)))  # fills the window
    waits = place(dispatcher, "r", [*PREFIX, 900], session=B)
    dispatcher.state.apply(removed("a", 2, PREFIX))
    dispatcher.state.apply(first_token("first", "b", at=1.0))

    grant = granted(dispatcher.grant_waiting(B, 1.0))
    request = dispatcher.state.workload.requests[RequestId("r")]

    assert (first.fetch_from, waits.fetch_from) == ("", A)
    assert (grant.request, grant.fetch_from, request.fetching) == ("r", "", False)
    assert request.uncached_tokens == 21 * BLOCK + 1
    assert dispatcher.state.workload.queues[B].prefill_tokens == 21 * BLOCK + 1


def test_the_request_is_in_the_engine_when_the_fetch_has_ended() -> None:
    dispatcher = pool()
    grant = granted(at_b(dispatcher, "r", [*PREFIX, 900]))
    state = dispatcher.state
    request, queue = state.workload.requests[RequestId("r")], state.workload.queues[B]
    assert (grant.fetch_from, grant.fetch_blocks, grant.fetched_tokens) == (A, 20, 20 * BLOCK)
    assert (request.fetching, request.stage) == (True, Stage.PREFILL)
    assert queue.engine_seconds_left(5.0) == pytest.approx(0.065)  # nothing of it is computed meanwhile

    state.apply(ended("r", at=5.0))

    assert not request.fetching
    assert request.granted_at == 5.0
    assert queue.engine_seconds_left(5.0) == pytest.approx(0.065)
    assert queue.engine_seconds_left(5.05) == pytest.approx(0.015)
    assert state.transfers.under_way == {}


@pytest.mark.parametrize(("version", "left"), [(9, 0.193), (8, 0.0)])
def test_who_is_granted_while_another_fetches_begins_then(version: int, left: float) -> None:
    """The fetch began 5 s before and keeps no engine at work."""
    dispatcher = pool(fold_version=version)
    at_b(dispatcher, "fetches", [*PREFIX, 900])
    at_b(dispatcher, "other", prompt(5000, 3), now=5.0)
    queue = dispatcher.state.workload.queues[B]

    assert [request.fetching for request in queue.prefill.values()] == [True, False]
    assert queue.engine_seconds_left(5.0) == pytest.approx(0.065 + left)


def test_after_a_failure_the_request_computes_its_prompt_and_the_pair_rests() -> None:
    dispatcher = pool()
    at_b(dispatcher, "r", [*PREFIX, 900])
    state = dispatcher.state

    state.apply(ended("r", at=1.0, failure="the source refused with status 500"))

    request, queue = state.workload.requests[RequestId("r")], state.workload.queues[B]
    assert (request.uncached_tokens, queue.prefill_tokens) == (21 * BLOCK + 1, 21 * BLOCK + 1)
    assert queue.prefill_seconds == pytest.approx(21 * 0.064 + 0.001)
    assert state.transfers.rests(A, B, 30.9)
    assert not place(dispatcher, "soon", [*PREFIX, 901, 902], now=30.9, session=B).fetch_from
    state.apply(first_token("r", "b", at=31.0))
    state.apply(RequestCancelled(at=31.0, request=RequestId("r"), reason=""))
    assert place(dispatcher, "later", [*prompt(1, 19), 903], now=31.1, session=B).hit_blocks > 0


@pytest.mark.parametrize(("version", "rests", "learned"), [(15, 1, 0), (14, 3, 3)])
def test_of_sources_that_left_while_they_gave_nothing_is_kept(version: int, rests: int, learned: int) -> None:
    """Engines have new names at each rollout."""
    dispatcher = pool(fold_version=version)
    state = dispatcher.state
    for number, at in enumerate((1.0, 40.0, 80.0, 120.0, 160.0, 200.0)):
        source = f"pod-{number}"
        state.apply(joined(source, at=at, fetches=True, transfer_tokens_per_s=RATE))
        own = prompt(1000 * (number + 1), 20)
        state.apply(stored(source, 1, own))
        assert granted(at_b(dispatcher, source, [*own, 900], now=at)).fetch_from == source
        state.apply(InstanceLeft(at=at, instance=InstanceId(source), epoch=Epoch(1), reason="replaced"))

        failure = "the source is gone" if number % 2 else ""
        state.apply(replace(ended(source, at=at, seconds=0.01, failure=failure), source=InstanceId(source)))
        state.apply(first_token(source, "b", at=at))
        state.apply(finished(source, "b", at=at))

    transfers = state.transfers
    assert len(transfers._rests_until) == rests
    assert len(transfers.rates._by_source) == len(transfers.waits._by_source) == learned


def test_requests_of_the_same_prefix_wait_for_the_fetch_and_others_do_not() -> None:
    dispatcher = pool()
    at_b(dispatcher, "first", [*PREFIX, 900])

    same = at_b(dispatcher, "same", [*PREFIX, 901])
    other = at_b(dispatcher, "other", prompt(5000, 3))

    assert not any(isinstance(event, RequestGranted) for event in same)
    assert granted(other).request == "other"
    dispatcher.state.apply(ended("first", at=0.1))
    late = granted(dispatcher.grant_waiting(B, 0.1))
    assert (late.request, late.fetch_from) == ("same", "")


def test_a_client_that_leaves_ends_the_fetch_and_lets_the_others_go_on() -> None:
    dispatcher = pool()
    at_b(dispatcher, "first", [*PREFIX, 900])
    at_b(dispatcher, "same", [*PREFIX, 901])

    cancelled = RequestCancelled(at=0.1, request=RequestId("first"), reason="", cause=CancelCause.CLIENT_GONE)
    dispatcher.state.apply(cancelled)
    events = dispatcher.grant_waiting(B, 0.1)

    assert granted(events).request == "same"
    assert "first" not in dispatcher.state.transfers.under_way.get(A, {})


def test_transfers_under_way_at_the_source_delay_the_next() -> None:
    dispatcher = pool()
    dispatcher.state.apply(stored("a", 2, prompt(700, 20)))
    alone = place(dispatcher, "alone", [*prompt(700, 20), 1], session=B)
    dispatcher.cancel_ungranted(RequestId("alone"), CancelCause.CLIENT_GONE, 0.0)
    dispatcher.cancel_any(RequestId("alone"), CancelCause.CLIENT_GONE, 0.0)
    at_b(dispatcher, "first", [*PREFIX, 900])

    behind = place(dispatcher, "behind", [*prompt(700, 20), 2], session=B)

    assert behind.transfer_seconds == pytest.approx(alone.transfer_seconds + 20 * BLOCK / RATE)


def test_a_slower_network_than_announced_is_learned_and_then_prompts_are_computed() -> None:
    dispatcher = pool()
    fetched = 0
    for number in range(6):
        at = 10.0 * number
        keys = prompt(1000 * (number + 1), 20)
        dispatcher.state.apply(stored("a", number + 2, keys))
        grant = granted(at_b(dispatcher, f"r{number}", [*keys, 900 + number], now=at))
        if grant.fetch_from:
            fetched += 1
            dispatcher.state.apply(ended(f"r{number}", at=at + 4.0, seconds=4.0, source=0.01))
        dispatcher.state.apply(first_token(f"r{number}", "b", at=at + (4.065 if grant.fetch_from else 1.345)))

    assert fetched == 2  # the last one to see whether it is still so
    assert dispatcher.state.transfers.rates.of(A, 10.0) > 10


def test_a_new_leader_finds_the_fetch_under_way_and_its_end() -> None:
    dispatcher = pool()
    log = [*at_b(dispatcher, "r", [*PREFIX, 900]), ended("r", at=1.0)]
    successor = State(PoolSettings())
    for event in [
        joined("a", fetches=True, transfer_tokens_per_s=RATE),
        joined("b", fetches=True, transfer_tokens_per_s=RATE),
        stored("a", 1, PREFIX),
        *log[:-1],
    ]:
        successor.apply(event)
    request = successor.workload.requests[RequestId("r")]
    assert (request.fetching, request.fetch_from) == (True, A)
    assert set(successor.transfers.under_way[A]) == {"r"}

    successor.apply(log[-1])

    assert (request.fetching, request.granted_at) == (False, 1.0)


def test_a_first_token_without_a_word_of_the_fetch_ends_it_and_teaches_nothing() -> None:
    dispatcher = pool()
    at_b(dispatcher, "r", [*PREFIX, 900])

    dispatcher.state.apply(first_token("r", "b", at=9.0))

    assert dispatcher.state.workload.requests[RequestId("r")].stage is Stage.DECODING
    assert dispatcher.state.transfers.under_way == {}
    assert dispatcher.state.latency.corrections == {}


def test_a_price_of_transfers_that_nobody_makes_is_no_setting_any_more_but_old_records_are_understood() -> None:
    old = {"tie_seconds": 0.001, "kvcache_balancing_threshold": 2.0, "transfer_tokens_per_s": 10_000.0}
    with pytest.raises(UnknownPolicyError, match="transfer_tokens_per_s"):
        policy_set(routing="min_ttft", settings={"transfer_tokens_per_s": 10_000.0})

    recorded = {**policy_set(routing="min_ttft").settings, **old}
    assert recorded_policy_set("min_ttft", recorded).settings == recorded


def fetching_best_effort(**settings: Any) -> Dispatcher:
    """Default policies; `a` holds the prefix and drains, so `b` fetches it for requests that are late even alone."""
    policies = policy_set(**settings)
    state = State(PoolSettings(), policies.trackers())
    for name in ("a", "b"):
        state.apply(joined(name, fetches=True, transfer_tokens_per_s=RATE))
    state.apply(stored("a", 1, PREFIX))
    dispatcher = Dispatcher(state, policies, term=Term(1))
    dispatcher.drain(A, "maintenance", 0.0)
    return dispatcher


def test_what_is_late_even_alone_and_fetches_its_prefix_is_granted_once() -> None:
    dispatcher = fetching_best_effort()

    events = asked(dispatcher, "late", [*PREFIX, *prompt(5000, 1)], slo_ttft=0.05)

    assert [type(event).__name__ for event in events] == ["RequestArrived", "RequestPlaced", "RequestGranted"]
    assert granted(events).fetch_from == A
    assert dispatcher.state.dead_letters.count == 0


def test_work_that_a_grant_changes_leaves_its_own_class_and_the_sum_of_best_effort() -> None:
    """The source evicts the prefix, so that all is computed after all."""
    dispatcher = fetching_best_effort(prefill_window_tokens=1_000)
    state = dispatcher.state
    asked(dispatcher, "first", prompt(9000, 60), slo_ttft=60.0)
    for number in range(4):
        asked(dispatcher, f"late-{number}", [*PREFIX, *prompt(7000 + 100 * number, 40)], now=0.1, slo_ttft=1.0)
    asked(dispatcher, "second", prompt(9500, 60), now=0.1, slo_ttft=60.0)
    state.apply(removed("a", 2, PREFIX))

    running, seen = "first", []
    for step in range(1, 6):
        state.apply(first_token(running, "b", at=6.0 * step))
        running = granted(dispatcher.grant_waiting(B, 6.0 * step)).request
        seen.append(running)
        pending = state.workload.queues[B].pending.values()
        for name, known in state.workload.queues[B].classes.items():
            mine = [request for request in pending if request.queue_class == name]
            assert known.seconds == pytest.approx(sum(request.prefill_seconds for request in mine)), (name, seen)
            assert known.tokens == sum(request.uncached_tokens for request in mine)
        late = [request for request in pending if request.best_effort]
        assert state.best_effort._pending_seconds == pytest.approx(sum(request.prefill_seconds for request in late))

    assert sorted(seen) == ["late-0", "late-1", "late-2", "late-3", "second"]
