"""A language model as judge: the same answer judged in several dimensions at once, behind one long rubric.

SGLang's benchmark `llm_judge`: six dimensions judged in parallel with at most 256 tokens each, then one score over all
judgements. Here a rubric comes first, one for each client; rubric and answer are shared in whole blocks.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from pointsman.primitives import Seconds, SessionId, Tenant, Tokens
from pointsman.simulation.workload.arrivals import answered_s
from pointsman.simulation.workload.generators.base import exponential_length, interleaved
from pointsman.simulation.workload.generators.clients import WELL_BEHAVED, Clients
from pointsman.simulation.workload.requests import BlockIds, WorkloadRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeShape:
    """Rubric, answers, dimensions, and who has them judged."""

    dimensions: int = 6
    rubric_blocks: int = 6
    """The rubric of each client; `clients` may lengthen it."""
    answer_blocks_min: int = 1
    answer_blocks_max: int = 6
    """What is judged, evenly between the two."""
    dimension_tokens: Tokens = 80
    """The text that names a dimension, or asks for the score."""
    judgement_tokens: float = 140.0
    """Mean (exponential)."""
    judgement_tokens_max: Tokens = 256
    score_tokens: Tokens = 2
    step_s: Seconds = 0.5
    """From the last judgement to the question for the score; mean."""
    clients: Clients = WELL_BEHAVED

    def requests(self) -> int:
        """Requests for one answer."""
        return self.dimensions + 1


def llm_as_judge(
    count: int, *, rate: float, chance: random.Random, shape: JudgeShape | None = None
) -> list[WorkloadRequest]:
    """`count` requests for answers that come at random so that about `rate` requests arrive a second."""
    shape = shape or JudgeShape()
    ids = BlockIds()
    tenants = shape.clients.tenants()
    rubrics = [ids.take(shape.clients.prefix_blocks(client, shape.rubric_blocks)) for client in range(len(tenants))]

    def judging(number: int, start: Seconds) -> Iterator[WorkloadRequest]:
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

    def requests(self, judged: tuple[int, ...], start: Seconds) -> Iterator[WorkloadRequest]:
        """All dimensions at once; when the last judgement is there, the score."""
        judgements = [self._dimension(judged, start) for _ in range(self.shape.dimensions)]
        yield from judgements
        read_s = max((answered_s(judgement) for judgement in judgements), default=start)
        yield self._behind(
            judged,
            arrival_s=read_s + self.chance.expovariate(1 / self.shape.step_s),
            tail=sum(judgement.output_tokens for judgement in judgements) + self.shape.dimension_tokens,
            output_tokens=self.shape.score_tokens,
        )

    def _dimension(self, judged: tuple[int, ...], arrival_s: Seconds) -> WorkloadRequest:
        judgement = min(exponential_length(self.shape.judgement_tokens, self.chance), self.shape.judgement_tokens_max)
        return self._behind(judged, arrival_s=arrival_s, tail=self.shape.dimension_tokens, output_tokens=judgement)

    def _behind(
        self, judged: tuple[int, ...], *, arrival_s: Seconds, tail: Tokens, output_tokens: Tokens
    ) -> WorkloadRequest:
        return self.ids.request(
            judged, tail, output_tokens=output_tokens, tenant=self.tenant, arrival_s=arrival_s, session=self.session
        )
