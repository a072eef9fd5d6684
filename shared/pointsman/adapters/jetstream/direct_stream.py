"""Conditional writes and single reads on a stream, for leases, values, checkpoints and elections."""

import json
from dataclasses import dataclass
from typing import Any

import msgspec

from pointsman.adapters.jetstream.commands import Requests
from pointsman.adapters.jetstream.connection import STREAM_NOT_FOUND, ApiError
from pointsman.ports import CommandTimeoutError, NoResponderError, StoreUnavailableError
from pointsman.primitives import Seconds, Sequence

CALL_SECONDS_MAX: Seconds = 1.0
MESSAGE_NOT_FOUND = 10037
WRONG_LAST_SEQUENCE = 10071
REVISION_TAKEN = (WRONG_LAST_SEQUENCE, 10164)
EXPECTED_LAST = "Nats-Expected-Last-Subject-Sequence"
ROLLUP = {"Nats-Rollup": "sub"}
VALUES = "$KV."


class RevisionTakenError(Exception):
    pass


class _StoredMessage(msgspec.Struct):
    seq: Sequence
    data: bytes = b""
    subject: str = ""


class _Answer(msgspec.Struct):
    error: ApiError | None = None
    seq: Sequence = 0
    message: _StoredMessage | None = None


@dataclass(frozen=True, slots=True)
class Found:
    sequence: Sequence
    payload: bytes
    subject: str = ""


_answers = msgspec.json.Decoder(_Answer)


class DirectStream:
    def __init__(self, requests: Requests, name: str, config: dict[str, Any] | None = None) -> None:
        self._requests = requests
        self._name = name
        self._config = config

    async def write(
        self, subject: str, payload: bytes, *, after: Sequence | None = None, headers: dict[str, str] | None = None
    ) -> Sequence:
        """`after`: expected last sequence. Raises RevisionTakenError, StoreUnavailableError."""
        all_headers = dict(headers or {})
        if after is not None:
            all_headers[EXPECTED_LAST] = str(after)
        address = self._requests.subject_of_value(subject) if subject.startswith(VALUES) else subject
        try:
            answer = self._decoded(await self._requests.request(address, payload, CALL_SECONDS_MAX, all_headers))
        except (NoResponderError, CommandTimeoutError) as error:
            # Within the API of another domain there is silence where nothing stores the subject (measured).
            may_be_missing = isinstance(error, NoResponderError) or address != subject
            if self._config is None or not may_be_missing:
                raise StoreUnavailableError(str(error)) from error
            await self._make(self._config)
            answer = await self._request(address, payload, all_headers)
        if answer.error is not None and answer.error.err_code in REVISION_TAKEN:
            raise RevisionTakenError(answer.error.description)
        return self._checked(answer).seq

    async def write_once(self, subject: str, payload: bytes, *, after: Sequence) -> Sequence:
        """`write` that may be repeated: what an earlier try has stored counts. Raises as `write`."""
        try:
            return await self.write(subject, payload, after=after)
        except RevisionTakenError as error:
            newest = await self.last(subject)
            if (newest.sequence if newest is not None else 0) == after:
                raise StoreUnavailableError(f"an earlier try is still in process: {error}") from error
            if newest is None or newest.payload != payload:
                raise
            return newest.sequence

    async def last(self, subject: str) -> Found | None:
        """Raises StoreUnavailableError."""
        return await self._get({"last_by_subj": subject})

    async def next(self, subject: str, start: Sequence) -> Found | None:
        """First message on a subject from `start` on. Raises StoreUnavailableError."""
        return await self._get({"seq": start, "next_by_subj": subject})

    async def at(self, sequence: Sequence) -> Found | None:
        """Raises StoreUnavailableError."""
        return await self._get({"seq": sequence})

    async def purge(self, subject: str) -> None:
        """Raises StoreUnavailableError."""
        request = json.dumps({"filter": subject}).encode()
        self._checked(await self._request(f"{self._requests.api}STREAM.PURGE.{self._name}", request))

    async def _get(self, query: dict[str, Any]) -> Found | None:
        answer = await self._request(f"{self._requests.api}STREAM.MSG.GET.{self._name}", json.dumps(query).encode())
        if answer.error is not None and answer.error.err_code in (MESSAGE_NOT_FOUND, STREAM_NOT_FOUND):
            return None
        message = self._checked(answer).message
        return None if message is None else Found(message.seq, message.data, message.subject)

    async def _make(self, config: dict[str, Any]) -> None:
        request = json.dumps(config | {"name": self._name}).encode()
        self._checked(await self._request(f"{self._requests.api}STREAM.CREATE.{self._name}", request))

    async def _request(self, subject: str, payload: bytes, headers: dict[str, str] | None = None) -> _Answer:
        try:
            return self._decoded(await self._requests.request(subject, payload, CALL_SECONDS_MAX, headers))
        except (NoResponderError, CommandTimeoutError) as error:
            raise StoreUnavailableError(str(error)) from error

    def _decoded(self, payload: bytes) -> _Answer:
        try:
            return _answers.decode(payload)
        except msgspec.DecodeError as error:
            raise StoreUnavailableError(f"{self._name}: JetStream's answer is not understood: {error}") from error

    def _checked(self, answer: _Answer) -> _Answer:
        if answer.error is not None:
            raise StoreUnavailableError(f"{self._name}: {answer.error.description}")
        return answer
