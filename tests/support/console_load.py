"""The log of a large fleet under load, to be followed while it is written. `record_load` makes it in virtual time, with
the production Dispatcher and as `pointsman tap --json` prints it; `write_as_time_passes` puts such a log into a stream;
`python -m tests.support.console_load FILE NATS_URL` does so in a process of its own."""

import asyncio
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import IO

import msgspec
from nats.aio.client import Client
from typing_extensions import override

from pointsman.adapters import jetstream
from pointsman.adapters.clocks import ScaledClock
from pointsman.contracts.codec import LogEvent, encode
from pointsman.contracts.requests import RequestArrived
from pointsman.contracts.subjects import subject_of
from pointsman.policies.policy_set import policy_set
from pointsman.ports import Clock, EventLog, LogEntry
from pointsman.primitives import EngineSeconds
from tests.support.served_log import POOL, ServedLog
from tests.support.waiting import eventually

INSTANCES = 500
REQUESTS_PER_SECOND = 200
BUSY_PACE = 4.0
"""With it, half of the engines have work."""


_AT = re.compile(rb'(\{"type":"\w+","at":)([0-9.e+-]+)')
_ARRIVED_AT = re.compile(rb'"arrived_at":([0-9.e+-]+)')


class _Line(msgspec.Struct):
    sequence: int
    subject: str
    event: msgspec.Raw


class _RecordedLoad(ServedLog):
    """Keeps nothing of what it writes: a minute is a gigabyte."""

    def __init__(self, sink: IO[bytes], *, seconds: int, instances: int, requests_per_second: int, policy: str) -> None:
        self._sink = sink
        self._written = 0
        super().__init__(
            requests=seconds * requests_per_second,
            gap=1 / requests_per_second,
            engines=instances,
            families=2 * instances,
            pace={f"engine-{number}": BUSY_PACE for number in range(1, instances + 1)},
            tenants=[f"tenant-{number}" for number in range(20)],
            policies=policy_set(routing=policy),
        )

    @override
    def _write(self, event: LogEvent, *, follow: bool) -> None:
        self._written += 1
        line = _Line(self._written, subject_of(POOL, event), msgspec.Raw(encode(event)))
        self._sink.write(msgspec.json.encode(line) + b"\n")
        if follow:
            self.state.apply(event, self._written)
        else:
            self.state.skip(self._written)


def record_load(
    file: Path,
    *,
    seconds: int,
    instances: int = INSTANCES,
    requests_per_second: int = REQUESTS_PER_SECOND,
    policy: str = "pointsman",
) -> None:
    with file.open("wb") as sink:
        _RecordedLoad(
            sink, seconds=seconds, instances=instances, requests_per_second=requests_per_second, policy=policy
        )


async def write_as_time_passes(log: EventLog, entries: Iterable[LogEntry], clock: Clock) -> None:
    """The first entry is of now, each other as much later as it was recorded."""
    shift: EngineSeconds | None = None
    for entry in entries:
        event = entry.event
        assert event is not None, entry.problem
        shift = clock.now() - event.at if shift is None else shift
        await clock.sleep(max(0.0, event.at + shift - clock.now()))
        log.append_soon(moved(event, shift))


def moved(event: LogEvent, shift: EngineSeconds) -> LogEvent:
    """The same event, so many seconds later."""
    if isinstance(event, RequestArrived):
        event = msgspec.structs.replace(event, arrived_at=event.arrived_at + shift)
    return msgspec.structs.replace(event, at=event.at + shift)


async def write_file(file: Path, nats_url: str) -> None:
    """As `write_as_time_passes`, of a recorded load: its payloads are not decoded again, so that this takes little of the
    machine that is measured."""
    clock = ScaledClock()
    async with jetstream.connect(nats_url, POOL, clock, name="load") as link:
        await eventually(lambda: link.commands.connected)
        await eventually(link.log.extent)
    client = Client()
    await client.connect(nats_url)
    start = clock.now()
    with file.open("rb") as lines:
        for line in lines:
            read = msgspec.json.decode(line, type=_Line)
            at, payload = _moved_payload(bytes(read.event), start)
            await clock.sleep(max(0.0, at - clock.now()))
            await client.publish(read.subject, payload)
    await client.close()


def _moved_payload(payload: bytes, shift: EngineSeconds) -> tuple[EngineSeconds, bytes]:
    found = _AT.match(payload)
    assert found is not None, payload[:100]
    at = float(found[2]) + shift
    payload = b"%s%r%s" % (found[1], at, payload[found.end() :])
    if b'"RequestArrived"' in found[1]:
        payload = _ARRIVED_AT.sub(lambda arrived: b'"arrived_at":%r' % (float(arrived[1]) + shift), payload, count=1)
    return at, payload


if __name__ == "__main__":
    asyncio.run(write_file(Path(sys.argv[1]), sys.argv[2]))
