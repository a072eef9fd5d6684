"""Workloads: which requests arrive when, with which shared prefixes.

A workload is a list of requests in order of arrival, whether read from a trace or made by a seeded generator. It is
plain data: the bench sends it over HTTP, the simulator plays it in virtual time, and both see the same prompts,
because the tokens of a block follow from its id and a seed alone.

Ids are chained as in Mooncake's traces: an id stands for 512 tokens *and everything before them*, so two prompts
share a prefix exactly as far as their ids are equal. A last block may be partial; a longer prompt with the same id
continues it.

Nothing here sends, waits or reads a clock; chance comes in as a `random.Random`.
"""

import heapq
import random
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import shake_128
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import msgspec

from pointsman.primitives import Seconds, SessionId, Tenant, Tokens

TRACE_BLOCK_TOKENS: Tokens = 512
"""Tokens that one id of a trace stands for."""

ROUNDING_SECONDS: Seconds = 3.0
"""Published traces round arrivals down to this."""

FIRST_TOKEN_ID = 300
"""Smallest id of a made-up prompt: below lie special tokens and single bytes in many vocabularies."""

BLOCKS_CACHED_MAX = 8192
"""How many blocks' tokens are remembered; 2 kB each."""


NO_TENANT = Tenant("")
NO_SESSION = SessionId("")


class TraceError(ValueError):
    """The file is no trace. The message begins with the file and, where it applies, the line number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadRequest:
    """One request: when it arrives (since the workload's start, engine time), and its prompt as block ids."""

    arrival_s: Seconds
    block_ids: tuple[int, ...]
    input_length: Tokens
    output_tokens: Tokens
    tenant: Tenant = NO_TENANT
    session: SessionId = NO_SESSION


# --- Traces ---


class _TraceRow(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def read_trace(
    path: Path,
    *,
    limit: int | None = None,
    chance: random.Random,
    spread_s: Seconds = ROUNDING_SECONDS,
    input_tokens_max: Tokens | None = None,
) -> list[WorkloadRequest]:
    """The first `limit` requests of a Mooncake-format trace (one JSON object a line; see `_TraceRow`; ms).

    Arrivals are spread over the `spread_s` that the trace rounded away (0 leaves them). Prompts longer than
    `input_tokens_max` are cut there. Raises TraceError, also for an empty file.
    """
    rows = list(_rows(path, limit))
    if not rows:
        msg = f"{path}: no requests"
        raise TraceError(msg)
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
            for line_number, line in enumerate(lines, start=1):
                if limit is not None and number >= limit:
                    return
                if line.strip():
                    number += 1
                    yield _checked(decoder, line, f"{path}:{line_number}")
    except OSError as error:
        msg = f"{path}: {error.strerror}"
        raise TraceError(msg) from error


def _checked(decoder: "msgspec.json.Decoder[_TraceRow]", line: bytes, where: str) -> _TraceRow:
    try:
        row = decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        msg = f"{where}: {error}"
        raise TraceError(msg) from error
    if row.input_length < 1 or row.output_length < 0 or row.timestamp < 0:
        msg = f"{where}: lengths and time must not be negative, and the prompt not empty"
        raise TraceError(msg)
    if len(row.hash_ids) != _blocks(row.input_length):
        msg = (
            f"{where}: {len(row.hash_ids)} hash_ids for {row.input_length} tokens; expected {_blocks(row.input_length)}"
        )
        raise TraceError(msg)
    return row


def input_capped(requests: Iterable[WorkloadRequest], input_tokens_max: Tokens | None) -> list[WorkloadRequest]:
    """The same requests, prompts cut after `input_tokens_max` tokens; None cuts nothing."""
    return [
        request
        if input_tokens_max is None or request.input_length <= input_tokens_max
        else replace(request, input_length=input_tokens_max, block_ids=request.block_ids[: _blocks(input_tokens_max)])
        for request in requests
    ]


# --- Time ---


def in_order(requests: Iterable[WorkloadRequest]) -> list[WorkloadRequest]:
    """By arrival, the first one at 0."""
    ordered = sorted(requests, key=lambda request: request.arrival_s)
    start = ordered[0].arrival_s if ordered else 0.0
    return [replace(request, arrival_s=request.arrival_s - start) for request in ordered]


def mean_rate(requests: Sequence[WorkloadRequest]) -> float:
    """Mean arrivals a second from the first to the last; 0 where there is no such time."""
    span = requests[-1].arrival_s - requests[0].arrival_s if requests else 0.0
    return (len(requests) - 1) / span if span > 0 else 0.0


def at_rate(requests: Sequence[WorkloadRequest], rate: float) -> list[WorkloadRequest]:
    """The same arrivals stretched or squeezed to a mean of `rate` a second. Raises ValueError unless positive."""
    return faster(requests, rate / mean_rate(requests)) if mean_rate(requests) else list(requests)


def faster(requests: Sequence[WorkloadRequest], factor: float) -> list[WorkloadRequest]:
    """The same arrivals in `factor` times less time. Raises ValueError unless positive."""
    if not factor > 0:
        msg = f"arrivals can be sped up by a positive factor only, not {factor}"
        raise ValueError(msg)
    return [replace(request, arrival_s=request.arrival_s / factor) for request in requests]


# --- Tokens ---


def prompt_token_ids(request: WorkloadRequest, *, vocab_size: int, seed: int) -> list[int]:
    """The prompt's tokens: equal for equal block ids, `vocab_size` and `seed`, on every machine.

    Ids lie from FIRST_TOKEN_ID up to below `vocab_size`. Raises ValueError when that leaves nothing.
    """
    tokens: list[int] = []
    for block_id in request.block_ids:
        tokens.extend(_block_tokens(block_id, vocab_size, seed))
    del tokens[request.input_length :]
    return tokens


@lru_cache(maxsize=BLOCKS_CACHED_MAX)
def _block_tokens(block_id: int, vocab_size: int, seed: int) -> "array[int]":
    span = vocab_size - FIRST_TOKEN_ID
    if span < 1:
        msg = f"a vocabulary of {vocab_size} is too small: prompts use ids from {FIRST_TOKEN_ID} on"
        raise ValueError(msg)
    stream = shake_128(f"{seed}:{block_id}".encode()).digest(4 * TRACE_BLOCK_TOKENS)
    return array(
        "I",
        [
            FIRST_TOKEN_ID + (int.from_bytes(stream[at : at + 4], "little") * span >> 32)
            for at in range(0, len(stream), 4)
        ],
    )


# --- Generators ---


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatShape:
    """Conversations that share a few system prompts and grow turn by turn. Lengths are means (exponential)."""

    system_prompt_blocks: tuple[int, ...] = (6, 4, 3, 2)
    """Length of each system prompt, most popular first: the n-th is chosen with weight 1/n."""
    turns: float = 5.0
    question_tokens: float = 400.0
    answer_tokens: float = 250.0
    think_s: Seconds = 30.0
    answer_s_per_token: Seconds = 0.03
    """How long the user waits for an answer before thinking; the workload is open loop, so this is a guess."""
    input_tokens_max: Tokens = 16_384
    """A conversation that grew beyond this is over."""
    output_tokens_max: Tokens = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolsShape:
    """Single requests behind long tool descriptions, a few of which are much hotter than the rest."""

    tools: int = 40
    zipf_exponent: float = 1.2
    prefix_blocks_min: int = 3
    prefix_blocks_max: int = 14
    question_tokens: float = 900.0
    answer_tokens: float = 120.0
    input_tokens_max: Tokens = 16_384
    output_tokens_max: Tokens = 1024


def chat(count: int, *, rate: float, chance: random.Random, shape: ChatShape | None = None) -> list[WorkloadRequest]:
    """`count` requests of conversations that begin at random so that about `rate` requests arrive a second."""
    shape = shape or ChatShape()
    ids = _BlockIds()
    systems = [ids.take(blocks) for blocks in shape.system_prompt_blocks]
    popularity = list(accumulate(1 / rank for rank in range(1, len(systems) + 1)))
    waiting: list[tuple[Seconds, int, WorkloadRequest]] = []
    chosen: list[WorkloadRequest] = []
    number, start = 0, 0.0
    while len(chosen) < count:
        # Nothing that begins later can come before `start`: what waits and is earlier is settled.
        while waiting and waiting[0][0] <= start:
            chosen.append(heapq.heappop(waiting)[2])
        number += 1
        system = chance.choices(systems, cum_weights=popularity)[0]
        for request in _conversation(number, start, system, ids, shape, chance):
            heapq.heappush(waiting, (request.arrival_s, number, request))
        start += chance.expovariate(rate / shape.turns)
    return in_order(chosen[:count])


def tools(count: int, *, rate: float, chance: random.Random, shape: ToolsShape | None = None) -> list[WorkloadRequest]:
    """`count` requests, `rate` a second at random moments, each behind one of the tools' prefixes."""
    shape = shape or ToolsShape()
    ids = _BlockIds()
    prefixes = [ids.take(chance.randint(shape.prefix_blocks_min, shape.prefix_blocks_max)) for _ in range(shape.tools)]
    popularity = list(accumulate(rank**-shape.zipf_exponent for rank in range(1, shape.tools + 1)))
    requests = []
    arrival_s = 0.0
    for _ in range(count):
        tool = chance.choices(range(shape.tools), cum_weights=popularity)[0]
        length = len(prefixes[tool]) * TRACE_BLOCK_TOKENS + _tokens(chance, shape.question_tokens)
        length = min(length, shape.input_tokens_max)
        requests.append(
            WorkloadRequest(
                arrival_s=arrival_s,
                block_ids=ids.extended(prefixes[tool], length),
                input_length=length,
                output_tokens=min(_tokens(chance, shape.answer_tokens), shape.output_tokens_max),
                tenant=Tenant(f"tool-{tool + 1}"),
            )
        )
        arrival_s += chance.expovariate(rate)
    return requests


class Generator(Protocol):
    """Makes `count` requests, about `rate` a second, from nothing but `chance`."""

    def __call__(self, count: int, *, rate: float, chance: random.Random) -> list[WorkloadRequest]: ...


GENERATORS: dict[str, Generator] = {"chat": chat, "tools": tools}


def _conversation(
    number: int, start: Seconds, system: tuple[int, ...], ids: "_BlockIds", shape: ChatShape, chance: random.Random
) -> Iterator[WorkloadRequest]:
    arrival_s, block_ids, length = start, system, len(system) * TRACE_BLOCK_TOKENS
    while True:
        length += _tokens(chance, shape.question_tokens)
        if length > shape.input_tokens_max:
            return
        block_ids = ids.extended(block_ids, length)
        answer = min(_tokens(chance, shape.answer_tokens), shape.output_tokens_max)
        yield WorkloadRequest(
            arrival_s=arrival_s,
            block_ids=block_ids,
            input_length=length,
            output_tokens=answer,
            tenant=Tenant(f"user-{number % 8 + 1}"),
            session=SessionId(f"chat-{number}"),
        )
        if chance.uniform(0.0, 1.0) < 1 / shape.turns:
            return
        length += answer
        arrival_s += answer * shape.answer_s_per_token + chance.expovariate(1 / shape.think_s)


class _BlockIds:
    """Gives out ids that were never used before."""

    def __init__(self) -> None:
        self._next = 1

    def take(self, count: int) -> tuple[int, ...]:
        first, self._next = self._next, self._next + count
        return tuple(range(first, self._next))

    def extended(self, block_ids: tuple[int, ...], length: Tokens) -> tuple[int, ...]:
        """`block_ids` with enough new ones behind them for a prompt of `length` tokens."""
        return block_ids + self.take(_blocks(length) - len(block_ids))


def _blocks(tokens: Tokens) -> int:
    return -(-tokens // TRACE_BLOCK_TOKENS)


def _tokens(chance: random.Random, mean: float) -> Tokens:
    """A length with this mean, at least 1."""
    return 1 + int(chance.expovariate(1 / mean))
