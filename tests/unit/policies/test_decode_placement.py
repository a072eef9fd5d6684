"""Prefill and decode on instances of their own: who is chosen, what is booked where, what is refused and when."""

from typing import Any

import msgspec
import pytest

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.commands import HandOverRequest
from pointsman.contracts.decisions import (
    HandOverRefused,
    RequestGranted,
    RequestHandedOver,
    RequestPlaced,
    RequestRejected,
)
from pointsman.contracts.fleet import DecodeCost, InstanceDraining
from pointsman.contracts.reasons import CancelCause
from pointsman.policies.dispatch import Dispatcher
from pointsman.policies.dispatch.recording import Recording
from pointsman.policies.policy_set import policy_set, scaling_policy
from pointsman.policies.scaling import Limits
from pointsman.policies.scaling.decider import Decider
from pointsman.primitives import Epoch, InstanceId, RequestId, Term
from pointsman.state.state import FOLD_VERSION, PoolSettings, State
from pointsman.state.workload import Stage
from tests.support.events import finished, first_token, joined, reported, route, stored

STEP = DecodeCost(step_s=0.02, per_request_s=0.02)
"""One request alone gets a token in 40 ms, with another beside it in 60 ms, with four in all in 100 ms."""
SLOWER = DecodeCost(step_s=0.05, per_request_s=0.02)
"""One alone in 70 ms, three in 110 ms: the objective of 100 ms is missed because of the others."""

SPLIT = {"p1": "prefill", "p2": "prefill", "d1": "decode", "d2": "decode"}


def pool(
    roles: dict[str, str] = SPLIT,
    *,
    settings: dict[str, Any] | None = None,
    fold_version: int = FOLD_VERSION,
    recording: Recording | None = None,
    **fields: Any,
) -> Dispatcher:
    policies = policy_set(routing="min_ttft", admission="predicted_ttft", settings=settings)
    state = State(PoolSettings(fold_version=fold_version), policies.trackers())
    for instance, role in roles.items():
        told: dict[str, Any] = {"role": role, "decode": STEP, "transfer_tokens_per_s": 10_000.0} | fields
        state.apply(joined(instance, **told))
    return Dispatcher(state, policies, term=Term(1), recording=recording)


def prompt(first: int, blocks: int = 4) -> list[int]:
    return list(range(first, first + blocks))


def ask(dispatcher: Dispatcher, request: str, keys: list[int], *, now: float = 0.0, **fields: Any) -> list[LogEvent]:
    return dispatcher.route(route(request, keys, arrived_at=now, **fields), now)


def placed(events: list[LogEvent]) -> RequestPlaced:
    return next(event for event in events if isinstance(event, RequestPlaced))


def prefilled(dispatcher: Dispatcher, request: str, *, now: float = 0.5) -> list[LogEvent]:
    known = dispatcher.state.workload.requests[RequestId(request)]
    command = HandOverRequest(request=known.id, attempt=known.attempt, instance=known.instance, prefill=now)
    return dispatcher.hand_over(command, now)


def test_a_pair_is_chosen_and_told_with_its_reasons() -> None:
    dispatcher = pool()

    chosen = placed(ask(dispatcher, "r", prompt(1)))

    assert (chosen.instance, chosen.decode) == ("p1", "d1")
    assert [c.instance for c in chosen.candidates] == ["p1", "p2"]
    assert [c.instance for c in chosen.decode_candidates] == ["d1", "d2"]
    assert chosen.decode_candidates[0].predicted_tpot == 0.04
    assert chosen.transfer_seconds == 257 / 10_000
    assert chosen.predicted_ttft == chosen.queue_seconds + chosen.prefill_seconds + chosen.transfer_seconds


def test_a_burst_spreads_over_who_decodes_before_any_of_it_does() -> None:
    dispatcher = pool()

    assert [placed(ask(dispatcher, f"r{n}", prompt(1))).decode for n in range(4)] == ["d1", "d2", "d1", "d2"]


def test_who_holds_most_of_the_prompt_decodes_it_where_loads_are_equal() -> None:
    dispatcher = pool()
    dispatcher.state.apply(stored("d2", 1, prompt(1)))

    chosen = placed(ask(dispatcher, "r", prompt(1)))

    assert chosen.decode == "d2"
    assert chosen.decode_candidates[1].transfer_tokens == 1


def test_who_has_no_room_for_the_kv_cache_comes_last() -> None:
    dispatcher = pool({"p1": "prefill", "d1": "decode"})
    dispatcher.state.apply(joined("d2", role="decode", kv_capacity_tokens=300, decode=DecodeCost(step_s=0.001)))

    assert placed(ask(dispatcher, "r", prompt(1), max_output_tokens=100)).decode == "d1"


@pytest.mark.parametrize(("version", "beside", "tpot"), [(10, 4, 0.12), (9, 1, 0.06)])
def test_a_request_of_several_answers_counts_for_each_of_them(version: int, beside: int, tpot: float) -> None:
    """Logs of before counted it once; they are replayed so."""
    dispatcher = pool({"p1": "prefill", "d1": "decode"}, fold_version=version)
    ask(dispatcher, "four", prompt(1), answers=4)

    (seen,) = placed(ask(dispatcher, "r", prompt(100), slo_tpot=0.2)).decode_candidates

    assert seen.requests == beside
    assert seen.predicted_tpot == pytest.approx(tpot)


@pytest.mark.parametrize(("version", "tpot"), [(10, 0.05), (9, 0.5 / 43)])
def test_what_an_instance_showed_with_several_answers_is_the_speed_of_each(version: int, tpot: float) -> None:
    """50 ms a token, while four answers of 11 tokens came side by side: 500 ms for 44 tokens."""
    dispatcher = pool({"p1": "prefill", "d1": "decode"}, fold_version=version)
    for number in range(10):
        name = f"four-{number}"
        ask(dispatcher, name, prompt(100 * number), answers=4)
        prefilled(dispatcher, name)
        dispatcher.state.apply(first_token(name, "d1", at=0.6))
        end = finished(name, "d1", at=0.6)
        dispatcher.state.apply(msgspec.structs.replace(end, completion_tokens=44, tpot=0.5 / 43))

    (seen,) = placed(ask(dispatcher, "r", prompt(5000), slo_tpot=0.2)).decode_candidates

    assert seen.predicted_tpot == pytest.approx(tpot, abs=1e-4)


def test_the_answers_of_a_request_need_room_each() -> None:
    dispatcher = pool({"p1": "prefill", "d1": "decode"}, kv_capacity_tokens=5_000)
    roomy = joined("d2", role="decode", kv_capacity_tokens=20_000, decode=SLOWER, transfer_tokens_per_s=10_000.0)
    dispatcher.state.apply(roomy)

    alone = placed(ask(dispatcher, "alone", prompt(1), max_output_tokens=512, slo_tpot=1.0))
    many = placed(ask(dispatcher, "many", prompt(100), max_output_tokens=512, answers=12, slo_tpot=1.0))
    after = placed(ask(dispatcher, "after", prompt(200), max_output_tokens=512, slo_tpot=1.0))

    assert [alone.decode, many.decode] == ["d1", "d2"]
    free = {candidate.instance: candidate.free_tokens for candidate in after.decode_candidates}
    assert free == {"d1": 5_000 - 257 - 512, "d2": 20_000 - 257 - 12 * 512}


def test_prefill_is_booked_on_one_and_decode_on_the_other() -> None:
    dispatcher = pool()
    lines = dispatcher.state.workload.queues
    ask(dispatcher, "r", prompt(1))

    assert (len(lines[InstanceId("p1")].prefill), len(lines[InstanceId("d1")].expected)) == (1, 1)

    events = prefilled(dispatcher, "r")
    request = dispatcher.state.workload.requests[RequestId("r")]

    assert isinstance(events[0], RequestHandedOver)
    assert (events[0].source, events[0].instance) == ("p1", "d1")
    assert (request.stage, request.instance, request.prefilled_by) == (Stage.HANDED_OVER, "d1", "p1")
    assert lines[InstanceId("p1")].requests == 0
    assert lines[InstanceId("p1")].prefill_seconds == 0.0
    assert (len(lines[InstanceId("d1")].decoding), len(lines[InstanceId("d1")].expected)) == (1, 0)
    assert dispatcher.state.latency.correction(InstanceId("p1")) > 1.0  # 0.257 s were predicted

    dispatcher.state.apply(first_token("r", "d1", at=0.6))
    assert request.stage is Stage.DECODING
    dispatcher.state.apply(finished("r", "d1", at=0.9))
    assert lines[InstanceId("d1")].requests == 0


def test_the_end_of_a_prefill_lets_the_next_one_in() -> None:
    dispatcher = pool({"p1": "prefill", "d1": "decode"})
    long = {"max_output_tokens": 1, "slo_ttft": 100.0}
    ask(dispatcher, "first", prompt(1, 200), **long)
    waits = ask(dispatcher, "second", prompt(1000, 200), **long)

    assert not [event for event in waits if isinstance(event, RequestGranted)]
    assert [e.request for e in prefilled(dispatcher, "first") if isinstance(e, RequestGranted)] == ["second"]


def test_an_end_before_the_hand_over_frees_who_expected_it() -> None:
    dispatcher = pool()
    ask(dispatcher, "r", prompt(1))

    dispatcher.cancel_any(RequestId("r"), CancelCause.CLIENT_GONE, 1.0)

    assert not dispatcher.state.workload.queues[InstanceId("d1")].expected


def test_a_request_that_would_get_its_tokens_too_slowly_everywhere_is_refused() -> None:
    dispatcher = pool()
    for number in range(8):
        ask(dispatcher, f"r{number}", prompt(1))

    refused = ask(dispatcher, "r8", prompt(1))[1]

    assert isinstance(refused, RequestRejected)
    assert refused.reason == "slo_tpot"
    assert [c.requests for c in refused.decode_candidates] == [4, 4]
    assert isinstance(ask(dispatcher, "one-token", prompt(1), max_output_tokens=1)[1], RequestPlaced)


def test_an_objective_that_an_idle_instance_misses_is_refused_to_nobody() -> None:
    dispatcher = pool()
    asked = [placed(ask(dispatcher, f"r{n}", prompt(10 * n), slo_tpot=0.03)) for n in range(1, 5)]
    handed = prefilled(dispatcher, "r1")

    assert [event.decode for event in asked] == ["d1", "d2", "d1", "d2"]
    assert isinstance(handed[0], RequestHandedOver)


def test_load_is_looked_at_again_when_the_prefill_is_over() -> None:
    dispatcher = pool()
    ask(dispatcher, "moved", prompt(1))
    dispatcher.state.apply(InstanceDraining(at=0.1, instance=InstanceId("d1"), epoch=Epoch(1)))

    event = prefilled(dispatcher, "moved")[0]

    assert isinstance(event, RequestHandedOver)
    assert event.instance == "d2"

    for request in ("other", "another", "refused"):
        ask(dispatcher, request, prompt(1), now=1.0)
    dispatcher.state.apply(joined("d2", epoch=2, at=1.1, role="decode", decode=SLOWER))
    refused = prefilled(dispatcher, "refused", now=1.2)[0]

    assert isinstance(refused, HandOverRefused)
    assert (refused.reason, refused.source) == ("slo_tpot", "p1")
    assert dispatcher.state.workload.requests[RequestId("refused")].awaits_decoder
    assert RequestId("refused") not in dispatcher.state.workload.queues[InstanceId("p1")].prefill


def test_who_was_refused_after_its_prefill_may_be_taken_when_it_is_asked_for_again() -> None:
    dispatcher = pool({"p1": "prefill", "d1": "decode"})
    for request in ("r", "other", "another"):
        ask(dispatcher, request, prompt(1))
    dispatcher.state.apply(joined("d1", epoch=2, at=0.1, role="decode", decode=SLOWER))
    assert isinstance(prefilled(dispatcher, "r")[0], HandOverRefused)
    assert isinstance(prefilled(dispatcher, "r", now=0.6)[0], HandOverRefused)
    dispatcher.state.apply(joined("d1", epoch=3, at=0.7, role="decode", decode=STEP))

    assert isinstance(prefilled(dispatcher, "r", now=0.8)[0], RequestHandedOver)
    lines = dispatcher.state.workload.queues
    assert [len(lines[InstanceId(name)].decoding) for name in ("p1", "d1")] == [0, 1]


def test_the_load_check_can_be_switched_off() -> None:
    dispatcher = pool(settings={"pair.load_check": False})
    events = [ask(dispatcher, f"r{number}", prompt(1)) for number in range(12)]

    assert {placed(event).settings["pair.load_check"] for event in events} == {False}


def test_transfer_counts_in_the_objective_on_the_first_token() -> None:
    dispatcher = pool(transfer_tokens_per_s=100.0)

    late = placed(ask(dispatcher, "r", prompt(1), slo_ttft=2.0))

    assert late.best_effort
    assert late.predicted_ttft > 2.0


def test_one_that_does_everything_keeps_what_it_prefills_unless_it_decodes_too_slowly() -> None:
    dispatcher = pool({"b1": "both", "d1": "decode"})
    alone = [placed(ask(dispatcher, f"r{n}", prompt(1))).decode for n in range(4)]
    for number in range(4):
        dispatcher.state.apply(first_token(f"r{number}", "b1", at=0.5))

    assert alone == ["", "", "", ""]
    assert placed(ask(dispatcher, "r4", prompt(1), now=1.0)).decode == "d1"


def test_without_anybody_who_decodes_only_who_does_everything_gets_requests() -> None:
    dispatcher = pool({"p1": "prefill", "b1": "both"})
    dispatcher.state.apply(InstanceDraining(at=0.0, instance=InstanceId("b1"), epoch=Epoch(1)))
    refused = ask(dispatcher, "r", prompt(1))[1]

    assert isinstance(refused, RequestRejected)
    assert (refused.reason, refused.detail) == ("no_instance", "no instance that decodes is ready")


def test_a_hand_over_says_how_many_it_weighed_and_does_not_list() -> None:
    dispatcher = pool(SPLIT | {"d3": "decode", "d4": "decode"}, recording=Recording(1))
    ask(dispatcher, "r", prompt(1))
    (over, *_) = prefilled(dispatcher, "r")

    assert isinstance(over, RequestHandedOver)
    assert (len(over.candidates), over.others) == (2, 2)


def test_a_hand_over_that_comes_twice_is_one() -> None:
    dispatcher = pool()
    ask(dispatcher, "r", prompt(1))
    source = dispatcher.state.workload.requests[RequestId("r")].instance
    command = HandOverRequest(request=RequestId("r"), attempt=1, instance=source, prefill=0.5)

    assert dispatcher.hand_over(command, 0.5)
    assert dispatcher.hand_over(command, 0.6) == []


def test_who_failed_to_decode_is_not_asked_again() -> None:
    dispatcher = pool()
    ask(dispatcher, "r", prompt(1))
    prefilled(dispatcher, "r")

    again = placed(ask(dispatcher, "r", prompt(1), now=1.0, attempt=2, excluded=[InstanceId("d1")]))

    assert (again.instance, again.decode) == ("p1", "d2")
    assert not dispatcher.state.workload.queues[InstanceId("d1")].decoding


def test_an_ingress_that_found_no_leader_says_where_its_request_is() -> None:
    dispatcher = pool()
    ask(dispatcher, "r", prompt(1))
    told = RequestHandedOver(
        at=0.5, request=RequestId("r"), source=InstanceId("p1"), instance=InstanceId("d2"), attempt=1, prefill=0.5
    )

    dispatcher.state.apply(told)
    dispatcher.state.apply(told)

    assert dispatcher.state.workload.requests[RequestId("r")].instance == "d2"
    assert [len(line.expected) for line in dispatcher.state.workload.queues.values()] == [0, 0, 0]


def test_a_pool_without_a_split_says_nothing_of_pairs() -> None:
    dispatcher = pool({"a": "both", "b": "both"})

    chosen = placed(ask(dispatcher, "r", prompt(1)))

    assert (chosen.decode, chosen.decode_candidates, chosen.transfer_seconds) == ("", [], 0.0)
    assert not [name for name in chosen.settings if name.startswith("pair.")]


def test_no_policy_changes_the_size_of_a_pool_whose_instances_have_roles() -> None:
    decisions = []
    for roles in (SPLIT, dict.fromkeys(SPLIT, "both")):
        policy = scaling_policy("target_utilisation")
        state = State(PoolSettings(), policy.trackers())
        for instance, role in roles.items():
            state.apply(joined(instance, role=role))
            state.apply(reported(instance, 0, []))
        decider = Decider(policy=policy, limits=Limits(), scaler="s")
        first = decider.decide(state, 1.0)
        assert first is not None
        state.apply(first, 1)
        decisions.append(decider.decide(state, 1000.0))

    assert decisions[0] is None
    assert decisions[1] is not None
