"""Deciding again: whatever a fleet went through, its log gives the same decisions; and what was forged is found."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import (
    MigrationRefused,
    RequestGranted,
    RequestHandedOver,
    RequestMigrated,
    RequestPlaced,
    RequestRejected,
    Settings,
)
from pointsman.contracts.fleet import InstanceEjected, InstanceSuspected, InstanceUnejected, Role
from pointsman.contracts.requests import PrefillFinished, PrefixFetchEnded, RequestCancelled
from pointsman.policies.admission import ADMISSION_POLICIES
from pointsman.policies.admission.admit_all import AdmitAll
from pointsman.policies.ordering import ORDERING_POLICIES
from pointsman.policies.policy_set import PolicySet, policy_set, recorded_policy_set
from pointsman.policies.routing import ROUTING_POLICIES
from pointsman.ports import LogEntry
from pointsman.primitives import InstanceId
from pointsman.simulation.replay import BaseState, Recomputed, fold, verify
from pointsman.state import prefix_copies
from pointsman.state.checkpoint import encode_state
from pointsman.state.workload import InstanceQueue, Stage
from tests.support.recorded_log import RecordedFleet, rewritten

pytestmark = pytest.mark.usefixtures("plain_sums")

OUTLIERS: Settings = {"outlier.consecutive_failures": 2, "outlier.base_ejection_seconds": 0.3}
WINDOW_TOKENS = 900
"""Small enough that requests wait."""


def policies(number: int, routing: str) -> PolicySet:
    """Each routing policy with another admission and another ordering."""
    admissions, orderings = list(ADMISSION_POLICIES), list(ORDERING_POLICIES)
    return policy_set(
        routing=routing,
        admission=admissions[number % len(admissions)],
        ordering=orderings[number % len(orderings)],
        prefill_window_tokens=WINDOW_TOKENS,
        settings=dict(OUTLIERS),
    )


@pytest.fixture(scope="module")
def entries() -> list[LogEntry]:
    fleet = RecordedFleet(
        policy_set(prefill_window_tokens=WINDOW_TOKENS, settings=OUTLIERS), seed=3, failing=True
    ).live(700)
    fleet.take_over()
    return fleet.live(500).write_all().entries


def decisions(entries: list[LogEntry], kind: type[LogEvent]) -> list[tuple[int, LogEvent]]:
    return [(e.sequence, e.event) for e in entries if isinstance(e.event, kind) and e.event.stamp is not None]


@pytest.mark.parametrize("number", range(len(ROUTING_POLICIES)))
def test_every_decision_of_every_policy_is_made_again_bit_for_bit_across_a_takeover(number: int) -> None:
    routing = list(ROUTING_POLICIES)[number]
    fleet = RecordedFleet(policies(number, routing), seed=number, failing=True).live(300)
    fleet.take_over()
    fleet.live(300)

    verdict = verify(fleet.entries)

    assert str(verdict) == f"decisions {verdict.decisions:,}, identical {verdict.decisions:,}, different 0"
    assert verdict.decisions > 100
    assert verdict.problems == []
    assert [term.term for term in verdict.terms] == [1, 2]


def test_a_log_that_ends_within_what_a_leader_decided_at_once_is_no_call_that_failed(entries: list[LogEntry]) -> None:
    placed = [index for index, entry in enumerate(entries) if isinstance(entry.event, RequestPlaced)]

    for end in placed[:: len(placed) // 10]:
        verdict = verify(entries[:end])

        assert not verdict.failed
        assert verdict.differences == []


@pytest.mark.parametrize("pending_max", [10_000, 6, 3])
def test_limits_and_classes_of_tenants_are_decided_again_bit_for_bit(pending_max: int) -> None:
    reasons: Counter[str] = Counter()
    for seed in (pending_max, pending_max + 1, 102):
        told = policies(seed, list(ROUTING_POLICIES)[seed % len(ROUTING_POLICIES)])
        fleet = RecordedFleet(replace(told, pending_max=pending_max), seed=seed, failing=True, limited=True).live(400)
        fleet.take_over()
        fleet.live(400).write_all()

        verdict = verify(fleet.entries)

        assert str(verdict) == f"decisions {verdict.decisions:,}, identical {verdict.decisions:,}, different 0", seed
        for _, event in decisions(fleet.entries, RequestRejected):
            assert isinstance(event, RequestRejected)
            reasons["displaced" if event.displaced_by else event.reason] += 1
    assert reasons["rate_limited"]
    assert reasons["displaced"] or pending_max > 1_000


def test_fetches_and_copies_are_decided_again_bit_for_bit_whatever_became_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefix_copies, "ARRIVALS_MIN", 2)
    granted: Counter[bool] = Counter()
    copied: Counter[bool] = Counter()
    ended: Counter[bool] = Counter()
    for seed, routing in enumerate(("round_robin", "min_ttft", "pointsman"), start=15):
        told = replace(policies(seed, routing), admission=AdmitAll(), prefill_window_tokens=16_384, copies=True)
        fleet = RecordedFleet(told, seed=seed, failing=True, fetching=True).live(1200)
        fleet.take_over()
        fleet.live(1200).write_all()

        verdict = verify(fleet.entries)

        assert str(verdict) == f"decisions {verdict.decisions:,}, identical {verdict.decisions:,}, different 0", seed
        for entry in fleet.entries:
            if isinstance(entry.event, RequestGranted) and entry.event.stamp is not None:
                granted[bool(entry.event.fetch_from)] += 1
                copied[bool(entry.event.copy_to)] += 1
            elif isinstance(entry.event, PrefixFetchEnded):
                ended[bool(entry.event.failure)] += 1
        workload, transfers = fold(fleet.entries).workload, fold(fleet.entries).transfers
        fetching = {request.id for request in workload.requests.values() if request.fetching}
        assert {request for giving in transfers.under_way.values() for request in giving} == fetching
        for queue in workload.queues.values():
            assert queue.prefill_seconds == pytest.approx(sum(r.prefill_seconds for r in queue.prefill.values()))
            assert queue.prefill_tokens == sum(r.uncached_tokens for r in queue.prefill.values())
            assert queue.pending_tokens == sum(r.uncached_tokens for r in queue.pending.values())
            assert queue.pending_seconds == pytest.approx(sum(r.prefill_seconds for r in queue.pending.values()))
            assert queue.prompt_tokens == _prompt_tokens(queue)
    assert min(granted[True], copied[True], ended[True], ended[False]) > 1


@pytest.mark.parametrize(
    "roles",
    [("prefill", "prefill", "decode", "decode"), ("prefill", "both", "decode", "prefill"), ("both", "decode")],
)
def test_pairs_of_prefill_and_decode_are_chosen_again_bit_for_bit(roles: tuple[Role, ...]) -> None:
    for seed, routing in enumerate(("min_ttft", "pointsman", "dualmap")):
        fleet = RecordedFleet(policies(seed, routing), seed=seed, roles=roles, failing=True).live(400)
        fleet.take_over()
        fleet.live(400).write_all()

        verdict = verify(fleet.entries)

        assert str(verdict) == f"decisions {verdict.decisions:,}, identical {verdict.decisions:,}, different 0", seed
        assert verdict.problems == []
        assert decisions(fleet.entries, RequestHandedOver) or "prefill" not in roles
        queues = fold(fleet.entries).workload.queues.values()
        assert [queue.prompt_tokens for queue in queues] == [_prompt_tokens(queue) for queue in queues]


def _prompt_tokens(queue: InstanceQueue) -> int:
    inside = (*queue.pending.values(), *queue.prefill.values(), *queue.decoding.values())
    return sum(request.prompt_tokens for request in inside)


def test_the_log_that_these_tests_forge_has_every_kind_of_decision(entries: list[LogEntry]) -> None:
    kinds = (
        RequestPlaced, RequestRejected, RequestGranted, RequestMigrated, MigrationRefused, RequestCancelled,
        PrefillFinished, InstanceSuspected, InstanceEjected, InstanceUnejected,
    )  # fmt: skip

    assert [kind.__name__ for kind in kinds if not decisions(entries, kind)] == []
    assert verify(entries).ok


FORGERIES: dict[type[LogEvent], Callable[[LogEvent], LogEvent]] = {
    RequestPlaced: lambda e: msgspec.structs.replace(e, predicted_ttft=e.predicted_ttft + 1e-12),  # type: ignore[union-attr]
    RequestRejected: lambda e: msgspec.structs.replace(e, retry_after=e.retry_after + 1e-12),  # type: ignore[union-attr]
    RequestGranted: lambda e: msgspec.structs.replace(e, attempt=9),
    RequestMigrated: lambda e: msgspec.structs.replace(e, hit_blocks=e.hit_blocks + 1),  # type: ignore[union-attr]
    MigrationRefused: lambda e: msgspec.structs.replace(e, detail="no reason"),
    PrefillFinished: lambda e: msgspec.structs.replace(e, prefill=0.125),
    InstanceSuspected: lambda e: msgspec.structs.replace(e, silent_seconds=1.0),
    RequestCancelled: lambda e: msgspec.structs.replace(e, instance=InstanceId("engine-9")),
    InstanceEjected: lambda e: msgspec.structs.replace(e, seconds=e.seconds + 1e-6),  # type: ignore[union-attr]
    InstanceUnejected: lambda e: msgspec.structs.replace(e, half_open=not e.half_open),  # type: ignore[union-attr]
}


@pytest.mark.parametrize("kind", FORGERIES, ids=lambda kind: kind.__name__)
def test_one_forged_figure_is_found_and_both_sides_are_shown(kind: type[LogEvent], entries: list[LogEntry]) -> None:
    sequence, event = decisions(entries, kind)[-1]
    forged = FORGERIES[kind](event)

    verdict = verify(rewritten(entries, sequence, forged))

    first = verdict.first
    assert not verdict.ok
    assert first is not None
    assert (first.sequence, first.recorded) == (sequence, forged)
    assert first.recomputed == event or kind is RequestCancelled  # of which one was asked for, only the log says
    assert first.as_json()["known"]["now"] == event.at


def test_where_a_request_was_put_elsewhere_the_first_difference_is(entries: list[LogEntry]) -> None:
    sequence, event = next(
        (s, e) for s, e in decisions(entries, RequestPlaced) if isinstance(e, RequestPlaced) and len(e.candidates) > 1
    )
    assert isinstance(event, RequestPlaced)
    elsewhere = next(c.instance for c in event.candidates if c.instance != event.instance)

    verdict = verify(rewritten(entries, sequence, msgspec.structs.replace(event, instance=elsewhere)))

    assert verdict.first is not None
    assert verdict.first.sequence == sequence
    assert verdict.first.recomputed == event


def test_a_difference_shows_the_queues_as_the_leader_weighed_them() -> None:
    told = policy_set(routing="min_ttft", prefill_window_tokens=WINDOW_TOKENS)
    entries = RecordedFleet(told, seed=3).live(300).write_all().entries
    corrected = 0
    for sequence, placed in decisions(entries, RequestPlaced)[::4]:
        assert isinstance(placed, RequestPlaced)
        verdict = verify(rewritten(entries, sequence, msgspec.structs.replace(placed, predicted_ttft=99.0)))

        shown = {instance["instance"]: instance for instance in verdict.differences[0].known["instances"]}
        for candidate in placed.candidates:
            assert shown[candidate.instance]["queue_seconds"] == pytest.approx(candidate.queue_seconds)
            corrected += candidate.queue_seconds > 0.0 and shown[candidate.instance]["correction"] != 1.0
    assert corrected > 5


def test_a_decision_that_nobody_made_and_one_that_is_left_out_are_told_apart(entries: list[LogEntry]) -> None:
    granted, event = decisions(entries, RequestGranted)[10]
    assert isinstance(event, RequestGranted)
    invented = msgspec.structs.replace(event, instance=InstanceId("engine-9"))

    difference = verify(rewritten(entries, granted, invented)).first

    assert difference is not None
    assert (difference.recorded, difference.recomputed) in ((invented, None), (None, event))


def test_a_hole_in_the_numbers_is_named_and_nothing_behind_it_is_called_identical(entries: list[LogEntry]) -> None:
    sequence, event = decisions(entries, RequestPlaced)[5]
    assert event.stamp is not None
    shorter = [LogEntry(n, e.subject, e.payload, e.event) for n, e in enumerate(_without(entries, sequence), 1)]

    verdict = verify(shorter[: sequence + 200])

    assert verdict.problems == [f"decision {event.stamp.number} of term 1 is missing"]
    assert verdict.identical + verdict.different + verdict.unchecked.total() == verdict.decisions
    assert verdict.unchecked.total() > 10


def test_a_decision_that_knew_more_than_the_log_has_before_it_ends_what_can_be_verified(
    entries: list[LogEntry],
) -> None:
    at, event = decisions(entries, RequestPlaced)[50]
    assert event.stamp is not None
    stamp = msgspec.structs.replace(event.stamp, as_of=at + 3)

    verdict = verify(rewritten(entries, at, msgspec.structs.replace(event, stamp=stamp)))

    assert verdict.problems == [
        f"decision {event.stamp.number} of term 1 was made on entry {at + 3}, which the log has lost"
    ]
    assert not verdict.differences
    assert verdict.unchecked.total() > 1


def test_of_a_log_whose_beginning_or_middle_is_gone_nothing_later_is_claimed(entries: list[LogEntry]) -> None:
    beheaded, gapped = verify(entries[100:]), verify(_without(entries, 400))

    assert (beheaded.identical, beheaded.unchecked.total()) == (0, beheaded.decisions)
    assert gapped.problems == ["entries 400 to 400 are missing"]
    assert gapped.different == 0
    assert 0 < gapped.identical < gapped.decisions


@pytest.mark.parametrize("as_of", [20, 300, 460])
def test_from_a_checkpoint_on_every_later_term_is_verified_and_nothing_is_claimed_of_the_one_under_way(
    entries: list[LogEntry], as_of: int
) -> None:
    chosen = policy_set(prefill_window_tokens=WINDOW_TOKENS, settings=OUTLIERS)
    known = BaseState(fold(entries[:as_of], trackers=chosen.trackers()), chosen)

    whole, verdict = verify(entries), verify(entries[as_of // 2 :], known=known)

    assert (verdict.known_as_of, verdict.different, verdict.problems) == (as_of, 0, [])
    assert verdict.terms == whole.terms[1:]
    assert verdict.identical > 150
    assert [reason.split(":")[0] for reason in verdict.unchecked] == [f"term 1 began before entry {as_of + 1}"]
    assert verdict.identical + verdict.unchecked.total() == verdict.decisions


def test_a_log_cut_off_in_the_middle_of_a_call_is_no_difference(entries: list[LogEntry]) -> None:
    for length in range(300, 400, 3):
        assert verify(entries[:length]).ok, length


def test_a_write_that_came_twice_is_one_decision(entries: list[LogEntry]) -> None:
    sequence, event = decisions(entries, RequestGranted)[0]
    half = entries[: sequence + 5]
    again = LogEntry(len(half) + 1, half[sequence - 1].subject, half[sequence - 1].payload, event)

    once, twice = verify(half), verify([*half, again])

    assert (twice.decisions, twice.identical, twice.different) == (once.decisions, once.identical, 0)


def test_the_state_at_an_entry_is_that_of_a_fold_stopped_there(entries: list[LogEntry]) -> None:
    for sequence in (1, 57, 400, len(entries)):
        stopped = fold(entries[:sequence])

        assert encode_state(fold(entries, until=lambda e, s=sequence: e.sequence > s)) == encode_state(stopped)  # type: ignore[misc]
        assert stopped.sequence == sequence


def test_who_watches_sees_what_the_leader_knew(entries: list[LogEntry]) -> None:
    stages: set[Stage] = set()

    def note(recomputed: Recomputed) -> None:
        if isinstance(recomputed.recorded, RequestGranted):
            stages.add(recomputed.state.workload.requests[recomputed.recorded.request].stage)

    verify(entries, watch=note)

    assert stages == {Stage.PENDING}


@pytest.mark.parametrize("routing", ROUTING_POLICIES)
def test_policies_are_made_again_from_what_an_event_says_of_them(routing: str) -> None:
    chosen = policies(3, routing)

    assert recorded_policy_set(chosen.routing.name, chosen.settings) == chosen


def _without(entries: list[LogEntry], sequence: int) -> list[LogEntry]:
    return [entry for entry in entries if entry.sequence != sequence]
