"""Generated workloads: the same from a seed, prefixes shared exactly as promised, no question before its answer."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise
from statistics import mean, pstdev
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.primitives import SessionId, Tenant, Tokens
from pointsman.simulation.workload import (
    ARRIVALS,
    GENERATORS,
    LONGER_PREFIXES,
    MORE_REQUESTS,
    WorkloadRequest,
    mean_rate,
    prompt_token_ids,
)
from pointsman.simulation.workload.arrivals import DayShape, answered_s, diurnal, gamma, in_steps, poisson, uniform
from pointsman.simulation.workload.generators.chat import ChatShape, chat
from pointsman.simulation.workload.generators.clients import Clients
from pointsman.simulation.workload.generators.generated_shared_prefix import GspShape, gsp
from pointsman.simulation.workload.generators.llm_as_judge import JudgeShape, llm_as_judge
from pointsman.simulation.workload.generators.long_document_qa import LongDocumentShape, long_document_qa
from pointsman.simulation.workload.generators.tools import tools
from pointsman.simulation.workload.generators.tree_of_thoughts import TreeShape, tree_of_thoughts
from pointsman.simulation.workload.generators.two_hot_prefixes import HotspotShape, two_hot_prefixes
from pointsman.simulation.workload.requests import (
    NO_SESSION,
    TRACE_BLOCK_TOKENS,
    in_order,
    infinite_cache_hit_share,
    input_capped,
)
from tests.support.examples import examples
from tests.support.workload_shapes import arrivals, by_session, common_blocks

SMALL = {
    "chat": partial(chat, shape=ChatShape(system_prompt_blocks=(2, 1), question_tokens=200, input_tokens_max=3000)),
    "gsp": partial(gsp, shape=GspShape(groups=3, prompts_per_group=4, prefix_tokens=1000, range_ratio=0.5)),
    "judge": partial(llm_as_judge, shape=JudgeShape(rubric_blocks=1, answer_blocks_max=2, clients=Clients(count=2))),
    "tree": partial(tree_of_thoughts, shape=TreeShape(instruction_blocks=1, depth=3, clients=Clients(count=2))),
}


def common_prefix(first: Sequence[int], second: Sequence[int]) -> Tokens:
    for place, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return place
    return min(len(first), len(second))


# --- Every generator ---


def causal(requests: Sequence[WorkloadRequest]) -> list[WorkloadRequest]:
    """The same requests, none before the answers that it continues; those that were too early come as they end.

    A request continues an earlier one of its session when it begins with all its whole blocks and has room for the
    answer behind them. The rate can only fall.
    """
    earlier: dict[SessionId, list[WorkloadRequest]] = {}
    moved = []
    for request in sorted(requests, key=lambda request: request.arrival_s):
        before = earlier.setdefault(request.session, []) if request.session != NO_SESSION else []
        ends = (answered_s(turn) for turn in before if _continues(request, turn))
        later = replace(request, arrival_s=max(request.arrival_s, max(ends, default=0.0)))
        before.append(later)
        moved.append(later)
    return in_order(moved)


def _continues(request: WorkloadRequest, before: WorkloadRequest) -> bool:
    whole: Tokens = before.input_length // TRACE_BLOCK_TOKENS
    return (
        before.input_length + before.output_tokens <= request.input_length
        and request.block_ids[:whole] == before.block_ids[:whole]
    )


@pytest.mark.parametrize("name", GENERATORS)
@examples(8)
@given(seed=st.integers(0, 10**6), count=st.integers(0, 300), rate=st.floats(0.5, 50))
def test_a_generator_gives_well_formed_requests_in_order_that_wait_for_answers(
    name: str, seed: int, count: int, rate: float
) -> None:
    requests = GENERATORS[name](count, rate=rate, chance=random.Random(seed))

    assert requests == GENERATORS[name](count, rate=rate, chance=random.Random(seed))
    assert len(requests) == count
    assert arrivals(requests) == sorted(arrivals(requests))
    assert all(len(r.block_ids) == -(-r.input_length // 512) for r in requests)
    assert all(len(set(r.block_ids)) == len(r.block_ids) for r in requests)
    assert all(r.output_tokens > 0 and r.tenant for r in requests)
    assert arrivals(causal(requests)) == pytest.approx(arrivals(requests))


@pytest.mark.parametrize("name", [name for name in GENERATORS if not name.startswith(("chat", "mixed_day"))])
def test_a_generator_keeps_the_rate_once_it_has_built_up(name: str) -> None:
    rates = [mean_rate(GENERATORS[name](2000, rate=5.0, chance=random.Random(seed))[500:]) for seed in range(3)]

    assert mean(rates) == pytest.approx(5.0, rel=0.1)


@pytest.mark.parametrize("name", GENERATORS)
def test_a_block_id_has_one_predecessor_only(name: str) -> None:
    before: dict[int, int] = {}

    for request in GENERATORS[name](1500, rate=5.0, chance=random.Random(2)):
        for previous, block_id in pairwise((0, *request.block_ids)):
            assert before.setdefault(block_id, previous) == previous
    assert before


# --- What an infinite cache hits ---


@pytest.mark.parametrize("name", SMALL)
@examples(3)
@given(seed=st.integers(0, 10**6), warmup=st.integers(0, 30))
def test_the_infinite_cache_agrees_with_comparing_all_tokens(name: str, seed: int, warmup: int) -> None:
    requests = SMALL[name](30, rate=5.0, chance=random.Random(seed))
    prompts = [prompt_token_ids(request, vocab_size=2**31, seed=seed) for request in requests]
    hits = [
        max((common_prefix(prompt, earlier) for earlier in prompts[:number]), default=0)
        for number, prompt in enumerate(prompts)
    ]

    total = sum(map(len, prompts[warmup:]))

    assert infinite_cache_hit_share(requests, warmup=warmup) == (sum(hits[warmup:]) / total if total else 0.0)


def test_a_shorter_prompt_does_not_make_the_cache_forget() -> None:
    long = WorkloadRequest(arrival_s=0.0, block_ids=(1, 2), input_length=1000, output_tokens=1)
    short = replace(long, input_length=600)

    assert infinite_cache_hit_share([long, short, long]) == (600 + 1000) / 2600


# --- One by one ---


@pytest.mark.parametrize("order", ["random", "round_robin"])
def test_gsp_shares_the_prefix_of_a_group_and_nothing_else(order: Literal["random", "round_robin"]) -> None:
    shape = GspShape(groups=20, prompts_per_group=5, prefix_tokens=2048, question_tokens=100, order=order)
    requests = gsp(100, rate=2.0, chance=random.Random(1), shape=shape)

    for one, other in combinations(requests, 2):
        assert common_blocks(one, other) == (4 if one.tenant == other.tenant else 0)
    assert set(Counter(r.tenant for r in requests).values()) == {5}
    assert infinite_cache_hit_share(requests) == pytest.approx(0.8 * 2048 / 2148)


def test_gsp_round_robin_uses_every_prefix_before_one_comes_again_and_random_does_not() -> None:
    in_turn = gsp(128, rate=2.0, chance=random.Random(1), shape=GspShape(order="round_robin"))
    shuffled = gsp(128, rate=2.0, chance=random.Random(1), shape=GspShape(order="random"))

    assert [r.tenant for r in in_turn[:64]] == [r.tenant for r in in_turn[64:]]
    assert len({r.tenant for r in in_turn[:64]}) == 64
    assert len({r.tenant for r in shuffled[:64]}) < 64


def test_gsp_begins_new_groups_when_more_prompts_are_asked_for() -> None:
    shape = GspShape(groups=4, prompts_per_group=3)
    requests = gsp(24, rate=2.0, chance=random.Random(1), shape=shape)

    assert len({r.block_ids[0] for r in requests[:12]}) == 4
    assert not {r.block_ids[0] for r in requests[:12]} & {r.block_ids[0] for r in requests[12:]}


def test_gsp_mixes_lengths_between_a_share_of_the_longest_and_the_longest() -> None:
    shape = GspShape(range_ratio=0.25, prefix_tokens=4096, question_tokens=400)
    requests = gsp(1024, rate=2.0, chance=random.Random(1), shape=shape)

    assert {min(r.output_tokens for r in requests), max(r.output_tokens for r in requests)} == {64, 256}
    assert len({r.input_length for r in requests}) > 500
    assert 1024 + 100 <= min(r.input_length for r in requests) < max(r.input_length for r in requests) <= 4496


def test_gsp_gives_each_group_one_of_its_lengths_and_shares_a_part_of_it() -> None:
    shape = GspShape(groups=10, prompts_per_group=4, lengths=(2048, 4096), prefix_share=0.75, output_tokens=4)
    requests = gsp(40, rate=2.0, chance=random.Random(1), shape=shape)

    for one, other in combinations(requests, 2):
        assert common_blocks(one, other) == ({2048: 3, 4096: 6}[one.input_length] if one.tenant == other.tenant else 0)
    assert Counter(r.input_length for r in requests) == {2048: 20, 4096: 20}


def test_one_client_asks_ten_times_as_often_or_reads_documents_twice_as_long() -> None:
    often, longer = (
        GENERATORS[f"long_document_qa_{kind}"](6000, rate=5.0, chance=random.Random(7)) for kind in ("s1", "s2")
    )
    readings = Counter(reading[0].tenant for reading in by_session(often).values())
    lengths = {tenant: [r.input_length for r in longer if r.tenant == tenant] for tenant in ("client-1", "client-2")}

    assert readings[Tenant("client-1")] / readings.total() == pytest.approx(10 / 17, abs=0.05)
    assert mean(lengths["client-1"]) == pytest.approx(2 * mean(lengths["client-2"]), rel=0.15)
    assert not {r.block_ids[0] for r in often if r.tenant == "client-1"} & {
        r.block_ids[0] for r in often if r.tenant != "client-1"
    }


def test_a_long_document_is_asked_several_short_questions_by_one_reader_after_the_other() -> None:
    requests = long_document_qa(2000, rate=3.0, chance=random.Random(3))
    documents = Counter(r.block_ids[0] for r in requests).most_common()

    assert documents[0][1] > 4 * documents[len(documents) // 2][1]
    assert 10_240 < min(r.input_length for r in requests) < max(r.input_length for r in requests) < 30_720
    for reading in by_session(requests).values():
        assert len(reading) <= LongDocumentShape().questions_max
        for before, after in pairwise(reading):
            assert common_blocks(before, after) >= 20
            assert after.arrival_s >= before.arrival_s + 0.03 * before.output_tokens
            assert set(before.block_ids) - set(after.block_ids)


def test_a_tree_shares_its_trunk_and_every_branch_what_lies_above_it() -> None:
    shape = TreeShape(branching=3, depth=3, instruction_blocks=2, question_blocks=1, thought_blocks=1)
    requests = tree_of_thoughts(39 * 40, rate=5.0, chance=random.Random(4), shape=shape)
    trees = [tree for tree in by_session(requests).values() if len(tree) == shape.requests()]

    assert len(trees) > 20
    for tree in trees:
        prompts = Counter(r.block_ids for r in tree)
        assert Counter(map(len, prompts)) == {3: 1, 4: 3, 5: 9}
        assert set(prompts.values()) == {3}
        assert all(r.input_length == 512 * len(r.block_ids) for r in tree)
        assert all(prompt[:-1] in prompts for prompt in prompts if len(prompt) > 3)
        for prompt in prompts:
            above = [r for r in tree if r.block_ids == prompt[:-1]]
            begun = min(r.arrival_s for r in tree if r.block_ids == prompt)
            assert all(begun >= r.arrival_s + 0.03 * r.output_tokens for r in above)
    first, second = trees[0][0], next(t[0] for t in trees[1:] if t[0].tenant == trees[0][0].tenant)
    stranger = next(t[0] for t in trees if t[0].tenant != first.tenant)
    assert (common_blocks(first, second), common_blocks(first, stranger)) == (2, 0)


def test_an_answer_is_judged_in_all_dimensions_at_once_and_scored_when_they_are_read() -> None:
    requests = llm_as_judge(7 * 60, rate=5.0, chance=random.Random(5))
    judgings = [judging for judging in by_session(requests).values() if len(judging) == 7]

    assert len(judgings) > 40
    for *dimensions, score in judgings:
        assert len(set(arrivals(dimensions))) == 1
        assert score.output_tokens == 2
        assert score.arrival_s >= max(r.arrival_s + 0.03 * r.output_tokens for r in dimensions)
        judged = len(dimensions[0].block_ids) - 1
        assert 6 < judged <= 12
        assert {common_blocks(one, other) for one, other in combinations([*dimensions, score], 2)} == {judged}
    for one, other in combinations([judging[0] for judging in judgings], 2):
        assert common_blocks(one, other) == (6 if one.tenant == other.tenant else 0)


def test_two_prefixes_come_in_bursts_among_prompts_that_share_nothing() -> None:
    shape = HotspotShape(shares=(0.4, 0.2), burst_requests=20, burst_s=1.0)
    requests = two_hot_prefixes(6000, rate=10.0, chance=random.Random(6), shape=shape)
    uses = Counter(r.tenant for r in requests)

    assert uses[Tenant("hot-1")] / 6000 == pytest.approx(0.4, abs=0.08)
    assert uses[Tenant("hot-2")] / 6000 == pytest.approx(0.2, abs=0.08)
    for tenant, blocks in (("hot-1", 12), ("hot-2", 5)):
        hot = [r for r in requests if r.tenant == tenant]
        assert len({r.block_ids[:blocks] for r in hot}) == 1
        gaps = [after - before for before, after in pairwise(arrivals(hot))]
        assert pstdev(gaps) > 2 * mean(gaps)
    cold = [r for r in requests if r.tenant == "cold"]
    assert infinite_cache_hit_share(cold) == 0.0


# --- Clients who misbehave ---


@pytest.mark.parametrize("generate", ["tree_of_thoughts", "llm_as_judge"])
def test_s1_sends_more_requests_and_s2_longer_prefixes(generate: str) -> None:
    usual, s1, s2 = (
        GENERATORS[f"{generate}{kind}"](8000, rate=5.0, chance=random.Random(7)) for kind in ("", "_s1", "_s2")
    )

    def tasks(requests: Sequence[WorkloadRequest]) -> Counter[Tenant]:
        return Counter(session[0].tenant for session in by_session(requests).values())

    def shared_blocks(requests: Sequence[WorkloadRequest], tenant: str) -> int:
        firsts = [session[0] for session in by_session(requests).values() if session[0].tenant == tenant]
        return min(common_blocks(one, other) for one, other in pairwise(firsts))

    misbehaving = Tenant("client-1")
    assert tasks(usual)[misbehaving] / tasks(usual).total() == pytest.approx(1 / 8, abs=0.06)
    assert tasks(s1)[misbehaving] / tasks(s1).total() == pytest.approx(8 / 15, abs=0.08)
    assert MORE_REQUESTS.requests_factor == 8.0
    assert len(tasks(s1)) == 8
    assert shared_blocks(s2, "client-1") == LONGER_PREFIXES.prefix_factor * shared_blocks(s2, "client-2")
    assert shared_blocks(usual, "client-1") == shared_blocks(usual, "client-2") == shared_blocks(s2, "client-2")


# --- Arrivals ---


@pytest.mark.parametrize("name", ARRIVALS)
def test_new_times_keep_the_order_and_the_rate(name: str) -> None:
    requests = chat(4000, rate=5.0, chance=random.Random(8))

    retimed = ARRIVALS[name](requests, rate=20.0, chance=random.Random(8))

    assert [replace(r, arrival_s=0.0) for r in retimed] == [replace(r, arrival_s=0.0) for r in requests]
    assert arrivals(retimed) == sorted(arrivals(retimed))
    assert mean_rate(retimed) == pytest.approx(20.0, rel=0.12)
    assert retimed == ARRIVALS[name](requests, rate=20.0, chance=random.Random(8))


@pytest.mark.parametrize("cv", [0.3, 1.0, 3.0])
def test_gaps_vary_as_much_as_was_asked_for(cv: float) -> None:
    requests = tools(20_000, rate=5.0, chance=random.Random(9))

    bursty = arrivals(gamma(requests, rate=5.0, cv=cv, chance=random.Random(9)))
    gaps = [after - before for before, after in pairwise(bursty)]

    assert pstdev(gaps) / mean(gaps) == pytest.approx(cv, rel=0.1)
    assert {round(b - a, 9) for a, b in pairwise(arrivals(uniform(requests, rate=5.0)))} == {0.2}


def test_a_day_is_quiet_at_its_ends_and_busy_in_the_middle() -> None:
    shape = DayShape(day_s=400.0, swing=0.8)
    requests = diurnal(tools(8000, rate=10.0, chance=random.Random(11)), shape=shape)
    quarters = Counter(int(r.arrival_s % 400 // 100) for r in requests)
    first_days = sum(r.arrival_s < 400 for r in requests)

    # The integral of 1 - 0.8 cos over a quarter day is a quarter, less or more 0.8 / (2 pi).
    for quarter, share in ((0, 0.123), (1, 0.377), (2, 0.377), (3, 0.123)):
        assert quarters[quarter] / 8000 == pytest.approx(share, abs=0.02)
    assert first_days / 8000 == pytest.approx(0.5, abs=0.03)
    assert arrivals(requests) == sorted(arrivals(requests))


def test_a_day_in_steps_brings_each_part_its_share_of_the_requests() -> None:
    requests = in_steps(tools(8000, rate=10.0, chance=random.Random(11)), parts=((0.5, 1.0), (0.25, 4.0), (0.25, 2.0)))
    quarters = Counter(int(4 * r.arrival_s / (requests[-1].arrival_s + 1e-9)) for r in requests)

    # Half a day at 1, a quarter at 4 and one at 2: 0.5 + 1 + 0.5 of 2.
    for quarter, share in ((0, 0.125), (1, 0.125), (2, 0.5), (3, 0.25)):
        assert quarters[quarter] / 8000 == pytest.approx(share, abs=0.02)
    assert mean_rate(requests) == pytest.approx(10.0, rel=0.05)


@pytest.mark.parametrize(
    "day", [partial(diurnal, shape=DayShape(day_s=100.0)), partial(in_steps, parts=((0.3, 1.0), (0.7, 5.0)))]
)
def test_a_day_leaves_a_session_its_own_pace(
    day: Callable[[Sequence[WorkloadRequest]], list[WorkloadRequest]],
) -> None:
    steady = chat(1000, rate=3.0, chance=random.Random(12))
    moved = by_session(day(steady))

    for session, turns in by_session(steady).items():
        pauses = [b - a for a, b in pairwise(arrivals(turns))]
        assert [b - a for a, b in pairwise(arrivals(moved[session]))] == pytest.approx(pauses)


# --- What is refused ---


def test_numbers_that_make_no_sense_are_refused() -> None:
    requests = tools(10, rate=5.0, chance=random.Random(1))

    for nonsense in (
        lambda: poisson(requests, rate=0.0, chance=random.Random(1)),
        lambda: gamma(requests, rate=1.0, cv=0.0, chance=random.Random(1)),
        lambda: DayShape(swing=1.0),
        lambda: GspShape(groups=0),
        lambda: GspShape(range_ratio=1.5),
        lambda: Clients(count=2, misbehaving=3),
        lambda: TreeShape(thought_tokens_max=513),
        lambda: HotspotShape(shares=(0.9, 0.2)),
    ):
        with pytest.raises(ValueError, match=r"must|needs?|do not fit"):
            nonsense()


def test_cut_prompts_still_share_what_they_shared() -> None:
    requests = input_capped(long_document_qa(300, rate=3.0, chance=random.Random(3)), 8192)

    assert {r.input_length for r in requests} == {8192}
    assert infinite_cache_hit_share(requests) == pytest.approx(1 - len({r.block_ids[0] for r in requests}) / 300)
