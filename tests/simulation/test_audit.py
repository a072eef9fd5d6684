"""The independent rules of torture, on the log of a leader in a history of our own."""

from dataclasses import replace

import msgspec

from pointsman.contracts.decisions import RequestPlaced, RequestRejected
from pointsman.policies.policy_set import policy_set
from pointsman_lab.torture.audit import audit
from pointsman_lab.torture.network import Stored
from pointsman_lab.torture.pool_model import PoolModel
from tests.support.events import BLOCK, joined, route
from tests.support.logged_leader import LoggedLeader


def displacing() -> list[Stored]:
    """A tenant fills the queue of one engine, and another takes the place of its newest request."""
    leader = LoggedLeader()
    leader.lead(policy_set(admission="none", prefill_window_tokens=1, pending_max=3), at=0.0)
    leader.happens(joined("a"))
    for number, tenant in enumerate(("greedy", "greedy", "greedy", "greedy", "modest"), 1):
        asked = route(f"r{number}", [10 * number, 10 * number + 1], tenant=tenant, slo_ttft=1e6)
        leader.decides(leader.dispatcher.route(asked, 1.0))
    assert all(entry.event is not None for entry in leader.log)
    return [Stored(e.sequence, e.event.at, "s", e.event) for e in leader.log if e.event is not None]


def problems(history: list[Stored]) -> list[str]:
    return list(audit(history, lambda: PoolModel(block_tokens=BLOCK, speed=1.0, model="m")))


def test_who_takes_the_place_of_another_is_weighed_with_the_queue_as_it_was_before() -> None:
    history = displacing()
    displaced = [s.event for s in history if isinstance(s.event, RequestRejected)]

    assert [(event.request, event.displaced_by) for event in displaced] == [("r4", "r5")]
    assert problems(history) == []


def test_a_placement_that_ignores_the_displaced_work_is_found() -> None:
    history = displacing()
    placed = history[-1].event
    assert isinstance(placed, RequestPlaced)
    (candidate,) = placed.candidates
    less = msgspec.structs.replace(candidate, queue_seconds=candidate.queue_seconds * 2 / 3)
    history[-1] = replace(history[-1], event=msgspec.structs.replace(placed, candidates=[less]))

    assert any("was weighed with" in problem for problem in problems(history))
