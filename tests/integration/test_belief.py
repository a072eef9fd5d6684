"""What is believed of an engine's cache is what is in it, or is said to be uncertain, whatever the engine does.

An engine of the test's own has a true cache and publishes on real ZMQ sockets. It loses, repeats and reorders messages,
restarts, offloads and lies, with and without a replay socket. A real worker follows it, a real scheduler folds what the worker
writes. Beside each case a monitor holds belief against truth all the time; it counts looks, not seconds, so that a machine that
stands still is no failure. Times of the real thing are shortened (see BOUNDS). All cases run side by side.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

from pointsman.adapters.clocks import ScaledClock
from pointsman.adapters.kv_events import continuity_tasks, sockets
from pointsman.adapters.kv_events.reader import KvEventReader
from pointsman.adapters.kv_events.sockets import KvEndpoint
from pointsman.contracts.block_keys import KeyChain
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.commands import RouteGranted
from pointsman.contracts.fleet import InstanceJoined, InstanceProbed
from pointsman.contracts.requests import PrefillFinished
from pointsman.contracts.subjects import command_subject
from pointsman.ports import EngineTarget
from pointsman.primitives import BlockKey, InstanceId, PoolName, RequestId, WallSeconds
from pointsman.state import holdings, reported_hits
from pointsman.state.fleet import Instance, Knowledge
from pointsman_lab.memory.log import MemoryBroker
from pointsman_scheduler import resync
from pointsman_scheduler.service import SchedulerService
from pointsman_worker.settings import WorkerSettings
from tests.support.events import finished, route
from tests.support.fake_publisher import BLOCK, Event, FakePublisher, ScriptedCache
from tests.support.log_reading import events_in
from tests.support.services import ToldEngine, running_scheduler, worker_over
from tests.support.waiting import eventually

POOL = PoolName("default")
INSTANCE = InstanceId("engine-1")
SPAN = 2
"""Engine blocks in a block of the pool."""
CHAIN = KeyChain(secret=b"pointsman-development", model="m", block_tokens=SPAN * BLOCK)

LOOK_SECONDS = 0.02
UNCONFIRMED_SECONDS = 2.0
"""Without a replay socket, what a busy machine takes longer to tell is forgotten for good."""
WRONG_LOOKS_MAX = round(2.0 / LOOK_SECONDS)
"""How long `exact` may be wrong: in the real thing 5 s, most of them the 2 s of silence and the 3 s in which a contradiction
settles, here 0.2 s and 0.3 s."""
PHANTOM_LOOKS_MAX = round(3.5 / LOOK_SECONDS)
"""How long anything may be believed that is not there: in the real thing a minute, of which 45 s are the decay."""
BOUNDS: list[tuple[object, str, float]] = [
    (holdings, "CONFIRMATION_WALL_SECONDS", 0.1),
    (holdings, "DELIVERED_WALL_SECONDS", UNCONFIRMED_SECONDS),
    (reported_hits, "SETTLING_WALL_SECONDS", 0.3),
    (sockets, "REPLAY_FRAME_SECONDS", 0.5),
    (continuity_tasks, "REPLAY_PAUSE_SECONDS", 0.5),
    (resync, "PERIOD_WALL_SECONDS", 0.1),
]


class CacheBench:
    """An engine, its worker and a leader; `cache` is the truth."""

    def __init__(self, publisher: FakePublisher, engine: ToldEngine) -> None:
        self.publisher = publisher
        self.engine = engine
        self.cache = ScriptedCache()
        self.clock = ScaledClock()
        self.broker = MemoryBroker(POOL)
        self.client = self.broker.client(self.clock, name="test")
        self.exact_and_wrong = 0
        """Most looks in a row at one key about which the index was wrong while it was said to be exact."""
        self.oldest_phantom = 0
        """Most looks at one key that was believed and not there."""
        self.most_believed = 0
        self.predicted_tokens = 0
        """As cached, of the last request."""
        self.failures: list[Exception] = []
        """Of the worker, the probe and the monitor."""
        self._requests = 0
        self._scheduler: SchedulerService | None = None

    @property
    def instance(self) -> Instance | None:
        assert self._scheduler is not None
        return self._scheduler.state.fleet.get(INSTANCE)

    @property
    def truth(self) -> set[BlockKey]:
        return self.cache.keys(CHAIN)

    @property
    def indexed(self) -> frozenset[BlockKey]:
        """What is believed by the engine's events."""
        assert self._scheduler is not None
        return self._scheduler.state.index.keys(INSTANCE)

    @property
    def believed(self) -> frozenset[BlockKey]:
        """The same, and what it delivered."""
        assert self._scheduler is not None
        return self.indexed | self._scheduler.state.delivered.keys(INSTANCE)

    @property
    def knowledge(self) -> tuple[Knowledge, str]:
        return (self.instance.knowledge, self.instance.knowledge_reason) if self.instance else (Knowledge.BLIND, "")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        events = KvEventReader(
            KvEndpoint(self.publisher.endpoint, self.publisher.replay_endpoint), idle_check_seconds=0.2
        )
        link = self.broker.client(self.clock, name="worker")
        settings = WorkerSettings(block_tokens=SPAN * BLOCK, flush_ms=2.0, report_seconds=WallSeconds(0.1))
        target, unconfirmed = EngineTarget(instance=INSTANCE, url="http://e:1"), WallSeconds(UNCONFIRMED_SECONDS)
        worker = worker_over(
            link, self.clock, self.engine, target, settings, events, unconfirmed_wall_seconds=unconfirmed
        )
        leader = self.broker.client(self.clock, name="s")
        async with running_scheduler(leader, self.clock, block_tokens=SPAN * BLOCK) as self._scheduler:
            tasks = [asyncio.create_task(work) for work in (worker.run(), self._probe(), self._watch())]
            try:
                await eventually(lambda: self._scheduler and self._scheduler.leading and self.instance)
                await self.publisher.subscribed()
                yield
            finally:
                await worker.leave("test over")
                for task in tasks:
                    task.cancel()
                ends = await asyncio.gather(*tasks, return_exceptions=True)
                await self._scheduler.resign()
                self.failures = [end for end in ends if isinstance(end, Exception)]

    async def _probe(self) -> None:
        """Every life is probed and found in order, as an ingress would."""
        probed = 0
        while True:
            if self.instance is not None and self.instance.epoch > probed:
                probed = self.instance.epoch
                verdict = InstanceProbed(at=self.clock.now(), instance=INSTANCE, epoch=self.instance.epoch, parity=True)
                await self.client.log.append(verdict)
            await asyncio.sleep(LOOK_SECONDS)

    async def _watch(self) -> None:
        wrong, ages = dict[BlockKey, int](), dict[BlockKey, int]()
        while True:
            exact = self.knowledge[0] is Knowledge.EXACT
            wrong = {key: wrong.get(key, 0) + 1 for key in self.indexed ^ self.truth if exact}
            ages = {key: ages.get(key, 0) + 1 for key in self.believed - self.truth}
            self.exact_and_wrong = max(self.exact_and_wrong, *wrong.values(), 0)
            self.oldest_phantom = max(self.oldest_phantom, *ages.values(), 0)
            self.most_believed = max(self.most_believed, len(self.indexed))
            await asyncio.sleep(LOOK_SECONDS)

    # What the engine does

    async def store(self, *bits: int, blocks: int = SPAN, **how: bool) -> None:
        """A prompt of `blocks` engine blocks for each bit becomes resident."""
        await self.publisher.publish(self.cache.store(prompt(*bits, blocks=blocks)), **how)

    async def evict(self, *bits: int, blocks: int = SPAN, **how: bool) -> None:
        """The last bit's blocks go, the last first."""
        tokens = prompt(*bits, blocks=blocks)
        events = [self.cache.evict(tokens[: len(tokens) - BLOCK * gone]) for gone in range(blocks)]
        await self.publisher.publish(*events, **how)

    async def restart(self, *, seen: bool = True) -> None:
        """`seen`: it is down for as long as the worker needs to notice."""
        self.cache = ScriptedCache(life=2)
        if seen:
            self.engine.away = True
            await eventually(lambda: self.instance is not None and not self.instance.serving)
        await self.publisher.restart()
        self.engine.away = False

    async def ask(self, tokens: Sequence[int], *, told: bool = True, lie: int | None = None) -> int:
        """A request is placed, computed and finished; how many tokens of it were cached. `told`: its blocks are published. `lie`:
        as many cached tokens the engine says that it had."""
        self._requests += 1
        request, now = RequestId(f"r{self._requests}"), self.clock.now()
        keys = CHAIN.extend(CHAIN.root(), list(tokens))
        command = route(request, keys, arrived_at=now, prompt_tokens=len(tokens), max_output_tokens=1)
        granted = await self.client.commands.request(command_subject(POOL, "route"), command, timeout=WallSeconds(5))
        assert isinstance(granted, RouteGranted)
        self.predicted_tokens = granted.hit_tokens
        cached = self.cached(tokens)
        event = self.cache.store(tokens[: len(tokens) // BLOCK * BLOCK])
        if told:
            await self.publisher.publish(event)
        await self.append(
            PrefillFinished(at=self.clock.now(), request=request, instance=INSTANCE, ttft=0.0, prefill=0.0),
            finished(
                request,
                INSTANCE,
                at=self.clock.now(),
                e2e=0.0,
                prompt_tokens=len(tokens),
                cached_tokens=cached if lie is None else lie,
                ttft=0.0,
                predicted_cached_tokens=granted.hit_tokens,
            ),
        )
        return cached

    def cached(self, tokens: Sequence[int]) -> int:
        """As vLLM reports it: whole blocks, and never the last token."""
        ends = range(BLOCK, len(tokens), BLOCK)
        return next((end - BLOCK for end in ends if ("", tuple(tokens[:end])) not in self.cache.held), ends[-1])

    async def append(self, *events: LogEvent) -> None:
        for event in events:
            await self.client.log.append(event)

    async def joins(self) -> list[InstanceJoined]:
        return [event for event in await events_in(self.client.log) if isinstance(event, InstanceJoined)]

    # What is expected

    async def is_exact(self) -> None:
        await eventually(
            lambda: self.knowledge[0] is Knowledge.EXACT and self.indexed == self.truth,
            seconds=6,
            what="exact knowledge of the truth",
        )

    async def believes_the_truth(self) -> None:
        await eventually(lambda: self.indexed == self.truth, seconds=6, what="belief in the truth")

    async def says(self, reason: str) -> None:
        """It is said that the cache is not known, and why, and what is not there is not believed for long."""
        await eventually(
            lambda: self.knowledge[0] is Knowledge.DEGRADED and reason in self.knowledge[1],
            seconds=6,
            what=f"that it is said: {reason!r}",
        )
        await eventually(lambda: self.believed <= self.truth, seconds=6, what="the end of phantoms")


def prompt(*bits: int, blocks: int = SPAN) -> list[int]:
    return [bit for bit in bits for _ in range(blocks * BLOCK)]


Script = Callable[[CacheBench], Awaitable[None]]


@dataclass(frozen=True)
class Case:
    script: Script
    name: str
    publisher: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)


CASES: list[Case] = []

REPLAY: dict[str, Any] = {}
NO_REPLAY: dict[str, Any] = {"replay": False}
SHORT_REPLAY: dict[str, Any] = {"buffer_steps": 1}


def case(*publishers: dict[str, Any], **engine: Any) -> Callable[[Script], Script]:
    """Add a script to the table, once for each kind of publisher."""

    def add(script: Script) -> Script:
        for kind in publishers or (REPLAY,):
            words = [
                "without_replay" if kind == NO_REPLAY else "",
                *(f"{k}_{v}" for k, v in kind.items() if k != "replay"),
            ]
            CASES.append(Case(script, "-".join(filter(None, [script.__name__, *words])), kind, engine))
        return script

    return add


NO_SOCKET = "no replay socket"


@case(REPLAY, {"by_position": True})
async def stores_branches_and_evictions(bench: CacheBench) -> None:
    await bench.store(1, 2, 3)
    await bench.store(1, 2, 4)
    await bench.evict(1, 2, 3)
    await bench.is_exact()


@case(NO_REPLAY)
async def a_removal_is_lost_and_the_next_batch_shows_the_gap(bench: CacheBench) -> None:
    await bench.store(1, 2)
    await bench.believes_the_truth()
    await bench.evict(1, 2, lost=True)
    await bench.store(3)
    await bench.says("not replayed")


@case(NO_REPLAY)
async def a_removal_is_lost_before_silence(bench: CacheBench) -> None:
    await bench.publisher.publish(bench.cache.clear())
    await bench.store(1, 2)
    await bench.believes_the_truth()
    await bench.evict(1, 2, lost=True)
    await bench.says(NO_SOCKET)


@case()
async def a_dropped_removal_is_had_again(bench: CacheBench) -> None:
    await bench.store(1, 2, 3)
    await bench.evict(1, 2, 3, dropped=True)
    await bench.store(3)
    await bench.is_exact()
    await bench.evict(1, 2, dropped=True)
    await bench.is_exact()


@case(SHORT_REPLAY)
async def removals_have_left_the_buffer(bench: CacheBench) -> None:
    await bench.is_exact()
    await bench.store(1, 2)
    await bench.believes_the_truth()
    await bench.evict(1, 2, lost=True)
    await bench.store(3, lost=True)
    await bench.store(4)
    await bench.says("left the engine's buffer")
    await bench.publisher.publish(bench.cache.clear())
    await bench.is_exact()  # before the next batch takes the only place in the buffer
    await bench.store(5)
    await bench.is_exact()


@case()
async def the_engine_restarts(bench: CacheBench) -> None:
    await bench.store(1, 2)
    await bench.is_exact()
    await bench.restart()
    await bench.is_exact()
    await bench.store(3)
    await bench.is_exact()


@case()
async def the_engine_restarts_so_quickly_that_nobody_sees_it(bench: CacheBench) -> None:
    await bench.store(1, 2)
    await bench.is_exact()
    await bench.restart(seen=False)
    await bench.is_exact()


@case(NO_REPLAY)
async def the_engine_restarts_and_is_idle(bench: CacheBench) -> None:
    await bench.publisher.publish(bench.cache.clear())
    await bench.store(1, 2)
    await bench.believes_the_truth()
    await bench.restart()
    await eventually(lambda: not bench.indexed, seconds=1.0, what="a fresh start without waiting for the decay")
    await bench.says(NO_SOCKET)


@case(REPLAY, NO_REPLAY)
async def the_engine_ends_and_stays_away(bench: CacheBench) -> None:
    await bench.publisher.publish(bench.cache.clear())
    await bench.store(1, 2)
    await bench.believes_the_truth()
    bench.engine.away = True
    await eventually(lambda: bench.instance and not bench.instance.serving)
    await asyncio.sleep(10 * LOOK_SECONDS)  # two reports
    assert bench.instance
    assert not bench.instance.serving
    assert len({join.epoch for join in await bench.joins()}) == 1


@case(NO_REPLAY)
async def the_engine_restarts_unseen_and_its_next_sequence_fits(bench: CacheBench) -> None:
    await bench.publisher.publish(bench.cache.clear())
    await bench.store(1, 2)
    await bench.store(1, 3)
    await bench.believes_the_truth()
    await bench.restart(seen=False)
    for bit in (4, 5, 6):
        await bench.store(bit, dropped=True)
    await bench.publisher.subscribed()
    await bench.store(7)
    await bench.says(NO_SOCKET)


@case(NO_REPLAY)
async def another_engine_takes_over_behind_a_proxy(bench: CacheBench) -> None:
    await bench.store(1, 2)
    await bench.store(1, 3)
    await bench.believes_the_truth()
    bench.cache = ScriptedCache(life=2)
    bench.publisher.begin_again()
    await bench.store(4)
    await bench.believes_the_truth()
    await bench.says(NO_SOCKET)


@case(REPLAY, NO_REPLAY)
async def the_connection_breaks_and_the_engine_lives_on(bench: CacheBench) -> None:
    await bench.publisher.publish(bench.cache.clear())
    await bench.store(1, 2)
    await bench.believes_the_truth()
    await bench.publisher.reconnect()
    await bench.publisher.subscribed()
    await bench.store(1, 3)
    if bench.publisher.replay_endpoint:
        await bench.is_exact()
    else:
        await bench.says("the connection was lost")


@case()
async def hashes_are_bytes_and_prompts_are_salted(bench: CacheBench) -> None:
    bench.cache = ScriptedCache(bytes_hashes=True)
    for salt in ("", "one", "two"):
        await bench.publisher.publish(bench.cache.store(prompt(1, 2), salt=salt))
    await bench.publisher.publish(bench.cache.evict(prompt(1, 2), salt="one"))
    await bench.is_exact()
    assert len(bench.indexed) == 5


@case()
async def blocks_in_the_middle_go_and_come_back(bench: CacheBench) -> None:
    await bench.store(1, 2, 3, 4)
    await bench.evict(1)
    await bench.is_exact()
    await bench.evict(1, 2, 3)
    await bench.is_exact()
    await bench.publisher.publish(bench.cache.store(prompt(1)), bench.cache.store(prompt(1, 2, 3)))
    await bench.is_exact()
    assert len(bench.indexed) == 4


@case()
async def messages_are_none_of_the_engines(bench: CacheBench) -> None:
    await bench.store(1, 2)
    await bench.publisher.publish_frames(b"kv", b"short", b"")
    await bench.publisher.publish_frames(b"two", b"frames")
    await bench.publisher.publish({"type": "BlockPromoted", "block_hashes": [1]})
    await bench.store(1, 3)
    await bench.is_exact()


@case(REPLAY, NO_REPLAY)
async def payloads_are_garbage(bench: CacheBench) -> None:
    await bench.store(1, 2)
    await bench.believes_the_truth()
    for payload in (b"\xc1", b"\x91" * 100_000, b""):
        await bench.publisher.publish_raw(payload)
    await bench.says("not understood")
    await bench.store(1, 3)
    await eventually(lambda: bench.truth & bench.indexed, what="belief in what came afterwards")


@case()
async def a_clear_stands_between_two_stores(bench: CacheBench) -> None:
    await bench.publisher.publish(bench.cache.store(prompt(1, 2)), bench.cache.clear(), bench.cache.store(prompt(1, 3)))
    await bench.is_exact()
    assert len(bench.indexed) == 2


@case()
async def batches_come_faster_than_they_are_written(bench: CacheBench) -> None:
    for bit in range(600):
        await bench.store(bit, dropped=bit % 50 == 7)
        if bit >= 100:
            await bench.evict(bit - 100, dropped=bit % 70 == 9)
    await bench.is_exact()


@case(REPLAY, NO_REPLAY)
async def everything_happens_at_random(bench: CacheBench) -> None:
    chance, lives = Random(3), 1
    for _ in range(150):
        what = chance.random()
        dropped = chance.random() < 0.15
        if what < 0.6:
            await bench.store(*(chance.randrange(4) for _ in range(chance.randrange(1, 5))), dropped=dropped)
        elif what < 0.85 and bench.cache.held:
            longest = max(bench.cache.held, key=lambda block: (len(block[1]), block))[1]
            await bench.publisher.publish(bench.cache.evict(longest), dropped=dropped)
        elif what < 0.9:
            await bench.publisher.publish(bench.cache.clear(), dropped=dropped)
        elif what < 0.98:
            await bench.publisher.repeat_newest()
        else:
            lives += 1
            await bench.publisher.restart()
            bench.cache = ScriptedCache(life=lives)
        await asyncio.sleep(chance.random() * 0.01)
    if bench.publisher.replay_endpoint:
        await bench.is_exact()
    else:
        await bench.says("")


@case()
async def children_come_before_their_parents(bench: CacheBench) -> None:
    parent = bench.cache.store(prompt(1))
    child = bench.cache.store(prompt(1, 2))
    await bench.publisher.publish(child)
    await bench.publisher.publish(parent)
    await bench.is_exact()


@case()
async def a_parent_is_never_stored(bench: CacheBench) -> None:
    await bench.is_exact()
    bench.cache.store(prompt(1))
    await bench.store(1, 2)
    await eventually(lambda: bench.knowledge[0] is not Knowledge.EXACT, seconds=6, what="uncertainty")
    await bench.says("follow one which never was")


@case(REPLAY, NO_REPLAY)
async def batches_are_repeated(bench: CacheBench) -> None:
    await bench.store(1, 2)
    await bench.store(1, 3)
    await bench.publisher.repeat(0)
    await bench.publisher.repeat(1)
    await bench.publisher.repeat(0)
    await bench.store(1, 4)
    await bench.believes_the_truth()
    assert len(await bench.joins()) == 1


@case(NO_REPLAY)
async def batches_are_reordered(bench: CacheBench) -> None:
    await bench.store(1, 2)
    await bench.store(1, 3, dropped=True)
    await bench.store(1, 4)
    await bench.publisher.repeat(1)
    await bench.believes_the_truth()
    assert len(await bench.joins()) == 1


@case()
async def batches_are_reordered_and_can_be_had_again(bench: CacheBench) -> None:
    await bench.store(1, 2)
    await bench.store(1, 3, dropped=True)
    await bench.evict(1, 2)
    await bench.publisher.repeat(1)
    await bench.is_exact()


@case()
async def blocks_are_offloaded(bench: CacheBench) -> None:
    event = bench.cache.store(prompt(1, 2))
    assert event is not None
    await bench.publisher.publish(event)
    for medium in ("CPU", "STORAGE"):
        await bench.publisher.publish(event | {"medium": medium, "token_ids": []})
        await bench.publisher.publish(
            {"type": "BlockRemoved", "block_hashes": event["block_hashes"], "medium": medium, "group_idx": 0}
        )
    await bench.is_exact()
    await bench.evict(1, 2)
    await bench.is_exact()


@case()
async def copies_are_stored_twice_and_removed_once(bench: CacheBench) -> None:
    event = bench.cache.store(prompt(1))
    assert event is not None
    await bench.publisher.publish(event, event)
    await bench.publisher.publish({"type": "BlockRemoved", "block_hashes": event["block_hashes"], "medium": "GPU"})
    await bench.is_exact()
    assert bench.indexed


@case(REPLAY, NO_REPLAY)
async def a_clear_is_lost(bench: CacheBench) -> None:
    await bench.store(1, 2)
    await bench.believes_the_truth()
    await bench.publisher.publish(bench.cache.clear(), dropped=True)
    if bench.publisher.replay_endpoint:
        await bench.is_exact()
    else:
        await bench.says("")
    assert not bench.indexed


@case(REPLAY, NO_REPLAY, kv_capacity_tokens=16 * BLOCK)
async def no_removal_is_ever_told(bench: CacheBench) -> None:
    """The engine evicts, the oldest prompt first, and says nothing of it."""
    for bit in range(40):
        if bit >= 8:
            tokens = prompt(bit - 8)
            for end in (len(tokens), BLOCK):
                bench.cache.evict(tokens[:end])
        await bench.store(bit)
        await asyncio.sleep(0.01)
    await bench.says("")
    assert bench.most_believed <= 16 // SPAN


@case(block_tokens=SPAN * BLOCK)
async def block_sizes_differ(bench: CacheBench) -> None:
    await bench.is_exact()
    await bench.store(1, 2)
    await bench.says(f"the engine's events have blocks of {BLOCK} tokens, its /metrics say {SPAN * BLOCK}")
    assert f"set --engine-block-tokens {BLOCK}" in bench.knowledge[1]


@case(REPLAY, NO_REPLAY)
async def an_event_is_not_understood(bench: CacheBench) -> None:
    await bench.store(1, 2)
    await bench.believes_the_truth()
    bench.cache.evict(prompt(1, 2))
    await bench.publisher.publish({"type": "BlockRemoved", "block_hashes": "none"})
    await bench.says("not understood")


@case()
async def the_replay_socket_stops_answering(bench: CacheBench) -> None:
    await bench.store(1, 2)
    await bench.is_exact()
    bench.publisher.answers_replays = False
    await bench.evict(1, 2, dropped=True)
    await bench.says(NO_SOCKET)
    await eventually(lambda: not bench.indexed, seconds=6, what="the decay of what nobody can confirm")
    bench.publisher.answers_replays = True
    await bench.says("could not be confirmed")


@case()
async def blocks_are_told_of_that_are_not_there(bench: CacheBench) -> None:
    lies = ScriptedCache()
    await bench.publisher.publish(lies.store(prompt(1, 2, 3, 4)))
    await eventually(lambda: len(bench.indexed) == 4, what="belief in the lie")
    for bit in (5, 6):
        assert await bench.ask(prompt(1, 2, 3, 4, bit), told=False) == 0 or bit == 6
        bench.cache = ScriptedCache()
    await bench.says("the engine had 0 tokens of a prompt cached, its events tell of 32")
    assert bench.oldest_phantom * LOOK_SECONDS < UNCONFIRMED_SECONDS, "what was a lie is forgotten, not left to decay"


@case()
async def blocks_are_there_that_are_not_told_of(bench: CacheBench) -> None:
    for _ in range(3):
        await bench.ask(prompt(1, 2, 3, 4), told=False)
    await bench.says("its events tell of 0")


@case()
async def it_is_told_that_nothing_was_cached_though_it_was(bench: CacheBench) -> None:
    for bit in (5, 6, 7):
        await bench.ask([*prompt(1, 2, 3, 4), *prompt(bit)], lie=0)
        await bench.believes_the_truth()
    await bench.says("the engine had 0 tokens of a prompt cached")


@case(NO_REPLAY)
async def hits_teach_what_events_do_not(bench: CacheBench) -> None:
    shared = prompt(1, 2, 3)
    await bench.ask(shared)
    taught_at = None
    for bit in range(10, 20):  # for longer than anything is believed that nothing confirms
        await asyncio.sleep(UNCONFIRMED_SECONDS / 5)
        asked_at, by_hits_alone = bench.clock.wall(), not bench.indexed
        assert await bench.ask([*shared, *prompt(bit)], told=False) == len(shared)
        if taught_at is not None and float(bench.clock.wall() - taught_at) < UNCONFIRMED_SECONDS:
            assert bench.predicted_tokens == len(shared), "a decision knows what hits taught"
        taught_at = asked_at if by_hits_alone else None
    assert not bench.indexed
    await bench.says("")


@case()
async def honest_evictions_under_load_are_no_contradiction(bench: CacheBench) -> None:
    chance, prompts = Random(7), [prompt(1, 2, 3, bit) for bit in range(10, 20)]
    for _ in range(60):
        tokens = chance.choice(prompts)
        await asyncio.gather(bench.ask(tokens), bench.ask(tokens))
        if chance.random() < 0.5:
            gone = sorted(bench.cache.held, key=lambda block: (len(block[1]), block[1]))[-2:]
            events: list[Event] = [bench.cache.evict(tokens) for _, tokens in reversed(gone)]
            await bench.publisher.publish(*events, dropped=chance.random() < 0.3)
    await bench.is_exact()
    assert len(await bench.joins()) == 1


async def _outcome(tried: Case) -> str:
    """What is wrong with a case; empty where nothing is."""
    async with FakePublisher(**tried.publisher) as publisher:
        bench = CacheBench(
            publisher, ToldEngine(**{"kv_capacity_tokens": 4_096, "max_model_len": 2_048} | tried.engine)
        )
        try:
            async with bench.running():
                try:
                    await tried.script(bench)
                except AssertionError as error:
                    return f"{error!r}; what is known: {bench.knowledge}"
                await asyncio.sleep(5 * LOOK_SECONDS)  # for the monitor to see how it ended
        except AssertionError as error:
            return f"{error!r}"
        if bench.failures:
            return repr(bench.failures)
        if bench.exact_and_wrong > WRONG_LOOKS_MAX:
            return f"said to be exact and wrong for {bench.exact_and_wrong * LOOK_SECONDS:.1f} s"
        if bench.oldest_phantom > PHANTOM_LOOKS_MAX:
            return f"a phantom lived for {bench.oldest_phantom * LOOK_SECONDS:.1f} s"
        return ""


async def _all_outcomes() -> dict[str, str]:
    outcomes = await asyncio.gather(*map(_outcome, CASES))
    return {tried.name: outcome for tried, outcome in zip(CASES, outcomes, strict=True)}


@pytest.fixture(scope="module")
def outcomes() -> Iterator[dict[str, str]]:
    with pytest.MonkeyPatch.context() as shortened:
        for module, name, seconds in BOUNDS:
            shortened.setattr(module, name, seconds)
        shortened.setattr("pointsman_worker.session.PARKED_SECONDS_MAX", 0.3)
        yield asyncio.run(_all_outcomes())


@pytest.mark.parametrize("name", [tried.name for tried in CASES])
def test_belief_is_the_truth_or_is_said_to_be_uncertain(name: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[name]
