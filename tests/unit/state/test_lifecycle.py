"""The table of request transitions: what it allows, and that an event which asks for anything else changes nothing."""

import pytest

from pointsman.contracts.block_keys import pack_keys
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import RequestGranted, RequestMigrated
from pointsman.contracts.envelope import Stamp
from pointsman.primitives import BlockKey, InstanceId, RequestId, Term
from pointsman.state.lifecycle import TRANSITIONS, Trigger
from pointsman.state.state import PoolSettings, State
from pointsman.state.workload import Stage
from tests.support.events import arrived, first_token, joined, placed

R, A, B = RequestId("r"), InstanceId("a"), InstanceId("b")


def stamp(number: int) -> Stamp:
    return Stamp(term=Term(1), number=number, as_of=2)


def to_decoding() -> list[LogEvent]:
    """The events of one request, one stage each."""
    return [
        arrived(R, at=1.0, keys=pack_keys([BlockKey(1)]), prompt_tokens=65, max_output_tokens=5, stamp=stamp(1)),
        placed(R, A, at=1.0, uncached_tokens=65, prefill_seconds=0.065, predicted_ttft=0.065, stamp=stamp(2)),
        RequestGranted(at=1.0, request=R, instance=A, stamp=stamp(3)),
        first_token("r", "a", at=1.1),
    ]  # fmt: skip


def moved(number: int, *, rebound: bool) -> RequestMigrated:
    return RequestMigrated(
        at=1.2, request=R, source=A, instance=B, hit_blocks=0, uncached_tokens=65, prefill_seconds=0.065,
        predicted_ttft=0.065, reason="", rebound=rebound, stamp=stamp(number),
    )  # fmt: skip


def state_after(steps: int) -> State:
    state = State(PoolSettings())
    for sequence, event in enumerate([joined("a"), joined("b"), *to_decoding()[:steps]], 1):
        state.apply(event, sequence)
    return state


def test_a_request_goes_through_its_stages() -> None:
    stages = [state_after(steps).workload.requests[R].stage for steps in (1, 2, 3, 4)]

    assert stages == [Stage.ARRIVED, Stage.PENDING, Stage.PREFILL, Stage.DECODING]


def test_only_a_retry_brings_a_decoding_request_back() -> None:
    assert {trigger for stage, trigger in TRANSITIONS if stage is Stage.DECODING} == {Trigger.RETRIED}
    assert {stage for stage, trigger in TRANSITIONS if trigger is Trigger.RETRIED} == set(Stage)


@pytest.mark.parametrize(
    ("steps", "illegal"),
    [
        (1, RequestGranted(at=1.2, request=R, instance=A, stamp=stamp(9))),
        (1, first_token("r", "a", at=1.2)),
        (1, moved(9, rebound=False)),
        (2, first_token("r", "a", at=1.2)),
        (2, moved(9, rebound=True)),
        (3, moved(9, rebound=False)),
        (3, RequestGranted(at=1.2, request=R, instance=A, stamp=stamp(9))),
        (4, RequestGranted(at=1.2, request=R, instance=A, stamp=stamp(9))),
        (4, moved(9, rebound=True)),
        (4, first_token("r", "a", at=1.2)),
    ],
)
def test_an_illegal_transition_changes_nothing_of_request_and_queues(steps: int, illegal: LogEvent) -> None:
    state = state_after(steps)
    request = state.workload.requests[R]
    before = [getattr(request, name) for name in request.__slots__]
    queues = {name: (*q.pending, *q.prefill, *q.decoding, q.queued_tokens) for name, q in state.workload.queues.items()}

    state.apply(illegal, 20)

    assert [getattr(request, name) for name in request.__slots__] == before
    assert queues == {
        name: (*q.pending, *q.prefill, *q.decoding, q.queued_tokens) for name, q in state.workload.queues.items()
    }
    assert state.dead_letters.count == 0


@pytest.mark.parametrize(("version", "learned"), [(9, 0.0), (8, 1.0)])
def test_a_place_that_an_ingress_chose_teaches_nothing_of_predictions(version: int, learned: float) -> None:
    """What was predicted was of another instance."""
    state = State(PoolSettings(fold_version=version))
    alone = RequestGranted(at=1.0, request=R, instance=B)
    events = [joined("a"), joined("b"), *to_decoding()[:2], alone, first_token("r", "b", at=5.0, prefill=4.0)]
    for sequence, event in enumerate(events, 1):
        state.apply(event, sequence)

    request = state.workload.requests[R]
    assert (request.stage, request.instance) == (Stage.DECODING, B)
    assert state.ttft_intervals.counted == learned
