"""Retrieval-augmented generation: an instruction of the tenant, the retrieved documents, the question. Documents of the
tenant's collection are popular by Zipf; their order in the prompt is that of their relevance, so that the same documents
in another order share nothing but the instruction. Some questions are followed up with the same documents."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from pointsman.primitives import EngineSeconds, SessionId, Tenant, Tokens
from pointsman.simulation.workload.arrivals import answered_s
from pointsman.simulation.workload.generators.base import exponential_length, interleaved, zipf
from pointsman.simulation.workload.requests import BlockIds, WorkloadRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class RagShape:
    tenants: int = 10
    """The n-th asks with weight 1/n."""
    instruction_blocks: tuple[int, ...] = (2, 1, 4, 1, 3)
    """Of the tenants in turn."""
    documents: int = 150
    """In the collection of each tenant."""
    zipf_exponent: float = 1.1
    document_blocks: tuple[int, ...] = (1, 2, 2, 3)
    """Of the documents in turn."""
    retrieved: tuple[int, ...] = (2, 4, 6)
    question_tokens: float = 60.0
    answer_tokens: float = 180.0
    output_tokens_max: Tokens = 1024
    questions_max: int = 3
    """Evenly from 1 about the same documents."""
    think_s: EngineSeconds = 20.0


class _Collection:
    """Documents behind an instruction. The ids of a document depend on all that stands before it."""

    def __init__(self, shape: RagShape, index: int, ids: BlockIds) -> None:
        self._shape, self._ids = shape, ids
        self._instruction = ids.take(shape.instruction_blocks[index % len(shape.instruction_blocks)])
        self._placed: dict[tuple[int, int], tuple[int, ...]] = {}

    def prompt(self, documents: list[int]) -> tuple[int, ...]:
        blocks = self._instruction
        for document in documents:
            place = (blocks[-1], document)
            if place not in self._placed:
                length = self._shape.document_blocks[document % len(self._shape.document_blocks)]
                self._placed[place] = self._ids.take(length)
            blocks += self._placed[place]
        return blocks


def rag(count: int, *, rate: float, chance: random.Random, shape: RagShape | None = None) -> list[WorkloadRequest]:
    shape = shape or RagShape()
    ids = BlockIds()
    collections = [_Collection(shape, index, ids) for index in range(shape.tenants)]
    activity, popularity = zipf(shape.tenants, 1.0), zipf(shape.documents, shape.zipf_exponent)

    def asking(number: int, start: EngineSeconds) -> Iterator[WorkloadRequest]:
        tenant = chance.choices(range(shape.tenants), cum_weights=activity)[0]
        found = chance.choices(range(shape.documents), cum_weights=popularity, k=chance.choice(shape.retrieved))
        prompt = collections[tenant].prompt(list(dict.fromkeys(found)))
        arrival_s = start
        for _ in range(chance.randint(1, shape.questions_max)):
            question = ids.request(
                prompt,
                exponential_length(shape.question_tokens, chance),
                output_tokens=min(exponential_length(shape.answer_tokens, chance), shape.output_tokens_max),
                tenant=Tenant(f"tenant-{tenant + 1}"),
                arrival_s=arrival_s,
                session=SessionId(f"asking-{number}"),
            )
            yield question
            arrival_s = answered_s(question) + chance.expovariate(1 / shape.think_s)

    return interleaved(count, tasks_rate=rate / ((1 + shape.questions_max) / 2), task=asking, chance=chance)
