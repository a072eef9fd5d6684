"""A language model as judge, as in SGLang's benchmark `llm_judge`: six dimensions of one answer judged in parallel with
at most 256 tokens each, then one score. A rubric of each client precedes; rubric and answer are whole blocks."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from pointsman.primitives import EngineSeconds, SessionId, Tenant, Tokens
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
        answer = ids.take(chance.randint(shape.answer_blocks_min, shape.answer_blocks_max))
        bench = _Judging(
            session=SessionId(f"judging-{number}"), tenant=tenants[client], ids=ids, shape=shape, chance=chance
        )
        return bench.requests(rubrics[client] + answer, start)

    return interleaved(count, tasks_rate=rate / shape.requests(), task=judging, chance=chance)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judging:
    session: SessionId
    tenant: Tenant
    ids: BlockIds
    shape: JudgeShape
    chance: random.Random

    def requests(self, judged: tuple[int, ...], start: EngineSeconds) -> Iterator[WorkloadRequest]:
        judgements = [self._dimension(judged, start) for _ in range(self.shape.dimensions)]
        yield from judgements
        read_s = max((answered_s(judgement) for judgement in judgements), default=start)
        yield self._behind(
            judged,
            arrival_s=read_s + self.chance.expovariate(1 / self.shape.step_s),
            tail=sum(judgement.output_tokens for judgement in judgements) + self.shape.dimension_tokens,
            output_tokens=self.shape.score_tokens,
        )

    def _dimension(self, judged: tuple[int, ...], arrival_s: EngineSeconds) -> WorkloadRequest:
        judgement = min(exponential_length(self.shape.judgement_tokens, self.chance), self.shape.judgement_tokens_max)
        return self._behind(judged, arrival_s=arrival_s, tail=self.shape.dimension_tokens, output_tokens=judgement)

    def _behind(
        self, judged: tuple[int, ...], *, arrival_s: EngineSeconds, tail: Tokens, output_tokens: Tokens
    ) -> WorkloadRequest:
        return self.ids.request(
            judged, tail, output_tokens=output_tokens, tenant=self.tenant, arrival_s=arrival_s, session=self.session
        )
