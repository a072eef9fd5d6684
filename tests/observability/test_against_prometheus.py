"""Every panel's query returns data, and alerts fire, in a real Prometheus that scrapes a real fleet under load."""

import asyncio
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from pointsman_cli.discovery import FleetFile, find_fleet
from pointsman_lab.background import background
from tests.observability.promql import METRIC
from tests.observability.test_alerts import FOLDER, RULES
from tests.observability.test_dashboards import NAMES, board_of, panels
from tests.support.prometheus import Prometheus, running_prometheus, targets_of
from tests.support.up import pointsman_up
from tests.support.waiting import eventually

SPEED = "5"
LOADERS = 6
START_SECONDS_MAX = SECONDS_MAX = 110.0
RARE = {
    "Ejections",
    "Event to move",
    "Hot prefixes copied",  # between engines that fetch from each other
    "Resyncs",
    # Of a shadow's simulated windows, the first of which ends after a minute:
    "Hit rate, simulated",
    "Regret, simulated",
    "Requests on time, simulated",
    "TTFT of the same arrivals, simulated",
    "What shadows could not do",
}
"""Panels about what this fleet may not do in this time; Prometheus takes their queries, and their metrics exist."""
EMPTY_IS_GOOD = {"Degraded parts", "Unexpected errors"}


@dataclass
class MonitoredFleet:
    fleet: FleetFile
    prometheus: Prometheus

    def pids(self, role: str) -> list[int]:
        return [process.pid for process in self.fleet.of_role(role)]

    def lacking(self, but: set[str]) -> list[str]:
        """Panels with a query that returns nothing."""
        return [
            f"{name}: {panel['title']}: {target['expr']}"
            for name in NAMES
            for panel in panels(board_of(name))
            if panel["title"] not in but
            for target in panel["targets"]
            if not any(series["value"][1] != "NaN" for series in self.prometheus.query(resolved(target["expr"])))
        ]


def resolved(expression: str) -> str:
    """With the variables' values as Grafana puts them in: `All` of pool and model."""
    values = {"pool": ".*", "model": ".*", "__rate_interval": "60s"}
    return re.sub(r"\$(\w+)", lambda found: values[found[1]], expression)


async def ask(client: aiohttp.ClientSession, body: dict[str, Any], **headers: str) -> int:
    try:
        async with client.post("/v1/completions", json=body, headers=headers) as answer:
            await answer.read()
            return answer.status
    except aiohttp.ClientError:
        return 0


async def load(client: aiohttp.ClientSession, model: str, own: int) -> None:
    """Conversations that share prefixes, some of them too ambitious, wrong or for nobody."""
    for turn in count():
        prompt = "a prefix that all of them have " * 40 + f"and one of conversation {own} " * (20 + turn % 5)
        body = {"model": model, "prompt": prompt, "max_tokens": 20, "stream": True}
        await ask(client, body)
        await ask(client, body, **{"x-slo-ttft-ms": "1", "x-slo-tpot-ms": "1"})
        await ask(client, {"model": model, "prompt": 5})
        await ask(client, {"model": "nobody's", "prompt": "hello"})
        await asyncio.sleep(0.1)


async def look_up(admin: str) -> None:
    """As another router."""
    async with aiohttp.ClientSession(admin, timeout=aiohttp.ClientTimeout(20)) as router:
        while True:
            with suppress(aiohttp.ClientError, TimeoutError):
                async with router.post("/kv/overlap", json={"prompts": [{"token_ids": [1]}]}) as answer:
                    await answer.read()
            await asyncio.sleep(0.5)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def monitored(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MonitoredFleet]:
    directory = tmp_path_factory.mktemp("observed")
    options = ("--instances", "2", "--speed", SPEED, "--set", "scheduler.admission=none")
    shadowed = ("--console", "--console-port", "0", "--set", "console.shadow=round_robin")
    with pointsman_up(directory, *options, *shadowed, "--set", "ingress.hold_seconds=1") as up:
        up.wait_for("Try it", START_SECONDS_MAX)
        fleet = find_fleet(data=up.data)
        with running_prometheus(directory, targets_of(fleet), FOLDER / "alerts.yaml") as prometheus:
            async with under_load(fleet):
                await eventually(lambda: prometheus.answers, seconds=SECONDS_MAX)
                yield MonitoredFleet(fleet, prometheus)
        up.stop()


@asynccontextmanager
async def under_load(fleet: FleetFile) -> AsyncIterator[None]:
    async with aiohttp.ClientSession(fleet.ingress, timeout=aiohttp.ClientTimeout(20)) as client:
        loaders = (load(client, fleet.model, own) for own in range(LOADERS))
        async with background(look_up(fleet.of_role("ingress")[0].probes), *loaders):
            yield


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def nothing_left(find: Callable[[], Collection[str]]) -> None:
    """Wait until `find` returns nothing; fails with what is left."""
    deadline = time.monotonic() + SECONDS_MAX
    while left := await asyncio.to_thread(find):
        assert time.monotonic() < deadline, "\n".join(left)
        await asyncio.sleep(0.5)


@contextmanager
def frozen(pids: list[int]) -> Iterator[None]:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


async def test_every_query_of_every_dashboard_returns_data(monitored: MonitoredFleet) -> None:
    os.kill(monitored.pids("engine")[0], signal.SIGKILL)  # `up` starts it again

    await nothing_left(lambda: monitored.lacking(RARE | EMPTY_IS_GOOD))


async def test_rare_queries_are_taken_too(monitored: MonitoredFleet) -> None:
    for name in NAMES:
        for panel in panels(board_of(name)):
            for target in panel["targets"]:
                monitored.prometheus.query(resolved(target["expr"]))  # raises if it is malformed


async def test_the_metrics_of_every_alert_are_there_and_prometheus_evaluates_it(monitored: MonitoredFleet) -> None:
    names = {name for rule in RULES.values() for name in METRIC.findall(rule["expr"])}

    await nothing_left(lambda: {name for name in names if not monitored.prometheus.query(name)})
    await nothing_left(lambda: {rule["name"] for rule in monitored.prometheus.rules() if rule["health"] != "ok"})
    assert {rule["name"] for rule in monitored.prometheus.rules()} == set(RULES)


async def test_a_fleet_that_serves_has_no_alert_but_the_slo_that_clients_set_too_low(monitored: MonitoredFleet) -> None:
    await nothing_left(lambda: monitored.prometheus.firing() ^ {"PointsmanSloBurnsFast", "PointsmanSloBurnsSlowly"})


async def test_engines_that_hang_are_told(monitored: MonitoredFleet) -> None:
    told = {"PointsmanEnginesNotServing", "PointsmanNoReadyEngine"}
    monitored.fleet = find_fleet(data=Path(monitored.fleet.data))  # one was started again
    with frozen(monitored.pids("engine")):
        await nothing_left(lambda: told - monitored.prometheus.firing())
    await nothing_left(lambda: monitored.prometheus.firing() & told)


async def test_a_scheduler_that_hangs_is_told(monitored: MonitoredFleet) -> None:
    told = {"PointsmanNoLeader", "PointsmanTargetDown", "PointsmanDegraded"}
    with frozen(monitored.pids("scheduler")):
        await nothing_left(lambda: told - monitored.prometheus.firing())
    await nothing_left(lambda: monitored.prometheus.firing() & told)
