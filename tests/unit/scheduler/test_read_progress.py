"""Which readers of the log have stalled: one that gets nothing of what is there, not one that is slow or has read all."""

from collections.abc import Callable

import pytest

from pointsman_scheduler.read_progress import LOOKS_MAX, ReadProgress

LOOKS = 10 * LOOKS_MAX
Pace = Callable[[int], int]
"""Of look."""


@pytest.mark.parametrize(
    ("position", "end"),
    [
        (lambda look: look // (LOOKS_MAX - 1), lambda _: 1000),
        (lambda _: 7, lambda _: 7),
        (lambda look: 100 + look, lambda look: 100 + 50 * look),
        (lambda _: 7, lambda look: 8 if look % 2 else 7),
        (lambda _: 7, lambda _: 0),
    ],
    ids=["slow", "idle", "falling behind", "read between looks", "all expired"],
)
def test_a_reader_that_gets_on_has_not_stalled(position: Pace, end: Pace) -> None:
    progress = ReadProgress()

    assert not any(progress.look(position(look), end(look)) for look in range(LOOKS))


def test_a_reader_has_stalled_once_it_got_nothing_for_so_many_looks() -> None:
    progress = ReadProgress()
    looks = [progress.look(7, 9) for _ in range(LOOKS_MAX + 1)]

    assert looks[:-1] == [""] * LOOKS_MAX
    assert "no entry after 7 can be read" in looks[-1]


def test_looks_from_before_the_log_was_away_do_not_count() -> None:
    progress = ReadProgress()
    for _ in range(LOOKS_MAX):
        progress.look(7, 9)
    progress.forget()

    assert not any(progress.look(7, 9) for _ in range(LOOKS_MAX - 1))
