"""Questions about long documents, LooGLE-like: documents of 10 to 30 thousand tokens (Zipf), short questions and
answers. Each question follows only the document, which is all that is shared."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from pointsman.primitives import EngineSeconds, SessionId, Tenant, Tokens
from pointsman.simulation.workload.arrivals import ANSWER_SECONDS_PER_TOKEN
from pointsman.simulation.workload.generators.base import exponential_length, interleaved, zipf
from pointsman.simulation.workload.generators.clients import Clients
from pointsman.simulation.workload.requests import BlockIds, WorkloadRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class LongDocumentShape:
    documents: int = 400
    """About 8 million tokens: more than a few engines cache."""
    zipf_exponent: float = 0.8
    document_blocks_min: int = 20
    document_blocks_max: int = 58
    """Evenly from 10,240 to 29,696 tokens."""
    questions_max: int = 7
    question_tokens: float = 30.0
    answer_tokens: float = 60.0
    output_tokens_max: Tokens = 512
    think_s: EngineSeconds = 15.0
    """Mean pause between an answer and the next question."""
    readers: int = 8
    clients: Clients | None = None
    """If given, the readers; each has documents of its own."""


def long_document_qa(
    count: int, *, rate: float, chance: random.Random, shape: LongDocumentShape | None = None
) -> list[WorkloadRequest]:
    shape = shape or LongDocumentShape()
    ids = BlockIds()
    clients = shape.clients
    documents = [
        [ids.take(clients.prefix_blocks(index, blocks) if clients else blocks) for blocks in _lengths(shape, chance)]
        for index in range(clients.count if clients else 1)
    ]
    popularity = zipf(shape.documents, shape.zipf_exponent)

    def reading(number: int, start: EngineSeconds) -> Iterator[WorkloadRequest]:
        client = clients.pick(chance) if clients else 0
        document = chance.choices(documents[client], cum_weights=popularity)[0]
        reader = clients.tenants()[client] if clients else Tenant(f"reader-{number % shape.readers + 1}")
        arrival_s = start
        for _ in range(chance.randint(1, shape.questions_max)):
            question = exponential_length(shape.question_tokens, chance)
            answer = min(exponential_length(shape.answer_tokens, chance), shape.output_tokens_max)
            yield ids.request(
                document,
                question,
                output_tokens=answer,
                tenant=reader,
                arrival_s=arrival_s,
                session=SessionId(f"reading-{number}"),
            )
            arrival_s += answer * ANSWER_SECONDS_PER_TOKEN + chance.expovariate(1 / shape.think_s)

    questions_mean = (1 + shape.questions_max) / 2
    return interleaved(count, tasks_rate=rate / questions_mean, task=reading, chance=chance)


def _lengths(shape: LongDocumentShape, chance: random.Random) -> list[int]:
    return [chance.randint(shape.document_blocks_min, shape.document_blocks_max) for _ in range(shape.documents)]
