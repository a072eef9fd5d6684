"""How deep a message nests, found without parsing it: whatever its strings say."""

import json
from random import Random
from typing import Any

import pytest

from pointsman.contracts.codec import NESTING_MAX, _is_deep

PIECES = ["[", "]", "{", "}", '"', "\\", '\\"', "\\\\", "a", "\N{SNOWMAN}", "\n"]


@pytest.mark.parametrize("seed", range(40))
def test_strings_of_quotes_brackets_and_backslashes_are_no_nesting(seed: int) -> None:
    chance = Random(seed)
    levels = NESTING_MAX + chance.randint(-1, 1)
    value: Any = _text(chance)
    for _ in range(levels):
        value = [_text(chance), value] if seed % 2 else {_text(chance): _text(chance), _text(chance) + "b": value}

    for form in ({"ensure_ascii": False}, {"indent": 1}):
        assert _is_deep(json.dumps(value, **form).encode()) == (levels > NESTING_MAX), value


@pytest.mark.parametrize("text", [b'{"x":"' + b"[" * 40, b'{"x":"\\' + b"\\" * 40, b'{"x":"\\"' + b"{" * 40])
def test_a_string_without_an_end_reaches_to_the_end(text: bytes) -> None:
    assert _is_deep(text)  # unbalanced
    assert not _is_deep(text[1:])


def _text(chance: Random) -> str:
    return "".join(chance.choices(PIECES, k=chance.randint(0, 6)))
