"""Token ids in JSON, read and written by slices: a decoder holds the interpreter, and so the event loop, until it
returns. In: a JSON list that was checked for its form. Out: ids packed as 32 bits."""

from array import array
from collections.abc import Sequence
from itertools import pairwise

import msgspec

SLICE_BYTES = 64 * 1024
SLICE_TOKENS = 16 * 1024

_BETWEEN_LISTS = b", \t\r\n"
_decode = msgspec.json.Decoder(list[int]).decode


def token_ids(listed: bytes) -> "array[int]":
    """Raises ValueError unless it is a list of ids from 0 to 4294967295."""
    if listed[:1] != b"[":
        raise _not_ids()
    ids, start, last = array("I"), 1, len(listed) - 1
    while start < last:
        end = listed.find(b",", start + SLICE_BYTES, last)
        end = last if end < 0 else end
        try:
            ids.extend(array("I", _decode(b"[%b]" % listed[start:end])))
        except (msgspec.DecodeError, OverflowError, RecursionError) as error:
            raise _not_ids() from error
        start = end + 1
    return ids


def token_lists(listed: bytes) -> "list[array[int]]":
    """Of a list of ids, or of a list of such lists. Raises ValueError."""
    if listed.find(b"[", 1) < 0:
        return [token_ids(listed)]
    found, start = [], 1
    while (begin := listed.find(b"[", start)) >= 0:
        end = listed.find(b"]", begin) + 1
        if listed[start:begin].strip(_BETWEEN_LISTS):
            raise _not_ids()
        found.append(token_ids(listed[begin:end]))
        start = end
    if listed[start:-1].strip(_BETWEEN_LISTS):
        raise _not_ids()
    return found


def json_list(tokens: Sequence[int]) -> bytes:
    starts = range(0, len(tokens), SLICE_TOKENS)
    slices = (list(tokens[start:end]) for start, end in pairwise((*starts, len(tokens))))
    return b"[%b]" % b",".join(msgspec.json.encode(part)[1:-1] for part in slices)


def _not_ids() -> ValueError:
    return ValueError("token ids are a list of integers from 0 to 4294967295")
