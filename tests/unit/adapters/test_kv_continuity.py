"""The continuity of KV events, fed by hand: no socket, no clock."""

import pytest

from pointsman.adapters.kv_events.continuity import Continuity, RawBatch
from pointsman.adapters.kv_events.continuity_tasks import REPLAY_PAUSE_SECONDS
from pointsman.adapters.kv_events.events import (
    Cursor,
    EngineAttached,
    EngineGap,
    EngineReplayed,
    EngineRestarted,
    EngineResumed,
)
from pointsman.primitives import Sequence


def payload_of(sequence: Sequence, engine: str = "a") -> bytes:
    return f"{engine}{sequence}".encode()


def frames_of(sequence: Sequence, engine: str = "a") -> list[bytes]:
    return [b"", sequence.to_bytes(8, "big"), payload_of(sequence, engine)]


def ready(continuity: Continuity) -> list[object]:
    """The items that are ready; batches as their sequence alone."""
    items = iter(continuity.next_item, None)
    return [item.sequence if isinstance(item, RawBatch) else item for item in items]


def answered(continuity: Continuity, *sequences: Sequence, engine: str = "a") -> Sequence:
    """Answer the question of the moment with these batches; returns what was asked."""
    start = continuity.replay_request(now=0.0)
    assert start is not None
    for sequence in sequences:
        if not continuity.replayed(sequence, payload_of(sequence, engine)):
            break
    continuity.answer_ended()
    return start


def catches_up(continuity: Continuity) -> bool:
    return continuity.catching_up


def attached(*sequences: Sequence) -> Continuity:
    """Follows an engine of which it has had these batches."""
    continuity = Continuity(replays=True)
    continuity.start()
    answered(continuity, *sequences)
    if sequences:
        answered(continuity, sequences[-1])
    assert continuity.replay_request(now=0.0) is None
    assert ready(continuity)[0] == EngineAttached(exact=True)
    return continuity


def test_a_hole_is_asked_for_and_filled_before_what_came_after_it() -> None:
    continuity = attached(0, 1)
    continuity.received(frames_of(4))

    assert answered(continuity, 1, 2, 3) == 1
    assert continuity.replay_request(now=0.0) is None
    assert ready(continuity) == [2, 3, EngineReplayed(2), 4]
    assert continuity.certain


def test_what_has_left_the_buffer_is_a_gap() -> None:
    continuity = attached(0, 1)
    continuity.received(frames_of(9))
    answered(continuity, 7, 8)

    assert continuity.replay_request(now=0.0) is None
    assert ready(continuity) == [EngineGap(5, "left the engine's buffer"), 7, 8, EngineReplayed(2), 9]


def test_another_batch_in_the_place_of_the_last_one_is_a_new_engine() -> None:
    continuity = attached(0, 1)
    assert continuity.interrupted()
    continuity.check(silent=False, now=0.0)
    answered(continuity, 1, 2, engine="b")
    answered(continuity, 0, 1, 2, engine="b")

    assert ready(continuity) == [EngineRestarted(exact=True), 0, 1, 2]


def test_reading_resumes_after_a_cursor_of_the_same_engine() -> None:
    first = attached(0, 1)
    assert first.cursor is not None
    continuity = Continuity(replays=True)
    continuity.start(first.cursor)
    answered(continuity, 1, 2)
    answered(continuity, 1, 2)

    assert ready(continuity) == [EngineResumed(), 2, EngineReplayed(1)]
    assert continuity.cursor is not None
    assert continuity.cursor.sequence == 2


def test_a_cursor_of_another_engine_begins_from_the_oldest_batch() -> None:
    continuity = Continuity(replays=True)
    continuity.start(Cursor(3, b"other"))
    answered(continuity, 3)
    answered(continuity, 2, 3)

    assert ready(continuity) == [EngineAttached(exact=False), 2, 3]


def test_a_replay_socket_that_fails_after_a_restart_does_not_end_the_reading() -> None:
    continuity = attached(0)
    continuity.received(frames_of(1))
    continuity.received(frames_of(0, "b"))
    answered(continuity)
    for _ in range(3):
        assert continuity.replay_request(now=0.0) == 0
        continuity.answer_failed()

    assert continuity.replay_request(now=0.0) is None
    assert ready(continuity) == [1, EngineRestarted(exact=False), 0]
    assert not continuity.certain


def test_without_a_replay_socket_repetitions_pass_and_other_payloads_are_a_new_engine() -> None:
    continuity = Continuity(replays=False)
    continuity.start()
    assert continuity.replay_request(now=0.0) is None
    for sequence in (5, 7, 6, 7):
        continuity.received(frames_of(sequence))
        assert continuity.replay_request(now=0.0) is None

    assert ready(continuity) == [EngineAttached(exact=False), 5, EngineGap(1, "not replayed"), 7, 6]
    continuity.received(frames_of(7, "b"))
    assert ready(continuity) == [EngineRestarted(exact=False), 7]
    assert not continuity.certain


def test_the_past_is_being_read_until_an_answer_from_the_last_batch_on_had_no_hole() -> None:
    continuity = Continuity(replays=True)
    continuity.start()
    assert catches_up(continuity)
    answered(continuity, 0, 1, 2)
    assert catches_up(continuity), "nobody knows yet that this was all"
    answered(continuity, 2, 3, 5)
    assert catches_up(continuity), "4 may be missing because it was lost on its way"
    answered(continuity, 3, 4, 5)
    assert continuity.replay_request(now=0.0) is None
    assert not catches_up(continuity)


def test_what_was_missed_on_the_way_is_the_past_until_all_of_it_was_read() -> None:
    continuity = attached(0, 1)
    continuity.received(frames_of(8))
    assert continuity.replay_request(now=0.0) == 1
    assert not catches_up(continuity), "what was read so far was the present"
    assert continuity.replayed(1, payload_of(1))
    assert not catches_up(continuity)
    assert continuity.replayed(2, payload_of(2))
    assert catches_up(continuity)
    assert not continuity.replayed(4, payload_of(4)), "3 may be missing because it was lost on its way"
    continuity.answer_ended()
    assert catches_up(continuity)
    assert continuity.replay_request(now=0.0) == 2
    assert catches_up(continuity)
    for sequence in range(2, 8):
        continuity.replayed(sequence, payload_of(sequence))
    assert catches_up(continuity)
    continuity.answer_ended()
    assert continuity.replay_request(now=0.0) is None
    assert not catches_up(continuity)
    assert ready(continuity) == [2, EngineReplayed(1), *range(3, 8), EngineReplayed(5), 8]


def test_a_look_whether_something_was_missed_finds_no_past_if_nothing_was() -> None:
    continuity = attached(0, 1)
    continuity.check(silent=True, now=0.0)
    assert continuity.replay_request(now=0.0) == 1
    assert continuity.replayed(1, payload_of(1))
    assert not catches_up(continuity)


def test_the_past_since_a_cursor_is_being_read_until_the_answer_ends() -> None:
    cursor = attached(0, 1).cursor
    continuity = Continuity(replays=True)
    continuity.start(cursor)
    assert catches_up(continuity)
    answered(continuity, 1, 2)
    assert catches_up(continuity)
    answered(continuity, 1, 2)
    assert continuity.replay_request(now=0.0) is None
    assert not catches_up(continuity)


@pytest.mark.parametrize("begun", [True, False])
def test_who_gives_up_the_past_reads_the_present(begun: bool) -> None:
    continuity = Continuity(replays=True)
    continuity.start()
    for attempt in range(10):
        if continuity.replay_request(now=0.0) is None:
            break
        assert catches_up(continuity)
        if begun and not attempt:
            continuity.replayed(0, payload_of(0))
        continuity.answer_failed()

    assert not catches_up(continuity)
    assert not continuity.certain
    assert ready(continuity)[0] == EngineAttached(exact=begun)


def test_a_replay_that_failed_is_tried_again_once_a_pause_although_the_engine_is_never_silent() -> None:
    continuity = attached(0, 1)
    continuity.received(frames_of(3))
    while continuity.replay_request(now=0.0) is not None:
        continuity.answer_failed()
    assert not continuity.certain
    sequence, now, requested = 3, 0.0, None
    while now < REPLAY_PAUSE_SECONDS:
        assert requested is None
        sequence, now = sequence + 1, now + 1.0
        continuity.received(frames_of(sequence))
        continuity.check(silent=False, now=now)
        requested = continuity.replay_request(now=now)
    assert requested == sequence
    continuity.answer_failed()
    assert continuity.replay_request(now=now) is None, "live batches wait for an answer that may never come"

    now += REPLAY_PAUSE_SECONDS
    continuity.check(silent=False, now=now)
    assert continuity.replay_request(now=now) == sequence
    assert continuity.replayed(sequence, payload_of(sequence))
    continuity.answer_ended()
    assert continuity.replay_request(now=now) is None
    assert continuity.certain
