"""Faults of containers, and which failed requests each of them excuses."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from docker.errors import APIError

from pointsman_lab.faults.clients import Exchange
from pointsman_lab.faults.injector import Injection
from tests.containers.fleet import Container, ContainerFleet

DOWN_SECONDS = 1.5
FROZEN_SECONDS = 4.0
CUT_SECONDS = 6.0
NOTICED_SECONDS_MAX = 1.0
PAUSE_ATTEMPTS_MAX = 10

Action = Literal["kill", "freeze", "cut"]
Excuse = Callable[[Exchange, Injection], bool]


def nothing(_exchange: Exchange, _injection: Injection) -> bool:
    return False


def connections_of_a_dead_ingress(exchange: Exchange, injection: Injection) -> bool:
    """Its process held the client's connection."""
    ended = exchange.ended_at or 0.0
    return exchange.ending == "dropped" and 0.0 <= ended - injection.at <= injection.lasted + NOTICED_SECONDS_MAX


def answers_of_a_dead_ingress_behind_haproxy(exchange: Exchange, injection: Injection) -> bool:
    """Begun answers break off; haproxy answers 502 for those that had not begun."""
    at_once = 0.0 <= (exchange.ended_at or 0.0) - injection.at <= NOTICED_SECONDS_MAX
    return at_once and (exchange.ending == "dropped" or (exchange.ending, exchange.status) == ("lost", 502))


def streams_of_a_dead_engine(exchange: Exchange, injection: Injection) -> bool:
    """Their first tokens were out, and the rest died with the engine. One that is told to stop ends them itself, with 503."""
    of_engine = exchange.instance == injection.victim and exchange.asked_at <= injection.at + injection.lasted
    return of_engine and exchange.streamed and exchange.ending == "cut" and exchange.detail in ("engine_failed", "503")


def requests_sent_before_no_engine_was_left(exchange: Exchange, injection: Injection) -> bool:
    """They may have run on an engine, so they are not tried on the same ones again."""
    refused = (exchange.ending, exchange.detail) == ("refused", "503 no_instance")
    return refused and exchange.asked_at <= injection.at + injection.lasted


def what_all_engines_had_begun(exchange: Exchange, injection: Injection) -> bool:
    return streams_of_a_dead_engine(exchange, injection) or requests_sent_before_no_engine_was_left(exchange, injection)


@dataclass(frozen=True, slots=True)
class Fault:
    """`action` on the container of `service`, for `seconds`. A cut takes it from `network`."""

    action: Action
    service: str
    seconds: float
    network: str = ""
    excused: Excuse = nothing

    @property
    def name(self) -> str:
        return f"{self.action} {self.service}" + (f" from {self.network}" if self.network else "")


async def carry_out(fleet: ContainerFleet, fault: Fault) -> Injection:
    """Strikes, waits, and takes the fault back."""
    struck = fleet.named(fault.service)
    name, container = struck.name, fleet.engine.containers.get(struck.name)
    if fault.action == "cut":
        network = fleet.engine.networks.get(f"{fleet.project}_{fault.network}")
        strike, repair = partial(network.disconnect, name), partial(network.connect, name, aliases=[fault.service])
    elif fault.action == "kill":
        strike, repair = container.kill, container.start
    else:
        strike, repair = partial(_pause, container), container.unpause
    at = time.monotonic()
    await asyncio.to_thread(strike)
    await asyncio.sleep(fault.seconds)
    await asyncio.to_thread(repair)
    return injected(fault.action, struck, at)


def injected(action: str, struck: Container, at: float) -> Injection:
    """What happened from `at` (monotonic) until now."""
    return Injection(
        fault=f"{action}:{struck.service}",
        victim=struck.instance if struck.is_engine else struck.service,
        pids=[],
        at=at,
        began=0.0,
        lasted=time.monotonic() - at,
    )


def _pause(container: Any) -> None:
    """The kernel now and then refuses to freeze a container that just starts a process, such as its health check."""
    for attempt in range(PAUSE_ATTEMPTS_MAX):
        try:
            container.pause()
        except APIError:
            if attempt + 1 == PAUSE_ATTEMPTS_MAX:
                raise
        else:
            return
