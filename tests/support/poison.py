"""Messages that no honest writer writes: made from good ones, every kind that a test should know of."""

import base64
import json
from collections.abc import Iterator
from random import Random
from typing import Any

import msgspec

ABSURD_NUMBERS = ("1e300", "-1e300", "1e400", "NaN", "Infinity", "null")
ABSURD_INTEGERS = (str(2**64), str(-(2**63)), str(10**30), "-2", "1.5", "9" * 5000)


def deep(payload: bytes, depth: int = 3000) -> bytes:
    """With an unknown field of so many lists within each other."""
    return payload[:-1] + b',"x":' + b"[" * depth + b"]" * depth + b"}"


def bad_utf8(payload: bytes) -> bytes:
    """With an unknown field that is no UTF-8."""
    return payload[:-1] + b',"x":"\xff\xfe"}'


def in_full(message: Any) -> Any:
    """A message as JSON objects with every field, also those that are at their defaults."""
    match message:
        case msgspec.Struct():
            tag = type(message).__struct_config__.tag
            fields = {name: in_full(getattr(message, name)) for name in message.__struct_fields__}
            return ({"type": tag} if tag else {}) | fields
        case bytes():
            return base64.b64encode(message).decode()
        case list():
            return [in_full(part) for part in message]
        case dict():
            return {name: in_full(value) for name, value in message.items()}
        case _:
            return message


def bad_fields(message: Any) -> Iterator[tuple[str, bytes]]:
    """The message once for every field in it and every way in which that can be beyond belief: where, and the bytes."""
    whole = in_full(message)
    for path, value in _leaves(message, ()):
        for poison in _poisons(value):
            yield f"{'.'.join(map(str, path))} = {poison[:40]}", _with(whole, path, poison)


def _leaves(value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    if isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from _leaves(getattr(value, name), (*path, name))
    else:
        yield path, value
        if isinstance(value, list) and value:
            yield from _leaves(value[0], (*path, 0))
        elif isinstance(value, dict):
            for name in value:
                if not isinstance(value[name], bool):
                    yield from _leaves(value[name], (*path, name))


def _poisons(value: Any) -> Iterator[str]:
    match value:
        case bool():
            yield from ("1", '"true"')
        case int():
            yield from ABSURD_INTEGERS
        case float():
            yield from ABSURD_NUMBERS
        case str():
            yield from ("5", '"' + "x" * 100_000 + '"')
        case bytes():
            yield from (json.dumps(base64.b64encode(b"1234567").decode()), '"!"', "5")
        case list():
            part = json.dumps(in_full(value[0])) if value else '"x"'
            yield from ("{}", "[" + ",".join([part] * (7_000_000 // len(part))) + "]" if len(part) < 60 else "5")
        case dict():
            yield from ("[]", json.dumps({f"k{n}": 1.0 for n in range(300)}))
        case _:
            yield "[]"


def _with(whole: Any, path: tuple[str | int, ...], poison: str) -> bytes:
    mark = "\x00here\x00"
    copy = json.loads(json.dumps(whole))
    holder = copy
    for step in path[:-1]:
        holder = holder[step]
    holder[path[-1]] = mark
    return json.dumps(copy).replace(json.dumps(mark), poison).encode()


NUMBERS: tuple[Any, ...] = (
    0,
    -1,
    1,
    1e13,
    -1e30,
    1e30,
    1e300,
    2**31,
    2**53,
    2**63 - 1,
    2**64 - 1,
    2**64,
    0.5,
    True,
    None,
    "x",
    [],
    {},
)
STRINGS: tuple[Any, ...] = (
    "a",
    "b",
    "r1",
    "r2",
    "engine-1",
    "",
    "[/red]",
    "\x1b[2J",
    "x" * 300,
    None,
    5,
    "\x00",
    "AQAAAAAAAAA=",
    "AQID",
)


def mutated(payload: bytes, chance: Random) -> bytes:
    """A message with some bytes, or some values, replaced."""
    if chance.random() < 0.2:
        changed = bytearray(payload)
        for _ in range(chance.randint(1, 4)):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        return bytes(changed[: chance.randrange(len(changed))] if chance.random() < 0.2 else changed)
    value = json.loads(payload)
    for _ in range(chance.randint(1, 3)):
        value = _mutated_value(value, chance)
    return json.dumps(value).encode()


def _mutated_value(value: Any, chance: Random) -> Any:
    match value:
        case dict() if value:
            name = chance.choice(list(value))
            return {**value, name: _mutated_value(value[name], chance)}
        case list() if value and chance.random() < 0.7:
            place = chance.randrange(len(value))
            return [*value[:place], _mutated_value(value[place], chance), *value[place + 1 :]]
        case list():
            return value * chance.choice((0, 2, 50))
        case str():
            return chance.choice(STRINGS)
        case _:
            return chance.choice(NUMBERS)
