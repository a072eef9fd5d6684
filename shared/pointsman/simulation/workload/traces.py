"""Reads published traces (one JSON object a line, as released with Mooncake) into a workload, without tenants and
sessions."""

import random
from collections.abc import Iterator
from pathlib import Path

import msgspec

from pointsman.primitives import EngineSeconds, Moment, Tokens
from pointsman.simulation.workload.requests import WorkloadRequest, blocks_for, in_order, input_capped

ROUNDING_SECONDS: EngineSeconds = 3.0
"""Published traces round arrivals down to this."""
LINE_BYTES_MAX = 4 * 1024**2
REQUESTS_MAX = 2_000_000


class TraceError(ValueError): ...


class _TraceRow(msgspec.Struct):
    timestamp: Moment
    input_length: Tokens
    output_length: Tokens
    hash_ids: list[int]


def read_trace(
    path: Path,
    *,
    limit: int | None = None,
    chance: random.Random,
    spread_s: EngineSeconds = ROUNDING_SECONDS,
    input_tokens_max: Tokens | None = None,
) -> list[WorkloadRequest]:
    """At most `limit` requests. Arrivals are spread over the `spread_s` that the trace rounded away; prompts are cut
    after `input_tokens_max`. Raises TraceError, also for an empty file."""
    rows = list(_rows(path, limit))
    if not rows:
        raise TraceError(f"{path}: no requests")
    first = min(row.timestamp for row in rows)
    requests = [
        WorkloadRequest(
            arrival_s=(row.timestamp - first) / 1000 + chance.uniform(0.0, spread_s),
            block_ids=tuple(row.hash_ids),
            input_length=row.input_length,
            output_tokens=row.output_length,
        )
        for row in rows
    ]
    return in_order(input_capped(requests, input_tokens_max))


def _rows(path: Path, limit: int | None) -> Iterator[_TraceRow]:
    decoder = msgspec.json.Decoder(_TraceRow)
    try:
        with path.open("rb") as lines:
            number = 0
            for line_number, line in enumerate(iter(lambda: lines.readline(LINE_BYTES_MAX + 1), b""), start=1):
                if len(line) > LINE_BYTES_MAX or number == REQUESTS_MAX:
                    raise TraceError(
                        f"{path}:{line_number}: a line has at most {LINE_BYTES_MAX:,} bytes, a trace {REQUESTS_MAX:,} requests"
                    )
                if limit is not None and number >= limit:
                    return
                if line.strip():
                    number += 1
                    yield _checked(decoder, line, f"{path}:{line_number}")
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error


def _checked(decoder: "msgspec.json.Decoder[_TraceRow]", line: bytes, where: str) -> _TraceRow:
    try:
        row = decoder.decode(line)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise TraceError(f"{where}: {error}") from error
    if row.input_length < 1 or row.output_length < 0 or row.timestamp < 0:
        raise TraceError(f"{where}: lengths and time must not be negative, and the prompt not empty")
    if len(row.hash_ids) != blocks_for(row.input_length):
        raise TraceError(
            f"{where}: {len(row.hash_ids)} hash_ids for {row.input_length} tokens; expected {blocks_for(row.input_length)}"
        )
    return row
