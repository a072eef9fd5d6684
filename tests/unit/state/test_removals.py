"""`Removals` answers as a dict of the last removal by block would, which forgets the oldest first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.contracts.block_keys import KEY_BYTES, pack_keys, unpack_keys
from pointsman.primitives import BlockKey, InstanceId
from pointsman.state import reported_hits
from pointsman.state.reported_hits import FORGOTTEN_AT, REMOVALS_REMEMBERED_MAX, Contradictions, Removals

REMEMBERED = 6
INSTANCE = InstanceId("gpu-1")

keys = st.integers(1, 12).map(BlockKey)


class Expected:
    def __init__(self, known_from: int) -> None:
        self.last: dict[BlockKey, int] = {}
        self.known_from = known_from

    def removed(self, removed: list[BlockKey], sequence: int) -> None:
        for key in removed:
            self.last.pop(key, None)
            self.last[key] = sequence
        while len(self.last) > REMEMBERED:
            self.known_from = self.last.pop(next(iter(self.last)))


@given(events=st.lists(st.lists(keys, min_size=1, max_size=8), max_size=30), known_from=st.integers(0, 9))
def test_what_was_removed_and_what_is_forgotten(events: list[list[BlockKey]], known_from: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reported_hits, "REMOVALS_REMEMBERED_MAX", REMEMBERED)
        found, expected = Contradictions(), Expected(known_from)
        found.begin(INSTANCE, known_from)
        for sequence, removed in enumerate(events, 10):
            found.removed(INSTANCE, pack_keys(removed), sequence)
            expected.removed(removed, sequence)
            for as_of in range(12 + len(events)):
                forgotten = expected.known_from > as_of
                for key in map(BlockKey, range(1, 13)):
                    after = expected.last.get(key, 0) > as_of
                    assert found.explained(INSTANCE, key, as_of) == (forgotten or after)
                    assert forgotten or found.removed_after(INSTANCE, key, as_of) == after


def test_repeats_take_no_memory() -> None:
    removals = Removals()
    for sequence in range(10_000):
        removals.add(pack_keys(map(BlockKey, range(1, 33))), sequence)

    assert sum(map(len, vars(removals)["_keys"])) <= FORGOTTEN_AT * REMOVALS_REMEMBERED_MAX * KEY_BYTES
    assert removals.has(BlockKey(7), 9_998)


def test_events_behind_a_large_one_do_not_go_through_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each took a quarter of a second."""
    removals, looked_at = Removals(), 0

    def counted(packed: bytes) -> list[BlockKey]:
        nonlocal looked_at
        looked_at += len(packed) // KEY_BYTES
        return unpack_keys(packed)

    monkeypatch.setattr(reported_hits, "unpack_keys", counted)
    large = 4 * FORGOTTEN_AT * REMOVALS_REMEMBERED_MAX
    removals.add(pack_keys(range(large)), 1)
    for sequence in range(2, 102):
        removals.add(pack_keys([sequence + large]), sequence)

    assert looked_at <= large
    assert removals.has(BlockKey(0), 0)


def test_keys_across_two_others_are_not_found() -> None:
    found = Contradictions()
    first, second = BlockKey(0x0102030405060708), BlockKey(0x1112131415161718)
    across = BlockKey(int.from_bytes(pack_keys([first, second])[3:11], "little"))
    found.removed(INSTANCE, pack_keys([first, second]), 5)

    assert found.removed_after(INSTANCE, second, 4)
    assert not found.removed_after(INSTANCE, across, 4)
