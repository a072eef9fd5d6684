"""Carries out the schedule, and waits until the fleet has recovered."""

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Collection, Sequence

import aiohttp
import msgspec

from pointsman.contracts.commands import DescribeFleet, FleetDescribed
from pointsman.contracts.subjects import command_subject
from pointsman.ports import CommandTimeoutError, Link, NoResponderError
from pointsman.primitives import EngineSeconds, InstanceId, PoolName, WallSeconds
from pointsman_cli.discovery import FleetProcess
from pointsman_cli.up.child import missing_parts
from pointsman_cli.up.probe import NoAnswerError, http_get
from pointsman_engine_sim.misbehaviour import MISBEHAVE_PATH
from pointsman_lab.faults.bad_engines import EngineWatch, Touched
from pointsman_lab.faults.balancer import Balancer
from pointsman_lab.faults.fleet import NATS, FleetUnderTest
from pointsman_lab.faults.schedule import MISBEHAVIOUR, Fault

VICTIM_SECONDS_MAX = 20.0
ASK_SECONDS_MAX = 0.5
WELL_SECONDS_MAX = 60.0
WELL_POLL_SECONDS = 0.25
READY = 200
ENDS_PROCESSES = frozenset({"kill", "restart"})
DIAGNOSED_SHARE = 0.6


class Injection(msgspec.Struct, kw_only=True):
    """One fault as it was carried out. `at`: monotonic clock; `began`: wall seconds after the first request.
    `served_s`: until a later request was answered; `normal_s`: until service was normal; `well_s`: until everything was
    ready. None: not seen."""

    fault: str
    victim: str
    pids: list[int]
    at: float
    began: EngineSeconds
    lasted: EngineSeconds
    served_s: EngineSeconds | None = None
    normal_s: EngineSeconds | None = None
    well_s: EngineSeconds | None = None
    streams_cut: int = 0
    ended: float = 0.0
    answered: int = 0
    statuses: dict[str, int] = {}
    failed: int = 0
    ttft_p99_s: EngineSeconds | None = None
    out_of_rotation: dict[str, EngineSeconds] = {}
    touched: Touched | None = None
    unwell: str = ""
    """What was not ready when it was last asked."""


class Injector:
    def __init__(
        self, fleet: FleetUnderTest, link: Link, *, seed: int, watch: EngineWatch, balancer: Balancer | None = None
    ) -> None:
        self._fleet = fleet
        self._link = link
        self._chance = random.Random(seed)
        self._balancer = balancer
        self._watch = watch
        self._started = 0.0
        self._restarted: set[str] = set()
        self.injections: list[Injection] = []

    async def run(self, faults: Sequence[Fault]) -> None:
        self._started = time.monotonic()
        async with asyncio.TaskGroup() as injecting:
            for fault in faults:
                await asyncio.sleep(self._started + fault.at - time.monotonic())
                injecting.create_task(self._strike(fault))

    async def run_in_turn(
        self, faults: Sequence[Fault], *, settle: EngineSeconds, on_injected: Callable[[Injection], None]
    ) -> None:
        """One fault after the other, with a pause before each and after the last. Calls `on_injected` after each."""
        self._started = time.monotonic()
        for fault in faults:
            await asyncio.sleep(settle)
            await self._strike(fault)
            on_injected(self.injections[-1])
        await asyncio.sleep(settle)

    async def leader(self) -> FleetDescribed | None:
        return await leader_of(self._link, PoolName(self._fleet.settings.pool))

    async def _strike(self, fault: Fault) -> None:
        victims = (
            {} if fault.action == "network" else await self._victims(fault.targets, in_turn=fault.action == "restart")
        )
        at, pids = time.monotonic(), list(victims)
        names = ", ".join(victims.values()) or "network"
        injection = Injection(
            fault=fault.name, victim=names, pids=pids, at=at, began=at - self._started, lasted=fault.lasts
        )
        self.injections.append(injection)
        if fault.action in ENDS_PROCESSES:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):  # an earlier injection's victim that is not back yet
                    os.kill(pid, signal.SIGKILL if fault.action == "kill" else signal.SIGTERM)
        elif fault.action == "down":
            await self._fleet.nats_down(names, fault.lasts)
        elif fault.action in MISBEHAVIOUR:
            await asyncio.gather(*(self._misbehave(fault, InstanceId(name), injection) for name in victims.values()))
        elif fault.action == "freeze":
            await asyncio.gather(*(_frozen(pid, fault.lasts) for pid in pids))
        else:
            network = self._fleet.network
            assert network is not None, "a fleet with network faults is behind a proxy"
            await getattr(network, fault.targets[0])(fault.lasts)
        await self._until_well(injection, gone=set(pids) if fault.action in ENDS_PROCESSES else set())
        injection.ended = time.monotonic()

    async def _misbehave(self, fault: Fault, instance: InstanceId, injection: Injection) -> None:
        (url,) = [process.url for process in self._fleet.file.processes if process.name == instance]
        async with aiohttp.ClientSession(url) as session, asyncio.TaskGroup() as looking:
            async with asyncio.timeout(VICTIM_SECONDS_MAX):  # while one that an earlier fault struck is started again
                while not await _tell(session, fault.action):  # noqa: ASYNC110 - asking is how one knows
                    await asyncio.sleep(0.05)
            try:
                await asyncio.sleep(DIAGNOSED_SHARE * fault.lasts)
                diagnosed = looking.create_task(self._watch.diagnose(instance))
                await asyncio.sleep(injection.at + fault.lasts - time.monotonic())
            finally:
                await _tell(session, "")
            well_at = time.monotonic()
            injection.lasted = well_at - injection.at
            whole_s = await self._whole_after(instance, well_at)
        injection.touched = diagnosed.result()
        injection.touched.whole_s = whole_s

    async def _whole_after(self, instance: InstanceId, moment: float) -> EngineSeconds | None:
        while time.monotonic() < moment + WELL_SECONDS_MAX:
            if self._watch.whole(instance):
                return time.monotonic() - moment
            await asyncio.sleep(WELL_POLL_SECONDS)
        return None

    async def _victims(self, targets: Sequence[str], *, in_turn: bool) -> dict[int, str]:
        """Pids and names. `in_turn`: round-robin over alike processes, else random."""
        victims: dict[int, str] = {}
        for target in targets:
            name, pid = await self._victim(target, struck=victims, in_turn=in_turn)
            victims[pid] = name
        return victims

    async def _victim(self, target: str, *, struck: Collection[int], in_turn: bool) -> tuple[str, int]:
        if target == NATS:
            name = await self._fleet.nats_victim(self._link)
            return name, self._fleet.pids()[name]
        async with asyncio.timeout(VICTIM_SECONDS_MAX):  # while one that an earlier fault struck is started again
            while not (alike := await self._alike(target, struck)):  # noqa: ASYNC110 - asking is how one knows
                await asyncio.sleep(0.05)
        if in_turn:
            alike = [process for process in alike if process.name not in self._restarted] or alike
        chosen = self._chance.choice(alike)
        if in_turn:
            self._restarted.add(chosen.name)
        return chosen.name, chosen.pid

    async def _alike(self, target: str, struck: Collection[int]) -> list[FleetProcess]:
        processes = [p for p in self._fleet.file.processes if p.pid and p.pid not in struck and _lives(p.pid)]
        if target not in ("leader", "follower"):
            return [p for p in processes if p.role == target]
        if (leader := await self.leader()) is None:
            return []
        leads = int(leader.scheduler.split("-")[1])
        return [p for p in processes if p.role == "scheduler" and (p.pid == leads) == (target == "leader")]

    async def _until_well(self, injection: Injection, *, gone: set[int]) -> None:
        deadline = time.monotonic() + WELL_SECONDS_MAX
        while time.monotonic() < deadline:
            if gone.isdisjoint(self._fleet.pids().values()):
                injection.unwell = await self._unwell()
                if not injection.unwell:
                    injection.well_s = time.monotonic() - injection.at
                    return
            await asyncio.sleep(WELL_POLL_SECONDS)

    async def _unwell(self) -> str:
        """The first thing that is not ready, or nothing."""
        if await self.leader() is None:
            return "nobody leads"
        if self._balancer is not None and not self._balancer.whole:
            return f"rotation {self._balancer.rotation}"
        for process in self._fleet.file.processes:
            if process.role == NATS:
                continue
            path = "/health" if process.role == "engine" else "/readyz"
            try:
                status, body = await http_get(process.probes + path, timeout=ASK_SECONDS_MAX)
            except NoAnswerError as error:
                return f"{process.name}: {error}"
            if status != READY or missing_parts(body):
                return f"{process.name}: {status} {missing_parts(body)}"
        return ""


async def leader_of(link: Link, pool: PoolName) -> FleetDescribed | None:
    """The pool as its leader describes it; None if none answers."""
    try:
        answer = await link.commands.request(
            command_subject(pool, "fleet"), DescribeFleet(), timeout=WallSeconds(ASK_SECONDS_MAX)
        )
    except (NoResponderError, CommandTimeoutError):
        return None
    return answer if isinstance(answer, FleetDescribed) else None


def _lives(pid: int) -> bool:
    """The fleet's file names the dead one until the next is started."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def _tell(engine: aiohttp.ClientSession, kind: str) -> bool:
    """False if it is not there. One that was killed behaves when it is back."""
    try:
        async with engine.post(MISBEHAVE_PATH, json={"kind": kind}) as answer:
            answer.raise_for_status()
    except aiohttp.ClientConnectionError:
        return False
    return True


async def _frozen(pid: int, seconds: EngineSeconds) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            os.kill(pid, signal.SIGCONT)
