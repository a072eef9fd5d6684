"""Never two at once: candidates on one lease, in virtual time, with pauses, slow answers and a server that forgets."""

import asyncio
import heapq
from itertools import count
from random import Random

import pytest
from typing_extensions import override

from pointsman.ports import Clock, Lease, StoreUnavailableError, Tenure
from pointsman.primitives import Term, WallSeconds
from pointsman.runtime.leadership import Leadership
from pointsman_lab.memory.stores import MemoryLease

LEASE_SECONDS = 1.0


class Timeline:
    """Wakes sleepers in the order of their times, and nothing else happens in between."""

    def __init__(self) -> None:
        self.now = 0.0
        self._numbers = count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    async def sleep_until(self, moment: float) -> None:
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (moment, next(self._numbers), future))
        await future

    async def steps(self, until: float) -> None:
        await self._quiet()
        while self._sleepers and self._sleepers[0][0] <= until:
            moment, _, future = heapq.heappop(self._sleepers)
            self.now = max(self.now, moment)
            if not future.done():
                future.set_result(None)
            await self._quiet()

    async def _quiet(self) -> None:
        """Let everybody go as far as they can at this moment."""
        for _ in range(6):
            await asyncio.sleep(0)


class ProcessClock(Clock):
    """One process's time. While it is stopped nothing of it wakes."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self.stopped_until = 0.0

    @property
    @override
    def speed(self) -> float:
        return 1.0

    @override
    def now(self) -> float:
        return self._timeline.now

    @override
    def wall(self) -> WallSeconds:
        return WallSeconds(self._timeline.now)

    @override
    async def sleep(self, seconds: float) -> None:
        await self.sleep_wall(WallSeconds(seconds))

    @override
    async def sleep_wall(self, seconds: WallSeconds) -> None:
        moment = self._timeline.now + float(seconds)
        await self._timeline.sleep_until(moment)
        while self.stopped_until > self._timeline.now:
            await self._timeline.sleep_until(self.stopped_until)


class SlowLease(Lease):
    """A lease behind a network that takes its time both ways."""

    def __init__(self, lease: MemoryLease, clock: ProcessClock, chance: Random) -> None:
        self._lease = lease
        self._clock = clock
        self._chance = chance

    @override
    async def look(self) -> Tenure | None:
        await self._way()
        found = await self._lease.look()
        await self._way()
        return found

    @override
    async def put(self, holder: str, term: Term, *, after: int) -> Tenure:
        await self._way()
        written = await self._lease.put(holder, term, after=after)
        await self._way()
        return written

    async def _way(self) -> None:
        slow = self._chance.random() < 0.1
        await self._clock.sleep_wall(WallSeconds(self._chance.expovariate(4 if slow else 500)))


class Candidate:
    def __init__(self, name: str, lease: MemoryLease, timeline: Timeline, chance: Random, terms: list[Term]) -> None:
        self.name = name
        self.clock = ProcessClock(timeline)
        self.leadership = Leadership(
            SlowLease(lease, self.clock, chance), self.clock, name=name, lease_seconds=WallSeconds(LEASE_SECONDS)
        )
        self._terms = terms

    async def live(self) -> None:
        while True:
            await self.leadership.obtain(term_of_log=lambda: max(self._terms, default=Term(0)))
            self._terms.append(self.leadership.term_above(max(self._terms, default=Term(0))))
            await self.leadership.keep(deposed=lambda: "")


@pytest.mark.parametrize("seed", range(20))
async def test_at_most_one_holds_the_lease_and_somebody_does(seed: int) -> None:
    chance, timeline = Random(seed), Timeline()
    up = [True]
    lease = MemoryLease(lambda: up[0])
    terms: list[Term] = []
    candidates = [Candidate(name, lease, timeline, chance, terms) for name in ("one", "two", "three")]
    lives = [asyncio.create_task(candidate.live()) for candidate in candidates]
    led = 0
    holding: tuple[list[str], float] = ([], 0.0)
    for step in range(1, 1001):
        await timeline.steps(step * 0.05)
        timeline.now = step * 0.05
        holders = [c.name for c in candidates if c.leadership.holds and c.clock.stopped_until <= timeline.now]
        assert len(holders) <= 1, (seed, timeline.now, holders)
        led += bool(holders)
        if chance.random() < 0.03:
            candidate = chance.choice(candidates)
            candidate.clock.stopped_until = timeline.now + chance.expovariate(1.0)
        if chance.random() < 0.02:
            up[0] = not up[0]
        elif not up[0] and chance.random() < 0.2:
            up[0] = True
        if holders != holding[0]:
            holding = (holders, timeline.now)
        if holders and timeline.now - holding[1] > 2 * LEASE_SECONDS and chance.random() < 0.02:
            lease.forget()  # at most once in a lease: beyond that only terms help
            holding = (holders, timeline.now)
    for life in lives:
        life.cancel()
    await asyncio.gather(*lives, return_exceptions=True)

    assert led > 400, "somebody leads for most of the time"
    assert terms == sorted(terms)
    assert terms


async def test_who_has_resigned_does_not_take_a_lease_that_becomes_free() -> None:
    """A process that stops waits for its last writes while it still looks."""
    timeline, lease = Timeline(), MemoryLease(lambda: True)
    one, two = (
        Leadership(lease, ProcessClock(timeline), name=name, lease_seconds=WallSeconds(LEASE_SECONDS))
        for name in ("one", "two")
    )
    await one.obtain(term_of_log=lambda: Term(0))
    obtaining = asyncio.create_task(two.obtain(term_of_log=lambda: Term(1)))
    await timeline.steps(until=0.5)
    await two.resign()
    await one.resign()
    await timeline.steps(until=5.0)
    obtaining.cancel()
    found = await lease.look()

    assert found is not None
    assert found.holder == ""


async def test_why_the_lease_cannot_be_had_is_logged_once_and_kept_until_it_can(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class RefusedLease(MemoryLease):
        refusal = "insufficient memory resources available"

        @override
        async def put(self, holder: str, term: Term, *, after: int) -> Tenure:
            if self.refusal:
                raise StoreUnavailableError(self.refusal)
            return await super().put(holder, term, after=after)

    timeline, lease = Timeline(), RefusedLease(lambda: True)
    leadership = Leadership(lease, ProcessClock(timeline), name="one", lease_seconds=WallSeconds(LEASE_SECONDS))
    obtaining = asyncio.create_task(leadership.obtain(term_of_log=lambda: Term(0)))
    await timeline.steps(until=20.0)
    assert leadership.trouble == lease.refusal
    assert capsys.readouterr().err.count("lease_unavailable") == 1

    lease.refusal = ""
    await timeline.steps(until=21.0)
    await obtaining
    assert leadership.holds
    assert leadership.trouble == ""


async def test_a_term_is_not_used_again_though_lease_and_log_have_forgotten_it() -> None:
    timeline = Timeline()
    clock, lease = ProcessClock(timeline), MemoryLease(lambda: True)
    leadership = Leadership(lease, clock, name="one", lease_seconds=WallSeconds(LEASE_SECONDS))
    await leadership.obtain(term_of_log=lambda: Term(0))
    assert leadership.term_above(Term(6)) == 7  # a leader without a lease had been elected in the meantime

    lease.forget()
    await leadership.obtain(term_of_log=lambda: Term(0))

    assert leadership.term_above(Term(0)) == 8
