"""JetStream API calls for the pool's stream and its consumers. An existing stream gets what it lacks and loses nothing."""

import asyncio
import json
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from pointsman.adapters.jetstream.commands import Requests
from pointsman.adapters.jetstream.connection import STREAM_NOT_FOUND, ApiError
from pointsman.contracts.subjects import SUBJECT_ROOT, log_subjects, stream_name
from pointsman.ports import (
    CommandTimeoutError,
    LogEntry,
    LogExtent,
    LogMissingError,
    LogUnavailableError,
    NoResponderError,
)
from pointsman.primitives import PoolName, Seconds, Sequence

_Answer = TypeVar("_Answer")

API_SECONDS_MAX = 2.0
CONSUMER_IDLE_SECONDS_MAX = 30.0
"""The server deletes a consumer after this long without a pull."""
NANOSECONDS = 1_000_000_000
SILENCE_SECONDS_MAX = 3.0
"""Servers hear from each other each second, and elect another leader after 4 at least."""
LAG_SECONDS_MAX = 5.0
"""A server that has just become the log's leader may not have applied what its predecessor confirmed."""

NO_ROOM = frozenset({10005, 10023, 10047})
"""No server with room for another stream, or none in this one."""

DUPLICATE_SECONDS: Seconds = 120.0
"""For this long the server knows a write again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSettings:
    bytes_max: int = 4 * 1024**3
    """Before compression."""
    age_seconds_max: Seconds = 7 * 24 * 3600.0
    replicas: int = 1
    """3 survives the loss of a node, and needs three servers."""


class _StreamState(msgspec.Struct):
    first_seq: int
    last_seq: int
    bytes: int = 0


class _Peer(msgspec.Struct):
    active: int = 0
    """Nanoseconds since it was heard."""
    current: bool = True


class _Cluster(msgspec.Struct):
    leader: str = ""
    replicas: list[_Peer] = []

    @property
    def has_majority(self) -> bool:
        """False: the answer is of a leader that was cut off, and may be old; another may have been elected (seen for 10 s)."""
        heard = sum(peer.active <= SILENCE_SECONDS_MAX * NANOSECONDS for peer in self.replicas)
        return bool(self.leader) and 2 * (1 + heard) > 1 + len(self.replicas)

    @property
    def behind(self) -> int:
        return sum(not peer.current for peer in self.replicas)


class _StreamAnswer(msgspec.Struct):
    error: ApiError | None = None
    cluster: _Cluster | None = None
    created: str = ""
    config: dict[str, Any] = {}
    state: _StreamState | None = None


class _ConsumerAnswer(msgspec.Struct):
    error: ApiError | None = None
    num_pending: int = 0


_stream_answer = msgspec.json.Decoder(_StreamAnswer)
_consumer_answer = msgspec.json.Decoder(_ConsumerAnswer)


BROUGHT_UP = ("compression", "allow_direct")
"""Settings of an existing stream that whoever may create it changes."""


class Stream:
    def __init__(self, requests: Requests, pool: PoolName, settings: StreamSettings, *, creates: bool = True) -> None:
        """`creates`: a missing stream, and what an existing one lacks (`_lacking`)."""
        self._requests = requests
        self._creates = creates
        self._pool = pool
        self._settings = settings
        self._own_subjects = f"{SUBJECT_ROOT}.{pool}."
        self._created = ""
        self._newest: Sequence = 0
        self._behind_since: Seconds | None = None
        self.name = stream_name(pool)

    def saw(self, sequence: Sequence) -> None:
        """It was read or confirmed."""
        self._newest = max(self._newest, sequence)

    async def ensure(self) -> tuple[LogExtent, list[str], int]:
        """Create it unless it exists. Returns extent, differing settings, replicas. Raises LogUnavailableError."""
        answer = await self._request("STREAM.INFO")
        if answer.error is not None and answer.error.err_code == STREAM_NOT_FOUND and self._creates:
            answer = await self._request("STREAM.CREATE", json.dumps(self._wanted()).encode())
            if answer.error is not None:  # another process was faster, with other settings
                answer = await self._request("STREAM.INFO", refusal=answer.error)
        if answer.error is not None:
            raise LogUnavailableError(self._refusal(answer.error))
        self._check_ours(answer.config)
        changes = self._lacking(answer.config) if self._creates else {}
        refused: list[str] = []
        if changes:
            answer, refused = await self._updated(answer, changes)
        differences = [*self._differences(answer.config), *refused]
        return _extent(answer), differences, int(answer.config.get("num_replicas", 1))

    def _refusal(self, error: ApiError) -> str:
        """A store of which everything is reserved may be empty: the words of the server send people to its disk."""
        if error.err_code not in NO_ROOM:
            return error.description
        reserved = self._settings.bytes_max / 1024**3
        return (
            f"{error.description}: a new log reserves {reserved:g} GiB (--log-bytes-max) of the server's max_file_store"
        )

    def _check_ours(self, found: dict[str, Any]) -> None:
        """Raises LogUnavailableError: what others keep under our name is neither read nor changed."""
        subjects = found.get("subjects", [])
        if subjects and not any(subject.startswith((f"{SUBJECT_ROOT}.", "*", ">")) for subject in subjects):
            kept = ", ".join(map(str, subjects[:3]))
            raise LogUnavailableError(
                f"the stream {self.name} is another's, with {kept}: remove it, or choose another pool or nats-server"
            )

    def _lacking(self, found: dict[str, Any]) -> dict[str, Any]:
        """What takes nothing away: subjects of new events, compression, direct reads, and a larger size or age that was
        asked for. Smaller ones and replicas are the operator's."""
        subjects, ours = found.get("subjects", []), self._wanted()
        missing = [subject for subject in log_subjects(self._pool) if subject not in subjects]
        changes: dict[str, Any] = {"subjects": [*subjects, *missing]} if missing else {}
        changes |= {key: ours[key] for key in BROUGHT_UP if found.get(key) != ours[key]}
        defaults = StreamSettings()
        asked_for = {
            "max_bytes": self._settings.bytes_max != defaults.bytes_max,
            "max_age": self._settings.age_seconds_max != defaults.age_seconds_max,
        }
        grown = {key: ours[key] for key, asked in asked_for.items() if asked and 0 < found.get(key, 0) < ours[key]}
        return changes | grown

    async def _updated(self, found: _StreamAnswer, changes: dict[str, Any]) -> tuple[_StreamAnswer, list[str]]:
        """Returns the stream as it is then, and what the server refused. One change at a time, so that a server without
        room for a larger log still stores new events."""
        refused: list[str] = []
        for key, value in changes.items():
            wanted = json.dumps(found.config | {key: value}).encode()
            try:
                answer = await self._request("STREAM.UPDATE", wanted)
            except LogUnavailableError as error:
                refused.append(f"{key} was not changed: {error}")
                continue
            if answer.error is None:
                found = answer
            else:
                refused.append(f"{key} was not changed: {answer.error.description}")
        return found, refused

    async def extent(self) -> LogExtent:
        """Raises LogUnavailableError, LogMissingError if there is none."""
        known = self._newest
        answer = await self._request("STREAM.INFO")
        if answer.error is None:
            self._check_ours(answer.config)
            return self._caught_up(answer, known)
        if answer.error.err_code == STREAM_NOT_FOUND:
            raise LogMissingError(f"there is no stream {self.name}")
        raise LogUnavailableError(answer.error.description)

    def _caught_up(self, answer: _StreamAnswer, known: Sequence) -> LogExtent:
        """Raises LogUnavailableError while the server that answers lacks known entries. What is missing later is lost."""
        extent, now = _extent(answer), asyncio.get_running_loop().time()
        replicated = answer.cluster is not None and answer.cluster.replicas
        lacks_entries = extent.identity == self._created and extent.last < known
        if replicated and lacks_entries:
            self._behind_since = now if self._behind_since is None else self._behind_since
            if now - self._behind_since < LAG_SECONDS_MAX:
                raise LogUnavailableError(
                    f"the nats-server that answers has {extent.last} entries of the log, {known} were seen"
                )
        lost = lacks_entries or extent.identity != self._created
        self._newest = extent.last if lost else max(self._newest, extent.last)
        self._created, self._behind_since = extent.identity, None
        return extent

    async def create_consumer(self, name: str, start: Sequence, kinds: tuple[str, ...]) -> int:
        """Returns the number of pending messages. Raises LogUnavailableError."""
        config: dict[str, Any] = {
            "name": name,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": start,
            "ack_policy": "none",
            "replay_policy": "instant",
            "mem_storage": True,
            "num_replicas": 1,
            "inactive_threshold": int(CONSUMER_IDLE_SECONDS_MAX * NANOSECONDS),
        }
        if kinds:
            config["filter_subjects"] = [subject for kind in kinds for subject in self._subjects_of(kind)]
        request = json.dumps({"stream_name": self.name, "config": config, "action": "create"}).encode()
        answer = await self._call(f"CONSUMER.CREATE.{self.name}.{name}", request, _consumer_answer)
        if answer.error is not None:
            raise LogUnavailableError(answer.error.description)
        return answer.num_pending

    def next_subject(self, consumer: str) -> str:
        return f"{self._requests.api}CONSUMER.MSG.NEXT.{self.name}.{consumer}"

    @property
    def direct_subject(self) -> str:
        return f"{self._requests.api}DIRECT.GET.{self.name}"

    def entry(self, sequence: Sequence, subject: str, payload: bytes) -> LogEntry:
        """A reader may have the server deliver entries of another pool into this log; they keep their subject."""
        if subject.startswith(self._own_subjects):
            return LogEntry.read(sequence, subject, payload)
        return LogEntry.foreign(sequence, subject)

    def new_inbox(self) -> str:
        return self._requests.new_inbox()

    def _subjects_of(self, kind: str) -> list[str]:
        whole = f"{SUBJECT_ROOT}.{self._pool}.{kind}"
        return [whole + ".*"] if whole + ".*" in log_subjects(self._pool) else [whole]

    def _wanted(self) -> dict[str, Any]:
        settings = self._settings
        return {
            "name": self.name,
            "subjects": log_subjects(self._pool),
            "retention": "limits",
            "discard": "old",
            "storage": "file",
            "compression": "s2",
            "max_bytes": settings.bytes_max,
            "max_age": int(settings.age_seconds_max * NANOSECONDS),
            "num_replicas": settings.replicas,
            "duplicate_window": int(DUPLICATE_SECONDS * NANOSECONDS),
            "deny_delete": True,
            "deny_purge": True,
            "allow_direct": True,
        }

    def _differences(self, found: dict[str, Any]) -> list[str]:
        return [
            f"{key} is {found.get(key)!r}, not {value!r}"
            for key, value in self._wanted().items()
            if found.get(key) != value
        ]

    async def _request(self, call: str, request: bytes = b"", *, refusal: ApiError | None = None) -> _StreamAnswer:
        answer = await self._call(f"{call}.{self.name}", request, _stream_answer)
        if answer.cluster is not None and answer.cluster.replicas and not answer.cluster.has_majority:
            raise LogUnavailableError("the nats-server that answers for the log hears no majority of its servers")
        if answer.error is not None and refusal is not None:
            return _StreamAnswer(error=refusal)
        return answer

    async def _call(self, call: str, request: bytes, answers: msgspec.json.Decoder[_Answer]) -> _Answer:
        try:
            return answers.decode(await self._requests.request(f"{self._requests.api}{call}", request, API_SECONDS_MAX))
        except NoResponderError as error:
            raise LogUnavailableError(f"JetStream does not answer: {error}") from error
        except CommandTimeoutError as error:
            raise LogUnavailableError(str(error)) from error
        except msgspec.DecodeError as error:
            raise LogUnavailableError(f"JetStream's answer is not understood: {error}") from error


def _extent(answer: _StreamAnswer) -> LogExtent:
    state = answer.state or _StreamState(0, 0)
    limit = answer.config.get("max_bytes", 0)
    return LogExtent(
        identity=answer.created,
        first=max(1, state.first_seq),
        last=state.last_seq,
        bytes=state.bytes,
        bytes_max=limit if isinstance(limit, int) and limit > 0 else 0,
        copies_behind=answer.cluster.behind if answer.cluster is not None else 0,
    )
