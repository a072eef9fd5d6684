"""Observations at the end of a run: answers, log, leader, engines and archive, gathered once they agree or after
QUIET_SECONDS_MAX."""

import asyncio
import sqlite3
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from pointsman.contracts.block_keys import KeyChain
from pointsman.contracts.commands import FleetDescribed
from pointsman.contracts.requests import RequestArrived
from pointsman.ports import Link, LogEntry, LogUnavailableError
from pointsman.primitives import BlockKey, EngineSeconds, InstanceId
from pointsman.runtime.settings import FleetSettings
from pointsman.state.state import State
from pointsman_cli.history.archive import ArchiveHistory
from pointsman_cli.history.entries import HistoryError
from pointsman_cli.up.plan import archive_file
from pointsman_lab.faults.balancer import Balancer
from pointsman_lab.faults.clients import Exchange
from pointsman_lab.faults.engine_truth import EngineSilentError, held_keys, replay_endpoint_of
from pointsman_lab.faults.fleet import FleetUnderTest
from pointsman_lab.faults.injector import Injection
from pointsman_lab.faults.log_tail import LogTail

QUIET_SECONDS_MAX = 45.0
QUIET_POLL_SECONDS = 0.5


@dataclass(slots=True)
class Evidence:
    """`truth`: keys in each engine's cache. `archived`: sequence and payload of every archived entry."""

    exchanges: list[Exchange]
    injections: list[Injection]
    entries: list[LogEntry]
    resets: list[str]
    state: State
    leader: FleetDescribed | None
    truth: dict[InstanceId, set[BlockKey]] = field(default_factory=dict)
    silent: list[str] = field(default_factory=list)
    archived: dict[int, bytes] = field(default_factory=dict)
    gaps: list[str] = field(default_factory=list)
    balancer: Balancer | None = None
    quiet_s: EngineSeconds | None = None
    log_replicas: int = 1


async def evidence_of(
    link: Link,
    log_tail: LogTail,
    exchanges: list[Exchange],
    injections: list[Injection],
    *,
    leader: Callable[[], Awaitable[FleetDescribed | None]],
    look: Callable[[Evidence], Awaitable[None]],
    in_agreement: Callable[[Evidence], bool],
) -> Evidence:
    """The evidence, once `in_agreement` holds, at the latest after QUIET_SECONDS_MAX. `look` adds what engines and
    archive hold."""
    started = time.monotonic()
    while True:
        evidence = Evidence(exchanges, injections, log_tail.entries, log_tail.resets, log_tail.state, await leader())
        overdue = time.monotonic() - started > QUIET_SECONDS_MAX
        if overdue or await _settled(link, evidence):
            evidence.entries = list(log_tail.entries)  # the archive is read later, and has all of these then
            _name_as_logged(evidence)
            await look(evidence)
            if in_agreement(evidence):
                evidence.quiet_s = time.monotonic() - started
                return evidence
        if overdue:
            return evidence
        await asyncio.sleep(QUIET_POLL_SECONDS)


def _name_as_logged(evidence: Evidence) -> None:
    """Requests without an answer. One sent again within an ingress is in the log under each of its ids; the last one
    counts."""
    arrived = (entry.event for entry in evidence.entries if isinstance(entry.event, RequestArrived))
    logged = {event.client_request_id: event.request for event in arrived}
    for exchange in evidence.exchanges:
        exchange.request = logged.get(exchange.request, exchange.request)


async def _settled(link: Link, evidence: Evidence) -> bool:
    if evidence.leader is None or evidence.state.workload.requests:
        return False
    try:
        return (await link.log.extent()).last <= evidence.state.sequence
    except LogUnavailableError:
        return False


async def look_at(fleet: FleetUnderTest, evidence: Evidence) -> None:
    """Adds the caches of a fleet of processes, and its archive."""
    endpoints = {}
    for engine in fleet.file.of_role("engine"):
        try:
            endpoints[InstanceId(engine.name)] = replay_endpoint_of(engine.pid).replace(
                "*", urlsplit(engine.url).hostname or ""
            )
        except (OSError, ValueError) as error:
            evidence.silent.append(f"{engine.name}: {error}")
    await ask_engines(endpoints, fleet.settings, fleet.file.model, evidence)
    await asyncio.to_thread(read_archive, archive_file(fleet.data), evidence)


async def ask_engines(
    endpoints: Mapping[InstanceId, str], settings: FleetSettings, model: str, evidence: Evidence
) -> None:
    """Adds the caches behind these replay endpoints."""
    chain = KeyChain(secret=settings.secret.encode(), model=model, block_tokens=settings.block_tokens)
    for instance, endpoint in endpoints.items():
        try:
            evidence.truth[instance] = await held_keys(endpoint, chain)
        except EngineSilentError as error:
            evidence.silent.append(f"{instance}: {error}")


def read_archive(file: Path, evidence: Evidence) -> None:
    try:
        evidence.archived = {e.sequence: e.payload for e in ArchiveHistory(f"sqlite:///{file}").entries()}
        with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as archive:
            evidence.gaps = [str(row) for row in archive.execute("select log, sequence, reason from gaps")]
    except (HistoryError, sqlite3.Error) as error:
        evidence.gaps = [f"the archive cannot be read: {error}"]
