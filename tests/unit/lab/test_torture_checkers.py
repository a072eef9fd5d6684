"""What folds of one log in two orders need not agree on."""

from pointsman.contracts.codec import LogEvent
from pointsman.primitives import InstanceId
from pointsman.state.state import PoolSettings, State
from pointsman_lab.torture.checkers import _answered_before_arrivals
from pointsman_lab.torture.network import Stored
from tests.support.events import arrived, finished, joined, reported

A = InstanceId("a")
HOUR = 3600.0


def folded(events: list[LogEvent]) -> State:
    state = State(PoolSettings())
    for sequence, event in enumerate(events, 1):
        state.apply(event, sequence)
    return state


def stored(events: list[LogEvent]) -> list[Stored]:
    return [Stored(sequence, 0.0, "", event) for sequence, event in enumerate(events, 1)]


def test_since_when_an_engine_is_idle_is_not_told_alike_where_an_answer_stands_before_its_arrival() -> None:
    """Torture seed 3300141: the log's disk was slow, and the clocks of a worker and an ingress were an hour behind."""
    fleet: list[LogEvent] = [joined("a"), reported("a", 0, [], at=HOUR)]
    arrival = arrived("r", at=2 * HOUR, arrived_at=HOUR, sent_at=HOUR)
    answer = finished("r", "a", at=HOUR + 5.0)
    as_written, as_decided = [*fleet, answer, arrival], [*fleet, arrival, answer]

    assert folded(as_written).fleet[A].idle_since == HOUR + 5.0
    assert folded(as_decided).fleet[A].idle_since == 2 * HOUR + 5.0
    assert _answered_before_arrivals(stored(as_written)) == {A}
    assert _answered_before_arrivals(stored(as_decided)) == set()
    assert _answered_before_arrivals(stored([*fleet, answer])) == set(), (
        "placed by its ingress: no order dates it otherwise"
    )
