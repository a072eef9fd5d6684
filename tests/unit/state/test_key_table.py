"""A table of keys against a dictionary of them, while it grows bucket by bucket; and the compiled table against it."""

import os
import pickle
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy
import pytest

from pointsman.contracts.block_keys import pack_keys
from pointsman.primitives import BlockKey
from pointsman.state import key_table
from pointsman.state.key_table import BUCKETS_MIN, COMPILED, ENTRY, FILL, GROWN, GROWN_MIN, NOWHERE, KeyTable, new_table

Made = Callable[[], Any]
CAN_COMPILE = bool(shutil.which("cc")) and Path(sysconfig.get_path("include"), "Python.h").exists()
needs_compiled = pytest.mark.skipif(not (COMPILED or CAN_COMPILE), reason="there is no C compiler")
tables = pytest.mark.parametrize("make", [KeyTable, pytest.param(new_table, marks=needs_compiled)])


def random_keys(chance: Random, count: int) -> list[BlockKey]:
    return [BlockKey(chance.getrandbits(64)) for _ in range(count)]


@tables
@pytest.mark.parametrize("run", [1, 2, 5, 32])
def test_keys_are_found_where_they_were_put_at_every_step_of_growth(run: int, make: Made) -> None:
    chance, table = Random(run), make()
    known: dict[BlockKey, int] = {}
    runs: list[tuple[list[BlockKey], int]] = []
    number = 0
    while len(known) < 12_000:
        number += 1
        keys = random_keys(chance, run)
        assert table.insert(keys, pack_keys(keys), number << 32) == run
        runs.append((keys, number << 32))
        known.update((key, number << 32 | at) for at, key in enumerate(keys))
        if len(runs) > 1 and chance.random() < 0.2:
            gone, place = runs.pop(chance.randrange(len(runs)))
            table.delete(pack_keys(gone), place)
            for key in gone:
                del known[key]
                assert table.place(key) == NOWHERE
        looked_at, place = chance.choice(runs)
        assert [table.place(key) for key in looked_at] == [place | at for at in range(run)]
        assert [list(table.places(key)) for key in looked_at] == [[place | at] for at in range(run)]

    assert len(table) == len(known)
    assert {key: table.place(key) for key in known} == known
    assert all(table.place(key) == NOWHERE for key in random_keys(chance, 1_000))


def test_no_call_makes_more_new_buckets_than_its_keys_pay_for() -> None:
    chance, table = Random(7), KeyTable()
    sizes = [len(table._buckets)]
    for number in range(1, 20_000):
        keys = random_keys(chance, 1)
        table.insert(keys, pack_keys(keys), number << 32)
        sizes.append(len(table._buckets))

    assert max(after - before for before, after in pairwise(sizes)) == GROWN_MIN + GROWN
    assert sizes[-1] * FILL > len(table)
    assert sum(map(len, table._buckets)) == ENTRY * len(table), "nothing is left in twins"


@tables
def test_a_key_at_two_places_has_both_while_the_table_grows(make: Made) -> None:
    chance, table = Random(9), make()
    twice = random_keys(chance, 1_000)
    for number, key in enumerate(twice, 1):
        table.insert([key], pack_keys([key]), number << 32)
        table.insert_again(key, number << 32 | 7)
    for number, key in enumerate(random_keys(chance, 20_000), 5_000):
        table.insert([key], pack_keys([key]), number << 32)
        known = twice[number % len(twice)]
        first = (number % len(twice) + 1) << 32
        assert list(table.places(known)) == [first, first | 7]


@tables
def test_what_was_deleted_does_not_come_back_when_the_table_has_grown(make: Made) -> None:
    chance, table = Random(11), make()
    old = random_keys(chance, 3_000)
    for number, key in enumerate(old, 1):
        table.insert([key], pack_keys([key]), number << 32)
    for number, key in enumerate(old, 1):
        table.delete(pack_keys([key]), number << 32)
        fresh = random_keys(chance, 5)
        table.insert(fresh, pack_keys(fresh), 10_000 + number << 32)

    assert all(table.place(key) == NOWHERE for key in old)
    assert len(table) == 15_000


def test_it_grows_by_keys_that_may_be_somewhere_already_too() -> None:
    chance, table = Random(3), KeyTable()
    keys = random_keys(chance, 4_000)
    for number, key in enumerate(keys):
        table.insert_again(key, number)

    assert max(map(len, table._buckets)) <= 4 * FILL * ENTRY
    assert [table.place(key) for key in keys] == list(range(len(keys)))


@tables
def test_a_table_that_is_filled_in_parts_finds_each_key_at_its_place(
    monkeypatch: pytest.MonkeyPatch, make: Made
) -> None:
    monkeypatch.setattr(key_table, "FILLED_AT_ONCE", BUCKETS_MIN)
    chance = Random(5)
    keys = [*(BlockKey(chance.getrandbits(64)) for _ in range(5000)), BlockKey(2**64 - 1)]
    table = make()
    table.fill(numpy.array(keys, "<u8"), numpy.arange(len(keys), dtype="<u8") << numpy.uint64(32))

    assert [table.place(key) for key in keys] == [number << 32 for number in range(len(keys))]
    assert len(table) == len(keys)
    assert table.place(BlockKey(1)) == NOWHERE
    table.delete(pack_keys(keys[7:8]), 7 << 32)
    assert table.place(keys[7]) == NOWHERE


@needs_compiled
def test_the_compiled_table_is_the_one_in_use() -> None:
    assert not isinstance(new_table(), KeyTable)


@needs_compiled
@pytest.mark.parametrize("seed", range(40))
def test_both_tables_answer_alike_after_any_history(seed: int) -> None:
    """Also where a key is at several places, in their order, while tables grow and shrink, and of a copy."""
    chance = Random(seed)
    ours, compiled = KeyTable(), new_table()
    keys_max, runs = chance.choice([20, 300, 5_000, 2**64 - 1]), list[tuple[list[BlockKey], int]]()
    for step in range(chance.choice([50, 1_500])):
        keys = [BlockKey(chance.randint(1, keys_max)) for _ in range(chance.choice([1, 2, 32]))]
        place = chance.getrandbits(20) << 32
        if chance.random() < 0.15:
            ours.insert_again(keys[0], place)
            compiled.insert_again(keys[0], place)
            runs.append((keys[:1], place))
        else:
            count = ours.insert(keys, pack_keys(keys), place)
            assert compiled.insert(keys, pack_keys(keys), place) == count
            runs.append((keys[:count], place))
        while runs and chance.random() < (0.6 if step % 500 > 250 else 0.2):
            gone, first = runs.pop(chance.randrange(len(runs)))
            kept = chance.randrange(len(gone) + 1)
            ours.delete(pack_keys(gone[kept:]), first + kept)
            compiled.delete(pack_keys(gone[kept:]), first + kept)
            runs.append((gone[:kept], first))
        if chance.random() < 0.02:
            compiled = pickle.loads(pickle.dumps(compiled))
        assert len(ours) == len(compiled)
        for key in keys:
            assert ours.place(key) == compiled.place(key)
            assert list(ours.places(key)) == list(compiled.places(key))


@tables
def test_a_key_that_is_not_at_this_place_is_not_deleted(make: Made) -> None:
    table, keys = make(), random_keys(Random(1), 3)
    table.insert(keys, pack_keys(keys), 1 << 32)
    for place in (2 << 32, 1 << 32 | 1):
        with pytest.raises(AssertionError):
            table.delete(pack_keys(keys[:1]), place)

    assert [table.place(key) for key in keys] == [1 << 32, 1 << 32 | 1, 1 << 32 | 2]


@pytest.mark.parametrize("source", ["VERSION = 0", "", "raise ImportError('of another Python')"])
def test_a_compiled_table_that_does_not_fit_is_left_alone(source: str, tmp_path: Path) -> None:
    package = tmp_path / "pointsman_native"
    package.mkdir()
    package.joinpath("__init__.py").touch()
    package.joinpath("key_table.py").write_text(source)
    asked = "from pointsman.state.key_table import COMPILED, new_table; print(COMPILED, type(new_table()).__module__)"

    said = subprocess.run(
        [sys.executable, "-c", asked],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
        check=True,
    )

    assert said.stdout == "False pointsman.state.key_table\n"
