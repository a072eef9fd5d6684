"""A language model as judge, as in SGLang's benchmark `llm_judge`: six dimensions of one answer judged in parallel with
at most 256 tokens each, then one score. A rubric of each client precedes; rubric and answer are whole blocks."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from pointsman.primitives import EngineSeconds, SessionId, Tokens
from pointsman.simulation.workload.arrivals import answered_s
from pointsman.simulation.workload.generators.base import exponential_length, interleaved
from pointsman.simulation.workload.generators.clients import WELL_BEHAVED, Clients
from pointsman.simulation.workload.requests import BlockIds, WorkloadRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeShape:
    dimensions: int = 6
    rubric_blocks: int = 6
    answer_blocks_min: int = 1
    answer_blocks_max: int = 6
    dimension_tokens: Tokens = 80
    judgement_tokens: float = 140.0
    judgement_tokens_max: Tokens = 256
    score_tokens: Tokens = 2
    step_s: EngineSeconds = 0.5
    """Mean pause before the score."""
    clients: Clients = WELL_BEHAVED

    def requests(self) -> int:
        return self.dimensions + 1


def llm_as_judge(
    count: int, *, rate: float, chance: random.Random, shape: JudgeShape | None = None
) -> list[WorkloadRequest]:
    shape = shape or JudgeShape()
    ids = BlockIds()
    tenants = shape.clients.tenants()
    rubrics = [ids.take(shape.clients.prefix_blocks(client, shape.rubric_blocks)) for client in range(len(tenants))]

    def judging(number: int, start: EngineSeconds) -> Iterator[WorkloadRequest]:
        client = shape.clients.pick(chance)
        judged = rubrics[client] + ids.take(chance.randint(shape.answer_blocks_min, shape.answer_blocks_max))

        def behind(arrival_s: EngineSeconds, tail: Tokens, output_tokens: Tokens) -> WorkloadRequest:
            tenant, session = tenants[client], SessionId(f"judging-{number}")
            return ids.request(
                judged, tail, output_tokens=output_tokens, tenant=tenant, arrival_s=arrival_s, session=session
            )

        def judgement_tokens() -> Tokens:
            return min(exponential_length(shape.judgement_tokens, chance), shape.judgement_tokens_max)

        judgements = [behind(start, shape.dimension_tokens, judgement_tokens()) for _ in range(shape.dimensions)]
        yield from judgements
        read_s = max((answered_s(judgement) for judgement in judgements), default=start)
        tail = sum(judgement.output_tokens for judgement in judgements) + shape.dimension_tokens
        yield behind(read_s + chance.expovariate(1 / shape.step_s), tail, shape.score_tokens)

    return interleaved(count, tasks_rate=rate / shape.requests(), task=judging, chance=chance)
