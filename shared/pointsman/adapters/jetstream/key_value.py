"""Values in the key-value bucket POINTSMAN_ACCESS. Readers use one API call (MSG.GET): one request per poll while nothing
changes."""

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
    async def read(self) -> ValuesRead:
        found = await self._read_from(1, await self._bucket.last(self._prefix + ">"))
        return ValuesRead(self._newest(found), whole=True, exists=bool(found))

    @override
    async def follow(self) -> AsyncIterator[ValuesRead]:
        newest: Found | None = None
        begun = is_told = False
        read_at = self._clock.wall()
        while True:
            try:
                last = await self._bucket.last(self._prefix + ">")
                if not begun or last != newest:
                    # While `newest` is still there, the bucket is the same one and only later messages are new.
                    same = newest is not None and await self._bucket.next(newest.subject, newest.sequence) == newest
                    found = await self._read_from(newest.sequence + 1 if newest is not None and same else 1, last)
                    newest, begun = (found[-1] if found else newest if same else None), True
                    yield ValuesRead(self._newest(found), whole=not same, exists=last is not None)
                elif is_told:
                    yield ValuesRead([], whole=False, exists=last is not None)
                read_at, is_told = self._clock.wall(), False
            except StoreUnavailableError as error:
                if not is_told and self._clock.wall() - read_at >= UNREAD_WALL_SECONDS:
                    is_told = True
                    yield ValuesRead([], whole=False, unread=str(error))
            await self._clock.sleep_wall(POLL_WALL_SECONDS)

    async def _read_from(self, start: int, last: Found | None) -> list[Found]:
        """In the order of writing. What is written meanwhile is beyond `last` and comes after all others."""
        end = last.sequence + 1 if last is not None else start
        step = max(READ_AHEAD_MIN, -(-(end - start) // READERS_MAX))
        parts = [self._read_between(at, min(at + step, end)) for at in range(start, end, step)]
        found = [one for part in await asyncio.gather(*parts) for one in part]
        return found + await self._read_between(end, None)

    async def _read_between(self, start: int, end: int | None) -> list[Found]:
        found: list[Found] = []
        while (one := await self._bucket.next(self._prefix + ">", start)) is not None:
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
