"""The event loop of commands."""

import asyncio
import socket
from collections.abc import Coroutine
from functools import partial
from typing import Any, TypeVar

from typing_extensions import override

from pointsman.adapters.daemon_threads import in_daemon_thread

T = TypeVar("T")


class _CommandLoop(asyncio.SelectorEventLoop):
    @override
    async def getaddrinfo(
        self,
        host: bytes | str | None,
        port: bytes | str | int | None,
        *,
        family: int = 0,
        type: int = 0,
        proto: int = 0,
        flags: int = 0,
    ) -> list[Any]:
        """In a thread that holds up no end: where no DNS answers, Ctrl-C would wait for the lookup."""
        return await in_daemon_thread(partial(socket.getaddrinfo, host, port, family, type, proto, flags), "lookup")


def command_runner() -> asyncio.Runner:
    return asyncio.Runner(loop_factory=_CommandLoop)


def run_command(main: Coroutine[Any, Any, T]) -> T:
    with command_runner() as runner:
        return runner.run(main)
