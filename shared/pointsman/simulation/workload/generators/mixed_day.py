"""A pool that everybody uses: conversations, questions about long documents that nobody else asks about, and short calls
of programs, by tenants of different sizes. The rate changes in steps: night, morning, a peak, afternoon, a spike after
work, evening. A document is asked about once to four times, so that most of its cost is its first prefill."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from pointsman.primitives import EngineSeconds, SessionId, Tenant, Tokens
from pointsman.simulation.workload.arrivals import answered_s, in_steps
from pointsman.simulation.workload.generators.base import exponential_length, interleaved, zipf
from pointsman.simulation.workload.requests import TRACE_BLOCK_TOKENS, BlockIds, WorkloadRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedShape:
    """Lengths and pauses are means (exponential)."""

    tenants: int = 9
    """The n-th has weight 1/n."""
    system_prompt_blocks: tuple[int, ...] = (3, 1, 5)
    """Of the tenants in turn."""
    conversations: float = 0.3
    documents: float = 0.04
    """Shares of all tasks; the rest are short calls."""
    turns_max: int = 8
    question_tokens: float = 250.0
    answer_tokens: float = 220.0
    document_blocks_min: int = 12
    document_blocks_max: int = 56
    document_questions_max: int = 4
    call_tokens: float = 350.0
    call_answer_tokens: float = 40.0
    call_template_share: float = 0.5
    """Calls behind the tenant's system prompt; the others share nothing."""
    think_s: EngineSeconds = 25.0
    output_tokens_max: Tokens = 1024
    day: tuple[tuple[float, float], ...] = ((0.2, 0.5), (0.2, 1.2), (0.1, 1.9), (0.25, 1.0), (0.05, 2.4), (0.2, 0.6))
    """Parts of the day: share of its length and rate, in any unit."""

    def requests_mean(self) -> float:
        short = 1 - self.conversations - self.documents
        turns, questions = (1 + self.turns_max) / 2, (1 + self.document_questions_max) / 2
        return self.conversations * turns + self.documents * questions + short


def mixed_day(
    count: int, *, rate: float, chance: random.Random, shape: MixedShape | None = None
) -> list[WorkloadRequest]:
    shape = shape or MixedShape()
    made = _Tasks(shape, chance)
    steady = interleaved(count, tasks_rate=rate / shape.requests_mean(), task=made.task, chance=chance)
    return in_steps(steady, parts=shape.day)


class _Tasks:
    def __init__(self, shape: MixedShape, chance: random.Random) -> None:
        self._shape, self._chance, self._ids = shape, chance, BlockIds()
        blocks = shape.system_prompt_blocks
        self._systems = [self._ids.take(blocks[index % len(blocks)]) for index in range(shape.tenants)]
        self._sizes = zipf(shape.tenants, 1.0)
        self._kinds: list[Callable[[int, EngineSeconds, int], Iterator[WorkloadRequest]]] = [
            self._conversation,
            self._document,
            self._call,
        ]
        shares = (shape.conversations, shape.documents, 1 - shape.conversations - shape.documents)
        self._shares = list(accumulate(shares))

    def task(self, number: int, start: EngineSeconds) -> Iterator[WorkloadRequest]:
        tenant = self._chance.choices(range(self._shape.tenants), cum_weights=self._sizes)[0]
        kind = self._chance.choices(self._kinds, cum_weights=self._shares)[0]
        return kind(number, start, tenant)

    def _conversation(self, number: int, start: EngineSeconds, tenant: int) -> Iterator[WorkloadRequest]:
        prompt = self._systems[tenant]
        arrival_s, length = start, len(prompt) * TRACE_BLOCK_TOKENS
        for _ in range(self._chance.randint(1, self._shape.turns_max)):
            length += exponential_length(self._shape.question_tokens, self._chance)
            prompt = self._ids.extended(prompt, length)
            turn = self._request(prompt, length, self._shape.answer_tokens, arrival_s, tenant, f"chat-{number}")
            yield turn
            length += turn.output_tokens
            arrival_s = answered_s(turn) + self._chance.expovariate(1 / self._shape.think_s)

    def _document(self, number: int, start: EngineSeconds, tenant: int) -> Iterator[WorkloadRequest]:
        shape = self._shape
        document = self._ids.take(self._chance.randint(shape.document_blocks_min, shape.document_blocks_max))
        arrival_s = start
        for _ in range(self._chance.randint(1, shape.document_questions_max)):
            length = len(document) * TRACE_BLOCK_TOKENS + exponential_length(shape.question_tokens, self._chance)
            prompt = self._ids.extended(document, length)
            asked = self._request(prompt, length, shape.answer_tokens, arrival_s, tenant, f"document-{number}")
            yield asked
            arrival_s = answered_s(asked) + self._chance.expovariate(1 / shape.think_s)

    def _call(self, number: int, start: EngineSeconds, tenant: int) -> Iterator[WorkloadRequest]:
        template = self._chance.uniform(0.0, 1.0) < self._shape.call_template_share
        prefix = self._systems[tenant] if template else ()
        length = len(prefix) * TRACE_BLOCK_TOKENS + exponential_length(self._shape.call_tokens, self._chance)
        prompt = self._ids.extended(prefix, length)
        yield self._request(prompt, length, self._shape.call_answer_tokens, start, tenant, f"call-{number}")

    def _request(
        self,
        prompt: tuple[int, ...],
        length: Tokens,
        answer: float,
        arrival_s: EngineSeconds,
        tenant: int,
        session: str,
    ) -> WorkloadRequest:
        return WorkloadRequest(
            arrival_s=arrival_s,
            block_ids=prompt,
            input_length=length,
            output_tokens=min(exponential_length(answer, self._chance), self._shape.output_tokens_max),
            tenant=Tenant(f"tenant-{tenant + 1}"),
            session=SessionId(session),
        )
