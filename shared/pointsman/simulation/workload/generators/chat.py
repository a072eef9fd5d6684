"""Conversations, ShareGPT-like: each turn repeats everything before it, behind one of a few system prompts. Geometric
numbers of rounds, exponential lengths, and pauses for reading and typing."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from pointsman.primitives import EngineSeconds, SessionId, Tenant, Tokens
from pointsman.simulation.workload.arrivals import ANSWER_SECONDS_PER_TOKEN
from pointsman.simulation.workload.generators.base import exponential_length, interleaved, zipf
from pointsman.simulation.workload.requests import TRACE_BLOCK_TOKENS, BlockIds, WorkloadRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatShape:
    """Lengths are means (exponential)."""

    system_prompt_blocks: tuple[int, ...] = (6, 4, 3, 2)
    """Most popular first: the n-th has weight 1/n."""
    turns: float = 5.0
    question_tokens: float = 400.0
    answer_tokens: float = 250.0
    think_s: EngineSeconds = 30.0
    answer_s_per_token: EngineSeconds = ANSWER_SECONDS_PER_TOKEN
    """Guessed wait for an answer: the workload is open loop."""
    input_tokens_max: Tokens = 16_384
    output_tokens_max: Tokens = 1024


def chat(count: int, *, rate: float, chance: random.Random, shape: ChatShape | None = None) -> list[WorkloadRequest]:
    shape = shape or ChatShape()
    ids = BlockIds()
    systems = [ids.take(blocks) for blocks in shape.system_prompt_blocks]
    popularity = zipf(len(systems), 1.0)

    def conversation(number: int, start: EngineSeconds) -> Iterator[WorkloadRequest]:
        system = chance.choices(systems, cum_weights=popularity)[0]
        arrival_s, block_ids, length = start, system, len(system) * TRACE_BLOCK_TOKENS
        while True:
            length += exponential_length(shape.question_tokens, chance)
            if length > shape.input_tokens_max:
                return
            block_ids = ids.extended(block_ids, length)
            answer = min(exponential_length(shape.answer_tokens, chance), shape.output_tokens_max)
            yield WorkloadRequest(
                arrival_s=arrival_s,
                block_ids=block_ids,
                input_length=length,
                output_tokens=answer,
                tenant=Tenant(f"user-{number % 8 + 1}"),
                session=SessionId(f"chat-{number}"),
            )
            if chance.uniform(0.0, 1.0) < 1 / shape.turns:
                return
            length += answer
            arrival_s += answer * shape.answer_s_per_token + chance.expovariate(1 / shape.think_s)

    return interleaved(count, tasks_rate=rate / shape.turns, task=conversation, chance=chance)
