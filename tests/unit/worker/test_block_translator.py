"""The block translator against a slow reference model, and its rules one by one."""

import sys
from array import array
from collections import Counter
from collections.abc import Iterable
from functools import reduce
from operator import xor
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.adapters.kv_events.codec import decode_batch
from pointsman.adapters.kv_events.events import EngineBlockRemoved, EngineBlockStored, EngineCacheCleared
from pointsman.contracts.block_keys import KeyChain, unpack_keys
from pointsman.contracts.cache import Run
from pointsman.primitives import BlockKey
from pointsman_worker.engine_blocks import Block
from pointsman_worker.held_keys import PENDING_KEYS_MAX, Changes, HeldKeys
from pointsman_worker.orphans import PARKED_BLOCKS_MAX
from pointsman_worker.translator import BlockTranslator, HeldBlocks
from tests.support.examples import examples

WIDTH = 2
"""Tokens in an engine block."""

Prefix = tuple[int, ...]


def chain_of(span: int) -> KeyChain:
    return KeyChain(secret=b"secret", model="m", block_tokens=span * WIDTH)


def engine_hash(prefix: Prefix) -> int:
    """An engine's hash of a block, here simply a name for all tokens up to its end."""
    return hash(prefix) & (1 << 64) - 1


def stored(prefix: Prefix, first: int = 0, **fields: Any) -> EngineBlockStored:
    """The blocks of `prefix` from block `first` on."""
    ends = range((first + 1) * WIDTH, len(prefix) + 1, WIDTH)
    event = EngineBlockStored(
        block_hashes=[engine_hash(prefix[:end]) for end in ends],
        parent_block_hash=engine_hash(prefix[: first * WIDTH]) if first else None,
        token_ids=list(prefix[first * WIDTH :]),
        block_size=WIDTH,
        medium="GPU",
    )
    for name, value in fields.items():
        setattr(event, name, value)
    return event


def extra(*entries: Any) -> list[msgspec.Raw]:
    """Extra keys, one entry for each block."""
    return [msgspec.Raw(msgspec.msgpack.encode(entry)) for entry in entries]


def removed(*prefixes: Prefix, **fields: Any) -> EngineBlockRemoved:
    return EngineBlockRemoved(block_hashes=[engine_hash(prefix) for prefix in prefixes], **fields)


def prompt(blocks: int, *, start: int = 1) -> Prefix:
    return tuple(range(start, start + blocks * WIDTH))


class ReferenceModel:
    """The same rules over prefixes instead of hashes, recomputed each time."""

    def __init__(self, span: int) -> None:
        self.span = span
        self.chain = chain_of(span)
        self.copies: Counter[Prefix] = Counter()
        self.known: set[Prefix] = set()
        self.parked: list[tuple[list[Prefix], set[Prefix]]] = []

    def apply_stored(self, prefix: Prefix, first: int) -> None:
        self._store_or_park([prefix[:end] for end in range((first + 1) * WIDTH, len(prefix) + 1, WIDTH)])
        late: list[Prefix] = []
        while ready := [entry for entry in self.parked if self._parent(entry[0][0]) in self.known]:
            self.parked.remove(ready[0])
            self._store_or_park(ready[0][0])
            late.extend(ready[0][1])
        for gone in late:
            self.copies[gone] -= 1
        self._forget()

    def apply_removed(self, prefix: Prefix) -> None:
        if self.copies[prefix] > 0:
            self.copies[prefix] -= 1
            self._forget()
            return
        for entry in self.parked:
            blocks, gone = entry
            if prefix in blocks and prefix not in gone:
                gone.add(prefix)
                if len(gone) == len(blocks) and not any(self._parent(other[0]) in blocks for other, _ in self.parked):
                    self.parked = [other for other in self.parked if other is not entry]
                return

    def apply_cleared(self) -> None:
        self.copies.clear()
        self.known.clear()
        self.parked.clear()

    def keys(self) -> set[BlockKey]:
        return {
            self.chain.extend(self.chain.root(), prefix)[-1]
            for prefix in self.known
            if len(prefix) % (self.span * WIDTH) == 0 and all(self.copies[part] > 0 for part in self._span_of(prefix))
        }

    def _store_or_park(self, blocks: list[Prefix]) -> None:
        parent = self._parent(blocks[0])
        if parent and parent not in self.known:
            self.parked.append((blocks, set()))
            return
        self.known.update(blocks)
        self.copies.update(blocks)

    def _parent(self, prefix: Prefix) -> Prefix:
        return prefix[:-WIDTH]

    def _span_of(self, prefix: Prefix) -> list[Prefix]:
        """The blocks of the same span up to this one."""
        start = (len(prefix) - 1) // (self.span * WIDTH) * self.span * WIDTH
        return [prefix[:end] for end in range(start + WIDTH, len(prefix) + 1, WIDTH)]

    def _forget(self) -> None:
        """Keep only blocks that are held, or that a kept one of the same span depends on."""
        self.known = {part for held in self.known if self.copies[held] > 0 for part in self._span_of(held)}


def handed_over(translator: BlockTranslator, span: int) -> BlockTranslator:
    """A successor restored from a dump, or the same translator if there is none."""
    kept = translator.dump()
    if kept is None:
        return translator
    successor = BlockTranslator(chain_of(span), WIDTH)
    successor.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(kept), type=HeldBlocks))
    assert (successor.keys.count, successor.keys.digest) == (translator.keys.count, translator.keys.digest)
    return successor


def folded(keys: set[BlockKey], changes: Changes) -> set[BlockKey]:
    """A plain set after these changes; every expired key was there, every stored one was not."""
    keys = set() if changes.cleared else set(keys)
    keys.difference_update(changes.removed)
    for key in keys_in(changes.stored):
        assert key not in keys
        keys.add(key)
    return keys


def keys_in(runs: Iterable[Run]) -> list[BlockKey]:
    return [key for run in runs for key in unpack_keys(run.keys)]


def assert_parents_first(runs: list[Run]) -> None:
    members = set(keys_in(runs))
    seen: set[int] = set()
    for run in runs:
        assert run.parent not in members or run.parent in seen
        seen.update(unpack_keys(run.keys))


# A small world of prompts that branch early and late, so that blocks meet, spans are shared and parents go missing.
trunks = ((1, 1, 1, 1, 1, 1, 1, 1, 1), (1, 1, 2, 1, 1, 1), (1, 2, 2, 2, 2, 3), (3, 1, 1))
prompts = st.builds(
    lambda trunk, blocks: tuple(token for bit in trunk[:blocks] for token in (bit, 7)),
    st.sampled_from(trunks),
    st.integers(1, 9),
)
steps = st.one_of(
    st.tuples(st.just("store"), prompts, st.integers(0, 4)),
    st.tuples(st.just("store"), prompts, st.just(0)),
    st.tuples(st.just("remove"), prompts, st.just(0)),
    st.tuples(st.just("take"), st.just(()), st.just(0)),
    st.tuples(st.sampled_from(["clear"] + ["snapshot"] * 2 + ["hand over"] * 2), st.just(()), st.just(0)),
)


@examples(300)
@given(span=st.sampled_from([1, 2, 4]), history=st.lists(steps, max_size=60))
def test_held_keys_match_the_reference_model_and_every_change_is_reported_once(span: int, history: list[Any]) -> None:
    translator, reference = BlockTranslator(chain_of(span), WIDTH), ReferenceModel(span)
    reported: set[BlockKey] = set()
    for step, prefix, first in [*history, ("take", (), 0)]:
        if step == "store":
            first = min(first, len(prefix) // WIDTH - 1)
            translator.apply(stored(prefix, first))
            reference.apply_stored(prefix, first)
        elif step == "remove":
            translator.apply(removed(prefix))
            reference.apply_removed(prefix)
        elif step == "clear":
            translator.apply(EngineCacheCleared())
            reference.apply_cleared()
        elif step == "snapshot":
            runs = translator.keys.take_snapshot()
            reported = set(keys_in(runs))
            assert_parents_first(runs)
        elif step == "hand over":
            translator = handed_over(translator, span)
        else:
            changes = translator.keys.take_changes()
            reported = folded(reported, changes)
            assert_parents_first(changes.stored)

        assert set(translator.keys.parents) == reference.keys()
        if step in ("take", "snapshot"):
            assert reported == reference.keys()
            assert (translator.keys.count, translator.keys.digest) == (len(reported), reduce(xor, reported, 0))
            assert not translator.keys.changed


def test_keys_are_those_the_ingress_chains() -> None:
    chain = chain_of(2)
    translator = BlockTranslator(chain, WIDTH)
    tokens = prompt(7)
    translator.apply(stored(tokens[: 3 * WIDTH]))
    translator.apply(stored(tokens, 3))

    (run,) = translator.keys.take_changes().stored

    assert unpack_keys(run.keys) == chain.extend(chain.root(), tokens)
    assert run.parent == 0


def test_salt_and_adapter_enter_the_root() -> None:
    chain = chain_of(1)
    translator = BlockTranslator(chain, WIDTH)
    tokens = prompt(2)
    translator.apply(stored(tokens, extra_keys=extra(["poet", "salt"], ["poet"]), lora_name="poet", lora_id=1))

    root = chain.root(lora="poet", cache_salt="salt")

    assert set(translator.keys.parents) == set(chain.extend(root, tokens))


def test_blocks_keyed_by_more_than_tokens_and_their_successors_get_no_key() -> None:
    chain = chain_of(1)
    translator = BlockTranslator(chain, WIDTH)
    tokens = prompt(4)
    translator.apply(stored(tokens[: 3 * WIDTH], extra_keys=extra(None, [["image", 3]], None)))
    translator.apply(stored(tokens, 3))
    assert set(translator.keys.parents) == set(chain.extend(chain.root(), tokens[:WIDTH]))

    translator.apply(removed(tokens, tokens[: 3 * WIDTH], tokens[: 2 * WIDTH], tokens[:WIDTH]))

    assert set(translator.keys.parents) == set()
    assert translator.counters.keyless == 3


@pytest.mark.parametrize(
    ("entry", "salt"),
    [
        (None, ""),
        ([], ""),
        (["poet"], ""),
        (["poet", "salt"], "salt"),
        (["salt"], "salt"),
        (["poet", "salt", "image"], None),
        (["salt", ["image", 3]], None),
        ([["image", 3]], None),
        ([b"embeddings"], None),
        ([None], None),
        ("poet", None),
        ({"poet": 1}, None),
        ([[]] * 10_000, None),
    ],
)
def test_a_prompts_first_block_has_a_key_only_if_nothing_but_adapter_and_salt_is_beside_its_tokens(
    entry: Any, salt: str | None
) -> None:
    chain = chain_of(1)
    translator = BlockTranslator(chain, WIDTH)
    tokens = prompt(1)
    translator.apply(stored(tokens, extra_keys=extra(entry), lora_name="poet"))

    expected = set() if salt is None else set(chain.extend(chain.root(lora="poet", cache_salt=salt), tokens))
    assert set(translator.keys.parents) == expected
    assert translator.counters.mismatches == 0


@pytest.mark.parametrize("entries", [1, 3])
def test_extra_keys_that_are_not_as_many_as_the_blocks_make_a_store_unusable(entries: int) -> None:
    translator = BlockTranslator(chain_of(1), WIDTH)
    translator.apply(stored(prompt(2), extra_keys=extra(*[None] * entries)))

    assert not translator.keys.parents
    assert translator.counters.mismatches == 1


def test_a_parked_store_keeps_what_its_extra_keys_said_and_not_the_payload_that_they_came_in() -> None:
    chain = chain_of(1)
    translator = BlockTranslator(chain, WIDTH)
    tokens = prompt(3)
    translator.apply(stored(tokens, 1, extra_keys=extra(None, [["image", 3]])))
    assert [orphan.event.extra_keys for orphan in translator.orphans.take_children(engine_hash(tokens[:WIDTH]))] == [
        None
    ]

    translator.apply(stored(tokens, 1, extra_keys=extra(None, [["image", 3]])))
    translator.apply(stored(tokens[:WIDTH]))

    assert set(translator.keys.parents) == set(chain.extend(chain.root(), tokens[: 2 * WIDTH]))
    assert translator.counters.keyless == 1


def test_stores_of_no_block_are_not_parked_since_the_bound_counts_blocks() -> None:
    translator = BlockTranslator(chain_of(1), WIDTH, parked_blocks_max=4)
    for number in range(100):
        translator.apply(EngineBlockStored(block_hashes=[], parent_block_hash=number, token_ids=[], block_size=WIDTH))

    assert not translator.orphans


def test_a_copy_keeps_a_block_until_the_last_one_goes() -> None:
    translator = BlockTranslator(chain_of(1), WIDTH)
    tokens = prompt(1)
    translator.apply(stored(tokens))
    translator.apply(stored(tokens))
    translator.apply(removed(tokens))
    assert len(translator.keys.parents) == 1

    translator.apply(removed(tokens))
    translator.apply(removed(tokens))

    assert set(translator.keys.parents) == set()


def test_one_remove_drops_a_block_with_an_unverified_number_of_copies() -> None:
    translator = BlockTranslator(chain_of(1), WIDTH)
    tokens = prompt(1)
    translator.apply(stored(tokens))
    translator.apply(stored(tokens))
    translator.verification.mark_counts_unverified()
    assert len(translator.keys.parents) == 1

    translator.apply(removed(tokens))

    assert set(translator.keys.parents) == set()


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_cache_spec_kind": "sliding_window", "group_idx": 1},
        {"kv_cache_spec_kind": "mamba"},
    ],
)
def test_other_groups_change_nothing(fields: dict[str, Any]) -> None:
    translator = BlockTranslator(chain_of(1), WIDTH)
    translator.apply(stored(prompt(2), group_idx=0, kv_cache_spec_kind="full_attention", medium="gpu"))
    before = set(translator.keys.parents)

    translator.apply(stored(prompt(4), **fields))
    gone = removed(prompt(1), prompt(2), medium=fields.get("medium"), group_idx=fields.get("group_idx", 2))
    translator.apply(gone)

    assert set(translator.keys.parents) == before


@pytest.mark.parametrize(
    "fields",
    [
        {"block_size": 3},
        {"token_ids": []},
        {"token_ids": [1, 2, 3]},
        {"token_ids": [1, -2]},
        {"token_ids": [1, 1 << 40]},
    ],
)
def test_a_store_that_contradicts_itself_is_counted_and_changes_nothing(fields: dict[str, Any]) -> None:
    translator = BlockTranslator(chain_of(1), WIDTH)

    translator.apply(stored(prompt(1), **fields))

    assert set(translator.keys.parents) == set()
    assert translator.counters.mismatches == 1


def test_parked_stores_are_bounded_and_the_oldest_is_dropped() -> None:
    translator = BlockTranslator(chain_of(1), WIDTH, parked_blocks_max=4)
    for start in (100, 200, 300):
        translator.apply(stored(prompt(3, start=start), 1))
    assert (translator.orphans.blocks, translator.counters.parked_dropped) == (4, 2)

    for start in (100, 200, 300):
        translator.apply(stored(prompt(1, start=start)))

    assert translator.orphans.blocks == 0
    assert len(translator.keys.parents) == 1 + 3 + 3


def test_a_parked_store_of_which_nothing_is_left_takes_no_room() -> None:
    """An engine that we came to late evicts what it had, the ends of prompts first."""
    translator, whole = BlockTranslator(chain_of(1), WIDTH, parked_blocks_max=4), prompt(5)
    translator.apply(stored(whole[: 3 * WIDTH], first=1))
    translator.apply(stored(whole, first=3))
    parked = []
    for end in range(5, 1, -1):
        translator.apply(removed(whole[: end * WIDTH]))
        parked.append(translator.orphans.blocks)
    translator.apply(stored(prompt(5, start=100), first=1))

    assert parked == [4, 2, 2, 0]
    assert translator.counters.parked_dropped == 0


def test_a_pool_block_must_be_whole_engine_blocks() -> None:
    with pytest.raises(ValueError, match="no multiple"):
        BlockTranslator(KeyChain(secret=b"", model="m", block_tokens=5), 2)


def test_before_the_first_write_only_what_is_held_counts() -> None:
    translator = BlockTranslator(chain_of(1), WIDTH)
    kept, passing = prompt(1), prompt(1, start=50)
    for event in (stored(kept), stored(passing), removed(passing)):
        translator.apply(event)
    changes = translator.keys.take_changes()

    assert set(keys_in(changes.stored)) == keys_of(kept)
    assert not changes.removed


def test_a_removal_is_told_although_the_block_came_back_or_was_never_told() -> None:
    translator = BlockTranslator(chain_of(1), WIDTH)
    kept, passing = prompt(1), prompt(1, start=50)
    translator.apply(stored(kept))
    translator.keys.take_changes()
    for event in (removed(kept), stored(kept), stored(passing), removed(passing)):
        translator.apply(event)
    digest = translator.keys.digest
    changes = translator.keys.take_changes()

    assert set(changes.removed) == keys_of(kept) | keys_of(passing)
    assert set(keys_in(changes.stored)) == keys_of(kept)
    assert (translator.keys.count, translator.keys.digest) == (1, digest)
    assert not translator.keys.take_changes()


def test_removals_gathered_while_nothing_can_be_written_are_bounded() -> None:
    keys = HeldKeys(0)
    keys.take_changes()
    for key in range(1, PENDING_KEYS_MAX + 10):
        keys.gain(BlockKey(key), BlockKey(0))
        keys.lose(BlockKey(key), expired=False)
    smaller = keys.snapshot_is_smaller
    keys.take_snapshot()

    assert smaller
    assert not keys.changed


@given(
    histories=st.lists(st.tuples(st.sampled_from(range(4)), st.integers(1, 40)), min_size=1, max_size=8),
    widths=st.sampled_from([(1, 2), (2, 4), (1, 8), (4, 8)]),
)
def test_engines_with_blocks_of_any_size_hold_the_same_keys_for_the_same_prompts(
    histories: list[tuple[int, int]], widths: tuple[int, int]
) -> None:
    chain = KeyChain(secret=b"secret", model="m", block_tokens=8)
    prompts = [[7, stem, *range(length)] for stem, length in histories]
    expected = {key for tokens in prompts for key in chain.extend(chain.root(), tokens)}

    for width in widths:
        translator = BlockTranslator(chain, width)
        for tokens in prompts:
            ends = range(width, len(tokens) + 1, width)
            hashes: list[Any] = [engine_hash(tuple(tokens[:end])) for end in ends]
            for first, last in ((0, len(hashes) // 2), (len(hashes) // 2, len(hashes))):  # as prefills come in chunks
                if first < last:
                    translator.apply(
                        EngineBlockStored(
                            block_hashes=hashes[first:last],
                            parent_block_hash=hashes[first - 1] if first else None,
                            token_ids=tokens[first * width : last * width],
                            block_size=width,
                        )
                    )
        assert set(translator.keys.parents) == expected


# What may have been removed unseen


def test_unconfirmed_blocks_expire_separately_from_removed_ones() -> None:
    translator = BlockTranslator(chain_of(1), WIDTH)
    for start in (1, 50, 90):
        translator.apply(stored(prompt(2, start=start)), now=0.0)
    translator.keys.take_changes()
    translator.verification.mark_counts_unverified(10.0)
    translator.apply(stored(prompt(2, start=50)), now=20.0)
    translator.apply(removed(prompt(2, start=90)), now=20.0)
    kept_until_then = translator.expire(9.9)
    given_up = translator.expire(10.0)
    changes = translator.keys.take_changes()

    assert (kept_until_then, given_up) == (0, 3)
    assert set(changes.removed) == keys_of(prompt(2, start=90)) - keys_of(prompt(1, start=90))
    assert set(changes.expired) == keys_of(prompt(2)) | keys_of(prompt(1, start=90))
    assert set(translator.keys.parents) == keys_of(prompt(2, start=50))
    assert (translator.expire(1000.0), set(translator.keys.parents)) == (0, keys_of(prompt(2, start=50)))


def test_more_blocks_than_may_expire_at_once_expire_one_portion_after_the_other() -> None:
    translator = BlockTranslator(chain_of(1), WIDTH)
    for start in (1, 50, 90):
        translator.apply(stored(prompt(8, start=start)), now=0.0)
    translator.keys.take_changes()
    translator.verification.mark_counts_unverified(10.0)
    portions = list[int]()
    while not portions or portions[-1]:
        translator.keys.work.most = translator.keys.work.done + 20
        portions.append(translator.expire(10.0))
        translator.keys.work.most = sys.maxsize
        translator.keys.finish()

    assert max(portions) < 8
    assert sum(portions) == 24
    assert not translator.keys.parents
    assert len(translator.keys.take_changes().expired) == 24


@pytest.mark.parametrize("marked_at", [1.0, 10.0])
@pytest.mark.parametrize("span", [1, 2])
def test_a_store_confirms_every_block_that_it_builds_on(span: int, marked_at: float) -> None:
    translator = BlockTranslator(chain_of(span), WIDTH)
    long = prompt(8)
    translator.apply(stored(long[: 4 * WIDTH]), now=0.0)
    translator.apply(stored(long[: 6 * WIDTH], first=4), now=0.0)
    translator.apply(stored(prompt(4, start=100)), now=0.0)
    translator.verification.mark_counts_unverified(marked_at)
    translator.apply(stored(long, first=6), now=marked_at + 1.0)
    translator.expire(marked_at)

    assert set(translator.keys.parents) == keys_of(long, span)


@pytest.mark.parametrize("fading", [False, True])
def test_a_cycle_of_parents_ends_the_walk(fading: bool) -> None:
    def lie(engine_hash: int, parent: int | None) -> EngineBlockStored:
        return EngineBlockStored(
            block_hashes=[engine_hash], parent_block_hash=parent, token_ids=[1, 2], block_size=WIDTH
        )

    translator = BlockTranslator(chain_of(1), WIDTH)
    translator.verification.set_unverifiable(0.0, on=fading)
    translator.apply(lie(1, None), now=0.0)
    translator.apply(lie(2, 1), now=0.0)
    translator.apply(EngineBlockRemoved(block_hashes=[1]), now=0.0)
    translator.apply(lie(1, 2), now=0.0)
    translator.apply(lie(3, 1), now=20.0)

    assert len(translator.keys.parents) == 3


def test_unverifiable_blocks_need_repeated_confirmation() -> None:
    translator = BlockTranslator(chain_of(1), WIDTH)
    translator.apply(stored(prompt(2)), now=0.0)
    translator.verification.set_unverifiable(5.0, on=True)
    translator.apply(stored(prompt(2, start=50)), now=6.0)
    translator.apply(stored(prompt(2)), now=7.0)
    held = []
    for until in (5.0, 6.0, 7.0):
        translator.expire(until)
        held.append(set(translator.keys.parents))

    assert held == [keys_of(prompt(2)) | keys_of(prompt(2, start=50)), keys_of(prompt(2)), set()]


def test_blocks_stay_once_removals_are_verifiable_again() -> None:
    translator = BlockTranslator(chain_of(1), WIDTH)
    translator.apply(stored(prompt(2)), now=0.0)
    translator.verification.set_unverifiable(5.0, on=True)
    translator.apply(stored(prompt(2, start=50)), now=6.0)
    translator.verification.set_unverifiable(7.0, on=False)
    translator.expire(100.0)

    assert set(translator.keys.parents) == keys_of(prompt(2)) | keys_of(prompt(2, start=50))


@pytest.mark.parametrize("span", [1, 2])
def test_a_store_restores_given_up_parents_unless_they_were_removed(span: int) -> None:
    translator = BlockTranslator(chain_of(span), WIDTH)
    long, other = prompt(6), prompt(6, start=50)
    for tokens in (long, other):
        translator.apply(stored(tokens[: 4 * WIDTH]), now=0.0)
    translator.verification.mark_counts_unverified(1.0)
    translator.expire(1.0)
    given_up = set(translator.keys.parents)
    translator.apply(removed(other[: 4 * WIDTH]), now=2.0)
    translator.apply(stored(long, first=4), now=3.0)
    translator.apply(stored(other, first=4), now=3.0)

    assert given_up == set()
    assert set(translator.keys.parents) == keys_of(long, span)
    assert translator.orphans.blocks == 2
    translator.apply(removed(*(long[:end] for end in range(WIDTH, len(long) + 1, WIDTH))), now=4.0)
    assert set(translator.keys.parents) == set()


def test_removing_the_end_of_a_span_keeps_its_given_up_blocks() -> None:
    translator = BlockTranslator(chain_of(2), WIDTH)
    span = prompt(2)
    translator.apply(stored(span), now=0.0)
    translator.verification.mark_counts_unverified(1.0)
    translator.expire(1.0)
    translator.apply(removed(span), now=2.0)
    translator.apply(stored(span, first=1), now=3.0)

    assert set(translator.keys.parents) == keys_of(span, 2)


def test_given_up_blocks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pointsman_worker.verification.GIVEN_UP_BLOCKS_MAX", 2)
    translator = BlockTranslator(chain_of(1), WIDTH)
    for start in (1, 50, 90):
        translator.apply(stored(prompt(1, start=start)), now=0.0)
    translator.verification.mark_counts_unverified(1.0)
    translator.expire(1.0)
    for start in (1, 50, 90):
        translator.apply(stored(prompt(2, start=start), first=1), now=2.0)

    assert set(translator.keys.parents) == keys_of(prompt(2, start=50)) | keys_of(prompt(2, start=90))


def test_trim_drops_the_longest_unconfirmed_blocks_and_ends_before_beginnings() -> None:
    translator = BlockTranslator(chain_of(1), WIDTH, capacity_blocks=5)
    translator.apply(stored(prompt(3)), now=0.0)
    translator.apply(stored(prompt(2, start=50)), now=10.0)
    fits = translator.blocks_over
    translator.apply(stored(prompt(2, start=90)), now=20.0)

    assert (fits, translator.blocks_over) == (0, 2)
    assert translator.trim(), "all blocks were verified: removals were lost unnoticed"
    assert set(translator.keys.parents) == keys_of(prompt(1)) | keys_of(prompt(2, start=50)) | keys_of(
        prompt(2, start=90)
    )
    assert translator.blocks_over == 0


def test_unverified_blocks_are_trimmed_before_verified_ones() -> None:
    translator = BlockTranslator(chain_of(1), WIDTH, capacity_blocks=4)
    translator.apply(stored(prompt(2, start=50)), now=0.0)
    translator.apply(stored(prompt(2)), now=10.0)
    translator.verification.mark_counts_unverified(20.0)
    translator.apply(stored(prompt(2, start=50)), now=30.0)
    translator.apply(stored(prompt(1, start=90)), now=30.0)

    assert not translator.trim()
    assert set(translator.keys.parents) == keys_of(prompt(1)) | keys_of(prompt(2, start=50)) | keys_of(
        prompt(1, start=90)
    )


def test_removed_and_cleared_blocks_do_not_count_towards_the_capacity() -> None:
    translator = BlockTranslator(chain_of(1), WIDTH, capacity_blocks=2)
    translator.apply(stored(prompt(2)))
    translator.apply(stored(prompt(2)))
    for _ in range(2):
        translator.apply(removed(prompt(2)))
    translator.apply(stored(prompt(1, start=50)))
    translator.apply(EngineCacheCleared())
    translator.apply(stored(prompt(2, start=90)))

    assert translator.blocks_over == 0


def test_the_capacity_is_unknown_if_several_groups_share_the_cache() -> None:
    translator = BlockTranslator(chain_of(1), WIDTH, capacity_blocks=1)
    translator.apply(stored(prompt(1), group_idx=0, kv_cache_spec_kind="full_attention"))
    translator.apply(stored(prompt(1), group_idx=1, kv_cache_spec_kind="sliding_window"))
    translator.apply(stored(prompt(3, start=50), group_idx=0, kv_cache_spec_kind="full_attention"))

    assert translator.blocks_over == 0


def test_a_dropped_store_reports_its_problem() -> None:
    translator = BlockTranslator(chain_of(1), WIDTH, parked_blocks_max=1)
    translator.apply(stored(prompt(1), block_size=32))
    wrong_size = translator.counters.problem
    translator.apply(stored(prompt(3), 1), now=4.0)

    assert wrong_size == (
        f"the engine's events have blocks of 32 tokens, its /metrics say {WIDTH}: set --engine-block-tokens 32"
    )
    assert translator.counters.problem == "2 blocks follow one that was never stored"
    assert (translator.counters.parked_dropped, translator.counters.mismatches) == (2, 1)


def test_70_000_blocks_in_one_event_are_70_000_blocks() -> None:
    tokens, width = 16 * 70_000, 16
    event = EngineBlockStored(
        block_hashes=list(range(70_000)), parent_block_hash=None, token_ids=[7] * tokens, block_size=width
    )
    batch = decode_batch(0, msgspec.msgpack.encode([0.0, [event], 0]))
    translator = BlockTranslator(KeyChain(secret=b"secret", model="m", block_tokens=64), width)
    for decoded in batch.events:
        translator.apply(decoded)

    assert batch.problem == ""
    assert len(translator.keys.parents) == tokens // 64


def keys_of(prefix: Prefix, span: int = 1) -> set[BlockKey]:
    chain = chain_of(span)
    return set(chain.extend(chain.root(), list(prefix)))


def test_a_block_removed_while_parked_is_not_held_when_its_parent_arrives() -> None:
    translator = BlockTranslator(chain_of(1), WIDTH)
    whole = prompt(3)
    translator.apply(stored(whole, first=1))
    translator.apply(removed(whole))
    translator.apply(stored(whole[: 1 * WIDTH]))

    assert set(translator.keys.parents) == set(chain_of(1).extend(chain_of(1).root(), whole[: 2 * WIDTH]))
    assert translator.orphans.blocks == 0


def test_a_key_with_three_engine_blocks_is_held_until_the_last_is_removed() -> None:
    translator, block = BlockTranslator(chain_of(1), WIDTH), prompt(1)
    for name in (1, 2, 3):
        translator.apply(stored(block, block_hashes=[name]))
    held = []
    for name in (1, 2, 3):
        translator.apply(EngineBlockRemoved(block_hashes=[name]))
        held.append(len(translator.keys.parents))

    assert held == [1, 1, 0]


@pytest.mark.timeout(20)
def test_a_message_about_parked_blocks_does_not_hold_up_the_process() -> None:
    """Searches for each hash would take minutes."""
    translator, many = BlockTranslator(chain_of(1), WIDTH), PARKED_BLOCKS_MAX
    repeated = EngineBlockStored([5] * many, 1, [0] * (WIDTH * many), WIDTH)
    translator.apply(repeated)
    translator.apply(EngineBlockRemoved([5] * 400_000))
    translator.apply(EngineBlockStored([1], None, [0] * WIDTH, WIDTH))
    names = [n.to_bytes(32, "big") for n in range(many)]
    for name in names:
        translator.apply(EngineBlockStored([name], b"unknown", [0] * WIDTH, WIDTH))
    for _ in range(2):
        translator.apply(EngineBlockRemoved(list(reversed(names))))
    translator.apply(EngineBlockStored([b"unknown"], 1, [0] * WIDTH, WIDTH))

    assert translator.blocks.nodes[5].copies == many - 1, "a removal is one of an event's blocks"
    assert set(translator.blocks.nodes) == {1, 5, b"unknown"}
    assert translator.orphans.blocks == 0


def test_a_block_at_another_place_of_its_span_is_a_mismatch_and_no_chain_is_longer_than_a_span() -> None:
    span, length = 4, 3_000
    translator = BlockTranslator(chain_of(span), WIDTH)
    translator.apply(EngineBlockStored([0], None, [1] * WIDTH, WIDTH))
    for name in range(1, length):
        translator.apply(EngineBlockStored([name - 1, name], None, [1] * 2 * WIDTH, WIDTH))
    for _ in range(2):
        translator.apply(EngineBlockRemoved([0]))
    twice_in_one = EngineBlockStored([-8, -8, -9, -10], None, [1] * 4 * WIDTH, WIDTH)
    mismatches = translator.counters.mismatches
    translator.apply(twice_in_one)

    assert mismatches == length // 2 - 1, "every second store names a block that ended the one before"
    assert translator.counters.mismatches == mismatches + 1
    assert max(chain_length(node) for node in translator.blocks.nodes.values()) == 2
    assert -8 not in translator.blocks.nodes
    assert translator.counters.problem == "a store with a block that is number 0 of its span as number 1"


def chain_length(node: Block) -> int:
    return 1 if node.parent is None else 1 + chain_length(node.parent)


def test_a_long_chain_that_a_saved_cache_has_is_recounted_without_recursion() -> None:
    keys, chain = HeldKeys(5_000), list[Block]()
    for index in range(5_001):
        before = chain[-1] if chain else None
        chain.append(Block(index, index, BlockKey(9), BlockKey(0), array("I"), before, None, copies=1))
        if before is not None:
            before.children = {chain[-1]: None}
    keys.recount(chain[0])

    assert set(keys.parents) == {9}


def test_a_span_of_many_blocks_costs_no_more_looks_than_it_has_blocks() -> None:
    span, branches = 64, 1_000
    translator = BlockTranslator(chain_of(span), WIDTH)
    root: list[int | bytes] = list(range(1, span))
    translator.apply(EngineBlockStored(root, None, [1] * WIDTH * len(root), WIDTH))
    stored_looks = translator.keys.work.done
    for branch in range(branches):
        translator.apply(EngineBlockStored([1_000 + branch], root[-1], [branch] * WIDTH, WIDTH))
    before, held = translator.keys.work.done, len(translator.keys.parents)
    translator.apply(EngineBlockRemoved(list(root)))

    assert stored_looks <= 2 * span
    assert held == branches
    assert translator.keys.work.done - before <= branches + 3 * span
    assert not translator.keys.parents


def test_a_known_block_counts_again_though_its_next_store_says_that_it_has_no_key() -> None:
    translator, prompt = BlockTranslator(chain_of(2), WIDTH), (1, 2, 3, 4)
    translator.apply(stored(prompt))
    translator.apply(EngineBlockRemoved([engine_hash(prompt[:WIDTH])]))
    gone = set(translator.keys.parents)
    translator.apply(stored(prompt[:WIDTH], extra_keys=extra(["an image", "and more"])))

    assert gone == set()
    assert len(translator.keys.parents) == 1
