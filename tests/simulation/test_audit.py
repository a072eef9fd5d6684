"""The independent rules of torture, on the log of a leader in a history of our own."""

from dataclasses import replace

import msgspec

from pointsman.contracts.decisions import RequestGranted, RequestMigrated, RequestPlaced, RequestRejected
from pointsman.contracts.fleet import InstanceJoined
from pointsman.policies.policy_set import policy_set
from pointsman.primitives import InstanceId
from pointsman_lab.torture.audit import audit
from pointsman_lab.torture.network import Stored
from pointsman_lab.torture.pool_model import PoolModel
from tests.support.events import BLOCK, finished, joined, route
from tests.support.logged_leader import LoggedLeader


def displacing() -> list[Stored]:
    """A tenant fills the queue of one engine, and another takes the place of its newest request."""
    leader = LoggedLeader()
    leader.lead(policy_set(admission="none", prefill_window_tokens=1, pending_max=3), at=0.0)
    leader.happens(joined("a"))
    for number, tenant in enumerate(("greedy", "greedy", "greedy", "greedy", "modest"), 1):
        asked = route(f"r{number}", [10 * number, 10 * number + 1], tenant=tenant, slo_ttft=1e6)
        leader.decides(leader.dispatcher.route(asked, 1.0))
    return entries(leader)


def entries(leader: LoggedLeader) -> list[Stored]:
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


def draining_for_decode() -> list[Stored]:
    """The one engine that prefills and decodes is to decode only; one of its two requests waits there."""
    leader = LoggedLeader()
    leader.lead(policy_set(routing="round_robin", admission="none", prefill_window_tokens=1), at=0.0)
    leader.happens(joined("a", role_switching=True))
    for number in (1, 2):
        asked = route(f"r{number}", [10 * number, 10 * number + 1], slo_ttft=1e6)
        leader.decides(leader.dispatcher.route(asked, 1.0))
    leader.happens(joined("b", at=1.5, role="prefill"))
    leader.decides(leader.dispatcher.drain(InstanceId("a"), "a role", 2.0, by="operator", becomes="decode"))
    leader.happens(finished("r1", "a", at=2.5))
    leader.decides(leader.dispatcher.grant_waiting(InstanceId("a"), 2.5))
    return entries(leader)


def test_what_waits_at_an_engine_that_drains_is_granted_there_if_nobody_would_decode_it_elsewhere() -> None:
    history = draining_for_decode()
    granted = [s.event for s in history if isinstance(s.event, RequestGranted)]

    assert [(event.request, event.instance) for event in granted] == [("r1", "a"), ("r2", "a")]
    assert problems(history) == []


def test_a_grant_at_an_engine_that_drains_is_found_where_another_would_serve_the_request() -> None:
    history = [
        replace(s, event=msgspec.structs.replace(s.event, role="both"))
        if isinstance(s.event, InstanceJoined) and s.event.instance == "b"
        else s
        for s in draining_for_decode()
    ]

    assert any("a is draining; ['b'] would take r2" in problem for problem in problems(history))


def moved_beside_a_full_cache() -> list[Stored]:
    """What waits at an engine that leaves goes to one whose KV cache others fill."""
    leader = LoggedLeader()
    leader.lead(policy_set(routing="pointsman", admission="none", prefill_window_tokens=1), at=0.0)
    leader.happens(joined("a"))
    for number in (1, 2, 3):
        asked = route(f"r{number}", [10 * number, 10 * number + 1], slo_ttft=1e6, max_output_tokens=100)
        leader.decides(leader.dispatcher.route(asked, 1.0))
    leader.happens(joined("b", at=1.5, kv_capacity_tokens=200))
    leader.decides(leader.dispatcher.drain(InstanceId("a"), "maintenance", 2.0, by="operator"))
    return entries(leader)


def test_the_wait_for_kv_memory_is_part_of_what_a_move_predicts() -> None:
    history = moved_beside_a_full_cache()
    moved = [s.event for s in history if isinstance(s.event, RequestMigrated)]

    assert [event.request for event in moved] == ["r2", "r3"]
    assert moved[1].predicted_ttft > 1.0
    assert problems(history) == []
