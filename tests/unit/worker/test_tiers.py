"""Slower cache tiers in the worker: events as vLLM's connectors and LMCache shape them, and a plain model of sets."""

from functools import reduce
from itertools import pairwise
from operator import xor

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.adapters.kv_events.codec import decode_batch
from pointsman.adapters.kv_events.events import (
    EngineBlockRemoved,
    EngineBlockStored,
    EngineCacheCleared,
    EngineEvent,
)
from pointsman.contracts.block_keys import KeyChain
from pointsman.contracts.cache import CacheSnapshot, SlowerTier
from pointsman.primitives import BlockKey, InstanceId
from pointsman.state.state import PoolSettings, State
from pointsman_worker import tiers
from pointsman_worker.event_sequencer import CacheEventSequencer
from pointsman_worker.tiers import CacheTranslator, HeldTiers
from tests.support.events import joined
from tests.support.examples import examples

WIDTH = 4
"""Tokens in an engine block."""
SPAN = 2
"""Engine blocks in a pool block."""
Prefix = tuple[int, ...]
CHAIN = KeyChain(secret=b"secret", model="m", block_tokens=SPAN * WIDTH)
A = InstanceId("a")


def engine_hash(prefix: Prefix) -> int:
    return hash(prefix) & (1 << 64) - 1


def tokens(blocks: int, *, start: int = 1) -> Prefix:
    return tuple(range(start, start + blocks * WIDTH))


def on_device(prefix: Prefix, first: int = 0) -> EngineBlockStored:
    return EngineBlockStored(
        block_hashes=[engine_hash(prefix[:end]) for end in range((first + 1) * WIDTH, len(prefix) + 1, WIDTH)],
        parent_block_hash=engine_hash(prefix[: first * WIDTH]) if first else None,
        token_ids=list(prefix[first * WIDTH :]),
        block_size=WIDTH,
        medium="GPU",
        group_idx=0,
        kv_cache_spec_kind="full_attention",
    )


def named(prefix: Prefix, medium: str = "CPU") -> EngineBlockStored:
    """As vLLM's OffloadingConnector tells of its host blocks: an event for each, by hash alone."""
    return EngineBlockStored(
        block_hashes=[engine_hash(prefix)], parent_block_hash=None, token_ids=[], block_size=0, medium=medium,
        group_idx=0,
    )  # fmt: skip


def described(prefix: Prefix, medium: str = "CPU") -> EngineBlockStored:
    """The same with `self_describing_kv_events`; vLLM 0.32 tells no extra keys there."""
    return EngineBlockStored(
        block_hashes=[engine_hash(prefix)],
        parent_block_hash=engine_hash(prefix[:-WIDTH]) if len(prefix) > WIDTH else None,
        token_ids=list(prefix[-WIDTH:]),
        block_size=WIDTH,
        medium=medium,
        group_idx=0,
        kv_cache_spec_kind="full_attention",
    )


def chunk(prefix: Prefix, blocks: int, medium: str = "cpu") -> EngineBlockStored:
    """As LMCache tells of a chunk: hashes of its own, its chunk size as the block size."""
    size = blocks * WIDTH
    return EngineBlockStored(
        block_hashes=[engine_hash((*prefix, -1))],
        parent_block_hash=engine_hash((*prefix[:-size], -1)) if len(prefix) > size else None,
        token_ids=list(prefix[-size:]),
        block_size=size,
        medium=medium,
    )


def gone(*prefixes: Prefix, medium: str = "CPU", chunks: bool = False) -> EngineBlockRemoved:
    hashes: list[int | bytes] = [engine_hash((*prefix, -1) if chunks else prefix) for prefix in prefixes]
    return EngineBlockRemoved(hashes, medium, None if chunks else 0)


def keys_of(prefix: Prefix) -> set[BlockKey]:
    return set(CHAIN.extend(CHAIN.root(), prefix))


def held(translator: CacheTranslator, tier: SlowerTier = "host") -> set[BlockKey]:
    known = translator.slower.get(tier)
    return set(known.keys.parents) if known is not None else set()


def new_translator(*, tier_blocks_max: int = 1000, device_blocks_max: int = 1000) -> CacheTranslator:
    return CacheTranslator(CHAIN, WIDTH, tier_blocks_max=tier_blocks_max, device_blocks_max=device_blocks_max)


@pytest.mark.parametrize("told", [named, described])
def test_a_host_block_outlives_its_copy_on_the_device(told) -> None:  # type: ignore[no-untyped-def]
    translator, prompt = new_translator(), tokens(4)
    translator.apply(on_device(prompt))
    for blocks in (1, 2, 3, 4):
        translator.apply(told(prompt[: blocks * WIDTH]))

    translator.apply(gone(*(prompt[: blocks * WIDTH] for blocks in (4, 3, 2, 1)), medium="GPU"))
    after_device = held(translator)
    translator.apply(gone(prompt[: 3 * WIDTH]))

    assert not translator.device.keys.parents
    assert after_device == keys_of(prompt)
    assert held(translator) == keys_of(prompt[: 2 * WIDTH])
    assert (translator.device.counters.parked_dropped, translator.device.counters.mismatches) == (0, 0)


def test_a_block_that_nobody_described_is_ignored() -> None:
    translator = new_translator()
    translator.apply(named(tokens(2)))

    assert not held(translator)
    assert translator.device.counters.ignored == 1


def test_a_described_block_may_follow_one_that_only_the_device_holds() -> None:
    translator, prompt = new_translator(), tokens(4)
    translator.apply(on_device(prompt))
    for blocks in (3, 4):
        translator.apply(described(prompt[: blocks * WIDTH]))

    assert held(translator) == keys_of(prompt) - keys_of(prompt[: 2 * WIDTH])


def test_a_chunk_of_lmcache_is_taken_apart_and_removed_as_one() -> None:
    translator, prompt = new_translator(), tokens(8)
    translator.apply(on_device(prompt))
    for blocks in (4, 8):
        translator.apply(chunk(prompt[: blocks * WIDTH], 4))
    whole = held(translator)

    translator.apply(gone(prompt[: 4 * WIDTH], chunks=True))

    assert whole == keys_of(prompt)
    assert held(translator) == keys_of(prompt) - keys_of(prompt[: 4 * WIDTH])
    translator.apply(chunk(prompt[:3], 1))  # its last chunk, not whole
    assert translator.device.counters.mismatches == 0


def test_an_engine_of_a_shared_store_tells_of_external_blocks() -> None:
    translator, prompt = CacheTranslator(CHAIN, WIDTH, shared_store=True), tokens(2)
    translator.apply(on_device(prompt))
    translator.apply(named(prompt[:WIDTH], "cpu"))
    translator.apply(named(prompt, "cpu"))
    remote = new_translator()
    remote.apply(msgspec.structs.replace(described(prompt[:WIDTH]), locality="REMOTE"))

    assert (held(translator, "external"), held(translator)) == (keys_of(prompt), set())
    assert set(remote.slower) == {"external"}


def test_all_tiers_are_cleared_and_a_successor_knows_all_of_them() -> None:
    translator, prompt = new_translator(), tokens(4)
    translator.apply(on_device(prompt))
    for blocks in range(1, 5):
        translator.apply(named(prompt[: blocks * WIDTH], "STORAGE"))
    for part in (translator.device, *translator.slower.values()):
        part.keys.take_changes()
    dump = translator.dump()
    assert dump is not None
    successor = new_translator()
    successor.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(dump), type=HeldTiers))

    translator.apply(EngineCacheCleared())

    assert successor.digests == [d for d in successor.digests if d.blocks == 2 and d.tier == "storage"]
    assert held(successor, "storage") == keys_of(prompt)
    assert not held(translator, "storage")


@pytest.mark.parametrize(
    "event",
    [
        named(tokens(1), "QUANTUM"),
        EngineBlockStored([1] * 5, 7, [], -3, medium="CPU"),
        EngineBlockStored([1, 2], None, [1, 2, 3], 10**12, medium="cpu"),
        EngineBlockStored([], None, [], 0, medium="STORAGE"),
        EngineBlockStored([5], 5, list(range(WIDTH)), WIDTH, medium="CPU"),
        EngineBlockStored([5], None, [-1] * WIDTH, WIDTH, medium="CPU"),
        EngineBlockRemoved([1, 2, 3], "CPU", 3),
        EngineBlockRemoved([b"x" * 64], "\x00"),
    ],
)
def test_what_no_engine_says_changes_no_device_block(event: EngineBlockStored | EngineBlockRemoved) -> None:
    translator, prompt = new_translator(), tokens(2)
    translator.apply(on_device(prompt))

    for _ in range(3):
        translator.apply(event)

    assert set(translator.device.keys.parents) == keys_of(prompt)
    assert (translator.device.counters.parked_dropped, translator.device.counters.mismatches) == (0, 0)
    assert not held(translator)


def test_a_tier_without_removals_keeps_a_bounded_number_of_its_newest_blocks() -> None:
    translator = new_translator(tier_blocks_max=8)
    for number in range(50):
        translator.apply(chunk(tokens(2, start=1 + 100 * number), 2), now=float(number))

    newest = [keys_of(tokens(2, start=1 + 100 * number)) for number in range(46, 50)]
    assert held(translator) == set().union(*newest)


@pytest.mark.parametrize("capacity", [0, 1_000_000_000])
def test_a_device_whose_engine_tells_of_no_removals_keeps_a_bounded_number_of_its_newest_blocks(capacity: int) -> None:
    translator = CacheTranslator(CHAIN, WIDTH, capacity_blocks=capacity, device_blocks_max=8)
    prompts = [tokens(2, start=1 + 100 * number) for number in range(50)]
    for number, prompt in enumerate(prompts):
        translator.apply(on_device(prompt), now=float(number))
        assert translator.device.held_blocks <= 8

    assert set(translator.device.keys.parents) == set().union(*map(keys_of, prompts[-4:]))


def test_a_device_within_its_bound_keeps_all() -> None:
    translator = new_translator(device_blocks_max=100)
    prompts = [tokens(2, start=1 + 100 * number) for number in range(50)]
    for number, prompt in enumerate(prompts):
        translator.apply(on_device(prompt), now=float(number))

    assert set(translator.device.keys.parents) == set().union(*map(keys_of, prompts))


def test_a_chunk_is_not_taken_apart_into_more_blocks_than_an_event_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "BLOCKS_PER_EVENT_MAX", 4)
    translator = new_translator()
    translator.apply(chunk(tokens(4), 4))
    translator.apply(chunk(tokens(5, start=1000), 5))

    assert held(translator) == keys_of(tokens(4))
    assert translator.device.counters.ignored == 1


def test_events_on_the_wire_say_their_tier() -> None:
    """Maps as vLLM 0.32 sends them."""
    events = [
        {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [], "block_size": 0,
         "lora_id": None, "medium": "CPU", "lora_name": None, "group_idx": 0, "locality": "LOCAL"},
        {"type": "BlockRemoved", "block_hashes": [1], "medium": "STORAGE", "group_idx": 0, "locality": "REMOTE",
         "ownership": "fs"},
    ]  # fmt: skip
    batch = decode_batch(1, msgspec.msgpack.encode([0.0, events, 0]))

    stored, removed = batch.events
    assert isinstance(stored, EngineBlockStored)
    assert isinstance(removed, EngineBlockRemoved)
    assert (stored.medium, stored.locality, removed.medium, removed.locality) == ("CPU", "LOCAL", "STORAGE", "REMOTE")


TRUNKS = (tokens(6), tokens(3) + tokens(3, start=100), tokens(4, start=200))
acts = st.tuples(
    st.sampled_from(["device", "host", "described", "drop host", "drop device", "clear", "write"]),
    st.sampled_from(TRUNKS),
    st.integers(1, 6),
)


@given(st.lists(acts, max_size=60))
@examples(150)
def test_the_log_has_what_the_engine_holds_in_each_tier(history: list[tuple[str, Prefix, int]]) -> None:
    """An engine that says the truth, its worker, and the fold of what the worker writes."""
    translator, sequencer, state = new_translator(), CacheEventSequencer(A, 1), State(PoolSettings())  # type: ignore[arg-type]
    state.apply(joined("a", block_tokens=SPAN * WIDTH))
    device: set[Prefix] = set()
    host: set[Prefix] = set()

    def write() -> None:
        for event in sequencer.changes(0.0, translator.device.keys.take_changes()):
            state.apply(event)
        for tier, blocks in translator.slower.items():
            for event in sequencer.changes(0.0, blocks.keys.take_changes(), tier):
                state.apply(event)

    for what, trunk, blocks in history:
        prefix = trunk[: blocks * WIDTH]
        before = [prefix[:end] for end in range(WIDTH, len(prefix) + 1, WIDTH)]
        if what == "device":
            # An engine computes a prompt from its first missing block on.
            first = next((place for place, block in enumerate(before) if block not in device), None)
            if first is not None and not any(block in device for block in before[first:]):
                translator.apply(on_device(prefix, first))
                device.update(before)
        elif what in ("host", "described") and prefix in device and prefix not in host:
            translator.apply(named(prefix) if what == "host" else described(prefix))
            host.add(prefix)
        elif what == "drop host" and prefix in host:
            translator.apply(gone(prefix))
            host.remove(prefix)
        elif what == "drop device" and prefix in device:
            longer = {block for block in device if block[: len(prefix)] == prefix}
            translator.apply(gone(*sorted(longer, key=len, reverse=True), medium="GPU"))
            device -= longer
        elif what == "clear":
            translator.apply(EngineCacheCleared())
            device.clear()
            host.clear()
        elif what == "write":
            write()
    write()

    assert state.index.keys(A) == _whole_keys(device)
    assert state.slower.keys("host", A) == _whole_keys(host)
    digests = {d.tier: (d.blocks, d.digest) for d in translator.digests}
    assert digests.get("host", (0, 0)) == (len(_whole_keys(host)), reduce(xor, _whole_keys(host), 0))
    assert (translator.device.counters.parked_dropped, translator.device.counters.mismatches) == (0, 0)

    copy = State(PoolSettings())
    copy.apply(joined("a", block_tokens=SPAN * WIDTH))
    for event in sequencer.snapshot(0.0, translator.device.keys.take_snapshot()):
        assert isinstance(event, CacheSnapshot)
        copy.apply(event)
    for tier, kept in translator.slower.items():
        for event in sequencer.stored(0.0, kept.keys.take_snapshot(), tier):
            copy.apply(event)
    assert copy.slower.keys("host", A) == state.slower.keys("host", A)


def _whole_keys(blocks: set[Prefix]) -> set[BlockKey]:
    """Keys of the pool blocks of which every engine block is held."""
    found = set()
    for block in blocks:
        parts = [block[:end] for end in range(len(block) - (SPAN - 1) * WIDTH, len(block) + 1, WIDTH)]
        if len(block) % (SPAN * WIDTH) == 0 and all(part in blocks for part in parts):
            found.add(CHAIN.extend(CHAIN.root(), block)[-1])
    return found


@pytest.mark.parametrize("lost", [False, True])
def test_a_chunk_is_held_until_its_last_copy_goes_and_then_all_of_it_is_gone(lost: bool) -> None:
    translator, prompt = new_translator(), tokens(4)
    translator.apply(on_device(prompt))
    for _ in range(2):
        translator.apply(chunk(prompt, 4))
    if lost:
        translator.mark_counts_unverified(1.0)
    removals = []
    for _ in range(3):
        translator.apply(gone(prompt, chunks=True))
        removals.append(held(translator))

    assert removals == [set() if lost else keys_of(prompt), set(), set()]
    assert translator.slower["host"].held_blocks == 0
    assert not translator.slower["host"].blocks.nodes


@pytest.mark.parametrize("medium", ["GPU", "CPU"])
def test_a_block_that_was_parked_before_events_were_lost_is_not_held_when_its_parent_comes(medium: str) -> None:
    """Its removal may be among them."""
    translator, prompt = new_translator(), tokens(4)
    first, rest = (
        msgspec.structs.replace(event, medium=medium)
        for event in (on_device(prompt[: SPAN * WIDTH]), on_device(prompt, SPAN))
    )
    translator.apply(rest, 1.0)
    translator.mark_counts_unverified(2.0)
    translator.apply(first, 3.0)
    keys = translator.device.keys if medium == "GPU" else translator.slower["host"].keys
    known = set(keys.parents)
    translator.apply(rest, 4.0)

    assert known == keys_of(prompt[: SPAN * WIDTH])
    assert set(keys.parents) == keys_of(prompt)


@pytest.mark.parametrize("given_up", [True, False])
def test_a_host_block_does_not_show_that_the_one_before_it_is_there_still(given_up: bool) -> None:
    translator, prompt = new_translator(), tokens(2 * SPAN)
    first = prompt[: SPAN * WIDTH]
    translator.apply(on_device(prompt), 0.0)
    for end in (WIDTH, 2 * WIDTH):
        translator.apply(described(prompt[:end]), 0.0)
    translator.mark_counts_unverified(10.0)
    if given_up:
        translator.expire(10.0)
    for end in (3 * WIDTH, 4 * WIDTH):
        translator.apply(described(prompt[:end]), 20.0)
    before = held(translator)
    translator.expire(30.0)

    assert before == keys_of(prompt) - (keys_of(first) if given_up else set())
    assert held(translator) == keys_of(prompt) - keys_of(first)


def test_a_parked_chunk_loses_all_of_its_copies() -> None:
    translator, prompt = new_translator(), tokens(8)
    for _ in range(2):
        translator.apply(chunk(prompt, 4))
    for _ in range(2):
        translator.apply(gone(prompt, chunks=True))
    translator.apply(chunk(prompt[: 4 * WIDTH], 4))

    assert held(translator) == keys_of(prompt[: 4 * WIDTH])
    assert translator.slower["host"].held_blocks == 4


def test_a_removal_names_no_more_blocks_than_were_stored() -> None:
    translator, prompt = new_translator(), tokens(1000)
    translator.apply(chunk(prompt, 1000))
    looked_at = counted_blocks(translator, gone(*[prompt] * 1000, chunks=True))

    assert looked_at <= 2 * 1000


def counted_blocks(translator: CacheTranslator, event: EngineBlockRemoved) -> int:
    """Blocks that a slower tier is told to remove."""
    host, told = translator.slower["host"], list[int]()

    def apply(event: EngineEvent, now: float = 0.0) -> None:
        assert isinstance(event, EngineBlockRemoved)
        told.append(len(event.block_hashes))

    host.apply = apply  # type: ignore[method-assign]
    translator.apply(event)
    return sum(told)


def test_a_batch_that_changes_the_same_blocks_again_and_again_is_not_applied_to_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    branches, first = 1_000, tokens(1)
    translator = new_translator(device_blocks_max=2 * branches)
    honest = translator.apply_all([on_device((*first, *[n] * WIDTH)) for n in range(branches)], 0.0)
    monkeypatch.setattr(tiers, "WORK_PER_BATCH_MAX", 10 * branches)
    held_before = len(translator.device.keys.parents)
    for _ in range(branches):
        translator.apply_all([gone(first, medium="GPU")], 0.0)
    lying = translator.apply_all([on_device(first), gone(first, medium="GPU")] * branches, 0.0)
    honest_again = translator.apply_all([on_device(tokens(2, start=7_000))], 0.0)

    assert (honest, held_before) == (0, branches)
    assert 2 * branches - 20 <= lying < 2 * branches
    assert honest_again == 0


def test_the_removal_of_what_many_blocks_build_on_is_finished_later_if_it_is_too_much_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if those blocks go, or the cache is cleared, meanwhile."""
    branches, first, most = 1_000, tokens(1), 300
    translator = new_translator(device_blocks_max=2 * branches)
    translator.apply_all([on_device(first), *(on_device((*first, *[n] * WIDTH), 1) for n in range(branches))], 0.0)
    translator.device.keys.take_changes()
    monkeypatch.setattr(tiers, "WORK_PER_BATCH_MAX", most)
    counts, lost = [branches], [translator.apply_all([gone(first, medium="GPU")], 1.0)]
    while counts[-1] != len(translator.device.keys.parents):
        counts.append(len(translator.device.keys.parents))
        lost.append(translator.apply_all([gone((*first, *[len(counts)] * WIDTH), medium="GPU")], 1.0))
        translator.expire(0.0)

    assert lost == [1, *[0] * (len(lost) - 1)]
    assert len(counts) > branches // most
    assert max(before - after for before, after in pairwise(counts)) <= most + 1
    assert counts[-1] == 0
    assert len(translator.device.keys.take_changes().removed) == branches
    translator.apply_all([on_device(first)], 1.0)
    for _ in range(branches // most):
        translator.expire(0.0)
    back = len(translator.device.keys.parents)
    unfinished = translator.apply_all([gone(first, medium="GPU")], 1.0)
    translator.apply_all([EngineCacheCleared()], 1.0)
    translator.expire(0.0)

    assert back == branches - (len(counts) - 1)
    assert unfinished == 1
    assert not translator.device.keys.parents


@pytest.mark.parametrize("medium", ["GPU", "CPU", "LMCache"])
def test_a_store_of_more_blocks_than_one_batch_may_change_is_left_out(
    medium: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    translator, prompt = new_translator(), tokens(400)
    monkeypatch.setattr(tiers, "WORK_PER_BATCH_MAX", 2_000)
    if medium == "CPU":
        translator.apply(on_device(prompt))
        event = msgspec.structs.replace(on_device(prompt), token_ids=[], medium=medium)
    else:
        event = chunk(prompt, 400) if medium == "LMCache" else on_device(prompt)
    lost = translator.apply_all([event, named(prompt[:WIDTH])], 0.0)

    assert lost == 2
    assert not translator.slower
    assert bool(translator.device.held_blocks) == (medium == "CPU")


def test_blocks_that_a_tier_takes_from_the_device_for_one_that_it_names_count_as_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    span, prompts = 50, 100
    translator = CacheTranslator(KeyChain(secret=b"s", model="m", block_tokens=span), 1)
    for n in range(prompts):
        translator.apply(EngineBlockStored([n * span + part for part in range(span)], None, [n] * span, 1))
    monkeypatch.setattr(tiers, "WORK_PER_BATCH_MAX", 5_000)
    last = EngineBlockStored([n * span + span - 1 for n in range(prompts)], None, [], 0, medium="CPU")
    lost = translator.apply_all([last], 0.0)

    assert lost == 1
    assert len(translator.slower["host"].blocks.nodes) <= 1_000


def test_a_host_block_at_another_place_than_the_devices_is_not_built_upon() -> None:
    translator, prompt = new_translator(), tokens(3)
    translator.apply(msgspec.structs.replace(described(prompt[:WIDTH]), parent_block_hash=None))
    lie = EngineBlockStored([1, engine_hash(prompt[:WIDTH])], None, list(range(2 * WIDTH)), WIDTH, medium="CPU")
    translator.apply(lie)

    assert translator.slower["host"].counters.mismatches == 1
    assert set(translator.slower["host"].blocks.nodes) == {engine_hash(prompt[:WIDTH])}
