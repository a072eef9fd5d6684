"""What each part of a run cost: waiting for a placement and the first byte, from the ingresses' access logs; elections
and suspicions, from the log; broken connections, from the processes' log lines. Times are Unix seconds."""

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from pointsman.contracts.decisions import LeaderElected
from pointsman.contracts.fleet import InstanceLeft, InstanceSuspected
from pointsman.ports import LogEntry
from pointsman.simulation.metrics import percentile
from pointsman_cli.bench.answer import decoded_object
from pointsman_cli.terminal import table

DISCONNECTED = "nats_disconnected"


class Phase(msgspec.Struct, kw_only=True):
    """`queue_ms`, `first_byte_ms`: P50, P90 and P99 of requests that arrived in it."""

    name: str
    begin: float
    end: float
    requests: int = 0
    queue_ms: tuple[float, ...] = ()
    first_byte_ms: tuple[float, ...] = ()
    elections: int = 0
    suspected: int = 0
    left: int = 0
    disconnected: int = 0
    warnings: dict[str, int] = {}


def measure(phases: Sequence[Phase], entries: Sequence[LogEntry], logs: Path) -> None:
    lines = list(_lines(logs))
    for phase in phases:
        accesses = [line for at, line in lines if line.get("log") == "access" and phase.begin <= at < phase.end]
        served = [line for line in accesses if line["status"] == 200 and line["retries"] == 0 and line["stream"]]
        phase.requests = len(accesses)
        phase.queue_ms = _percentiles([line["queue_ms"] for line in served if line["queue_ms"] is not None])
        phase.first_byte_ms = _percentiles(
            [line["first_byte_ms"] for line in served if line["first_byte_ms"] is not None]
        )
        events = [e.event for e in entries if e.event is not None and phase.begin <= e.event.at < phase.end]
        phase.elections = sum(isinstance(event, LeaderElected) for event in events)
        phase.suspected = sum(isinstance(event, InstanceSuspected) for event in events)
        phase.left = sum(isinstance(event, InstanceLeft) for event in events)
        warned = [
            line for at, line in lines if line.get("level") in ("warning", "error") and phase.begin <= at < phase.end
        ]
        phase.warnings = dict(Counter(str(line["event"]) for line in warned).most_common())
        phase.disconnected = phase.warnings.get(DISCONNECTED, 0)


def shown(phases: Sequence[Phase]) -> Table:
    made = table(
        "phase",
        ">requests",
        ">placed P50/P90/P99",
        ">first byte P50/P90/P99",
        ">elections",
        ">suspected",
        ">left",
        ">NATS lost",
    )
    for phase in phases:
        counts = (phase.elections, phase.suspected, phase.left, phase.disconnected)
        made.add_row(
            phase.name,
            str(phase.requests),
            _milliseconds(phase.queue_ms),
            _milliseconds(phase.first_byte_ms),
            *map(str, counts),
        )
    return made


def _lines(logs: Path) -> Iterator[tuple[float, dict[str, Any]]]:
    for file in logs.glob("*.log"):
        for text in file.read_bytes().splitlines():
            line = decoded_object(text)
            moment = line.get("time") or line.get("timestamp")
            if isinstance(moment, str):
                yield datetime.fromisoformat(moment).timestamp(), line


def _percentiles(values: Sequence[float]) -> tuple[float, ...]:
    found = (percentile(values, percent) for percent in (50, 90, 99))
    return tuple(value for value in found if value is not None)


def _milliseconds(values: Sequence[float]) -> str:
    return " / ".join(f"{value:.0f}" for value in values) + " ms" if values else "-"
