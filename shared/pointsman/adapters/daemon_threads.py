"""Runs blocking calls in threads that do not delay the end of the process, as threads of asyncio's executor would."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def in_daemon_thread(call: Callable[[], T], name: str) -> "asyncio.Future[T]":
    """A thread of its own. Whoever waits may go, the call goes on. RuntimeError: there are no more threads."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def work() -> None:
        try:
            told = partial(answer.set_result, call())
        except BaseException as error:  # noqa: BLE001 - whoever waits gets it
            told = partial(answer.set_exception, error)
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(lambda: None if answer.done() else told())

    try:
        Thread(target=work, name=name, daemon=True).start()
    except RuntimeError as error:
        answer.set_exception(error)
    return answer
