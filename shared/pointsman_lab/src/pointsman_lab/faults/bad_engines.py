"""Effects of a misbehaving engine: requests sent to it, commands that report it, and its recovery."""

import asyncio
import os
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pointsman.contracts.decisions import RequestGranted, RequestPlaced
from pointsman.contracts.requests import RequestAttemptFailed, RequestFailed
from pointsman.ports import LogEntry
from pointsman.primitives import EngineSeconds, InstanceId
from pointsman_cli.up.scripts import console_script
from pointsman_lab.faults.clients import Exchange
from pointsman_lab.faults.log_tail import LogTail

FIRST_SECONDS = 10.0
"""Grace period of detection. First-byte timeouts take 5 s at least."""
TOUCHED_SHARE_MAX = 0.02
BACK_SECONDS_MAX = 30.0
COMMAND_SECONDS_MAX = 40.0
NICENESS = 10
BAD_WORDS = re.compile(r"eject|outlier|fail|error|slow|hang|first.byte|status 500", re.IGNORECASE)


class Touched(msgspec.Struct, kw_only=True):
    """`asked`, `touched`: requests after the grace period, until recovery; `early`: touched before that. `doctor`,
    `explain`: their line about it, or empty. `whole_s`, `back_s`: wall seconds from recovery until it was not ejected,
    and until it answered a request."""

    instance: str
    asked: int = 0
    touched: int = 0
    early: int = 0
    failures: dict[str, int] = {}
    doctor: str = ""
    explain: str = ""
    whole_s: EngineSeconds | None = None
    back_s: EngineSeconds | None = None

    @property
    def share(self) -> float:
        return self.touched / self.asked if self.asked else 0.0


class EngineWatch:
    def __init__(self, log_tail: LogTail, data: Path) -> None:
        self._log_tail = log_tail
        self._data = data

    async def diagnose(self, instance: InstanceId) -> Touched:
        doctor, explain = _line_about(await self._output_of("doctor"), instance), ""
        for request in self._requests_about(instance):
            explain = explain or _line_about(await self._output_of("explain", request), instance)
        return Touched(instance=instance, doctor=doctor, explain=explain)

    def whole(self, instance: InstanceId) -> bool:
        known = self._log_tail.state.fleet.get(instance)
        return known is not None and known.status == "ready" and not known.half_open

    def _requests_about(self, instance: InstanceId) -> list[str]:
        events = [entry.event for entry in reversed(self._log_tail.entries) if entry.event is not None]
        failed = next((e for e in events if isinstance(e, RequestAttemptFailed) and e.instance == instance), None)
        placed = next((e for e in events if isinstance(e, RequestPlaced)), None)
        return [event.request for event in (failed, placed) if event is not None]

    async def _output_of(self, *command: str) -> str:
        process = await asyncio.create_subprocess_exec(
            str(console_script("pointsman")),
            *command,
            *("--from", str(self._data)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=os.environ | {"COLUMNS": "300"},
        )
        os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
        try:
            async with asyncio.timeout(COMMAND_SECONDS_MAX):
                output, _ = await process.communicate()
        except TimeoutError:
            process.kill()
            await process.wait()
            return ""
        return output.decode(errors="replace")


def count_touched(
    touched: Touched, *, began: float, ended: float, exchanges: Sequence[Exchange], entries: Sequence[LogEntry]
) -> None:
    """Fills in the counts at the end. `began`, `ended`: of the fault, monotonic clock."""
    sent = _sent_to(InstanceId(touched.instance), entries)
    late = [e for e in exchanges if began + FIRST_SECONDS <= e.asked_at < ended]
    touched.asked, touched.touched = len(late), sum(e.request in sent for e in late)
    touched.early = sum(e.request in sent for e in exchanges if began <= e.asked_at < began + FIRST_SECONDS)
    counts: dict[str, int] = defaultdict(int)
    for exchange in exchanges:
        for failure in sent.get(exchange.request, ()) if began <= exchange.asked_at < ended else ():
            counts[failure] += 1
    touched.failures = dict(counts)
    served = [
        e.ended_at
        for e in exchanges
        if e.asked_at >= ended and e.instance == touched.instance and e.ending == "completed" and e.ended_at
    ]
    if served and touched.whole_s is not None:
        touched.back_s = max(touched.whole_s, min(served) - ended)


def _sent_to(instance: InstanceId, entries: Sequence[LogEntry]) -> dict[str, list[str]]:
    sent: dict[str, list[str]] = {}
    for entry in entries:
        event = entry.event
        if isinstance(event, RequestGranted) and event.instance == instance:
            sent.setdefault(event.request, [])
        elif isinstance(event, RequestAttemptFailed) and event.instance == instance:
            sent.setdefault(event.request, []).append(event.failure)
        elif isinstance(event, RequestFailed) and event.instance == instance:
            sent.setdefault(event.request, []).append(f"failed: {event.status}")
    return sent


def _line_about(output: str, instance: InstanceId) -> str:
    lines = (line.strip() for line in output.splitlines())
    return next((line for line in lines if re.search(rf"\b{instance}\b", line) and BAD_WORDS.search(line)), "")
