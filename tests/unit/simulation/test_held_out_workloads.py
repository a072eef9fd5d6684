"""Agents, RAG, code completion, batch jobs and a mixed day look like the use that they are named after."""

import random
from collections import Counter
from itertools import combinations, pairwise
from statistics import mean

from pointsman.primitives import Tenant
from pointsman.simulation.workload import WorkloadRequest
from pointsman.simulation.workload.generators.agent_loops import AgentShape, agent_loops
from pointsman.simulation.workload.generators.batch_classification import batch_classification
from pointsman.simulation.workload.generators.code_completion import CompletionShape, code_completion
from pointsman.simulation.workload.generators.mixed_day import mixed_day
from pointsman.simulation.workload.generators.rag import RagShape, rag
from pointsman.simulation.workload.requests import infinite_cache_hit_share
from tests.support.workload_shapes import arrivals, by_session, common_blocks


def test_an_agent_repeats_its_whole_context_until_it_is_summarised() -> None:
    requests = agent_loops(3000, rate=5.0, chance=random.Random(1), shape=AgentShape(input_tokens_max=16_384))
    systems = AgentShape().system_prompt_blocks
    summaries = 0

    for steps in by_session(requests).values():
        for before, after in pairwise(steps):
            shared = common_blocks(before, after)
            if shared >= before.input_length // 512:
                assert after.input_length >= before.input_length + before.output_tokens
            else:
                summaries += 1
                assert shared in systems
    assert 10 < summaries < 300


def test_documents_are_shared_in_the_same_order_behind_the_same_instruction_only() -> None:
    requests = rag(600, rate=5.0, chance=random.Random(1))
    shape = RagShape()
    instructions = {
        Tenant(f"tenant-{index + 1}"): shape.instruction_blocks[index % 5] for index in range(shape.tenants)
    }
    firsts = [asked[0] for asked in by_session(requests).values()]
    shared = [(one, other, common_blocks(one, other)) for one, other in combinations(firsts, 2)]

    assert all(blocks == 0 for one, other, blocks in shared if one.tenant != other.tenant)
    assert all(blocks >= instructions[one.tenant] for one, other, blocks in shared if one.tenant == other.tenant)
    with_documents = [blocks > instructions[one.tenant] for one, other, blocks in shared if one.tenant == other.tenant]
    assert 0.02 < mean(with_documents) < 0.3


def test_a_completion_continues_the_file_or_diverges_in_its_middle() -> None:
    requests = code_completion(3000, rate=5.0, chance=random.Random(1))
    continued = diverged = 0

    for editing in by_session(requests).values():
        for before, after in pairwise(editing):
            shared = common_blocks(before, after)
            assert shared >= CompletionShape().context_blocks_min
            continued += shared >= before.input_length // 512
            diverged += shared < before.input_length // 512
    assert 0.02 < diverged / continued < 0.2
    starts = {r.block_ids[0] for r in requests}
    assert len(starts) == len({r.tenant for r in requests}) < len({r.block_ids[:3] for r in requests})


def test_the_items_of_a_job_share_its_examples_and_arrive_together() -> None:
    requests = batch_classification(3000, rate=2.0, chance=random.Random(1))
    jobs: dict[int, list[WorkloadRequest]] = {}
    for request in requests:
        jobs.setdefault(request.block_ids[0], []).append(request)
    gaps = [after - before for items in jobs.values() for before, after in pairwise(arrivals(items))]

    assert len(jobs) > 30
    assert max(r.output_tokens for r in requests) == 6
    assert sum(gap < 1 for gap in gaps) > 0.9 * len(gaps)
    assert infinite_cache_hit_share(requests) > 0.8


def test_a_mixed_day_has_a_few_long_documents_and_a_spike() -> None:
    requests = mixed_day(4000, rate=5.0, chance=random.Random(1))
    long = [r for r in requests if r.session.startswith("document")]
    twentieths = Counter(int(20 * r.arrival_s / (requests[-1].arrival_s + 1)) for r in requests)

    assert 0.02 < len(long) / 4000 < 0.08
    assert 0.15 < sum(r.input_length for r in long) / sum(r.input_length for r in requests) < 0.5
    assert twentieths[15] > 1.3 * mean(twentieths[part] for part in range(10, 15))
    assert len({r.tenant for r in requests}) == 9
