"""Checkpoints in the object bucket `pointsman-<pool>`: chunks, then a description. Each slot alternates between two
chunk subjects, so an interrupted write leaves the previous object intact. A head has chunks of its own, the first ones,
and its own digest."""

import asyncio
import contextlib
from base64 import urlsafe_b64encode
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import asdict
from functools import partial
from hashlib import sha256
from typing import TypeVar

import msgspec
from typing_extensions import override

from pointsman.adapters.backoff import Backoff
from pointsman.adapters.checkpoint_retention import CHECKPOINTS_KEPT, superseded
from pointsman.adapters.jetstream.commands import Requests
from pointsman.adapters.jetstream.direct_stream import ROLLUP, DirectStream, RevisionTakenError
from pointsman.adapters.log_listener import LogListener
from pointsman.contracts.subjects import bucket_name, checkpoint_bucket
from pointsman.ports import CheckpointLabel, Checkpoints, StoreUnavailableError
from pointsman.primitives import PoolName, Sequence

Result = TypeVar("Result")

CHUNK_BYTES = 128 * 1024
READ_AHEAD = 8
TRIES_MAX = 5
DIGITS_MAX = 19
"""Of a sequence. Python refuses to read a number of some thousands."""
SLOTS = tuple(f"checkpoint-{number}" for number in range(CHECKPOINTS_KEPT))


class _Head(msgspec.Struct, frozen=True):
    chunks: int = 0
    digest: str = ""


class _Description(msgspec.Struct):
    name: str
    bucket: str
    nuid: str
    size: int
    chunks: int
    digest: str = ""
    deleted: bool = False
    """By a tool of NATS, which keeps the description."""
    metadata: dict[str, str] = {}
    options: dict[str, int] = {}
    head: _Head = _Head()
    """Unknown to NATS, whose clients read the object as a whole."""


_descriptions = msgspec.json.Decoder(_Description)


class JetStreamCheckpoints(Checkpoints):
    def __init__(
        self, requests: Requests, pool: PoolName, listener: LogListener, *, replicas: int, creates: bool = True
    ) -> None:
        self._name = bucket_name(pool)
        self._listener = listener
        self._told: set[str] = set()
        """Slots whose description is not understood."""
        config = {
            "subjects": [f"$O.{self._name}.C.>", f"$O.{self._name}.M.>"],
            "storage": "file",
            "discard": "new",
            "allow_direct": True,
            "allow_rollup_hdrs": True,
            "num_replicas": replicas,
        }
        self._bucket = DirectStream(requests, checkpoint_bucket(pool), config if creates else None)

    @override
    async def save(
        self, label: CheckpointLabel, content: bytes, *, head_bytes: int = 0, log_begins: Sequence = 1
    ) -> None:
        known = await self._known()
        slot = _slot_for(label, known, log_begins)
        replaced = known.get(slot)
        object_id = f"{slot}-b" if replaced is not None and replaced.nuid == f"{slot}-a" else f"{slot}-a"
        await self._sweep(object_id)
        whole = memoryview(content)
        head, rest = _chunks(whole[:head_bytes]), _chunks(whole[head_bytes:])
        await self._write(self._chunk_subject(object_id), [*head, *rest])
        description = _Description(
            name=slot,
            bucket=self._name,
            nuid=object_id,
            size=len(content),
            chunks=len(head) + len(rest),
            digest=_digest(content),
            head=_Head(len(head), _digest(whole[:head_bytes])),
            options={"max_chunk_size": CHUNK_BYTES},
            metadata={key: str(value) for key, value in asdict(label).items()},
        )
        described = msgspec.json.encode(description)
        await _repeated(partial(self._bucket.write, self._slot_subject(slot), described, headers=ROLLUP))
        if replaced is not None:
            with contextlib.suppress(StoreUnavailableError):  # it is stored, and who writes there next sweeps first
                await self._sweep(replaced.nuid)

    @override
    async def labels(self) -> list[CheckpointLabel]:
        found = (await self._known()).values()
        return sorted(map(_label, found), key=lambda label: -label.as_of)

    @override
    async def load(self, label: CheckpointLabel) -> bytes | None:
        found = await self._described(label)
        return None if found is None else await self._content(found, found.chunks, found.digest)

    @override
    async def load_head(self, label: CheckpointLabel) -> bytes | None:
        found = await self._described(label)
        if found is None or not found.head.chunks:
            return None
        return await self._content(found, found.head.chunks, found.head.digest)

    async def _described(self, label: CheckpointLabel) -> _Description | None:
        return next((found for found in (await self._known()).values() if _label(found) == label), None)

    async def _known(self) -> dict[str, _Description]:
        found = await asyncio.gather(*map(self._description, SLOTS))
        return {slot: description for slot, description in zip(SLOTS, found, strict=True) if description is not None}

    async def _content(self, description: _Description, chunks: int, digest: str) -> bytes | None:
        parts: dict[Sequence, bytes] = {}
        while len(parts) < chunks:
            # Chunks mostly have consecutive sequences. Where they have not, two requests find the same one.
            first = max(parts, default=0) + 1
            ahead = min(READ_AHEAD, chunks - len(parts)) if parts else 1
            found = await self._next(self._chunk_subject(description.nuid), range(first, first + ahead))
            if not found:
                return None
            parts |= found
        content = b"".join(parts[sequence] for sequence in sorted(parts))
        return content if _digest(content) == digest else None

    async def _write(self, subject: str, chunks: Iterable[memoryview]) -> None:
        """Raises StoreUnavailableError."""
        last: Sequence = 0
        try:
            for chunk in chunks:
                last = await _repeated(partial(self._bucket.write_once, subject, bytes(chunk), after=last))
        except RevisionTakenError as error:
            raise StoreUnavailableError(f"another process writes to {subject}: {error}") from error

    async def _next(self, subject: str, starts: Iterable[Sequence]) -> dict[Sequence, bytes]:
        """The first chunk from each start on, by sequence. Raises StoreUnavailableError."""
        found = await asyncio.gather(*(_repeated(partial(self._bucket.next, subject, start)) for start in starts))
        return {chunk.sequence: chunk.payload for chunk in found if chunk is not None}

    async def _sweep(self, object_id: str) -> None:
        if await self._bucket.last(self._chunk_subject(object_id)) is not None:
            await self._bucket.purge(self._chunk_subject(object_id))

    async def _description(self, slot: str) -> _Description | None:
        """None if the slot is free. One that is not understood is free, too."""
        found = await _repeated(partial(self._bucket.last, self._slot_subject(slot)))
        if found is None:
            return None
        try:
            description = _descriptions.decode(found.payload)
        except msgspec.DecodeError as error:
            if slot not in self._told:
                self._told.add(slot)
                self._listener.trouble(f"{slot} is not understood and will be replaced", str(error))
            return None
        return None if description.deleted else description

    def _slot_subject(self, slot: str) -> str:
        return f"$O.{self._name}.M.{urlsafe_b64encode(slot.encode()).decode()}"

    def _chunk_subject(self, object_id: str) -> str:
        return f"$O.{self._name}.C.{object_id}"


def _slot_for(label: CheckpointLabel, known: dict[str, _Description], log_begins: Sequence) -> str:
    kept = {slot: _label(description) for slot, description in known.items()}
    free = next((slot for slot in SLOTS if slot not in kept), None)
    if free is not None:
        return free
    forgotten = superseded(kept.values(), label, log_begins=log_begins)
    return next(slot for slot in SLOTS if kept[slot] == forgotten)


async def _repeated(attempt: Callable[[], Awaitable[Result]]) -> Result:
    """One question that takes too long must not cost the whole checkpoint. Raises StoreUnavailableError."""
    backoff = Backoff()
    while True:
        try:
            return await attempt()
        except StoreUnavailableError:
            if backoff.attempts + 1 >= TRIES_MAX:
                raise
            await asyncio.sleep(float(backoff.next_wait()))


def _label(description: _Description) -> CheckpointLabel:
    known = description.metadata
    as_of = known.get("as_of", "")
    return CheckpointLabel(
        identity=known.get("identity", ""),
        as_of=int(as_of) if as_of.isdecimal() and len(as_of) <= DIGITS_MAX else -1,
        entry=known.get("entry", ""),
        form=known.get("form", ""),
    )


def _chunks(content: memoryview) -> list[memoryview]:
    return [content[start : start + CHUNK_BYTES] for start in range(0, len(content), CHUNK_BYTES)]


def _digest(content: bytes | memoryview) -> str:
    return "SHA-256=" + urlsafe_b64encode(sha256(content).digest()).decode()
