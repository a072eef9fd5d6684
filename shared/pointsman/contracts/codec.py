"""Encoding: msgspec structs as JSON. The only validation of messages: what is read or written has the types and bounds
of the wire structs and is UTF-8."""

from typing import get_args

import msgspec

from pointsman.contracts.access import ApiKeyChanged
from pointsman.contracts.cache import AnyCacheEvent, CacheEvent
from pointsman.contracts.commands import CommandRefused, PoolCommand
from pointsman.contracts.decisions import PoolDecision, RequestDecision
from pointsman.contracts.envelope import Event
from pointsman.contracts.fleet import AnyFleetEvent, FleetEvent, InstanceJoined, InstanceProbed, InstanceReported
from pointsman.contracts.overlap import OverlapAnswered, OverlapRefused, OverlapRequest
from pointsman.contracts.reasons import CommandRefusal
from pointsman.contracts.requests import (
    PrefixCopyEnded,
    PrefixFetchEnded,
    RequestAttemptFailed,
    RequestFailed,
    RequestFinished,
    RequestProgress,
)
from pointsman.contracts.subjects import is_of_cache, is_small, is_subject_of
from pointsman.contracts.tenants import TenantPoliciesSet
from pointsman.contracts.wire import WIRE_VERSION

AnyRequestEvent = RequestProgress | RequestDecision
LogEvent = AnyCacheEvent | AnyFleetEvent | AnyRequestEvent | PoolDecision | TenantPoliciesSet | ApiKeyChanged
AnyCommand = PoolCommand | OverlapRequest | OverlapAnswered | OverlapRefused

PAYLOAD_BYTES_MAX = 8 * 1024 * 1024
SMALL_BYTES_MAX = 512 * 1024
"""Of events about instances, and of commands of workers, readers and operators: the leader decodes them in one step."""
CACHE_BYTES_MAX = 1024 * 1024
"""Of cache events. Workers write at most 64 KiB; older releases wrote up to 49,152 keys, which are a little more than 512 KiB."""
EVENT_PARTS_MAX = 2**18
"""Commas and opening brackets of an event, which bound the time that it takes to decode. Thousands are usual at most."""
EVENT_ROOM_BYTES = 4096
"""By which a command is smaller, so that the event that records it fits too."""
NESTING_MAX = 32
"""Nested lists and objects. Present messages have five levels."""
SHALLOW_BYTES_MAX = 512
REASON_LENGTH_MAX = 200

NEVER_DECIDED = (
    CacheEvent,
    InstanceJoined,
    InstanceReported,
    InstanceProbed,
    PrefixCopyEnded,
    PrefixFetchEnded,
    RequestAttemptFailed,
    RequestFinished,
    RequestFailed,
)
"""Written by workers and ingresses. With a stamp it would use up a number of the leader's decisions."""

_COMMAND_NAMES = frozenset(kind.__name__ for kind in get_args(AnyCommand))


class _Head(msgspec.Struct):
    """What can be read of a command of any release."""

    type: str = ""
    wire: int = 0


_heads = msgspec.json.Decoder(_Head)
_encoder = msgspec.json.Encoder()
_events: msgspec.json.Decoder[LogEvent] = msgspec.json.Decoder(LogEvent)
_commands: msgspec.json.Decoder[AnyCommand] = msgspec.json.Decoder(AnyCommand)
_neither_brackets_nor_quotes = bytes(set(range(256)) - set(b'[]{}"'))


class UndecodableError(ValueError):
    """Not a known event or command. The message has place and reason, at most REASON_LENGTH_MAX characters."""


class OversizedError(UndecodableError):
    """Not decoded: the message is larger than what belongs on its subject, or has too many parts."""


class UnwritableError(ValueError):
    """The message could not be read back: a number is not finite, or a value exceeds its bounds. Or it is larger than
    what the server takes."""


class TooLargeError(UnwritableError):
    """The event is larger than PAYLOAD_BYTES_MAX or, about an instance or its cache, SMALL_BYTES_MAX or CACHE_BYTES_MAX; or the command than the first less
    EVENT_ROOM_BYTES."""


def encode(message: Event | AnyCommand) -> bytes:
    """Raises UnwritableError for messages that the decoders would refuse."""
    unwritable = f"a {type(message).__name__} cannot be written"
    is_event = isinstance(message, Event)
    most = PAYLOAD_BYTES_MAX if is_event else PAYLOAD_BYTES_MAX - EVENT_ROOM_BYTES
    if isinstance(message, FleetEvent):
        most = SMALL_BYTES_MAX
    elif isinstance(message, CacheEvent):
        most = CACHE_BYTES_MAX
    try:
        payload = _encoder.encode(message)
        if len(payload) <= most:
            (decode_event if is_event else decode_command)(payload)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UnwritableError(f"{unwritable}: {short_reason(error)}") from error
    if len(payload) > most:
        raise TooLargeError(f"{unwritable}: {len(payload)} bytes are more than {most}")
    return payload


def decode_event(payload: bytes, subject: str | None = None) -> LogEvent:
    """One event, which must belong on `subject` if given. Raises UndecodableError."""
    _check_size(payload, subject)
    _check_parts(payload)
    _check_form(payload)
    try:
        event = _events.decode(payload)
    except (msgspec.DecodeError, ValueError) as error:
        raise UndecodableError(short_reason(error)) from error
    if event.stamp is not None and isinstance(event, NEVER_DECIDED):
        raise UndecodableError(f"no leader decides a {type(event).__name__}, so it has no stamp")
    if subject is not None and not is_subject_of(subject, event):
        raise UndecodableError(short_reason(f"a {type(event).__name__} does not belong on this subject"))
    return event


def decode_command(payload: bytes, subject: str | None = None) -> AnyCommand:
    """`subject`: where it came, if given. Raises UndecodableError, also for a command that needs a later wire version."""
    _check_size(payload, subject)
    _check_form(payload)
    try:
        command = _commands.decode(payload)
    except (msgspec.DecodeError, ValueError) as error:
        raise UndecodableError(short_reason(error)) from error
    if command.wire > WIRE_VERSION:
        raise UndecodableError(_needs_later(type(command).__name__, command.wire))
    return command


def unreadable(payload: bytes, problem: UndecodableError) -> CommandRefused:
    """The answer to a command that `decode_command` refuses."""
    try:
        head = _Head() if isinstance(problem, OversizedError) else _heads.decode(payload)
    except (msgspec.DecodeError, ValueError, RecursionError):
        head = _Head()
    if head.wire > WIRE_VERSION:
        reason, detail = CommandRefusal.NEWER_WIRE, _needs_later(head.type, head.wire)
    elif head.type and head.type not in _COMMAND_NAMES:
        reason, detail = CommandRefusal.UNKNOWN_COMMAND, f"this release knows no command {head.type}"
    else:
        reason, detail = CommandRefusal.INVALID, str(problem)
    return CommandRefused(reason=reason, detail=short_reason(detail), reads=WIRE_VERSION)


def _needs_later(name: str, wire: int) -> str:
    return short_reason(f"this {name} needs wire version {wire}, and this release has {WIRE_VERSION}")


def short_reason(error: object) -> str:
    """One printable line of at most REASON_LENGTH_MAX characters."""
    text = str(error)[: REASON_LENGTH_MAX + 1]
    if not text.isprintable():
        text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return text if len(text) <= REASON_LENGTH_MAX else text[: REASON_LENGTH_MAX - 3] + "..."


def _check_size(payload: bytes, subject: str | None) -> None:
    if len(payload) <= SMALL_BYTES_MAX:
        return
    most = PAYLOAD_BYTES_MAX
    if subject is not None and is_small(subject):
        most = SMALL_BYTES_MAX
    elif subject is not None and is_of_cache(subject):
        most = CACHE_BYTES_MAX
    if len(payload) > most:
        raise OversizedError(f"{len(payload)} bytes are more than {most}")


def _check_parts(payload: bytes) -> None:
    if len(payload) > EVENT_PARTS_MAX and sum(map(payload.count, (b",", b"[", b"{"))) > EVENT_PARTS_MAX:
        raise OversizedError(f"more than {EVENT_PARTS_MAX} lists, objects and their parts")


def _check_form(payload: bytes) -> None:
    """Checks unknown fields, which msgspec skips, and nesting. Raises UndecodableError."""
    if not payload.isascii():
        try:
            payload.decode()
        except UnicodeDecodeError as error:
            raise UndecodableError(f"byte {error.start} is not UTF-8") from None
    if len(payload) <= SHALLOW_BYTES_MAX:
        return
    if payload.count(b"[") + payload.count(b"{") > NESTING_MAX and _is_deep(payload):
        raise UndecodableError(f"more than {NESTING_MAX} lists and objects within each other")


def _is_deep(payload: bytes) -> bool:
    """Whether brackets are nested deeper than NESTING_MAX, or unbalanced."""
    if b"\\" in payload:
        payload = payload.replace(b"\\\\", b"").replace(b'\\"', b"")
    brackets = b"".join(payload.translate(None, _neither_brackets_nor_quotes).split(b'"')[::2])
    for _ in range(NESTING_MAX):
        if not brackets:
            return False
        brackets = brackets.replace(b"{}", b"").replace(b"[]", b"")
    return bool(brackets)
