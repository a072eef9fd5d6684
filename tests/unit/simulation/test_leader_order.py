"""The leader's order of a log: its decisions where it made them, everything else where it read it."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import LeaderElected, WritesLost
from pointsman.contracts.envelope import Stamp, is_fenced
from pointsman.contracts.requests import RequestFinished
from pointsman.ports import LogEntry
from pointsman.primitives import Term
from pointsman.simulation.replay import leader_order
from pointsman.simulation.replay.leader_order import LeaderOrder, Step
from pointsman.state.state import PoolSettings, State
from tests.support.events import finished

TERM = Term(2)


def entry(sequence: int, event: LogEvent | None) -> LogEntry:
    return LogEntry(sequence, f"subject.{sequence}", b"", event, "" if event else "damaged")


def decision(number: int, as_of: int, term: int = TERM) -> WritesLost:
    return WritesLost(
        at=1.0, writer="s", count=1, reason="full", stamp=Stamp(term=Term(term), number=number, as_of=as_of)
    )


def other(number: int = 0) -> RequestFinished:
    return finished(f"r{number}", "a", at=1.0)


def told(steps: list[Step[LogEntry]]) -> list[tuple[str, int]]:
    return [(step.kind.name, step.entry.sequence) for step in steps]


def run(order: LeaderOrder[LogEntry], entries: list[LogEntry]) -> list[tuple[str, int]]:
    return told([*(step for each in entries for step in order.feed(each)), *order.finish()])


@given(st.lists(st.integers(0, 4), max_size=12), st.randoms(use_true_random=False))
def test_a_log_in_any_order_of_writing_gives_the_order_in_which_it_was_made(gaps: list[int], random: Random) -> None:
    made: list[tuple[str, int]] = []
    entries: dict[int, LogEntry] = {}
    sequence, pending = 0, list[tuple[int, int]]()
    for number, gap in enumerate(gaps, 1):
        as_of = sequence
        pending.append((number, as_of))
        for _ in range(gap):
            sequence += 1
            if pending and random.random() < 0.5:
                n, known = pending.pop(random.randrange(len(pending)))
                entries[sequence] = entry(sequence, decision(n, known))
            else:
                entries[sequence] = entry(sequence, other())
    for n, known in pending:
        sequence += 1
        entries[sequence] = entry(sequence, decision(n, known))
    decided = sorted(
        (e.event.stamp.as_of, e.event.stamp.number, e.sequence) for e in entries.values() if e.event and e.event.stamp
    )
    read = 0
    for as_of, _, at in decided:
        made += [("READ", s) for s in range(read + 1, as_of + 1)]
        read = max(read, as_of)
        made.append(("DECIDED", at))
    made += [("READ", s) for s in range(read + 1, sequence + 1)]

    assert run(LeaderOrder(TERM), list(entries.values())) == made
    assert run(LeaderOrder(TERM, held_max=1000), list(entries.values())) == made


def test_a_missing_decision_ends_the_order_and_says_why() -> None:
    order = LeaderOrder[LogEntry](TERM)

    found = run(order, [entry(1, decision(1, 0)), entry(2, decision(3, 0)), entry(3, other())])

    assert found == [("DECIDED", 1), ("LOST", 2)]
    assert order.hole == "decision 2 of term 2 is missing"


def test_a_decision_made_on_entries_that_the_log_lost_ends_the_order() -> None:
    order = LeaderOrder[LogEntry](TERM)

    assert run(order, [entry(1, decision(1, 7)), entry(2, decision(2, 7))]) == [("LOST", 1), ("LOST", 2)]
    assert order.hole == "decision 1 of term 2 was made on entry 7, which the log has lost"


def test_a_bounded_order_passes_gaps_over_and_holds_no_more_than_its_bound() -> None:
    order = LeaderOrder[LogEntry](TERM, held_max=3)
    entries = [entry(1, decision(1, 0)), entry(2, decision(3, 1)), *(entry(s, other()) for s in range(3, 9))]

    found = told([step for each in entries for step in order.feed(each)])

    assert found == [("DECIDED", 1), ("READ", 1), ("DECIDED", 2), *(("READ", s) for s in range(2, 6))]
    assert order.unseen(8) == 2
    assert told(list(order.finish())) == [("READ", 6), ("READ", 7), ("READ", 8)]


def test_without_decisions_no_more_than_a_bound_is_held_and_a_decision_from_before_what_was_read_ends_the_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leader_order, "HELD_MAX", 3)
    order = LeaderOrder[LogEntry](TERM)
    silent = [entry(1, decision(1, 0)), *(entry(s, other()) for s in range(2, 9))]

    read = told([step for each in silent for step in order.feed(each)])
    in_time = told(list(order.feed(entry(9, decision(2, 6)))))
    repeated = told(list(order.feed(entry(10, decision(1, 0)))))
    too_late = told([*order.feed(entry(11, decision(3, 4))), *order.feed(entry(12, decision(4, 11))), *order.finish()])

    assert read == [("DECIDED", 1), *(("READ", s) for s in range(1, 6))]
    assert in_time == [("READ", 6), ("DECIDED", 9)]
    assert repeated == [("REPEATED", 10), ("READ", 7)]
    assert too_late == [("LOST", 11), ("LOST", 12)]
    assert order.hole == "decision 3 of term 2 was made on entry 4, more than 3 entries before it"


def test_a_decision_that_waits_for_a_missing_one_waits_for_a_bounded_number_of_entries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leader_order, "HELD_MAX", 3)
    order = LeaderOrder[LogEntry](TERM)

    found = run(order, [entry(1, decision(2, 0)), *(entry(s, other()) for s in range(2, 9)), entry(9, decision(1, 0))])

    assert found == [("LOST", 1), ("LOST", 9)]
    assert order.hole == "decision 1 of term 2 is missing"


def test_a_second_copy_of_a_decision_is_a_repeat() -> None:
    found = run(LeaderOrder(TERM), [entry(1, decision(1, 0)), entry(2, decision(1, 0))])

    assert found == [("DECIDED", 1), ("REPEATED", 2), ("READ", 1), ("READ", 2)]


def test_replay_applies_each_step_behind_it_and_tells_which_count() -> None:
    elected = LeaderElected(at=1.0, term=TERM, scheduler="s", as_of=0)
    entries = [
        entry(1, elected),
        entry(2, decision(1, 0, term=1)),
        entry(3, None),
        entry(4, decision(1, 2)),
        entry(5, decision(1, 2)),
        entry(6, other()),
    ]
    state = State(PoolSettings())
    seen = [
        (step.kind.name, step.entry.sequence, step.counts, state.sequence, state.writes_lost)
        for step in LeaderOrder[LogEntry](TERM).replay(entries, state)
    ]

    assert seen == [
        ("READ", 1, True, 0, 0),
        ("READ", 2, False, 1, 0),
        ("DECIDED", 4, True, 2, 0),
        ("REPEATED", 5, False, 2, 1),
        ("READ", 3, False, 2, 1),
        ("READ", 4, False, 3, 1),
        ("READ", 5, False, 4, 1),
        ("READ", 6, True, 5, 1),
    ]
    assert (state.sequence, state.writes_lost, state.fenced) == (6, 1, 1)


def test_replay_goes_on_from_a_state_in_the_middle_of_the_term() -> None:
    elected = LeaderElected(at=1.0, term=TERM, scheduler="s", as_of=0)
    state = State(PoolSettings())
    state.apply(elected, 1)
    state.apply(decision(1, 1), 2)

    steps = told(list(LeaderOrder[LogEntry](TERM).replay([entry(3, other()), entry(4, decision(2, 2))], state)))

    assert steps == [("DECIDED", 4), ("READ", 3), ("READ", 4)]
    assert state.writes_lost == 2


def test_only_an_earlier_leader_is_fenced() -> None:
    assert is_fenced(Stamp(term=Term(1), number=1, as_of=0), TERM)
    assert not is_fenced(Stamp(term=TERM, number=1, as_of=0), TERM)
    assert not is_fenced(None, TERM)
