"""Access to a Docker daemon. The client library is imported here alone, and late: only its users have it. It blocks."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")


class DockerMissingError(Exception):
    """The client library is not installed."""


class Docker:
    """Which daemon. `url`: empty: from the environment."""

    def __init__(self, url: str = "") -> None:
        """Raises DockerMissingError."""
        try:
            import docker
        except ImportError as error:
            raise DockerMissingError("Docker needs its client: pip install 'pointsman[docker]'") from error
        self._library: Any = docker
        self._url = url
        self.errors: tuple[type[Exception], ...] = (docker.errors.DockerException, OSError)
        """What a call raises if the daemon does not do as asked."""
        self.not_found: type[Exception] = docker.errors.NotFound
        self.image_not_found: type[Exception] = docker.errors.ImageNotFound

    def connected(self, *, timeout: int | None) -> Any:
        """A DockerClient. `timeout`: wall seconds of a call. Raises `errors`."""
        if self._url:
            return self._library.DockerClient(base_url=self._url, timeout=timeout)
        return self._library.from_env(timeout=timeout)


def in_thread(call: Callable[[], T]) -> "asyncio.Future[T]":
    """A thread of its own, which holds up no process's end, as those of asyncio do: a daemon that is frozen leaves a call
    unanswered until its timeout."""
    answer: Future[T] = Future()
    answer.set_running_or_notify_cancel()  # whoever waits may go, the call goes on

    def ask() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:  # noqa: BLE001 - whoever waits gets it
            answer.set_exception(error)

    Thread(target=ask, name="docker", daemon=True).start()
    return asyncio.wrap_future(answer)
