"""Slower cache tiers in the fold: against a plain model of sets, and what loading back costs."""

from functools import reduce
from operator import xor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.contracts.block_keys import pack_keys
from pointsman.contracts.cache import BlocksRemoved, BlocksStored, CacheCleared, CacheSnapshot, Run, SlowerTier, Tier
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import TierTokens
from pointsman.contracts.fleet import InstanceLeft, InstanceReported, TierDigest
from pointsman.contracts.requests import RequestFinished
from pointsman.policies.dispatch import Dispatcher
from pointsman.policies.policy_set import policy_set
from pointsman.primitives import BlockKey, Epoch, InstanceId
from pointsman.state import holdings
from pointsman.state.checkpoint import decode_state, encode_state, state_digest
from pointsman.state.slower_tiers import LOAD_SHARES, REFUTED_WALL_SECONDS
from pointsman.state.state import PoolSettings, State
from tests.support.events import BLOCK, COST, finished, first_token, joined, reported, route
from tests.support.examples import examples
from tests.support.leading import leader_of, place

INSTANCES = ("a", "b")
OWN_TIERS: tuple[SlowerTier, ...] = ("host", "storage")
A = InstanceId("a")

# Prompts that share a beginning. A key names all blocks up to its own, so it follows one other key only.
PROMPTS = [[BlockKey(k) for k in keys] for keys in ([1, 2, 3, 4, 5, 6], [1, 2, 13, 14], [21, 22, 23])]


def tier_stored(instance: str, sequence: int, keys: list[int], tier: Tier = "host") -> BlocksStored:
    run = Run(pack_keys([BlockKey(key) for key in keys]))
    return BlocksStored(at=0.0, instance=InstanceId(instance), epoch=Epoch(1), sequence=sequence, runs=[run], tier=tier)


def tier_removed(instance: str, sequence: int, keys: list[int], tier: Tier = "host") -> BlocksRemoved:
    packed = pack_keys([BlockKey(key) for key in keys])
    return BlocksRemoved(
        at=0.0, instance=InstanceId(instance), epoch=Epoch(1), sequence=sequence, keys=packed, tier=tier
    )


class Model:
    """Sets of keys. The store is one set for all that use it."""

    def __init__(self) -> None:
        self.held: dict[str, dict[Tier, set[int]]] = {}
        self.store: set[int] = set()
        self.users: set[str] = set()
        self.sequences: dict[str, int] = {}

    def where(self, instance: str, tier: Tier) -> set[int]:
        return self.store if tier == "external" else self.held[instance].setdefault(tier, set())

    def leave(self, instance: str) -> None:
        del self.held[instance]
        self.users.discard(instance)
        if not self.users:
            self.store.clear()

    def found(self, instance: str, keys: list[BlockKey]) -> tuple[int, dict[Tier, int]]:
        """The device's leading blocks, and what goes on in each slower tier, the first that has it."""
        depth = 0
        while depth < len(keys) and keys[depth] in self.where(instance, "device"):
            depth += 1
        loads: dict[Tier, int] = {}
        for key in keys[depth:]:
            tiers: list[Tier] = [tier for tier in OWN_TIERS if key in self.where(instance, tier)]
            if instance in self.users and key in self.store:
                tiers.append("external")
            if not tiers:
                break
            loads[tiers[0]] = loads.get(tiers[0], 0) + 1
        return depth, loads

    def report(self, instance: str) -> InstanceReported:
        tiers = [
            TierDigest(tier, len(self.where(instance, tier)), reduce(xor, self.where(instance, tier), 0))
            for tier in OWN_TIERS
        ]
        return reported(instance, self.sequences[instance], list(self.where(instance, "device")), tiers=tiers)


class TieredPool:
    def __init__(self) -> None:
        self.state, self.model = State(PoolSettings()), Model()

    def act(self, what: str, instance: str, tier: Tier, keys: list[BlockKey]) -> None:
        model = self.model
        if what == "join":
            if instance in model.held:
                return
            epoch = Epoch(self.state.epochs.get(InstanceId(instance), 0) + 1)
            self.state.apply(joined(instance, epoch=epoch))
            model.held[instance], model.sequences[instance] = {}, 0
            return
        if instance not in model.held:
            return
        epoch = self.state.epochs[InstanceId(instance)]
        if what == "leave":
            self.state.apply(InstanceLeft(at=0.0, instance=InstanceId(instance), epoch=epoch, reason="test"))
            model.leave(instance)
            return
        model.sequences[instance] += 1
        event: LogEvent
        common = {"at": 0.0, "instance": InstanceId(instance), "epoch": epoch, "sequence": model.sequences[instance]}
        if what == "store":
            # The device's index asks for the parent; slower tiers do not look at it.
            runs = [Run(pack_keys([key]), parent_of(key)) for key in keys]
            event = BlocksStored(**common, runs=runs, tier=tier)  # type: ignore[arg-type]
            if tier == "external" and keys:
                model.users.add(instance)
            model.where(instance, tier).update(keys)
        elif what == "remove":
            event = BlocksRemoved(**common, keys=pack_keys(keys), tier=tier)  # type: ignore[arg-type]
            if self.state.slower or tier == "device":
                model.where(instance, tier).difference_update(keys)
        elif what == "clear":
            event = CacheCleared(**common)  # type: ignore[arg-type]
            model.held[instance] = {}
        else:
            runs = [Run(pack_keys([key]), parent_of(key)) for key in keys]
            event = CacheSnapshot(**common, runs=runs)  # type: ignore[arg-type]
            model.held[instance] = {"device": set(keys)}
        self.state.apply(event)

    def check(self) -> None:
        state, model = self.state, self.model
        assert not state.dead_letters.count
        for keys in PROMPTS:
            hits = state.hits(keys)
            loads = state.slower.loads(keys, hits)
            for instance in model.held:
                name = InstanceId(instance)
                assert (hits.get(name, 0), loads.get(name, {})) == model.found(instance, keys)


def parent_of(key: BlockKey) -> BlockKey:
    for prompt in PROMPTS:
        if key in prompt:
            place = prompt.index(key)
            return prompt[place - 1] if place else BlockKey(0)
    raise AssertionError


pieces = st.builds(
    lambda prompt, first, last: prompt[first:last], st.sampled_from(PROMPTS), st.integers(0, 3), st.integers(1, 6)
)
acts = st.tuples(
    st.sampled_from(["store"] * 5 + ["remove"] * 4 + ["join", "clear", "snapshot", "leave"]),
    st.sampled_from("aab"),
    st.sampled_from(["device", "host", "storage", "external"]),
    pieces,
)


@given(st.lists(acts, min_size=10, max_size=40))
@examples(150)
def test_hits_and_loads_are_those_of_plain_sets(history: list[tuple[str, str, Tier, list[BlockKey]]]) -> None:
    pool = TieredPool()
    for instance in INSTANCES:
        pool.act("join", instance, "device", [])

    for act in history:
        pool.act(*act)
        pool.check()

    again = decode_state(encode_state(pool.state))
    assert state_digest(again) == state_digest(pool.state)


@given(st.lists(acts, max_size=25), st.sampled_from(OWN_TIERS))
@examples(60)
def test_a_report_agrees_for_each_tier_until_one_block_differs(
    history: list[tuple[str, str, Tier, list[BlockKey]]], tier: SlowerTier
) -> None:
    pool = TieredPool()
    pool.act("join", "a", "device", [])
    for act in history:
        if act[0] not in ("leave", "join"):
            pool.act(*act)
    right = pool.model.report("a")
    pool.state.apply(right)
    agreed = pool.state.fleet[A].doubt
    pool.model.where("a", tier).symmetric_difference_update({BlockKey(99)})

    pool.state.apply(pool.model.report("a"))

    assert agreed == ""
    assert f"in its {tier} tier" in pool.state.fleet[A].doubt


def test_a_block_that_leaves_the_device_is_still_a_hit_and_costs_its_load() -> None:
    dispatcher = _leader()
    state = dispatcher.state
    keys = [BlockKey(number) for number in range(1, 11)]
    state.apply(BlocksStored(at=0.0, instance=A, epoch=Epoch(1), sequence=1, runs=[Run(pack_keys(keys))]))
    state.apply(tier_stored("a", 2, list(keys)))
    state.apply(tier_removed("a", 3, list(keys[4:]), "device"))

    placed = place(dispatcher, "r", list(keys))

    loaded = 6 * BLOCK
    load_seconds = loaded * COST.per_token_s * LOAD_SHARES["host"]
    assert (placed.instance, placed.hit_blocks, placed.uncached_tokens) == ("a", 10, 1)
    assert placed.loads == [TierTokens("host", loaded)]
    assert placed.load_seconds == load_seconds
    assert placed.predicted_ttft == placed.prefill_seconds + load_seconds
    assert [c.loaded_tokens for c in placed.candidates if c.instance == "a"] == [loaded]


def test_the_queue_of_others_does_not_wait_for_a_load() -> None:
    dispatcher = _leader()
    keys = [BlockKey(number) for number in range(1, 11)]
    dispatcher.state.apply(tier_stored("a", 1, list(keys)))
    place(dispatcher, "r", list(keys))

    assert dispatcher.state.workload.queues[A].queued_tokens == 1


def test_what_one_engine_put_into_the_shared_store_all_of_its_users_load() -> None:
    state = State(PoolSettings())
    for name, shared in (("a", True), ("b", True), ("c", False)):
        state.apply(joined(name, shared_store=shared))
    keys = [BlockKey(number) for number in (1, 2, 3)]
    state.apply(tier_stored("a", 1, [1], "external"))
    state.apply(tier_stored("b", 1, [2, 3], "external"))

    assert state.slower.loads(keys, {}) == {"a": {"external": 3}, "b": {"external": 3}}
    state.apply(InstanceLeft(at=0.0, instance=A, epoch=Epoch(1), reason="gone"))
    assert state.slower.loads(keys, {}) == {"b": {"external": 3}}


def test_the_speed_of_loading_is_learned_from_first_tokens() -> None:
    dispatcher = _leader()
    slow = 0.0005
    """Seconds a token: half as long as computing it, eight times the prior."""
    keys = [BlockKey(number) for number in range(1, 41)]
    dispatcher.state.apply(tier_stored("a", 1, list(keys)))
    for number in range(60):
        now = 100.0 * number
        request = f"r{number}"
        placed = place(dispatcher, request, list(keys), now=now)
        took = COST.per_token_s * placed.uncached_tokens + slow * 40 * BLOCK
        dispatcher.state.apply(first_token(request, "a", at=now + took))
        dispatcher.state.apply(_end(request, now + took + 1.0))

    learned = place(dispatcher, "last", list(keys), now=6_000.0).load_seconds / (40 * BLOCK)

    assert abs(learned - slow) < 0.15 * slow
    assert dispatcher.state.latency.correction(A) == 1.0


def test_how_slow_a_load_was_is_forgotten_after_some_minutes_since_nothing_slow_is_chosen_to_show_it() -> None:
    state, loads = _leader().state, (TierTokens("host", 6_400),)
    state.apply(tier_stored("a", 1, [BlockKey(1)]))
    before = state.slower.load_seconds(state.fleet[A], loads)
    state.slower.learn(state.fleet[A], loads, 4.5, now=10.0)
    seconds = []
    for now in (200.0, 311.0):
        state.settle(now)
        seconds.append(state.slower.load_seconds(state.fleet[A], loads))

    assert seconds[0] > 4 * before
    assert seconds[1] == before


def test_a_load_that_seems_free_still_costs_something() -> None:
    state = _leader().state
    loads = (TierTokens("host", 100_000),)
    for _ in range(50):
        state.slower.learn(state.fleet[A], loads, -1000.0, 0.0)

    assert state.slower.load_seconds(state.fleet[A], loads) > 0


def test_what_the_engine_did_not_find_is_no_hit_for_some_minutes() -> None:
    """LMCache and Mooncake's store drop blocks without an event."""
    dispatcher = _leader()
    state = dispatcher.state
    keys = [BlockKey(number) for number in range(1, 11)]
    state.apply(tier_stored("a", 1, list(keys)))
    state.apply(reported("a", 1, []), 0)
    report = reported("a", 1, [], at=1.0, tiers=[TierDigest("host", 10, reduce(xor, keys, 0))])
    state.apply(report)
    place(dispatcher, "r", list(keys), now=2.0)
    state.apply(first_token("r", "a", at=3.0))
    state.apply(_end("r", 4.0, cached=3 * BLOCK, predicted=10 * BLOCK))
    state.apply(report)
    loads = [state.slower.loads(keys, {}).get(A)]

    state.slower.settle(4.0 + float(REFUTED_WALL_SECONDS))
    loads.append(state.slower.loads(keys, {}).get(A))
    state.slower.refute(A, keys, 1e9)
    state.apply(tier_stored("a", 2, [1, 2]))
    loads.append(state.slower.loads(keys, {}).get(A))

    assert loads == [{"host": 3}, {"host": 10}, {"host": 2}]
    assert state.fleet[A].doubt == ""


@pytest.mark.parametrize("tiered", [False, True])
def test_only_an_engine_without_slower_tiers_contradicts_itself_by_delivering_more(*, tiered: bool) -> None:
    """vLLM's connector keeps its blocks when the device's cache is reset, and tells nothing of that."""
    dispatcher = _leader()
    state = dispatcher.state
    keys = [BlockKey(number) for number in range(1, 11)]
    state.apply(tier_stored("a", 1, list(keys), "host" if tiered else "device"))
    state.apply(CacheCleared(at=0.5, instance=A, epoch=Epoch(1), sequence=2))
    for number in range(4):
        now = 10.0 * (number + 1)
        state.apply(reported("a", 2, [], at=now))
        request = dispatcher.route(route(f"r{number}", list(keys), arrived_at=now, excluded=["b"]), now)
        assert request
        state.apply(first_token(f"r{number}", "a", at=now + 1.0))
        state.apply(_end(f"r{number}", now + 2.0, cached=10 * BLOCK, predicted=0))
        state.delivered.drop(A)
        state.apply(reported("a", 2, [], at=now + 3.0))
        state.apply(reported("a", 2, [], at=now + 8.0))

    assert bool(state.fleet[A].contradicted) is not tiered


@pytest.mark.parametrize("tier", ["device", "host", "external"])
def test_nobody_can_hold_more_blocks_than_any_engine_does(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holdings, "DEVICE_BLOCKS_MAX", 6)
    monkeypatch.setattr(holdings, "SLOWER_BLOCKS_MAX", 6)
    state = State(PoolSettings())

    events: list[LogEvent] = [joined("a"), *(tier_stored("a", n, [3 * n, 3 * n + 1, 3 * n + 2], tier) for n in (1, 2))]
    for sequence, event in enumerate(events):
        state.apply(event, sequence + 1)
    full = state.dead_letters.count
    state.apply(tier_stored("a", 3, [9], tier), 4)
    state.apply(reported("a", 3, [3, 4, 5, 6, 7, 8, 9]), 5)

    held = state.index.blocks(A) if tier == "device" else state.slower.blocks(tier, A)
    assert (held, full, state.dead_letters.count) == (6, 0, 1)
    assert tier != "device" or state.fleet[A].doubt


def test_a_snapshot_of_more_blocks_than_any_engine_holds_replaces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holdings, "DEVICE_BLOCKS_MAX", 2)
    state = State(PoolSettings())
    large = CacheSnapshot(at=1.0, instance=A, epoch=Epoch(1), sequence=2, runs=tier_stored("a", 1, [1, 2, 3]).runs)

    events: list[LogEvent] = [joined("a"), tier_stored("a", 1, [1, 2], "device"), large]
    for sequence, event in enumerate(events):
        state.apply(event, sequence + 1)

    assert (state.index.blocks(A), state.dead_letters.count) == (2, 1)


def test_a_pool_without_slower_tiers_keeps_nothing_of_them() -> None:
    state = _leader().state
    state.apply(tier_removed("a", 1, [1], "host"))

    assert not state.slower
    assert state.slower.loads([BlockKey(1)], {}) == {}


def _leader() -> Dispatcher:
    return leader_of(("a", "b"), policy_set(routing="min_ttft", admission="none"))


def _end(request: str, at: float, *, cached: int = -1, predicted: int = -1) -> RequestFinished:
    tokens = {"prompt_tokens": 10 * BLOCK + 1, "cached_tokens": cached, "predicted_cached_tokens": predicted}
    return finished(request, A, at=at, **tokens)
