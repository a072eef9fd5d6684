"""The engine model in virtual time: what it costs, what it caches, and that it never does the impossible."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.primitives import RequestId
from pointsman.simulation.block_cache import (
    BlockCache,
    BlockHash,
    BlocksEvicted,
    CacheChange,
    CacheReset,
    OpaqueChain,
    PromptIdentity,
    RunCached,
)
from pointsman.simulation.engine_model import EngineModel
from pointsman.simulation.engine_types import (
    EngineSettings,
    HashedPrompt,
    Prompt,
    RequestTooLongError,
    StepResult,
    TokenPrompt,
)
from pointsman.state.engine_profiles import PROFILES
from tests.support.examples import examples

PROFILE = PROFILES["qwen2.5-7b-910b4"]
SMALL = EngineSettings(block_size=4, num_gpu_blocks=24, max_num_batched_tokens=16, max_num_seqs=6)
CAPACITY_TOKENS = SMALL.block_size * SMALL.num_gpu_blocks


def prompt(*tokens: int, salt: str = "") -> TokenPrompt:
    """A prompt whose answer depends on it, as an engine's does."""
    start = sum(tokens) * 1000
    return TokenPrompt(
        tokens, lambda first, last: [start + n for n in range(first, last)], PromptIdentity(cache_salt=salt)
    )


@dataclass
class Mirror:
    """The cache as its events tell it: parents by hash."""

    parents: dict[BlockHash, BlockHash | None] = field(default_factory=dict)

    def apply(self, changes: Sequence[CacheChange]) -> None:
        for change in changes:
            match change:
                case RunCached(parent, hashes):
                    for block in hashes:
                        assert block not in self.parents, "stored twice"
                        assert parent is None or parent in self.parents, "stored after a parent that is not held"
                        self.parents[block] = parent
                        parent = block
                case BlocksEvicted(hashes):
                    for block in hashes:
                        del self.parents[block]
                        assert block not in self.parents.values(), "evicted before its child"
                case CacheReset():
                    self.parents.clear()


@dataclass
class Outcome:
    """What a run came to, to compare with another."""

    tokens: dict[RequestId, int] = field(default_factory=dict)
    cached: dict[RequestId, int] = field(default_factory=dict)
    first_at: dict[RequestId, float] = field(default_factory=dict)
    finished_at: dict[RequestId, float] = field(default_factory=dict)
    steps: int = 0

    def take(self, result: StepResult) -> None:
        self.steps += 1
        for request in result.decoded:
            self.tokens[request] += result.tokens_each
        for first in result.first_tokens:
            assert first.request not in self.tokens
            self.tokens[first.request] = 1
            self.cached[first.request] = first.cached_tokens
            self.first_at[first.request] = result.ended_at
        for request in result.finished:
            self.finished_at[request] = result.ended_at


@dataclass(frozen=True)
class Arrival:
    at: float
    prompt: TokenPrompt
    max_tokens: int
    abort_after: float | None


def run(model: EngineModel, arrivals: Sequence[Arrival], *, fused: int = 1) -> tuple[Outcome, Mirror]:
    """Play the arrivals, checking at every step what must always hold."""
    outcome, mirror = Outcome(), Mirror()
    pending: list[tuple[float, int, Arrival | None]] = []
    for number, arrival in enumerate(arrivals):
        pending.append((arrival.at, number, arrival))
        if arrival.abort_after is not None:
            pending.append((arrival.at + arrival.abort_after, number, None))
    pending.sort(key=lambda event: event[:2])
    now = 0.0
    while pending or model.step or not model.idle:
        step = model.step or model.begin_step(now, max_fused_steps=fused)
        assert step is not None or model.idle, "waits although nothing runs"
        if step is not None:
            assert step.prefill_tokens + step.decoding <= model.settings.max_num_batched_tokens
        if step is None or (pending and pending[0][0] < step.ends_at):
            now, number, event = pending.pop(0)
            request = RequestId(f"r{number}")
            if event is None:
                model.abort(request, now)
            else:
                model.submit(request, event.prompt, max_tokens=event.max_tokens, now=now)
            continue
        now = step.ends_at
        result = model.end_step(now)
        outcome.take(result)
        mirror.apply(result.changes)
        assert set(mirror.parents) == model.cache.cached()
        assert 0 <= model.cache.blocks_held <= model.cache.blocks_max
        assert len(model.cache) <= model.cache.blocks_max
        assert model.counts.running <= model.settings.max_num_seqs
    return outcome, mirror


@st.composite
def arrivals(draw: st.DrawFn) -> list[Arrival]:
    """Bursts of prompts that share prefixes, some of them as long as the whole cache, some given up."""
    result = []
    at = 0.0
    for number in range(draw(st.integers(1, 14))):
        at += draw(st.sampled_from((0.0, 0.0, 0.011, 0.13, 1.7)))
        shared = [draw(st.integers(0, 1))] * draw(st.integers(0, 40))
        tokens = (*shared, *[100 + number] * draw(st.integers(1, 12)))
        most = CAPACITY_TOKENS + 1 - len(tokens)
        max_tokens = draw(st.one_of(st.integers(1, min(9, most)), st.integers(1, most)))
        abort_after = draw(st.sampled_from((None, None, None, 0.0503, 0.7009)))
        result.append(Arrival(at, prompt(*tokens), max_tokens, abort_after))
    return result


@examples(100)
@given(arrivals())
def test_every_request_gets_its_tokens_and_the_cache_stays_within_its_bounds(plan: list[Arrival]) -> None:
    model = EngineModel(PROFILE, SMALL)

    outcome, _ = run(model, plan)

    for number, arrival in enumerate(plan):
        request = RequestId(f"r{number}")
        if arrival.abort_after is None:
            assert outcome.tokens[request] == arrival.max_tokens
            assert request in outcome.finished_at
        assert outcome.cached.get(request, 0) <= (len(arrival.prompt.tokens) - 1) // SMALL.block_size * SMALL.block_size
    assert model.cache.blocks_held == 0
    assert model.counts.generation_tokens == sum(outcome.tokens.values())
    assert model.counts.prefix_cache_hits <= model.counts.prefix_cache_queries


@examples(100)
@given(arrivals(), st.integers(2, 300))
def test_fusing_decode_steps_changes_nothing_but_their_number(plan: list[Arrival], fused: int) -> None:
    single_model, fused_model = EngineModel(PROFILE, SMALL), EngineModel(PROFILE, SMALL)

    single, single_cache = run(single_model, plan)
    together, fused_cache = run(fused_model, plan, fused=fused)

    stayed = {RequestId(f"r{number}") for number, arrival in enumerate(plan) if arrival.abort_after is None}
    assert {r: together.tokens[r] for r in stayed} == {r: single.tokens[r] for r in stayed}
    assert together.cached == single.cached
    assert together.first_at == pytest.approx(single.first_at)
    assert together.finished_at == pytest.approx(single.finished_at)
    assert fused_cache.parents == single_cache.parents
    assert fused_model.counts == single_model.counts
    assert together.steps <= single.steps


def test_equal_calls_give_equal_answers() -> None:
    plan = [Arrival(0.01 * n, prompt(*[n % 3] * (n + 1)), 5 + n, None) for n in range(12)]

    assert run(EngineModel(PROFILE, SMALL), plan) == run(EngineModel(PROFILE, SMALL), plan)


@pytest.mark.parametrize("profile", PROFILES.values(), ids=str)
@pytest.mark.parametrize(("total", "cached"), [(1024, 0), (6000, 0), (20_000, 0), (20_000, 10_240), (100_000, 0)])
def test_a_lone_prefill_takes_what_the_scheduler_predicts(profile: object, total: int, cached: int) -> None:
    profile = next(p for p in PROFILES.values() if p is profile)
    total = min(total, profile.kv_capacity_tokens // 64 * 64)
    model = EngineModel(profile)
    hashes = list(range(1, total // 64 + 1))
    finish(model, "warm", HashedPrompt(cached + 1, hashes), max_tokens=1)

    result = finish(model, "measured", HashedPrompt(total, hashes), max_tokens=1)

    assert result.cached[RequestId("measured")] == cached
    expected = profile.prefill_cost.seconds(total, cached)
    assert result.first_at[RequestId("measured")] == pytest.approx(expected, rel=0.03)


def test_a_step_reads_the_weights_and_every_sequence_it_decodes() -> None:
    model = EngineModel(PROFILE)
    for number in range(4):
        model.submit(RequestId(str(number)), HashedPrompt(1000, range(15)), max_tokens=9, now=0.0)
    model.begin_step(0.0)
    model.end_step(1.0)

    step = model.begin_step(1.0)

    assert step is not None
    memory_s = (PROFILE.weight_bytes + 4000 * PROFILE.kv_bytes_per_token) / PROFILE.memory_bytes_per_s
    assert step.seconds == pytest.approx(PROFILE.step_overhead_s + memory_s)


def test_long_prefills_are_chunked_and_decoding_goes_on_meanwhile() -> None:
    model = EngineModel(PROFILE, SMALL)
    model.submit(RequestId("short"), prompt(1, 2), max_tokens=20, now=0.0)
    model.begin_step(0.0)
    model.end_step(0.1)
    model.submit(RequestId("long"), prompt(*range(40)), max_tokens=1, now=0.1)

    results = []
    for number in range(3):
        model.begin_step(0.2 + number)
        results.append(model.end_step(0.3 + number))

    assert [result.decoded for result in results] == [["short"]] * 3
    assert [len(result.first_tokens) for result in results] == [0, 0, 1]


def test_the_answer_is_cached_for_the_next_turn() -> None:
    model = EngineModel(PROFILE, SMALL)
    first_turn = prompt(*range(10))
    finish(model, "first", first_turn, max_tokens=11)

    next_turn = (*first_turn.tokens, *first_turn.generated(0, 11), 7, 7)
    outcome = finish(model, "second", prompt(*next_turn), max_tokens=1)

    assert outcome.cached[RequestId("second")] == 20  # the last token generated was never computed


def test_requests_of_another_salt_share_nothing() -> None:
    model = EngineModel(PROFILE, SMALL)
    finish(model, "mine", prompt(*range(16), salt="a"), max_tokens=1)

    assert finish(model, "theirs", prompt(*range(16), salt="b"), max_tokens=1).cached[RequestId("theirs")] == 0
    assert finish(model, "again", prompt(*range(16), salt="a"), max_tokens=1).cached[RequestId("again")] == 12


def test_the_youngest_gives_way_when_decoding_runs_out_of_blocks_and_finishes_later() -> None:
    model = EngineModel(PROFILE, SMALL)
    plan = [Arrival(0.0, prompt(*[number] * 40), 50, None) for number in (1, 2)]

    outcome, _ = run(model, plan)

    assert model.counts.preemptions > 0
    assert outcome.finished_at[RequestId("r0")] < outcome.finished_at[RequestId("r1")]
    assert outcome.tokens == {"r0": 50, "r1": 50}


def test_what_cannot_be_is_refused_and_leaves_no_trace() -> None:
    model = EngineModel(PROFILE, SMALL)

    with pytest.raises(RequestTooLongError):
        model.submit(RequestId("x"), prompt(*range(CAPACITY_TOKENS)), max_tokens=2, now=0.0)
    with pytest.raises(ValueError, match="prompt"):
        model.submit(RequestId("x"), prompt(), max_tokens=2, now=0.0)
    with pytest.raises(ValueError, match="4294967295"):
        model.submit(RequestId("x"), prompt(-1), max_tokens=2, now=0.0)

    assert model.idle
    assert not model.abort(RequestId("x"), 0.0)


def test_blocks_of_a_prompt_without_hashes_are_computed_and_hit_by_no_other() -> None:
    model = EngineModel(PROFILE, SMALL)
    prompts = [HashedPrompt(9, [1]), HashedPrompt(9, [1]), HashedPrompt(9, [])]

    for number, one in enumerate(prompts):
        model.submit(RequestId(f"r{number}"), one, max_tokens=1, now=float(number))
        model.begin_step(float(number))
        first = model.end_step(number + 0.5).first_tokens

        assert [ended.cached_tokens for ended in first] == [4 if number == 1 else 0]


def test_the_cache_is_reset_only_while_nobody_holds_blocks() -> None:
    model = EngineModel(PROFILE, SMALL)
    model.submit(RequestId("x"), prompt(*range(9)), max_tokens=2, now=0.0)
    model.begin_step(0.0)

    assert not model.reset_prefix_cache()

    model.abort(RequestId("x"), 0.1)
    model.end_step(0.2)
    assert model.reset_prefix_cache()
    assert model.cache.take_changes() == [CacheReset()]
    assert len(model.cache) == 0


def test_the_least_recently_used_leaf_is_evicted_first() -> None:
    cache = BlockCache(blocks_max=6)
    chains = [OpaqueChain([1, 2, 3], unique=1), OpaqueChain([1, 2, 4], unique=2)]
    for chain in chains:
        held = cache.hit(chain.hashes, blocks_max=3)
        cache.hold(chain.hashes[:held])
        assert cache.allocate(3 - held)
        cache.fill(chain, held, 3)
    for chain in chains:
        cache.release(chain.hashes, private=0)
    cache.take_changes()

    assert cache.allocate(5)
    assert cache.take_changes() == [BlocksEvicted([3, 4, 2])]
    assert not cache.allocate(2)


def finish(model: EngineModel, name: str, asked: Prompt, *, max_tokens: int) -> Outcome:
    """Run one request, alone, from time zero to its end."""
    outcome = Outcome()
    now = 0.0
    model.submit(RequestId(name), asked, max_tokens=max_tokens, now=now)
    while (step := model.begin_step(now, max_fused_steps=8)) is not None:
        assert math.isfinite(step.seconds)
        now = step.ends_at
        outcome.take(model.end_step(now))
    return outcome
