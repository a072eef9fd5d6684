"""Values in the key-value bucket POINTSMAN_ACCESS. Readers use one API call (MSG.GET): one request per poll while nothing
changes, and a second one for each change."""

import asyncio
from collections.abc import AsyncIterator

from typing_extensions import override

from pointsman.adapters.jetstream.commands import Requests
from pointsman.adapters.jetstream.direct_stream import DirectStream, Found, RevisionTakenError
from pointsman.contracts.permissions import ACCESS_BUCKET, ACCESS_STREAM
from pointsman.ports import Clock, KeyValueStore, StoredValue, StoreUnavailableError, ValueChangedError, ValuesRead
from pointsman.primitives import WallSeconds

POLL_WALL_SECONDS: WallSeconds = WallSeconds(0.5)
UNREAD_WALL_SECONDS: WallSeconds = WallSeconds(3.0)
"""Without a successful read, before followers are told."""
READERS_MAX = 32
"""Requests at a time while many values are read."""
READ_AHEAD_MIN = 16
LARGE_BYTES, LARGE_POLLS = 64 * 1024, 20
"""A newest value of this size is asked for in one poll of so many, the others ask for later ones: all processes would read
the policies of 10,000 tenants twice a second. Until then a store that was recreated is not noticed."""


class JetStreamKeyValue(KeyValueStore):
    def __init__(self, requests: Requests, clock: Clock, *, replicas: int) -> None:
        self._prefix = f"$KV.{ACCESS_BUCKET}."
        self._clock = clock
        config = {
            "subjects": [f"{self._prefix}>"],
            "storage": "file",
            "max_msgs_per_subject": 1,
            "discard": "new",
            "deny_delete": True,
            "allow_direct": True,
            "allow_rollup_hdrs": False,
            "num_replicas": replicas,
        }
        self._bucket = DirectStream(requests, ACCESS_STREAM, config)

    @override
    async def get(self, key: str) -> StoredValue | None:
        found = await self._bucket.last(self._prefix + key)
        return None if found is None else self._value(found)

    @override
    async def put(self, key: str, value: bytes, *, after: int) -> int:
        try:
            return await self._bucket.write(self._prefix + key, value, after=after)
        except RevisionTakenError as error:
            raise ValueChangedError(str(error)) from error

    @override
    async def read(self, keys: str = "") -> ValuesRead:
        subject = self._subject(keys)
        found = await self._read_from(1, await self._bucket.last(subject), subject)
        return ValuesRead(self._newest(found), whole=True, exists=bool(found))

    @override
    async def follow(self, keys: str = "") -> AsyncIterator[ValuesRead]:
        subject = self._subject(keys)
        known: list[Found] = []
        begun = is_told = False
        read_at, polls = self._clock.wall(), 0
        while True:
            try:
                polls += 1
                last = await self._look(subject, known, whole=polls % LARGE_POLLS == 0)
                if not begun or last != (known[-1] if known else None):
                    start = await self._proven(known)
                    found = await self._read_from(start or 1, last, subject)
                    known, begun = _last_two([*known, *found] if start else found), True
                    yield ValuesRead(self._newest(found), whole=not start, exists=last is not None)
                elif is_told:
                    yield ValuesRead([], whole=False, exists=last is not None)
                read_at, is_told = self._clock.wall(), False
            except StoreUnavailableError as error:
                if not is_told and self._clock.wall() - read_at >= UNREAD_WALL_SECONDS:
                    is_told = True
                    yield ValuesRead([], whole=False, unread=str(error))
            await self._clock.sleep_wall(POLL_WALL_SECONDS)

    def _subject(self, keys: str) -> str:
        return self._prefix + keys + (">" if keys[-1:] in ("", ".") else "")

    async def _look(self, subject: str, known: list[Found], *, whole: bool) -> Found | None:
        """The last message, or a later one than those known."""
        if not whole and known and len(known[-1].payload) > LARGE_BYTES:
            return await self._bucket.next(subject, known[-1].sequence + 1) or known[-1]
        return await self._bucket.last(subject)

    async def _proven(self, known: list[Found]) -> int:
        """Where to read on in the bucket whose last two messages were `known`; 0 in another one. Behind the last, while it is
        there. A key that is made and revoked has overwritten it: then behind the one before, as from there on only the last
        was known."""
        for back, message in enumerate(reversed(known)):
            if await self._bucket.next(message.subject, message.sequence) == message:
                newer = await self._bucket.last(known[-1].subject) if back else None
                is_same = not back or (newer is not None and newer.sequence > known[-1].sequence)
                return message.sequence + 1 if is_same else 0
        return 0

    async def _read_from(self, start: int, last: Found | None, subject: str) -> list[Found]:
        """In the order of writing. What is written meanwhile is beyond `last` and comes after all others."""
        if not subject.endswith(">"):  # of one key there is one value, and each of the readers would find it
            return [last] if last is not None else []
        end = last.sequence + 1 if last is not None else start
        step = max(READ_AHEAD_MIN, -(-(end - start) // READERS_MAX))
        parts = [self._read_between(at, min(at + step, end), subject) for at in range(start, end, step)]
        found = [one for part in await asyncio.gather(*parts) for one in part]
        return found + await self._read_between(end, None, subject)

    async def _read_between(self, start: int, end: int | None, subject: str) -> list[Found]:
        found: list[Found] = []
        while (one := await self._bucket.next(subject, start)) is not None:
            if end is not None and one.sequence >= end:
                break
            found.append(one)
            start = one.sequence + 1
        return found

    def _newest(self, found: list[Found]) -> list[StoredValue]:
        """Once for each key: one that is written while it is read is found twice."""
        return [self._value(one) for one in {one.subject: one for one in found}.values()]

    def _value(self, found: Found) -> StoredValue:
        return StoredValue(found.subject.removeprefix(self._prefix), found.payload, found.sequence)


def _last_two(found: list[Found]) -> list[Found]:
    """Of different keys."""
    newest = {one.subject: one for one in found}
    return sorted(newest.values(), key=lambda one: one.sequence)[-2:]
