"""Workloads: traces read and spread, prefixes shared exactly where ids are, generators that repeat by seed."""

import random
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from pointsman.simulation.workload import (
    FIRST_TOKEN_ID,
    GENERATORS,
    TraceError,
    WorkloadRequest,
    at_rate,
    mean_rate,
    prompt_token_ids,
    read_trace,
)
from pointsman.simulation.workload.arrivals import faster
from pointsman.simulation.workload.generators.chat import ChatShape, chat
from pointsman.simulation.workload.generators.tools import tools

ROW = '{"timestamp": %d, "input_length": %d, "output_length": 5, "hash_ids": %s}\n'


def trace(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(lines))
    return path


def request(input_length: int, *block_ids: int) -> WorkloadRequest:
    return WorkloadRequest(arrival_s=0.0, block_ids=block_ids, input_length=input_length, output_tokens=1)


def test_a_trace_is_read_in_order_with_arrivals_spread_over_what_was_rounded_away(tmp_path: Path) -> None:
    path = trace(tmp_path, *(ROW % (3000 * (n // 50), 600, "[0, 1]") for n in range(200)))

    requests = read_trace(path, chance=random.Random(1))

    arrivals = [r.arrival_s for r in requests]
    assert len(requests) == 200
    assert arrivals == sorted(arrivals)
    assert arrivals[0] == 0.0
    assert 9.0 < arrivals[-1] < 12.0
    assert max(b - a for a, b in pairwise(arrivals)) < 1.0
    assert requests == read_trace(path, chance=random.Random(1))
    assert requests != read_trace(path, chance=random.Random(2))


def test_a_limit_and_an_input_cap_shorten_a_trace(tmp_path: Path) -> None:
    path = trace(tmp_path, ROW % (0, 1500, "[0, 1, 2]"), "\n", ROW % (9, 100, "[3]"), "no more is read\n")

    long, short = read_trace(path, limit=2, chance=random.Random(1), spread_s=0.0, input_tokens_max=1000)

    assert (long.input_length, long.block_ids, long.output_tokens) == (1000, (0, 1), 5)
    assert (short.input_length, short.block_ids, short.arrival_s) == (100, (3,), 0.009)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("not json\n", "trace.jsonl:2: "),
        ('{"timestamp": 1}\n', "trace.jsonl:2: .*input_length"),
        (ROW % (0, 600, "[1]"), "trace.jsonl:2: 1 hash_ids for 600 tokens; expected 2"),
        (ROW % (-1, 600, "[1, 2]"), "trace.jsonl:2: "),
        (ROW % (0, 600, '["a", 2]'), "trace.jsonl:2: .*hash_ids"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(TraceError, match=said):
        read_trace(trace(tmp_path, ROW % (0, 600, "[0, 1]"), line), chance=random.Random(1))


def test_a_missing_or_empty_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"absent\.jsonl: No such file"):
        read_trace(tmp_path / "absent.jsonl", chance=random.Random(1))
    with pytest.raises(TraceError, match="no requests"):
        read_trace(trace(tmp_path), chance=random.Random(1))


def test_prompts_share_tokens_exactly_as_far_as_their_ids_are_equal() -> None:
    first = prompt_token_ids(request(1500, 7, 8, 9), vocab_size=4000, seed=1)
    second = prompt_token_ids(request(1300, 7, 8, 10), vocab_size=4000, seed=1)
    longer = prompt_token_ids(request(1536, 7, 8, 9), vocab_size=4000, seed=1)

    assert (len(first), len(second)) == (1500, 1300)
    assert first[:1024] == second[:1024]
    assert first[1024:1034] != second[1024:1034]
    assert longer[:1500] == first
    assert min(longer) >= FIRST_TOKEN_ID
    assert max(longer) < 4000
    assert prompt_token_ids(request(512, 7), vocab_size=4000, seed=2) != first[:512]
    assert first[:4] == [3023, 2567, 3951, 2279]  # the same on every machine


def test_a_vocabulary_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="too small"):
        prompt_token_ids(request(10, 1), vocab_size=FIRST_TOKEN_ID, seed=1)


def test_arrivals_scale_to_a_rate_or_by_a_factor() -> None:
    requests = tools(500, rate=2.0, chance=random.Random(1))

    assert mean_rate(at_rate(requests, 8.0)) == pytest.approx(8.0)
    assert faster(requests, 4.0)[-1].arrival_s == pytest.approx(requests[-1].arrival_s / 4)
    with pytest.raises(ValueError, match="positive"):
        faster(requests, 0.0)


@pytest.mark.parametrize("name", GENERATORS)
def test_a_generator_repeats_by_seed_at_about_the_rate_it_was_asked_for(name: str) -> None:
    requests = GENERATORS[name](2000, rate=5.0, chance=random.Random(3))

    assert requests == GENERATORS[name](2000, rate=5.0, chance=random.Random(3))
    assert len(requests) == 2000
    assert [r.arrival_s for r in requests] == sorted(r.arrival_s for r in requests)
    assert 3.0 < mean_rate(requests) < 7.0
    assert all(len(r.block_ids) == -(-r.input_length // 512) for r in requests)
    assert all(0 < r.output_tokens <= 1024 for r in requests)


def test_each_turn_of_a_chat_continues_the_one_before_behind_a_shared_system_prompt() -> None:
    requests = chat(1000, rate=2.0, chance=random.Random(4))
    turns: dict[str, list[WorkloadRequest]] = {}
    for turn in requests:
        turns.setdefault(turn.session, []).append(turn)

    for conversation in turns.values():
        for before, after in pairwise(conversation):
            assert after.block_ids[: len(before.block_ids)] == before.block_ids
            assert after.input_length >= before.input_length + before.output_tokens
    assert 2.0 < len(requests) / len(turns) < ChatShape().turns
    assert len({conversation[0].block_ids[0] for conversation in turns.values()}) == 4


def test_a_few_tools_are_much_hotter_than_the_rest() -> None:
    requests = tools(2000, rate=5.0, chance=random.Random(5))
    uses = Counter(r.tenant for r in requests).most_common()

    assert uses[0][1] > 4 * uses[9][1]
    assert len(uses) > 30
    hottest = [r.block_ids for r in requests if r.tenant == uses[0][0]]
    assert len({ids[:3] for ids in hottest}) == 1
    assert len({ids[-1] for ids in hottest}) > len(hottest) / 2
