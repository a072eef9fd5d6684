"""Bounds on the form of a JSON body, checked before anything is built of it: nesting, lists and objects, entries. What
stands in strings does not count."""

import codecs
from collections.abc import Iterator

from pointsman_ingress.http.errors import nested_too_deeply, too_complex

NESTING_MAX = 100
BRACKETS_MAX = 50_000
"""Opening and closing ones: half as many lists and objects. A chat of 2,000 messages with 200 tools has some 30,000."""
STRINGS_MAX = 150_000
ENTRIES_MAX = 200_000
TOKEN_IDS_MAX = 1_050_000
"""Entries where a prompt may be token ids."""
LIGHT_BYTES_MAX = 64 * 1024
LIGHT_BRACKETS_MAX = 1_000
SLICE_BYTES = 256 * 1024

_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_NOT_MARKS = bytes(set(range(256)) - set(b"[]{},"))
_OPENING = frozenset(b"[{")
_utf8_decoder = codecs.getincrementaldecoder("utf-8")


def is_light(body: bytes) -> bool:
    """Whether it is parsed within a few milliseconds. Bracket characters in strings count too."""
    return len(body) <= LIGHT_BYTES_MAX and _brackets(body) <= LIGHT_BRACKETS_MAX


def check_form(body: bytes, *, entries_max: int = ENTRIES_MAX) -> None:
    """Raises ApiError. A large body takes up to a second, a slice of it a few milliseconds: call it in a thread."""
    if len(body) <= LIGHT_BYTES_MAX and _brackets(body) <= NESTING_MAX:
        return
    depth = brackets = commas = strings = 0
    for outside, begun in _outside_strings(body):
        strings += begun
        marks = outside.translate(None, _NOT_MARKS)
        commas += marks.count(b",")
        found = marks.translate(None, b",")
        brackets += len(found)
        if brackets > BRACKETS_MAX or commas > entries_max or strings > STRINGS_MAX:
            raise too_complex()
        for mark in found:
            depth += 1 if mark in _OPENING else -1
            if depth > NESTING_MAX:
                raise nested_too_deeply()


def check_text(body: bytes) -> None:
    """Raises UnicodeDecodeError. By slices, which leave the interpreter to others in between."""
    if body.isascii():
        return
    decoder = _utf8_decoder()
    for start in range(0, len(body), SLICE_BYTES):
        decoder.decode(body[start : start + SLICE_BYTES], final=start + SLICE_BYTES >= len(body))


def _brackets(body: bytes) -> int:
    return len(body.translate(None, _NOT_BRACKETS))


def _outside_strings(body: bytes) -> Iterator[tuple[bytes, int]]:
    """What is outside, and how many strings are there, by slices. None ends within an escape."""
    start, inside = 0, False
    while start < len(body):
        part = body[start : start + SLICE_BYTES]
        if (len(part) - len(part.rstrip(b"\\"))) % 2:
            part = body[start : start + SLICE_BYTES + 1]
        parts = part.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        yield b"".join(parts[inside::2]), len(parts) // 2
        inside ^= len(parts) % 2 == 0
        start += len(part)
