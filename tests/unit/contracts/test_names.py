"""Names that become tokens of subjects: a line feed at the end would end the command on the wire."""

import msgspec
import pytest

from pointsman.contracts.access import decode_key
from pointsman.contracts.subjects import valid_name


def test_no_name_ends_with_a_line_feed() -> None:
    assert valid_name("alice")
    assert not valid_name("alice\n")


def test_no_key_does() -> None:
    key = {"id": "abc", "digest": "A" * 43 + "=", "tenant": "alice", "created_at": 1.0}
    assert decode_key(msgspec.json.encode(key)).id == "abc"
    with pytest.raises(ValueError, match="id"):
        decode_key(msgspec.json.encode(key | {"id": "abc\n"}))
