"""Works out one thing from a log in a process of its own, so that the console never waits for it, can end it, and holds none
of its memory: `python -m pointsman_cli.console.jobs.process`. In: a Task as a line on standard input, which stays open as long as the
answer is wanted. Out: steps as lines on standard error, the answer on standard output; exit code 1 with a sentence instead,
3 if the log does not have the request."""

import os
import sys
import threading
from functools import partial
from typing import Literal

import click
import msgspec

from pointsman.primitives import Sequence
from pointsman_cli.console.jobs.views import WhatIfChange
from pointsman_cli.console.views import View
from pointsman_cli.history.entries import NotInLogError
from pointsman_cli.history.sources import open_history
from pointsman_cli.history.time_options import BoundedHistory, moment_in

NICENESS = 5
REFUSED_EXIT_CODE = 1
ABSENT_EXIT_CODE = 3


class Task(View, frozen=True, kw_only=True):
    """`place`, `pool`, `until`: as `--from`, `--pool` and `--until`. `first`: first entry of the request, if known."""

    kind: Literal["timeline", "examination", "what-if"]
    place: str | None
    pool: str | None
    until: str | None = None
    request: str = ""
    first: Sequence = 0
    change: WhatIfChange | None = None


def main() -> None:
    os.nice(NICENESS)
    task = msgspec.json.decode(sys.stdin.buffer.readline(), type=Task)
    threading.Thread(target=_end_when_unwanted, daemon=True).start()
    try:
        answer = _answer(task)
    except click.ClickException as error:
        sys.stdout.write(error.message)
        sys.stdout.flush()
        os._exit(ABSENT_EXIT_CODE if isinstance(error, NotInLogError) else REFUSED_EXIT_CODE)
    sys.stdout.buffer.write(msgspec.json.encode(answer))


def _answer(task: Task) -> View:
    """Raises click.ClickException."""
    with open_history(task.place, task.pool) as whole:
        history = BoundedHistory(whole, moment_in(whole, task.until)) if task.until is not None else whole
        match task.kind:
            case "timeline":
                from pointsman_cli.console.jobs.explanations import timeline_of_request

                return timeline_of_request(history, task.request, first=task.first)
            case "examination":
                from pointsman_cli.console.jobs.examinations import examination_of

                return examination_of(history)
            case "what-if":
                from pointsman_cli.console.jobs.simulations import run_of

                assert task.change is not None
                return run_of(history, task.change, partial(print, file=sys.stderr, flush=True))


def _end_when_unwanted() -> None:
    while os.read(sys.stdin.fileno(), 1):  # unbuffered: a buffer's lock would be held at the end
        pass
    os._exit(REFUSED_EXIT_CODE)


if __name__ == "__main__":
    main()
