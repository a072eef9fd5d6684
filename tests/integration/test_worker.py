"""The worker beside an engine that publishes on real ZMQ sockets: what the log says is what the engine holds."""

import asyncio
import errno
import itertools
import math
import os
import socket
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partialmethod, reduce
from itertools import pairwise
from operator import xor
from pathlib import Path
from typing import Any

import aiohttp
import click
import msgspec
import pytest
from aiohttp import web
from prometheus_client import REGISTRY

from pointsman.adapters.http_engine import EngineFacts, EngineLoad, EngineUnreachableError, FurtherNames, HttpEngine
from pointsman.adapters.kv_events import sockets
from pointsman.adapters.kv_events.codec import decode_batch
from pointsman.adapters.kv_events.events import (
    Cursor,
    EngineAttached,
    EngineBatch,
    EngineGap,
    EngineItem,
    EngineNoise,
    EngineReplayed,
    EngineRestarted,
)
from pointsman.adapters.kv_events.reader import KvEventReader
from pointsman.contracts.block_keys import KeyChain, pack_keys, unpack_keys
from pointsman.contracts.cache import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    CacheEvent,
    CacheGap,
    CacheSnapshot,
    Run,
)
from pointsman.contracts.codec import LogEvent, encode
from pointsman.contracts.commands import ResyncAnswered, ResyncCache
from pointsman.contracts.fleet import InstanceJoined, InstanceLeft, InstanceProbed, InstanceReported
from pointsman.ports import CommandTimeoutError
from pointsman.primitives import WHOLE_MAX, BlockKey, Epoch, InstanceId, PoolName, Seconds, WallSeconds
from pointsman.state.fleet import Knowledge
from pointsman.state.state import PoolSettings, State
from pointsman_lab.memory.log import Fault, MemoryBroker
from pointsman_worker import saved_session, session, writer
from pointsman_worker.event_sequencer import RUN_OVERHEAD_BYTES, CacheEventSequencer, portions
from pointsman_worker.service import LEAVE_SECONDS_MAX
from pointsman_worker.settings import WorkerSettings
from pointsman_worker.targets import listed_targets
from pointsman_worker.translator import BlockTranslator
from tests.support.events import joined
from tests.support.fake_publisher import BLOCK, Event, FakePublisher, ScriptedCache
from tests.support.memory_pool import POOL
from tests.support.services import ToldEngine
from tests.support.worker_bench import INSTANCE, TARGET, CacheView, WorkerBench, source_of, working

CHAIN = KeyChain(secret=b"pointsman-development", model="m", block_tokens=2 * BLOCK)
WAIT_SECONDS_MAX = 10.0


async def until(condition: Callable[[], object]) -> None:
    """Wait until it holds; the assertion is the caller's, so that a failure shows the values."""
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while not condition() and time.monotonic() < deadline:  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0.01)


def tokens(*bits: int, blocks: int = 1) -> list[int]:
    """A prompt of `blocks` blocks for each bit."""
    return [bit for bit in bits for _ in range(blocks * BLOCK)]


# The adapter alone


async def collected(source: KvEventReader, done: Callable[[list[EngineItem]], bool]) -> list[EngineItem]:
    items: list[EngineItem] = []
    async with asyncio.timeout(WAIT_SECONDS_MAX), aclosing(source.items()) as stream:
        async for item in stream:
            items.append(item)
            if done(items):
                break
    return items


async def scripted(
    publisher: FakePublisher,
    script: Callable[[list[EngineItem]], Coroutine[Any, Any, None]],
    done: Callable[[list[EngineItem]], bool],
) -> list[EngineItem]:
    """What is read while the publisher follows a script, which begins when the reader is attached and subscribed."""
    items: list[EngineItem] = []
    async with asyncio.TaskGroup() as group:

        async def begin() -> None:
            await publisher.subscribed()
            await until(lambda: items)
            await script(items)

        group.create_task(begin())
        async with asyncio.timeout(WAIT_SECONDS_MAX), aclosing(source_of(publisher).items()) as stream:
            async for item in stream:
                items.append(item)
                if done(items):
                    break
    return items


def sequences(items: list[EngineItem]) -> list[int]:
    return [item.sequence for item in items if isinstance(item, EngineBatch)]


async def test_everything_since_the_engines_start_is_read_even_what_came_before_us() -> None:
    async with FakePublisher() as publisher:
        for n in range(5):
            await publisher.publish(ScriptedCache().store(tokens(n)))
        items = await collected(source_of(publisher), lambda seen: len(seen) == 6)

    assert items[0] == EngineAttached(exact=True)
    assert sequences(items) == [0, 1, 2, 3, 4]


async def test_a_replay_that_is_more_than_is_read_ahead_is_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "READ_AHEAD_BYTES_MAX", 1_000)
    async with FakePublisher() as publisher:
        for n in range(300):
            await publisher.publish(ScriptedCache().store(tokens(n)))
        items = await collected(source_of(publisher), lambda seen: len(seen) == 301)

    assert sequences(items) == list(range(300))


async def test_a_buffer_that_no_longer_reaches_back_means_unknown_contents() -> None:
    async with FakePublisher(buffer_steps=2) as publisher:
        for n in range(5):
            await publisher.publish(ScriptedCache().store(tokens(n)))
        items = await collected(source_of(publisher), lambda seen: len(seen) == 3)

    assert items[0] == EngineAttached(exact=False)
    assert sequences(items) == [3, 4]


async def test_a_dropped_message_is_replayed_at_the_next_one_and_also_in_silence() -> None:
    async with FakePublisher() as publisher:

        async def script(items: list[EngineItem]) -> None:
            await publisher.publish()
            await publisher.publish(dropped=True)
            await publisher.publish()
            await until(lambda: sequences(items)[-1:] == [2])
            await publisher.publish(dropped=True)

        items = await scripted(publisher, script, lambda seen: sequences(seen)[-1:] == [3])

    assert sequences(items) == [0, 1, 2, 3]
    assert any(isinstance(item, EngineReplayed) for item in items)
    assert not any(isinstance(item, EngineGap | EngineRestarted) for item in items)


@pytest.mark.parametrize("replay", [True, False])
async def test_what_nobody_has_any_more_is_one_gap(replay: bool) -> None:
    async with FakePublisher(buffer_steps=1, replay=replay) as publisher:

        async def script(items: list[EngineItem]) -> None:
            await publisher.publish()
            await until(lambda: sequences(items) == [0])
            for _ in range(3):
                await publisher.publish(dropped=True)
            await publisher.publish()

        items = await scripted(publisher, script, lambda seen: sequences(seen)[-1:] == [4])

    (gap,) = [item for item in items if isinstance(item, EngineGap)]
    assert gap.missed == 3
    assert sequences(items) == [0, 4]


async def test_holes_in_the_engines_own_buffer_are_gaps_and_the_rest_is_read() -> None:
    async with FakePublisher() as publisher:

        async def script(items: list[EngineItem]) -> None:
            for n in range(9):
                await publisher.publish(lost=n in (2, 3, 6), dropped=n < 8)

        items = await scripted(publisher, script, lambda seen: sequences(seen)[-1:] == [8])

    assert sequences(items) == [0, 1, 4, 5, 7, 8]
    assert [item.missed for item in items if isinstance(item, EngineGap)] == [2, 1]


@pytest.mark.parametrize("replay", [True, False])
async def test_a_restarted_engine_is_a_new_one_even_when_it_has_come_further_than_the_old(replay: bool) -> None:
    async with FakePublisher(replay=replay) as publisher:

        async def script(items: list[EngineItem]) -> None:
            await publisher.publish(ScriptedCache().store(tokens(1)))
            await publisher.publish(ScriptedCache().store(tokens(2)))
            await until(lambda: sequences(items) == [0, 1])
            await publisher.restart()
            if not replay:
                await publisher.subscribed()
            for n in (3, 4, 5):
                await publisher.publish(ScriptedCache().store(tokens(n)), dropped=replay)

        items = await scripted(publisher, script, lambda seen: sequences(seen)[-1:] == [2])

    assert sequences(items) == [0, 1, 0, 1, 2]
    assert [item for item in items if isinstance(item, EngineRestarted)] == [EngineRestarted(exact=True)]
    assert any(isinstance(item, EngineGap) for item in items) != replay


@pytest.mark.parametrize("oldest", [2, 3])
async def test_a_restarted_engine_is_a_new_one_even_when_its_buffer_begins_where_the_old_one_had_come_to(
    oldest: int,
) -> None:
    async with FakePublisher(buffer_steps=5 - oldest) as publisher:

        async def script(items: list[EngineItem]) -> None:
            await publisher.publish()
            await publisher.publish()
            await until(lambda: sequences(items) == [0, 1])
            await publisher.restart()
            for _ in range(5):
                await publisher.publish(dropped=True)

        items = await scripted(publisher, script, lambda seen: sequences(seen)[-1:] == [4])

    assert sequences(items) == [0, 1, *range(oldest, 5)]
    assert items[3] == EngineRestarted(exact=False)


async def test_a_broken_connection_to_the_same_engine_loses_nothing() -> None:
    async with FakePublisher() as publisher:

        async def script(items: list[EngineItem]) -> None:
            await publisher.publish()
            await until(lambda: sequences(items) == [0])
            await publisher.reconnect()
            await publisher.publish()
            await publisher.publish()

        items = await scripted(publisher, script, lambda seen: sequences(seen)[-1:] == [2])

    assert sequences(items) == [0, 1, 2]
    assert not any(isinstance(item, EngineGap | EngineRestarted) for item in items)


async def test_an_engine_whose_past_could_not_be_had_is_read_after_a_broken_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sockets, "REPLAY_FRAME_SECONDS", 0.1)
    async with FakePublisher() as publisher:
        publisher.answers_replays = False

        async def script(_items: list[EngineItem]) -> None:
            publisher.answers_replays = True
            await publisher.reconnect()
            await publisher.publish()

        items = await scripted(publisher, script, lambda seen: sequences(seen) == [0])

    assert items[0] == EngineAttached(exact=False)
    assert items[1] == EngineRestarted(exact=True)


async def test_a_message_sent_twice_is_taken_once_and_one_that_is_none_of_vllms_is_noise() -> None:
    async with FakePublisher() as publisher:

        async def script(items: list[EngineItem]) -> None:
            await publisher.publish()
            await publisher.publish()
            await publisher.repeat(0)
            await publisher.repeat(1)
            await publisher.publish_frames(b"kv", b"short", b"")
            await publisher.publish_frames(b"two", b"frames")

        def noises(seen: list[EngineItem]) -> int:
            return len([item for item in seen if isinstance(item, EngineNoise)])

        items = await scripted(publisher, script, lambda seen: noises(seen) == 2)

    assert sequences(items) == [0, 1]
    assert not any(isinstance(item, EngineGap | EngineRestarted) for item in items)


# The service


@pytest.mark.parametrize(("by_position", "fault"), [(False, "none"), (True, "duplicate")], ids=["map", "array"])
async def test_the_log_folded_by_a_plain_set_is_what_the_engine_holds(by_position: bool, fault: Fault) -> None:
    cache = ScriptedCache()
    async with FakePublisher(by_position=by_position) as publisher:
        await publisher.publish(cache.store(tokens(1, 2, 3)))
        async with working(publisher, broker=MemoryBroker(POOL, fault=lambda _event: fault)) as bench:
            await publisher.publish(cache.store(tokens(1, 2, 4, 5)), cache.store(tokens(6, 7), salt="s"))
            await publisher.publish(cache.store(tokens(1, 2, 3, 8)), dropped=True)
            await publisher.publish(cache.evict(tokens(1, 2, 4, 5)))
            await publisher.publish(cache.evict(tokens(6, 7), salt="s"), dropped=True)
            await until(lambda: bench.log.held() == cache.keys(CHAIN))

            assert cache.keys(CHAIN)
            assert bench.log.held() == cache.keys(CHAIN)
            joined = bench.log.of(InstanceJoined)[-1]
            assert (joined.cache, joined.model, joined.engine_block_tokens) == ("empty", "m", BLOCK)
            assert not bench.log.of(CacheGap)


async def test_reports_carry_the_digest_of_what_the_log_holds_by_then() -> None:
    cache = ScriptedCache()
    engine = ToldEngine()
    async with FakePublisher() as publisher, working(publisher, engine=engine) as bench:
        engine.load_now = EngineLoad(waiting=2, running=3, kv_usage=0.5)
        for n in range(30):
            await publisher.publish(cache.store(tokens(n, n, n, n)))
            await asyncio.sleep(0.01)
        await until(lambda: len(bench.log.of(InstanceReported)) > 4 and bench.log.held() == cache.keys(CHAIN))

        keys: set[BlockKey] = set()
        last = 0
        for event in bench.log.events:
            if isinstance(event, BlocksStored):
                keys.update(key for run in event.runs for key in unpack_keys(run.keys))
                last = event.sequence
            if isinstance(event, InstanceReported):
                assert (event.sequence, event.blocks, event.digest) == (last, len(keys), reduce(xor, keys, 0))
        report = bench.log.of(InstanceReported)[-1]
        assert (report.serving, report.waiting, report.running, report.kv_usage) == (True, 2, 3, 0.5)


async def test_a_restarted_engine_begins_a_new_epoch_with_what_it_holds_now() -> None:
    engine, old, new = ToldEngine(), ScriptedCache(), ScriptedCache(life=2)
    async with FakePublisher() as publisher, working(publisher, engine=engine) as bench:
        await publisher.publish(old.store(tokens(1, 2)))
        await until(lambda: bench.log.held() == old.keys(CHAIN))
        engine.away = True
        await publisher.restart()
        await publisher.publish(new.store(tokens(3, 4)))
        await until(lambda: not bench.log.of(InstanceReported)[-1].serving)
        assert not bench.log.of(InstanceReported)[-1].serving
        assert not bench.board.whole

        engine.away = False
        await until(lambda: bench.log.held() == new.keys(CHAIN))

        assert bench.log.held() == new.keys(CHAIN)
        assert [event.cache for event in bench.log.of(InstanceJoined)] == ["empty", "empty"]
        await until(lambda: bench.log.of(InstanceReported)[-1].serving)
        assert bench.board.whole


async def test_a_new_epoch_joins_with_the_adapters_that_the_engine_has_by_then() -> None:
    engine = ToldEngine(load=EngineLoad(further_names=FurtherNames(("m-latest",), ("poet",))))
    async with FakePublisher() as publisher, working(publisher, engine=engine) as bench:
        await publisher.publish(ScriptedCache().store(tokens(1, 2)))
        await until(bench.log.held)
        engine.away = True
        await publisher.restart()
        await publisher.publish(ScriptedCache(life=2).store(tokens(3, 4)))
        await until(lambda: not bench.log.of(InstanceReported)[-1].serving)
        engine.load_now = EngineLoad(further_names=FurtherNames(adapters=("critic",)))
        engine.away = False
        await until(lambda: len(bench.log.of(InstanceJoined)) == 2)

        old, new = bench.log.of(InstanceJoined)
        assert (old.adapters, old.aliases) == (["poet"], ["m-latest"])
        assert (new.adapters, new.aliases) == (["critic"], [])


async def test_lost_events_keep_what_is_believed_but_as_unknown_until_the_cache_is_cleared() -> None:
    cache = ScriptedCache()
    async with FakePublisher(buffer_steps=1) as publisher, working(publisher) as bench:
        await until(lambda: bench.log.of(InstanceJoined))
        await publisher.publish(cache.store(tokens(1, 2)))
        await until(lambda: bench.log.held() == cache.keys(CHAIN))
        before = bench.log.held()
        await publisher.publish(cache.store(tokens(3, 4)), dropped=True)
        await publisher.publish(cache.store(tokens(5, 6)), dropped=True)
        await publisher.publish(cache.store(tokens(5, 6, 7, 8)))
        await until(lambda: bench.log.of(CacheSnapshot))

        assert bench.log.held() == before
        assert [event.cache for event in bench.log.of(InstanceJoined)] == ["empty", "unknown"]
        assert bench.log.of(CacheGap)[0].missed == 2

        await publisher.publish(cache.clear(), cache.store(tokens(9, 9)))
        await until(lambda: bench.log.held() == cache.keys(CHAIN))
        assert bench.log.held() == cache.keys(CHAIN)


@pytest.mark.parametrize("replay", [True, False])
async def test_stores_that_follow_blocks_of_before_we_came_are_a_loss_once_at_most(
    replay: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that has run for a while has thousands; a gap at each would have the leader ask for a snapshot for ever."""
    defaults = BlockTranslator.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "parked_blocks_max", 4)
    cache = ScriptedCache()
    async with FakePublisher(replay=replay) as publisher:
        cache.store(tokens(1, 2))  # nobody heard of it
        if not replay:
            await publisher.publish(cache.store(tokens(3)))
        async with working(publisher) as bench:
            await until(lambda: bench.log.of(InstanceJoined))
            await publisher.subscribed()
            for last in range(10):
                await publisher.publish(cache.store(tokens(1, 2, 50 + last, 60 + last)))
                await publisher.publish(cache.store(tokens(70 + last, 80 + last)))
            await until(lambda: len(bench.log.held()) == 10)
            await until(lambda: not bench.service.state.followed_session()[0].missed_reason)
            dropped = REGISTRY.get_sample_value(
                "pointsman_kv_stores_dropped_total", {"pool": "default", "engine": INSTANCE}
            )
            joins = [event.cache for event in bench.log.of(InstanceJoined)]
            gaps = bench.log.of(CacheGap)

    assert dropped
    assert joins == (["empty", "unknown"] if replay else ["unknown"])
    assert len(gaps) == len(joins) - 1


async def test_events_arrive_over_ipv6() -> None:
    cache = ScriptedCache()
    async with (
        asyncio.timeout(WAIT_SECONDS_MAX),
        FakePublisher(host="[::1]") as publisher,
        working(publisher) as bench,
    ):
        await publisher.publish(cache.store(tokens(1, 2)))
        await until(lambda: bench.log.held() == cache.keys(CHAIN))
        await publisher.subscribed()
        await publisher.publish(cache.store(tokens(3, 4)))
        await until(lambda: bench.log.held() == cache.keys(CHAIN))

        assert bench.log.held() == cache.keys(CHAIN)


def in_store(log: CacheView) -> int:
    """Blocks of the shared store, in a pool where another engine uses it as well."""
    state = State(PoolSettings(block_tokens=2 * BLOCK))
    state.apply(joined("other", shared_store=True))
    for event in log.events:
        state.apply(event)
    return state.slower.blocks("external", INSTANCE)


def stored_and_removed_elsewhere(
    cache: ScriptedCache, prompts: list[list[int]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What an engine says when the prompts' blocks enter a slower tier, and when they leave it."""
    names = [[cache._hash("", tuple(prompt[:end])) for end in (BLOCK, 2 * BLOCK)] for prompt in prompts]
    named: dict[str, Any] = {"parent_block_hash": None, "token_ids": [], "block_size": 0, "lora_id": None}
    held = [
        {"type": "BlockStored", "block_hashes": hashes, **named, "medium": "CPU", "lora_name": None, "group_idx": 0}
        for hashes in names
    ]
    gone = [{"type": "BlockRemoved", "block_hashes": hashes, "medium": "CPU", "group_idx": 0} for hashes in names]
    return held, gone


@pytest.mark.parametrize("change", ["clear", "loss", "restart"])
async def test_what_goes_from_the_shared_store_goes_from_the_index_whatever_becomes_of_the_engine(change: str) -> None:
    cache, prompts = ScriptedCache(), [tokens(1, 2), tokens(3, 4)]
    held, gone = stored_and_removed_elsewhere(cache, prompts)
    async with FakePublisher(buffer_steps=1) as publisher, working(publisher, shared_kv_store=True) as bench:
        await until(lambda: bench.log.of(InstanceJoined))
        await publisher.publish(*(cache.store(prompt) for prompt in prompts), *held)
        await until(lambda: in_store(bench.log) == 2)
        before = in_store(bench.log)
        match change:
            case "clear":
                await publisher.publish(cache.clear())
            case "loss":
                await publisher.publish(cache.store(tokens(5, 6)), dropped=True)
                await publisher.publish(cache.store(tokens(7, 8)), dropped=True)
            case _:
                await publisher.restart()
                await until(lambda: len(bench.log.of(InstanceJoined)) == 2)
                await publisher.subscribed()
        await publisher.publish(gone[0])
        await until(lambda: in_store(bench.log) == 1)
        after_one = in_store(bench.log)
        await publisher.publish(gone[1])
        await until(lambda: in_store(bench.log) == 0)

        assert (before, after_one, in_store(bench.log)) == (2, 1, 0)


async def test_what_went_from_the_shared_store_is_told_although_the_engine_restarts_while_the_log_is_away() -> None:
    cache, prompts = ScriptedCache(), [tokens(1, 2), tokens(3, 4)]
    held, gone = stored_and_removed_elsewhere(cache, prompts)
    async with FakePublisher() as publisher, working(publisher, shared_kv_store=True) as bench:
        await until(lambda: bench.log.of(InstanceJoined))
        await publisher.publish(*(cache.store(prompt) for prompt in prompts), *held)
        await until(lambda: in_store(bench.log) == 2)
        first, translator = bench.service.state.followed_session()
        bench.log.broker.disconnect()
        await publisher.publish(gone[0])
        await until(lambda: not bench.board.whole and not translator.changed)
        await publisher.restart()
        await until(lambda: bench.service.state.session is not first)
        bench.log.broker.reconnect()
        await until(lambda: in_store(bench.log) == 1)
        after_one = in_store(bench.log)
        await publisher.publish(gone[1])
        await until(lambda: in_store(bench.log) == 0)

        assert (after_one, in_store(bench.log)) == (1, 0)


async def test_what_does_not_decode_is_counted_and_makes_the_cache_unknown() -> None:
    async with FakePublisher() as publisher, working(publisher) as bench:
        await until(lambda: bench.log.of(InstanceJoined))
        await publisher.publish_raw(b"\xc1")
        await publisher.publish({"type": "BlockPromoted"})
        await until(lambda: bench.log.of(InstanceReported) and bench.log.of(InstanceReported)[-1].undecodable)

        assert bench.log.of(InstanceReported)[-1].undecodable == 1
        assert [event.cache for event in bench.log.of(InstanceJoined)] == ["empty", "unknown"]


async def test_a_resync_is_answered_once_the_snapshot_is_in_the_log() -> None:
    cache = ScriptedCache()
    async with FakePublisher() as publisher, working(publisher) as bench:
        await publisher.publish(cache.store(tokens(1, 2, 3, 4)), cache.store(tokens(1, 2, 5, 6)))
        await until(lambda: bench.log.held() == cache.keys(CHAIN))
        subject = f"pm.default.cmd.resync.{INSTANCE}"

        answer = await bench.commands.request(
            subject, ResyncCache(instance=INSTANCE, reason="test"), timeout=WallSeconds(1)
        )
        other = await bench.commands.request(
            subject, ResyncCache(instance=InstanceId("engine-2"), reason="test"), timeout=WallSeconds(1)
        )

        assert answer == ResyncAnswered(instance=INSTANCE, accepted=True)
        assert isinstance(other, ResyncAnswered)
        assert not other.accepted
        (snapshot,) = bench.log.of(CacheSnapshot)
        assert {key for run in snapshot.runs for key in unpack_keys(run.keys)} == cache.keys(CHAIN)
        assert bench.log.held() == cache.keys(CHAIN)


async def test_an_engine_is_distrusted_once_however_often_that_is_asked_and_nothing_of_before_is_believed() -> None:
    cache = ScriptedCache()
    async with FakePublisher() as publisher, working(publisher) as bench:
        await publisher.publish(cache.store(tokens(1, 2)))
        await until(lambda: bench.log.held() == cache.keys(CHAIN))
        (before,) = bench.log.of(InstanceJoined)
        command = ResyncCache(instance=INSTANCE, reason="it lies", above=before.epoch, distrust=True)
        subject = f"pm.default.cmd.resync.{INSTANCE}"
        answers = [await bench.commands.request(subject, command, timeout=WallSeconds(1)) for _ in range(2)]
        await until(lambda: bench.log.of(CacheSnapshot))
        forgotten = bench.log.held()
        await publisher.publish(cache.store(tokens(5, 6)))
        await until(bench.log.held)

        assert answers == [ResyncAnswered(instance=INSTANCE, accepted=True)] * 2
        assert forgotten == set()
        assert len(bench.log.held()) == 1
        _, joined = bench.log.of(InstanceJoined)
        assert (joined.cache, joined.certain, joined.cache_detail) == ("unknown", False, "it lies")
        await until(lambda: bench.log.of(InstanceReported)[-1].epoch == joined.epoch)
        assert not bench.log.of(InstanceReported)[-1].certain


async def test_while_the_log_is_away_changes_net_out_and_then_the_difference_is_written() -> None:
    cache = ScriptedCache()
    async with FakePublisher() as publisher, working(publisher) as bench:
        await publisher.publish(cache.store(tokens(1, 2)))
        await until(lambda: bench.log.held() == cache.keys(CHAIN))
        bench.log.broker.disconnect()
        await publisher.publish(cache.store(tokens(3, 4)))
        await until(lambda: not bench.board.whole)
        assert not bench.board.whole
        for n in range(10, 60):
            await publisher.publish(cache.store(tokens(n, n)))
            await publisher.publish(cache.evict(tokens(n, n)), cache.evict(tokens(n)))
        await publisher.publish(cache.store(tokens(7, 8)))
        await asyncio.sleep(0.3)
        written = len(bench.log.of(CacheEvent))
        bench.log.broker.reconnect()
        await until(lambda: bench.log.held() == cache.keys(CHAIN))

        assert bench.log.held() == cache.keys(CHAIN)
        assert len(bench.log.of(CacheEvent)) <= written + 4
        assert bench.board.whole


@pytest.mark.parametrize("loss", ["recreated", "tail", "head"])
async def test_a_log_that_lost_this_instance_is_told_again(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pointsman_worker.writer.LOG_CHECK_SECONDS", 0.05)
    cache = ScriptedCache()
    async with FakePublisher() as publisher, working(publisher) as bench:
        await publisher.publish(cache.store(tokens(1, 2)))
        await until(lambda: bench.log.held() == cache.keys(CHAIN) and len(bench.log.of(InstanceReported)) > 2)
        broker = bench.log.broker
        if loss == "recreated":
            broker.recreate()
        elif loss == "tail":
            broker.lose_after(0)
        else:
            broker.drop_before(broker.extent.last)

        told = CacheView(broker)
        await until(lambda: told.held() == cache.keys(CHAIN))

        assert told.held() == cache.keys(CHAIN)
        assert isinstance(told.of(InstanceJoined)[-1], InstanceJoined)


async def test_leaving_writes_what_is_pending_and_then_that_it_left() -> None:
    cache = ScriptedCache()
    async with FakePublisher() as publisher, working(publisher, flush_ms=1000.0) as bench:
        await publisher.publish(cache.store(tokens(1, 2)))
        await until(lambda: bench.log.held() == cache.keys(CHAIN))
        _, translator = bench.service.state.followed_session()
        await publisher.publish(cache.store(tokens(3, 4)))
        await until(lambda: translator.changed or bench.log.held() == cache.keys(CHAIN))
        await bench.service.leave("test over")

        left = bench.log.events[-1]
        assert isinstance(left, InstanceLeft)
        assert left.reason == "test over"
        assert bench.log.held() == cache.keys(CHAIN)


async def filled(publisher: FakePublisher, cache: ScriptedCache, worker: WorkerBench) -> None:
    """16 pool blocks in 8 prompts, each read by the worker before the next is published."""
    for n in range(8):
        await publisher.publish(cache.store(tokens(n, blocks=4)))
        await until(lambda: worker.log.held() == cache.keys(CHAIN))


def files_in(directory: Path) -> list[Path]:
    return list(directory.iterdir())


async def test_a_worker_that_is_started_again_goes_on_although_the_engine_can_replay_but_its_newest_events(
    tmp_path: Path,
) -> None:
    broker, cache = MemoryBroker(PoolName("default")), ScriptedCache()
    async with FakePublisher(buffer_steps=4) as publisher:
        async with working(publisher, broker=broker, state_directory=str(tmp_path)) as first:
            await filled(publisher, cache, first)
            await publisher.publish(cache.store(tokens(1, 2, blocks=1), salt="salty"))
            await until(lambda: first.log.held() == cache.keys(CHAIN))
            assert len(first.log.held()) == 17
        paused_at = broker.extent.last
        assert [report.back_within > 0 for report in first.log.of(InstanceReported)[-2:]] == [False, True]
        await publisher.publish(cache.evict(tokens(0, blocks=4)))
        await publisher.publish(cache.store([*tokens(3, blocks=4), *tokens(9, blocks=2)]))
        async with working(publisher, broker=broker, state_directory=str(tmp_path)) as second:
            await until(lambda: second.log.held() == cache.keys(CHAIN))
            await publisher.publish(cache.evict(tokens(5, blocks=4)))
            await until(lambda: second.log.held() == cache.keys(CHAIN))
            reported = len(second.log.of(InstanceReported))
            await until(lambda: len(second.log.of(InstanceReported)) > reported)

            assert second.log.held() == cache.keys(CHAIN)
            assert len(second.log.of(InstanceJoined)) == 1
            assert not second.log.of(InstanceLeft)
            assert second.log.of(InstanceReported)[-1].digest == reduce(xor, second.log.held())
            assert second.log.of(InstanceReported)[-1].certain
            assert broker.extent.last > paused_at


@pytest.mark.parametrize("change", ["engine restarted", "too much missed", "secret", "too old", "garbled"])
async def test_a_worker_that_cannot_go_on_begins_a_new_epoch_and_says_nothing_that_is_not_true(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, cache = MemoryBroker(PoolName("default")), ScriptedCache()
    async with FakePublisher(buffer_steps=4) as publisher:
        async with working(publisher, broker=broker, state_directory=str(tmp_path)) as first:
            await filled(publisher, cache, first)
        (file,) = files_in(tmp_path)
        if change == "engine restarted":
            await publisher.restart()
            cache = ScriptedCache(life=2)
        if change in ("engine restarted", "too much missed"):
            for n in range(8 if change == "engine restarted" else 5):
                await publisher.publish(cache.store(tokens(20 + n, blocks=4)))
        if change == "too old":
            monkeypatch.setattr(saved_session, "FRESH_WALL_SECONDS", 0.0)
        if change == "garbled":
            file.write_bytes(file.read_bytes()[:-9] + b"no blocks")
        chain = KeyChain(secret=b"other", model="m", block_tokens=2 * BLOCK) if change == "secret" else CHAIN
        other: dict[str, Any] = {"secret": "other"} if change == "secret" else {}
        async with working(publisher, broker=broker, state_directory=str(tmp_path), **other) as second:
            await until(lambda: len(second.log.of(InstanceJoined)) == 2)
            before = len(second.log.of(InstanceReported))
            await until(lambda: len(second.log.of(InstanceReported)) > before + 1)

            assert second.log.held() <= cache.keys(chain)
            assert second.log.of(InstanceJoined)[1].cache == "unknown"
            assert second.log.of(InstanceJoined)[1].epoch > second.log.of(InstanceJoined)[0].epoch
            assert not files_in(tmp_path)


def test_sessions_of_engines_that_did_not_come_back_are_removed_when_they_are_of_no_use(tmp_path: Path) -> None:
    names = ("default.gone.worker", "default.stopped.worker", "other.gone.worker", "default.notes")
    for name in names:
        (tmp_path / name).write_bytes(b"saved")
        os.utime(tmp_path / name, (1000.0, 1100.0 if "stopped" in name else 1000.0))

    saved_session.remove_expired(WorkerSettings(state_directory=str(tmp_path)), now=Seconds(1121.0))

    assert {file.name for file in files_in(tmp_path)} == set(names) - {"default.gone.worker"}


async def test_a_worker_that_is_started_again_with_other_settings_joins_anew_with_what_it_knew(tmp_path: Path) -> None:
    broker, cache = MemoryBroker(PoolName("default")), ScriptedCache()
    async with FakePublisher(buffer_steps=2) as publisher:
        async with working(publisher, broker=broker, state_directory=str(tmp_path)) as first:
            await filled(publisher, cache, first)
        async with working(
            publisher, broker=broker, state_directory=str(tmp_path), target=replace(TARGET, url="http://e:2")
        ) as second:
            await until(lambda: len(second.log.of(InstanceJoined)) == 2 and second.log.held() == cache.keys(CHAIN))

            assert second.log.held() == cache.keys(CHAIN)
            assert [joined.url for joined in second.log.of(InstanceJoined)] == ["http://e:1", "http://e:2"]
            assert second.log.of(InstanceJoined)[1].cache == "empty"


async def test_leaving_takes_no_longer_than_its_bound_when_the_log_is_away() -> None:
    async with FakePublisher() as publisher, working(publisher) as bench:
        await until(lambda: bench.log.of(InstanceJoined))
        bench.log.broker.disconnect()
        async with asyncio.timeout(3 * LEAVE_SECONDS_MAX):
            await bench.service.leave("stopped")


async def test_an_engine_without_events_joins_as_such_and_cannot_be_resynced() -> None:
    async with working(None) as bench:
        await until(lambda: bench.log.of(InstanceReported))
        answer = await bench.commands.request(
            f"pm.default.cmd.resync.{INSTANCE}", ResyncCache(instance=INSTANCE, reason="test"), timeout=WallSeconds(1)
        )

        assert [event.cache for event in bench.log.of(InstanceJoined)] == ["no_events"]
        assert isinstance(answer, ResyncAnswered)
        assert not answer.accepted


async def test_the_cache_of_an_engine_that_makes_vectors_only_is_not_followed_until_one_that_completes_takes_its_place() -> (
    None
):
    engine, cache = ToldEngine(completes=False), ScriptedCache()
    async with FakePublisher() as publisher, working(publisher, engine=engine) as bench:
        await publisher.publish(cache.store(tokens(1, 2)))
        await until(lambda: bench.log.of(InstanceReported))
        refused = await bench.commands.request(
            f"pm.default.cmd.resync.{INSTANCE}", ResyncCache(instance=INSTANCE, reason="test"), timeout=WallSeconds(10)
        )
        engine.away = True
        await until(lambda: not bench.log.of(InstanceReported)[-1].serving)
        before = bench.log.held()
        engine.away = False
        engine.becomes(completes=True)
        await until(lambda: bench.log.held() == cache.keys(CHAIN))

        assert isinstance(refused, ResyncAnswered)
        assert not refused.accepted
        assert before == set()
        assert bench.log.held() == cache.keys(CHAIN)
        said = [(event.cache, event.completes) for event in bench.log.of(InstanceJoined)]
        assert (said[0], said[-1]) == (("no_events", False), ("empty", True))


async def test_nothing_is_said_before_the_engine_answers() -> None:
    engine = ToldEngine(away=True)
    async with FakePublisher() as publisher, working(publisher, engine=engine) as bench:
        await asyncio.sleep(0.3)
        assert not bench.log.events
        assert not bench.board.whole

        engine.away = False
        await until(lambda: bench.log.of(InstanceJoined))
        assert bench.log.of(InstanceJoined)
        assert bench.board.whole


# The ledger


def test_what_does_not_fit_one_message_goes_on_in_the_next() -> None:
    runs = [Run(pack_keys([BlockKey(n)]), BlockKey(0)) for n in range(1, 4)]
    runs.append(Run(pack_keys([BlockKey(n) for n in range(10, 40)]), BlockKey(3)))

    cut = list(portions(runs, bytes_max=150))

    assert all(sum(RUN_OVERHEAD_BYTES + len(run.keys) for run in portion) <= 150 for portion in cut)
    links = [link for portion in cut for run in portion for link in pairwise([run.parent, *unpack_keys(run.keys)])]
    assert links == [link for run in runs for link in pairwise([run.parent, *unpack_keys(run.keys)])]


def test_a_cache_too_large_for_one_snapshot_is_continued_by_stores() -> None:
    ledger = CacheEventSequencer(INSTANCE, Epoch(1))
    keys = [BlockKey(n) for n in range(1, 100_001)]

    first, *rest = ledger.snapshot(0.0, [Run(pack_keys(keys))])

    assert isinstance(first, CacheSnapshot)
    assert rest
    assert all(isinstance(event, BlocksStored) for event in rest)
    assert [event.sequence for event in (first, *rest)] == list(range(1, len(rest) + 2))
    assert all(len(encode(event)) < 1_000_000 for event in (first, *rest))


# The engine's HTTP side

METRICS = """\
# HELP vllm:num_requests_waiting Number of requests waiting.
vllm:num_requests_waiting{engine="0",model_name="m"} 4.0
vllm:num_requests_running{engine="0",model_name="m"} 7.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:num_requests_waiting_by_reason{reason="x"} 99.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",num_gpu_blocks="1000",engine="0"} 1.0
"""


@asynccontextmanager
async def http_engine() -> AsyncIterator[tuple[str, dict[str, Any]]]:
    pages: dict[str, Any] = {
        "/health": "",
        "/v1/models": '{"data":[{"id":"poet","parent":"m"},{"id":"m","max_model_len":4096,"parent":null}]}',
        "/version": '{"version":"0.32.0"}',
        "/metrics": METRICS,
    }

    async def answer(request: web.Request) -> web.Response:
        page = pages.get(request.path, 503)
        return web.Response(status=page) if isinstance(page, int) else web.Response(text=page)

    server = web.Application()
    server.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(server)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", pages
    finally:
        await runner.cleanup()


async def test_the_engine_is_described_and_its_load_read_from_vllms_pages() -> None:
    async with http_engine() as (url, pages), HttpEngine(url) as engine:
        facts = await engine.describe()
        load = await engine.load()
        pages["/metrics"] = METRICS.replace('num_gpu_blocks="1000"', 'kv_cache_size_tokens="900",num_gpu_blocks="None"')
        said = await engine.describe()

        assert facts == EngineFacts(
            model="m",
            max_model_len=4096,
            version="0.32.0",
            block_tokens=16,
            kv_capacity_tokens=16_000,
            further_names=FurtherNames(adapters=("poet",)),
        )
        assert load == EngineLoad(
            waiting=4, running=7, kv_usage=0.25, further_names=facts.further_names, model="m", max_model_len=4096
        )
        assert said.kv_capacity_tokens == 900


@pytest.mark.parametrize(
    ("completions", "embeddings", "completes"),
    [(404, 405, False), (405, 405, True), (405, 404, True), (404, 404, True)],
)
async def test_an_engine_that_has_vectors_and_no_completions_does_not_complete(
    completions: int, embeddings: int, completes: bool
) -> None:
    async with http_engine() as (url, pages), HttpEngine(url) as engine:
        pages |= {"/v1/completions": completions, "/v1/embeddings": embeddings, "/pooling": 404}

        assert (await engine.describe()).completes == completes


async def test_an_engine_that_is_not_healthy_or_not_there_is_away() -> None:
    async with http_engine() as (url, pages), HttpEngine(url) as engine:
        del pages["/health"]
        with pytest.raises(EngineUnreachableError, match="status 503") as unhealthy:
            await engine.load()
    async with HttpEngine(url) as engine:
        with pytest.raises(EngineUnreachableError) as gone:
            await engine.load()

    assert not unhealthy.value.refused
    assert gone.value.refused


@pytest.mark.parametrize(
    ("step", "error"),
    [
        ("getaddrinfo", socket.gaierror(-3, "try again")),
        ("sock_connect", OSError(errno.EMFILE, "too many open files")),
        ("sock_connect", OSError(errno.EHOSTUNREACH, "no route to host")),
    ],
)
async def test_an_engine_that_cannot_be_reached_may_well_listen(
    step: str, error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise error

    async with http_engine() as (url, _), HttpEngine(url.replace("127.0.0.1", "localhost")) as engine:
        monkeypatch.setattr(socket if step == "getaddrinfo" else asyncio.get_running_loop(), step, failing)
        with pytest.raises(EngineUnreachableError) as unreachable:
            await engine.load()

    assert not unreachable.value.refused


async def test_a_name_all_of_whose_addresses_refuse_has_nobody_who_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    def two(_host: object, port: int, *_: object, **__: object) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"127.0.0.{n}", port)) for n in (2, 3)]

    async with http_engine() as (url, _):
        pass
    async with HttpEngine(url.replace("127.0.0.1", "localhost")) as engine:
        monkeypatch.setattr(socket, "getaddrinfo", two)
        with pytest.raises(EngineUnreachableError) as gone:
            await engine.load()

    assert gone.value.refused


async def test_engines_whose_names_hang_hold_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as the event loop has threads, and more."""
    ended, known = threading.Event(), socket.getaddrinfo

    def getaddrinfo(host: str, *arguments: Any, **options: Any) -> list[Any]:
        if host.startswith("slow"):
            ended.wait(60)
        return known("127.0.0.1", *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    async with http_engine() as (url, _), AsyncExitStack() as stack:
        *slow, engine = [
            await stack.enter_async_context(HttpEngine(url.replace("127.0.0.1", name), seconds_max=10.0))
            for name in (*(f"slow-{number}" for number in range(40)), "gpu")
        ]
        waiting = [asyncio.create_task(each.load()) for each in slow]
        await asyncio.sleep(0.1)
        try:
            assert (await engine.load()).running == 7
        finally:
            ended.set()
            await asyncio.gather(*waiting, return_exceptions=True)


async def test_while_the_lookup_of_an_engines_name_hangs_its_last_address_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hangs, hung, ended, known = threading.Event(), threading.Event(), threading.Event(), socket.getaddrinfo

    def getaddrinfo(_host: str, *arguments: Any, **options: Any) -> list[Any]:
        if hangs.is_set():
            hung.set()
            ended.wait(60)
        return known("127.0.0.1", *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    anew = partialmethod(aiohttp.TCPConnector.__init__, ttl_dns_cache=0, force_close=True)
    monkeypatch.setattr(aiohttp.TCPConnector, "__init__", anew)  # a connection and a lookup for each page
    async with http_engine() as (url, _), HttpEngine(url.replace("127.0.0.1", "gpu")) as engine:
        before = await engine.load()
        hangs.set()
        try:
            assert await engine.load() == before
            assert hung.is_set()
        finally:
            ended.set()


def test_the_instance_is_named_after_the_engines_port() -> None:
    def named(*urls: str, **settings: Any) -> list[str]:
        return [target.instance for target in listed_targets(WorkerSettings(engine_url=urls, **settings))]

    assert named("http://10.0.0.7:8101") == ["engine-8101"]
    assert named("http://gpu", instance="left-one") == ["left-one"]
    assert named("http://10.0.0.7:8101", "http://10.0.0.8:8101") == ["10-0-0-7-8101", "10-0-0-8-8101"]
    with pytest.raises(click.UsageError, match="cannot be an instance"):
        named("http://gpu", instance="Engine 1")


@dataclass
class ScriptedSource:
    """Events as a test says, of an engine without a replay socket."""

    said: asyncio.Queue[EngineItem] = field(default_factory=asyncio.Queue)
    replays: bool = False
    certain: bool = False
    catching_up: bool = False
    cursor: Cursor | None = None

    async def items(self, after: Cursor | None = None) -> AsyncGenerator[EngineItem, None]:
        while True:
            yield await self.said.get()


def soon_expiring(source: ScriptedSource, **how: Any) -> AbstractAsyncContextManager[WorkerBench]:
    """A worker that gives blocks up after a tenth of a second."""
    return working(source, unconfirmed_wall_seconds=WallSeconds(0.1), **{"report_seconds": 0.05} | how)


async def test_what_is_in_doubt_is_given_up_although_the_log_is_away() -> None:
    source, cache, before = ScriptedSource(), ScriptedCache(), expired()
    async with soon_expiring(source) as bench:
        source.said.put_nowait(EngineAttached(exact=False))
        await until(lambda: bench.log.of(InstanceJoined))
        bench.log.broker.disconnect()
        for sequence in range(200):
            source.said.put_nowait(batch_of(sequence, cache.store(tokens(sequence, blocks=2))))
            await asyncio.sleep(0.01)
            if expired() > before:
                break
        given_up = expired() - before
        bench.log.broker.reconnect()

    assert given_up > 0


async def test_an_engine_that_does_not_answer_is_not_offered_again_by_a_new_epoch() -> None:
    """As it would be by blocks that nothing confirms meanwhile. They are given up once it answers."""
    engine, source = ToldEngine(), ScriptedSource(replays=True, certain=True)
    async with soon_expiring(source, engine=engine) as bench:
        source.said.put_nowait(EngineAttached(exact=True))
        source.said.put_nowait(batch_of(0, ScriptedCache().store(tokens(1, blocks=2))))
        await until(bench.log.held)
        held, before, source.certain, engine.away, asked = bench.log.held(), expired(), False, True, engine.asked
        await until(lambda: engine.asked >= asked + 10)
        away = len(bench.log.of(InstanceJoined)), expired() - before
        engine.away = False
        await until(lambda: len(bench.log.of(InstanceJoined)) == 2)

    assert held
    assert away == (1, 0.0)
    assert [joined.cache for joined in bench.log.of(InstanceJoined)] == ["empty", "unknown"]


def expired() -> float:
    """Engine blocks that any worker of this process has given up."""
    expired = next(family for family in REGISTRY.collect() if family.name == "pointsman_kv_blocks_expired")
    return sum(sample.value for sample in expired.samples if sample.name.endswith("_total"))


def batch_of(sequence: int, *events: Any) -> EngineBatch:
    return decode_batch(sequence, msgspec.msgpack.encode([0.0, list(events), 0]))


def state_after(events: list[LogEvent]) -> State:
    """With a probe that found equal keys."""
    state = State(PoolSettings(block_tokens=2 * BLOCK))
    for event in events:
        state.apply(event)
    (newest,) = {event.epoch for event in events[-1:] if isinstance(event, InstanceReported)}
    state.apply(InstanceProbed(at=events[-1].at, instance=INSTANCE, epoch=newest, parity=True))
    return state


async def test_more_missed_batches_than_a_number_of_the_log_can_say_are_as_many_as_it_can() -> None:
    source, cache = ScriptedSource(), ScriptedCache()
    async with working(source, report_seconds=0.06) as bench:
        source.said.put_nowait(EngineAttached(exact=True))
        await until(lambda: bench.log.of(InstanceJoined))
        for _ in range(2):
            source.said.put_nowait(EngineGap(2**60, "not replayed"))
        await until(lambda: bench.log.of(CacheGap))
        source.said.put_nowait(batch_of(1, cache.store(tokens(1, 2))))
        await until(lambda: bench.log.held())

        assert bench.log.of(CacheGap)[-1].missed == WHOLE_MAX
        assert bench.log.held() == cache.keys(CHAIN)


@pytest.mark.parametrize("lost_first", [True, False])
async def test_a_loss_after_a_clear_leaves_the_cache_unknown_and_one_before_it_does_not(lost_first: bool) -> None:
    source, cache = ScriptedSource(certain=True, replays=True), ScriptedCache()
    async with working(source, report_seconds=0.06, flush_ms=200.0) as bench:
        source.said.put_nowait(EngineAttached(exact=True))
        await until(lambda: bench.log.of(InstanceJoined))
        source.said.put_nowait(EngineGap(1, "first"))
        await until(lambda: bench.log.of(CacheGap) and bench.log.of(CacheSnapshot))
        both: list[EngineItem] = [batch_of(3, cache.clear(), cache.store(tokens(1, 2))), EngineGap(1, "second")]
        for item in reversed(both) if lost_first else both:
            source.said.put_nowait(item)
        await until(lambda: len(bench.log.of(CacheGap)) > 1 and bench.log.held())
        bench.service.state.log_report()
        reports = len(bench.log.of(InstanceReported))
        await until(lambda: len(bench.log.of(InstanceReported)) > reports)
        last = [n for n, event in enumerate(bench.log.events) if isinstance(event, InstanceReported)][-1]
        instance = state_after(bench.log.events[: last + 1]).fleet[INSTANCE]

        assert (instance.knowledge is Knowledge.EXACT) == lost_first
        assert bench.log.held() == cache.keys(CHAIN)
        assert [said.epoch for said in bench.log.of(InstanceJoined)] == sorted(
            {said.epoch for said in bench.log.of(InstanceJoined)}
        )


async def test_a_clear_that_is_written_with_a_snapshot_makes_the_cache_exact() -> None:
    source, cache = ScriptedSource(certain=True, replays=True), ScriptedCache()
    async with working(source, report_seconds=0.06) as bench:
        source.said.put_nowait(EngineAttached(exact=True))
        await until(lambda: bench.log.of(InstanceJoined))
        source.said.put_nowait(EngineGap(1, "not replayed"))
        source.said.put_nowait(batch_of(2, cache.clear(), cache.store(tokens(1, 2))))
        await until(lambda: bench.log.held())
        bench.service.state.log_report()
        reports = len(bench.log.of(InstanceReported))
        await until(lambda: len(bench.log.of(InstanceReported)) > reports)
        events = bench.log.events[:]
        last = [n for n, event in enumerate(events) if isinstance(event, InstanceReported)][-1]

        assert [type(event) for event in events if isinstance(event, CacheEvent)] == [
            CacheGap,
            CacheCleared,
            CacheSnapshot,
        ]
        assert [said.cache for said in bench.log.of(InstanceJoined)] == ["empty", "unknown"]
        assert state_after(events[: last + 1]).fleet[INSTANCE].knowledge is Knowledge.EXACT
        assert bench.log.held() == cache.keys(CHAIN)


async def test_an_engine_that_ends_an_epoch_with_each_batch_gets_a_new_one_a_second_and_nothing_is_lost() -> None:
    source, cache, batches = ScriptedSource(certain=True, replays=True), ScriptedCache(), 40
    async with working(source, report_seconds=0.06) as bench:
        source.said.put_nowait(EngineAttached(exact=True))
        await until(lambda: bench.log.of(InstanceJoined))
        for number in range(batches):
            source.said.put_nowait(
                batch_of(number, cache.clear(), cache.store(tokens(number, number)), {"type": "BlockStored"})
            )
            await asyncio.sleep(0.03)
        await until(lambda: bench.log.held() == cache.keys(CHAIN))
        joins = bench.log.of(InstanceJoined)

        assert bench.log.held() == cache.keys(CHAIN)
        assert sum(gap.missed for gap in bench.log.of(CacheGap)) == batches
        assert min(later.at - earlier.at for earlier, later in pairwise(joins)) > 0.9
        assert (joins[0].cache, {said.cache for said in joins[1:]}) == ("empty", {"unknown"})


async def test_an_engine_that_clears_and_then_boasts_of_more_than_fits_is_not_known_by_that_clear() -> None:
    source, cache = ScriptedSource(certain=True, replays=True), ScriptedCache()
    async with working(source, report_seconds=0.06) as bench:
        source.said.put_nowait(EngineAttached(exact=False))
        await until(lambda: bench.log.of(InstanceJoined))
        source.said.put_nowait(batch_of(0, cache.clear(), *(cache.store(tokens(n, n)) for n in range(600))))
        await until(lambda: bench.log.of(CacheSnapshot))

        assert not bench.log.of(CacheCleared)
        assert bench.log.of(InstanceJoined)[-1].cache == "unknown"


async def test_an_event_that_can_never_be_written_is_not_retried_and_a_new_epoch_goes_on_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writer, "APPEND_RETRY_SECONDS_MAX", WallSeconds(0.05))
    monkeypatch.setattr(session, "WHOLE_MAX", 2**60)
    source, cache = ScriptedSource(), ScriptedCache()
    async with working(source, report_seconds=0.06) as bench:
        source.said.put_nowait(EngineAttached(exact=True))
        await until(lambda: bench.log.of(InstanceJoined))
        source.said.put_nowait(batch_of(0, cache.store(tokens(1, 2))))
        source.said.put_nowait(EngineGap(2**60, "not replayed"))
        await until(lambda: len(bench.log.of(InstanceJoined)) > 2 and bench.log.held() and bench.board.whole)

        assert not bench.log.of(CacheGap)
        assert bench.log.of(InstanceJoined)[-1].cache == "unknown"
        assert bench.log.held() == cache.keys(CHAIN)
        assert bench.board.whole


async def test_an_engine_whose_facts_cannot_be_written_is_reported_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writer, "APPEND_RETRY_SECONDS_MAX", WallSeconds(0.05))

    async with working(None, engine=ToldEngine(block_tokens=100_000)) as bench:
        await until(lambda: "cache events" in bench.board.lacks)
        lacks = dict(bench.board.lacks)

    assert "InstanceJoined cannot be written" in lacks["cache events"]
    assert not bench.log.of(InstanceJoined)


async def test_a_rejoin_above_an_epoch_that_none_can_follow_is_refused_and_the_worker_goes_on() -> None:
    async with working(None) as bench:
        await until(lambda: bench.log.of(InstanceReported))
        command = ResyncCache(instance=INSTANCE, reason="test", rejoin=True, above=Epoch(WHOLE_MAX))
        answer = await bench.commands.request(f"pm.default.cmd.resync.{INSTANCE}", command, timeout=WallSeconds(10))
        before = len(bench.log.of(InstanceReported))
        await until(lambda: len(bench.log.of(InstanceReported)) > before)

        assert isinstance(answer, ResyncAnswered)
        assert not answer.accepted
        assert len(bench.log.of(InstanceReported)) > before


async def test_a_worker_that_shares_its_name_leaves_the_others_question_to_the_other() -> None:
    async with working(None) as bench:
        await until(lambda: bench.log.of(InstanceReported))
        epoch, subject = bench.log.of(InstanceReported)[-1].epoch, f"pm.default.cmd.resync.{INSTANCE}"
        command = ResyncCache(instance=INSTANCE, reason="test", rejoin=True, above=epoch, epoch=Epoch(epoch + 1))
        with pytest.raises(CommandTimeoutError):
            await bench.commands.request(subject, command, timeout=WallSeconds(0.2))
        assert {event.epoch for event in bench.log.of(InstanceJoined)} == {epoch}

        command = msgspec.structs.replace(command, epoch=epoch)
        answer = await bench.commands.request(subject, command, timeout=WallSeconds(10))
        assert isinstance(answer, ResyncAnswered)
        assert answer.accepted
        await until(lambda: bench.log.of(InstanceReported)[-1].epoch > epoch)


@pytest.mark.parametrize("ends", ["catches up", "pauses"])
async def test_the_past_of_an_engine_is_not_told_and_nothing_of_it_expires(ends: str) -> None:
    source, cache = ScriptedSource(certain=True, replays=True, catching_up=True), ScriptedCache()
    async with soon_expiring(source, pauses=True) as bench:
        log = bench.log
        source.said.put_nowait(EngineAttached(exact=True))
        past = (cache.store(tokens(1, 2)), cache.evict(tokens(1, 2)), cache.store(tokens(1, 3)))
        for sequence, event in enumerate(past):
            source.said.put_nowait(batch_of(sequence, event))
        await until(lambda: len(log.of(InstanceReported)) > 6)  # for longer than what nobody confirms is believed
        assert not log.of(BlocksStored) + log.of(BlocksRemoved) + log.of(CacheSnapshot)
        assert not any(event.certain for event in (*log.of(InstanceJoined), *log.of(InstanceReported)))

        if ends == "catches up":
            source.catching_up = False
            await until(lambda: log.of(InstanceReported)[-1].certain)
            assert not log.of(BlocksRemoved)
            assert len(log.of(BlocksStored)) == 1
            assert log.held() == cache.keys(CHAIN)
            assert log.of(InstanceReported)[-1].blocks == len(log.held())
            assert [(event.cache, event.cache_detail) for event in log.of(InstanceJoined)] == [("empty", "")]


async def test_the_lag_of_events_is_that_of_the_newest_live_batch_and_never_negative() -> None:
    source, cache, sequences = ScriptedSource(certain=True, replays=True), ScriptedCache(), itertools.count()
    async with soon_expiring(source, pauses=True) as bench:
        source.said.put_nowait(EngineAttached(exact=True))
        state = bench.service.state

        async def lag_after(date: float) -> float | None:
            sequence = next(sequences)
            payload = msgspec.msgpack.encode([date, [cache.store(tokens(sequence, 2))], 0])
            source.said.put_nowait(decode_batch(sequence, payload))
            held = 2 * (sequence + 1)
            await until(lambda: state.session and state.followed_session()[1].device.held_blocks == held)
            return REGISTRY.get_sample_value("pointsman_kv_events_lag_seconds", {"pool": "default", "engine": INSTANCE})

        began = time.time()
        late = await lag_after(began - 100.0)
        assert late is not None
        assert 100.0 <= late <= 100.0 + time.time() - began
        for impossible in (math.nan, -math.inf, 0.0, -5.0):
            assert await lag_after(impossible) == late
        source.catching_up = True
        assert await lag_after(time.time() - 5_000.0) == late, "the age of what is replayed is no lag"
        source.catching_up = False
        assert await lag_after(time.time() + 3_600.0) == 0.0
        assert await lag_after(math.inf) == 0.0


async def test_missed_batches_are_told_at_once_when_the_last_was_read_and_as_one_change() -> None:
    source, cache = ScriptedSource(certain=True, replays=True), ScriptedCache()
    async with soon_expiring(source, pauses=True, report_seconds=3600.0) as bench:
        source.said.put_nowait(EngineAttached(exact=True))

        def say(sequence: int, event: Event | None) -> None:
            source.said.put_nowait(batch_of(sequence, event))

        say(0, cache.store(tokens(1, 2)))
        await until(lambda: bench.log.held() == cache.keys(CHAIN))
        source.catching_up = True
        for number in range(3, 8):
            say(number, cache.store(tokens(number, number)))
            say(number, cache.evict(tokens(number, number)))
        say(8, cache.store(tokens(1, 3)))
        await until(source.said.empty)
        source.catching_up = False
        source.said.put_nowait(EngineReplayed(11))
        await until(lambda: bench.log.held() == cache.keys(CHAIN))

        assert bench.log.held() == cache.keys(CHAIN)
        assert len(bench.log.of(BlocksStored)) == 2
