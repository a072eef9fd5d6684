"""The time for which workers gather cache changes follows what the log takes."""

import pytest

from pointsman.primitives import WallSeconds
from pointsman_scheduler.flush_pace import EVENTS_PER_SECOND, FLUSH_WALL_SECONDS_MAX, FlushPace

OWN_SECONDS = 0.01
STEP_SECONDS = 0.03
"""Of an engine; it stores and removes blocks in each."""


def run(pace: FlushPace, engines: int, *, begin: int, seconds: int) -> tuple[float, float]:
    """Engines that each write two events a flush, and have something to write each step. Returns the last flush and the
    events of the last second."""
    flush, written = OWN_SECONDS, 0.0
    for second in range(begin, begin + seconds):
        written = engines * 2 / max(flush, STEP_SECONDS)
        for _ in range(int(written)):
            pace.event_read()
        flush = max(OWN_SECONDS, pace.seconds(WallSeconds(second + 1.0)))
    return flush, written


@pytest.mark.parametrize("engines", [1, 8, 14])
def test_few_engines_are_not_slowed(engines: int) -> None:
    pace = FlushPace(WallSeconds(0.0))

    assert run(pace, engines, begin=0, seconds=60)[0] == OWN_SECONDS
    assert pace.seconds(WallSeconds(60.5)) == 0.0, "each worker goes by its own setting"


@pytest.mark.parametrize("engines", [32, 64, 128, 200])
def test_more_write_about_as_much_as_the_log_shall_take(engines: int) -> None:
    flush, written = run(FlushPace(WallSeconds(0.0)), engines, begin=0, seconds=30)

    assert OWN_SECONDS < flush <= FLUSH_WALL_SECONDS_MAX
    assert written == pytest.approx(EVENTS_PER_SECOND, rel=0.3)


def test_it_is_bounded_and_goes_back_when_the_engines_rest() -> None:
    pace = FlushPace(WallSeconds(0.0))
    assert run(pace, 2_000, begin=0, seconds=30)[0] == FLUSH_WALL_SECONDS_MAX

    assert run(pace, 8, begin=30, seconds=10)[0] == OWN_SECONDS


def test_it_falls_by_half_at_most_so_that_one_quiet_second_does_not_undo_it() -> None:
    pace = FlushPace(WallSeconds(0.0))
    run(pace, 2_000, begin=0, seconds=30)

    assert [pace.seconds(WallSeconds(at)) for at in (31.0, 32.0)] == [
        FLUSH_WALL_SECONDS_MAX / 2,
        FLUSH_WALL_SECONDS_MAX / 4,
    ]
