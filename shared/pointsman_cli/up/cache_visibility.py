"""Reports whether KV events of real engines arrive: the keys of the ingress's probe must come back."""

import asyncio
from collections.abc import Callable, Mapping
from typing import assert_never

from pointsman.adapters.clocks import ScaledClock
from pointsman.contracts.fleet import InstanceJoined, InstanceProbed, InstanceReported
from pointsman.contracts.permissions import BusRole, BusUser
from pointsman.ports import LogEntry, LogUnavailableError
from pointsman.primitives import EngineSeconds, InstanceId, engine_time_of
from pointsman.runtime.health import HealthBoard
from pointsman.runtime.log_connection import open_link
from pointsman.runtime.settings import FleetSettings
from pointsman.runtime.structured_logs import configure_logging

VERDICT_SECONDS_MAX: EngineSeconds = 180.0
Report = Callable[[str, str], None]


async def report_cache_visibility(
    settings: FleetSettings, engines: Mapping[InstanceId, str], since: EngineSeconds, report: Report
) -> None:
    """Prints a verdict on each engine (name, URL). `since`: Unix seconds; earlier events are of an earlier fleet."""
    configure_logging("error", "text")
    open_cases = dict(engines)
    try:
        async with asyncio.timeout(VERDICT_SECONDS_MAX):
            await _follow(settings, open_cases, engine_time_of(since, settings.speed), report)
    except TimeoutError:
        for instance, url in open_cases.items():
            report(
                f"? {instance} ({url}): no probe came back within {VERDICT_SECONDS_MAX:g} s; see pointsman fleet",
                "yellow",
            )
    except LogUnavailableError as error:
        report(f"? how well the engines' caches are known is not known: {error}", "yellow")


async def _follow(
    settings: FleetSettings, open_cases: dict[InstanceId, str], since: EngineSeconds, report: Report
) -> None:
    async with open_link(
        settings, ScaledClock(settings.speed), HealthBoard(), name="up", user=BusUser(BusRole.READER)
    ) as link:
        kinds = tuple(f"fleet.{instance}" for instance in open_cases)
        verdicts = Verdicts()
        async for entry in link.log.read(1, kinds=kinds):
            if not isinstance(entry, LogEntry):
                continue
            event = entry.event
            if (
                not isinstance(event, InstanceJoined | InstanceReported | InstanceProbed)
                or event.at < since
                or event.instance not in open_cases
            ):
                continue
            verdict = verdicts.on(event, open_cases[event.instance])
            if verdict is not None:
                report(*verdict)
                del open_cases[event.instance]
            if not open_cases:
                return


class Verdicts:
    def __init__(self) -> None:
        self._certain: dict[InstanceId, bool] = {}
        self._probed: dict[InstanceId, InstanceProbed] = {}

    def on(self, event: InstanceJoined | InstanceReported | InstanceProbed, url: str) -> tuple[str, str] | None:
        """Text and colour, once there is one. After a probe of uncertain events a report decides: when the engine joined,
        its past may still have been read."""
        judged: InstanceJoined | InstanceProbed | None
        match event:
            case InstanceProbed():
                judged = event
                if event.parity and not self._certain.get(event.instance, True):
                    self._probed[event.instance] = event
                    return None
            case InstanceJoined():
                judged = event
                self._certain[event.instance] = event.certain
            case InstanceReported():
                judged = self._probed.pop(event.instance, None)
                self._certain[event.instance] = event.certain
            case _:
                assert_never(event)
        return _verdict(judged, url, certain=self._certain.get(event.instance, True)) if judged else None


def _verdict(event: InstanceJoined | InstanceProbed, url: str, *, certain: bool) -> tuple[str, str] | None:
    match event:
        case InstanceJoined() if not event.completes:
            return (
                f"✓ {event.instance} ({url}) makes vectors: it is placed by load, and its cache need not be known",
                "green",
            )
        case InstanceJoined() if event.cache == "no_events":
            return (
                f"✗ {event.instance} ({url}) is blind: no endpoint of KV events was named; see docs/engines.md",
                "red",
            )
        case InstanceJoined():
            return None
        case InstanceProbed() if event.parity and not certain:
            text = f"! {event.instance} ({url}): {event.detail}, but no replay socket answers, so its cache is never known exactly"
            return f"{text}; docs/engines.md has more", "yellow"
        case InstanceProbed() if event.parity:
            return f"✓ {event.instance} ({url}): {event.detail}, so its cache is known", "green"
        case InstanceProbed():
            text = f"✗ {event.instance} ({url}) is served, but its cache is not known: {event.detail}; docs/engines.md has more"
            return text, "red"
        case _:
            assert_never(event)
