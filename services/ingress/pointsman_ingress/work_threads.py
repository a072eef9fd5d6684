"""Threads for work that would hold up the event loop: parsing and tokenizing large bodies, block keys of long prompts.
Fair: each owner (a tenant, else a client's address) has half of them at most, and owners take turns. The loop runs
meanwhile only as far as the work leaves it the interpreter: no single call of it may take long."""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

THREADS = 4

P = ParamSpec("P")
T = TypeVar("T")


class WorkThreads:
    def __init__(self, threads: int = THREADS, executor: Executor | None = None) -> None:
        """`executor`: replaces the threads."""
        self._executor = executor or ThreadPoolExecutor(threads, thread_name_prefix="work")
        self._free = threads
        self._share = max(1, threads // 2)
        self._running: dict[str, int] = {}
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """In the order of their turns; no empty queue."""

    async def run(self, owner: str, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Raises what the work raises. A cancelled call leaves its work to end in its thread."""
        loop = asyncio.get_running_loop()
        await self._turn(owner)
        try:
            running = self._executor.submit(work, *arguments, **named)
        except RuntimeError:  # the system has no thread more
            self._ended(owner)
            raise

        def ended(_: "Future[Any]") -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._ended, owner)

        running.add_done_callback(ended)
        try:
            return await asyncio.wrap_future(running)
        finally:
            del running  # its exception holds this frame, and so the body, until both are collected

    async def run_unless(
        self, light: bool, owner: str, work: Callable[P, T], *arguments: P.args, **named: P.kwargs
    ) -> T:
        """Light work is done at once, in the event loop."""
        if light:
            return work(*arguments, **named)
        return await self.run(owner, work, *arguments, **named)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _turn(self, owner: str) -> None:
        if self._may_run(owner):
            self._begin(owner)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._ended(owner)
            raise

    def _may_run(self, owner: str) -> bool:
        return self._free > 0 and self._running.get(owner, 0) < self._share

    def _begin(self, owner: str) -> None:
        self._free -= 1
        self._running[owner] = self._running.get(owner, 0) + 1

    def _ended(self, owner: str) -> None:
        self._free += 1
        self._running[owner] -= 1
        if not self._running[owner]:
            del self._running[owner]
        for next_owner in list(self._waiting):
            if self._may_run(next_owner):
                self._grant(next_owner)

    def _grant(self, owner: str) -> None:
        """Grants one, and puts the owner's others behind those of all."""
        turns = self._waiting.pop(owner)
        while turns:
            turn = turns.popleft()
            if not turn.done():
                self._begin(owner)
                turn.set_result(None)
                break
        if turns:
            self._waiting[owner] = turns
