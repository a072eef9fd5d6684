"""Threads for large bodies: nobody has them all, everybody gets a turn, and who goes away leaves none behind."""

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from pointsman_ingress.http.call import FREE_BYTES_MAX, BodyBudget, BodyLoan
from pointsman_ingress.http.errors import ApiError
from pointsman_ingress.work_threads import WorkThreads
from tests.support.waiting import eventually


@pytest.fixture
async def threads() -> AsyncIterator[WorkThreads]:
    made = WorkThreads(4)
    yield made
    made.close()


class Work:
    """Begins, and ends when it may."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.go = threading.Event()

    def __call__(self, name: str) -> str:
        self.begun.append(name)
        assert self.go.wait(10)
        return name


async def test_one_owner_has_half_of_the_threads_and_others_find_some(threads: WorkThreads) -> None:
    flood, mine = Work(), Work()
    flooding = [asyncio.create_task(threads.run("flood", flood, f"f{n}")) for n in range(20)]
    await eventually(lambda: len(flood.begun) == 2)
    mine.go.set()

    assert await threads.run("me", mine, "m") == "m"
    assert flood.begun == ["f0", "f1"]
    flood.go.set()
    assert await asyncio.gather(*flooding) == [f"f{n}" for n in range(20)]


async def test_owners_take_turns() -> None:
    threads, work = WorkThreads(1), Work()
    first = asyncio.create_task(threads.run("a", work, "a0"))
    await eventually(lambda: work.begun == ["a0"])
    others = [asyncio.create_task(threads.run(name[0], work, name)) for name in ("a1", "a2", "b1", "c1", "b2")]
    await asyncio.sleep(0)
    work.go.set()
    await asyncio.gather(first, *others)
    threads.close()

    assert work.begun == ["a0", "a1", "b1", "c1", "a2", "b2"]


async def test_work_whose_client_went_away_gives_its_thread_back(threads: WorkThreads) -> None:
    work = Work()
    running = [asyncio.create_task(threads.run("a", work, f"r{n}")) for n in range(2)]
    await eventually(lambda: len(work.begun) == 2)
    waiting = [asyncio.create_task(threads.run("a", work, f"w{n}")) for n in range(3)]
    await asyncio.sleep(0)
    for task in (*running, waiting[0]):
        task.cancel()
    await asyncio.gather(*running, waiting[0], return_exceptions=True)
    assert len(work.begun) == 2, "the threads are still busy"
    work.go.set()

    assert await asyncio.gather(*waiting[1:]) == ["w1", "w2"]
    await eventually(lambda: threads._free == 4)
    assert (threads._running, threads._waiting) == ({}, {})


async def test_work_for_which_the_system_has_no_thread_keeps_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of a container's processes counts threads too."""
    threads = WorkThreads(1)
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", _no_thread)
        with pytest.raises(RuntimeError, match="new thread"):
            await threads.run("a", len, "abc")
    async with asyncio.timeout(10):
        length = await threads.run("a", len, "abc")
    threads.close()

    assert length == 3


def _no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


async def test_what_the_work_raises_is_raised_and_keeps_no_thread(threads: WorkThreads) -> None:
    def fails() -> None:
        raise RecursionError

    for _ in range(10):
        with pytest.raises(RecursionError):
            await threads.run("a", fails)


def test_one_owner_holds_half_of_the_bytes_of_bodies_and_gives_them_back() -> None:
    mib = 1024 * 1024
    budget = BodyBudget(100 * mib)
    loans = [BodyLoan(budget, "flood") for _ in range(6)]
    for loan in loans[:5]:
        loan.add(10 * mib)
    with pytest.raises(ApiError, match="Too many large bodies"):
        loans[5].add(10 * mib)
    BodyLoan(budget, "me").add(50 * mib)
    for loan in loans:
        loan.end()

    with loans[0].scope():
        loans[0].add(50 * mib)
    again = BodyLoan(budget, "flood")
    again.add(FREE_BYTES_MAX)
    again.add(50 * mib - FREE_BYTES_MAX)


@pytest.mark.parametrize(("processes", "body_bytes_max"), [(1, 8), (4, 8), (64, 8), (4, 200)])
def test_processes_share_the_bytes_and_each_has_room_for_any_body_and_its_copy(
    processes: int, body_bytes_max: int
) -> None:
    mib = 1024 * 1024
    loan = BodyLoan(BodyBudget.of_process(processes, body_bytes_max * mib), "me")

    loan.add(body_bytes_max * mib)
    loan.add(body_bytes_max * mib)
    assert loan.left <= max(256 // processes, 2 * body_bytes_max) * mib
