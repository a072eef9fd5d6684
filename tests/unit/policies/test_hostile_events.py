"""Decisions on a State that lying or odd events have shaped: nothing raises, nothing stays for ever, all can be written."""

from collections.abc import Container
from typing import Any

import pytest

from pointsman.contracts.codec import decode_event, encode
from pointsman.contracts.commands import HandOverRequest
from pointsman.contracts.decisions import (
    MigrationRefused,
    RequestGranted,
    RequestMigrated,
    RequestPlaced,
    RequestRejected,
)
from pointsman.contracts.fleet import DecodeCost, InstanceDraining, InstanceLeft
from pointsman.contracts.requests import PrefixFetchEnded, RequestAttemptFailed, RequestFailed
from pointsman.contracts.tenants import TenantPolicies, TenantPolicy
from pointsman.policies.dispatch import Dispatcher
from pointsman.policies.policy_set import policy_set
from pointsman.policies.rebalancing.base import Migration, MigrationPlan
from pointsman.primitives import Epoch, InstanceId, RequestId, Term
from pointsman.state.state import FOLD_VERSION, PoolSettings, State
from pointsman.state.trackers.late_turns import LateCredit
from pointsman.state.trackers.service_window import ServiceWindow
from pointsman.state.trackers.tenant_accounts import TenantAccounts
from pointsman.state.workload import Stage
from tests.support.events import finished, first_token, joined, rejected, route, stored

A, B, D, P = (InstanceId(name) for name in "abdp")
PATIENT = 1000.0


def leader(*instances: dict[str, Any], fold_version: int = FOLD_VERSION, **policies: Any) -> Dispatcher:
    chosen = policy_set(**{"admission": "none"} | policies)
    state = State(PoolSettings(fold_version=fold_version), chosen.trackers())
    for fields in instances:
        state.apply(joined(**fields))
    return Dispatcher(state, chosen, term=Term(1))


def kinds(events: list[Any]) -> list[str]:
    return [type(event).__name__ for event in events]


def test_a_prompt_of_no_tokens_stops_no_pool() -> None:
    dispatcher = leader({"instance": "a"}, {"instance": "b"}, routing="preble", prefill_window_tokens=1)
    for number in range(2):
        dispatcher.route(route(f"w{number}", [number], prompt_tokens=100, slo_ttft=PATIENT, excluded=[B]), 0.0)
    dispatcher.route(route("none", [], prompt_tokens=0, slo_ttft=PATIENT, excluded=[A]), 0.0)

    events = dispatcher.route(route("next", [7, 8], arrived_at=1.0, slo_ttft=PATIENT), 1.0)
    for request in dispatcher.state.workload.requests.values():
        request.excluded = ()
    dispatcher.drain(A, "maintenance", 2.0)

    assert "RequestPlaced" in kinds(events)
    assert dispatcher.state.workload.requests[RequestId("w1")].instance == B


@pytest.mark.parametrize(("version", "failed"), [(9, 0), (8, 1)])
def test_the_end_of_a_prompt_of_no_tokens_is_told_to_everybody(version: int, failed: int) -> None:
    dispatcher = leader({"instance": "a"}, admission="predicted_ttft_fair", fold_version=version)
    state = dispatcher.state
    for number in range(60):
        dispatcher.route(route(f"w{number}", [number], tenant=f"t{number % 2}", slo_ttft=PATIENT), 0.0)
        state.apply(first_token(f"w{number}", "a", at=0.1, prefill=0.1))
    dispatcher.route(route("none", [], tenant="empty", prompt_tokens=0, slo_ttft=PATIENT), 0.0)
    state.apply(first_token("none", "a", at=0.1, prefill=0.1))

    assert state.dead_letters.count == failed


@pytest.mark.parametrize(("version", "outcomes"), [(9, 1), (8, 2)])
def test_a_refused_request_that_waited_too_long_is_one_outcome(version: int, outcomes: int) -> None:
    dispatcher = leader({"instance": "a"}, prefill_window_tokens=1, fold_version=version)
    state, window = dispatcher.state, ServiceWindow(1000.0)
    state.use_trackers((*state.trackers[:-2], window))
    for name in ("first", "late"):
        dispatcher.route(route(name, [1, 2, 3], slo_ttft=1.0), 0.0)
    state.apply(rejected("late", "queue_full", at=5.0))

    assert (window.outcomes(0.0).total, state.dead_letters.count) == (outcomes, 0)


@pytest.mark.parametrize(("version", "outcomes"), [(9, 0), (8, 1)])
def test_best_effort_that_is_refused_is_no_outcome(version: int, outcomes: int) -> None:
    dispatcher = leader({"instance": "a"}, admission="predicted_ttft", fold_version=version)
    state, window = dispatcher.state, ServiceWindow(1000.0)
    state.use_trackers((*state.trackers[:-2], window))
    for name in ("first", "second"):
        dispatcher.route(route(name, [], prompt_tokens=9_000), 0.0)
    request = state.workload.requests[RequestId("second")]
    assert (request.best_effort, request.stage) == (True, Stage.PENDING)
    state.apply(rejected(request.id, "queue_full", at=1.0))

    assert (window.outcomes(0.0).total, state.dead_letters.count) == (outcomes, 0)


@pytest.mark.parametrize("version", [9, 8])
def test_nothing_stays_of_who_left_when_its_last_requests_end(version: int) -> None:
    """Its first tokens, answers and failures come after its departure."""
    dispatcher = leader({"instance": "a"}, {"instance": "b"}, ordering="vtc", fold_version=version)
    state = dispatcher.state
    late = LateCredit(late_share=0.1)
    state.use_trackers((*state.trackers[:-2], late))
    names = ("one", "two", "three")
    for name in names:
        dispatcher.route(route(name, [1, 2, 3], excluded=[B], slo_ttft=PATIENT), 0.01)
    state.apply(
        RequestAttemptFailed(at=0.05, request=RequestId("three"), instance=A, attempt=1, failure="http_5xx", status=500)
    )
    state.apply(InstanceLeft(at=0.1, instance=A, epoch=Epoch(1), reason="x"))
    for name in names[:2]:
        state.apply(first_token(name, "a", at=0.2, prefill=0.2))
        state.apply(finished(name, "a", at=0.3))
    state.apply(RequestFailed(at=0.4, request=RequestId("three"), reason="engine_failed", status=502))

    counter = next(tracker for tracker in state.trackers if isinstance(tracker, TenantAccounts))
    kept: dict[str, Container[InstanceId]] = {
        "queues": state.workload.queues, "corrections": state.latency.corrections, "rates": state.latency.rates,
        "intervals": state.ttft_intervals.by_instance, "records": state.outliers._records,
        "credits": late._credits, "paces": late._corrections, "accounts": counter._accounts,
    }  # fmt: skip
    found = {name for name, known in kept.items() if A in known}
    assert found == (set() if version == 9 else {"corrections", "rates", "intervals", "records", "paces"})
    assert state.dead_letters.count == 0


@pytest.mark.parametrize("blocks", [0, 2**40])
def test_a_grant_that_lies_about_a_fetch_does_not_stop_the_turns(blocks: int) -> None:
    dispatcher = leader({"instance": "a", "fetches": True}, {"instance": "b", "fetches": True}, prefill_window_tokens=1)
    for name, keys in (("first", range(16)), ("short", range(0)), ("lied-about", range(500, 510))):
        dispatcher.route(
            route(name, list(keys), excluded=[B], slo_ttft=PATIENT, prompt_tokens=64 * len(keys) + 30), 0.0
        )
    lie = RequestGranted(at=0.1, request=RequestId("lied-about"), instance=A, fetch_from=B, fetch_blocks=blocks)
    dispatcher.state.apply(decode_event(encode(lie)), 2)

    assert not dispatcher.state.workload.requests[RequestId("lied-about")].fetching
    dispatcher.grant_everywhere(1.0)
    dispatcher.relocate_pending(1.0)
    dispatcher.grant_waiting(A, 2.0)


def test_a_plan_that_moves_a_request_twice_is_answered_move_by_move() -> None:
    dispatcher = leader({"instance": "a"}, {"instance": "b"}, prefill_window_tokens=1)
    for here, other, count in (("a", B, 6), ("b", A, 2)):
        for number in range(count):
            keys = list(range(1000 * number, 1000 * number + 16))
            dispatcher.route(route(f"{here}{number}", keys, excluded=[other], slo_ttft=PATIENT), 0.0)
    for request in dispatcher.state.workload.requests.values():
        request.excluded = ()

    def move(request: str, source: InstanceId, target: InstanceId) -> Migration:
        return Migration(RequestId(request), source, target, 1.0, "x")

    events = dispatcher.migrate(MigrationPlan(0, (move("b1", B, A), move("a5", A, B), move("a5", B, A))), 0.1)

    answers = [event for event in events if isinstance(event, RequestMigrated | MigrationRefused)]
    assert kinds(answers) == ["MigrationRefused", "RequestMigrated", "MigrationRefused"]
    assert dispatcher.state.workload.requests[RequestId("a5")].instance == B


def test_a_hand_over_ends_the_fetch_whose_end_was_lost_or_comes_later() -> None:
    slow = {"decode": DecodeCost(step_s=1.0), "fetches": True, "transfer_tokens_per_s": 1e6}
    dispatcher = leader(
        {"instance": "a", **slow}, {"instance": "b", **slow},
        {"instance": "d", "role": "decode", "decode": DecodeCost(step_s=0.01)},
    )  # fmt: skip
    state, keys = dispatcher.state, list(range(1, 200))
    state.apply(stored("a", 1, keys))
    state.apply(InstanceDraining(at=0.0, instance=A, epoch=Epoch(1)))
    dispatcher.route(route("r", [*keys[:100], 1001], slo_ttft=PATIENT), 0.0)
    request = state.workload.requests[RequestId("r")]
    assert (request.fetching, request.instance, request.decode) == (True, B, D)

    dispatcher.hand_over(HandOverRequest(request=request.id, attempt=1, instance=B, prefill=0.3), 1.0)
    assert not request.fetching
    assert not state.transfers.under_way
    late = PrefixFetchEnded(
        at=0.5, request=request.id, instance=B, source=A, tokens=6400, seconds=0.1, source_seconds=0.01
    )
    state.apply(late, 3)
    assert state.dead_letters.count == 0


def test_who_decoded_when_the_pool_stopped_being_split_is_forgotten_at_its_end() -> None:
    dispatcher = leader({"instance": "p", "role": "prefill"}, {"instance": "b"})
    state = dispatcher.state
    for number in range(5):
        keys = list(range(100 * number, 100 * number + 4))
        dispatcher.route(route(f"r{number}", keys, excluded=[P], slo_ttft=PATIENT, slo_tpot=10.0), float(number))
        state.apply(first_token(f"r{number}", "b", at=number + 0.1, prefill=0.1))
    state.apply(InstanceLeft(at=41.0, instance=P, epoch=Epoch(1), reason="x"))
    for number in range(5):
        state.apply(finished(f"r{number}", "b", at=42.0))

    assert not state.decode_load._decoding[B]


def test_no_queue_stays_of_who_left_while_it_was_to_decode_or_had_prefilled() -> None:
    split = ({"instance": "p", "role": "prefill"}, {"instance": "d", "role": "decode"})
    dispatcher = leader(*split)
    state = dispatcher.state
    dispatcher.route(route("r", list(range(4))), 0.0)
    state.apply(InstanceLeft(at=0.1, instance=D, epoch=Epoch(1), reason="x"))
    state.apply(finished("r", P, at=1.0))
    assert set(state.workload.queues) <= {P}

    dispatcher = leader(*split)
    state = dispatcher.state
    dispatcher.route(route("r", list(range(4))), 0.0)
    state.apply(InstanceLeft(at=0.1, instance=P, epoch=Epoch(1), reason="x"))
    dispatcher.hand_over(HandOverRequest(request=RequestId("r"), attempt=1, instance=P, prefill=0.1), 0.2)
    state.apply(finished("r", "d", at=1.0))
    assert set(state.workload.queues) <= {D}


@pytest.mark.parametrize("rate", [1e-31, 5e-324])
def test_a_refusal_can_be_written_however_small_a_limit_is(rate: float) -> None:
    dispatcher = leader({"instance": "a"})
    dispatcher.set_tenant_policies(TenantPolicies(default=TenantPolicy(requests_per_second=rate)), 0.0, by="a")
    events = [event for number in range(3) for event in dispatcher.route(route(f"r{number}", [1]), 0.0)]

    assert any(isinstance(event, RequestRejected) for event in events)
    for event in events:
        decode_event(encode(event))


@pytest.mark.parametrize("rate", [1e-29, -1e-3])
def test_a_placement_can_be_written_whatever_rate_a_worker_tells(rate: float) -> None:
    dispatcher = leader(
        {"instance": "p", "role": "prefill"}, {"instance": "d", "role": "decode", "transfer_tokens_per_s": rate}
    )
    events = dispatcher.route(route("r", list(range(16)), slo_ttft=PATIENT), 0.0)

    assert "RequestPlaced" in kinds(events)
    for event in events:
        decode_event(encode(event))
    assert dispatcher.state.workload.requests[RequestId("r")].predicted_ttft > 0


def test_nothing_is_placed_nowhere() -> None:
    told = leader({"instance": "a"}).route(route("r", [1]), 0.0)
    (placed,) = [encode(event) for event in told if isinstance(event, RequestPlaced)]
    dispatcher = leader(hold_seconds=60.0)
    dispatcher.route(route("r", [1]), 0.0)
    dispatcher.state.apply(decode_event(placed.replace(b'"instance":"a"', b'"instance":""', 1)), 9)

    assert dispatcher.state.workload.requests[RequestId("r")].stage is Stage.ARRIVED
    assert dispatcher.state.workload.queues == {}
