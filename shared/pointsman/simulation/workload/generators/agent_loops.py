"""Agents that call tools in a loop: every step repeats the whole context and adds a tool call and its result. A long
system prompt with the tool descriptions is shared by all tasks of a kind of agent. Tools answer within seconds; now and
then a person is asked. A context that gets too long is replaced by a summary behind the same system prompt."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from pointsman.primitives import EngineSeconds, SessionId, Tenant, Tokens
from pointsman.simulation.workload.arrivals import answered_s
from pointsman.simulation.workload.generators.base import exponential_length, interleaved, zipf
from pointsman.simulation.workload.requests import TRACE_BLOCK_TOKENS, BlockIds, WorkloadRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentShape:
    """Lengths and pauses are means (exponential)."""

    system_prompt_blocks: tuple[int, ...] = (16, 10, 22, 7, 13)
    """Kinds of agents, most popular first: the n-th has weight 1/n."""
    steps_min: int = 2
    steps_max: int = 22
    task_tokens: float = 250.0
    result_tokens: float = 450.0
    long_result_tokens: float = 3_000.0
    long_result_share: float = 0.1
    call_tokens: float = 90.0
    tool_s: EngineSeconds = 1.5
    person_s: EngineSeconds = 40.0
    person_share: float = 0.06
    """Steps that wait for a person instead of a tool."""
    summary_tokens: Tokens = 1_200
    input_tokens_max: Tokens = 24_576
    output_tokens_max: Tokens = 1024
    companies: int = 12


def agent_loops(
    count: int, *, rate: float, chance: random.Random, shape: AgentShape | None = None
) -> list[WorkloadRequest]:
    shape = shape or AgentShape()
    ids = BlockIds()
    systems = [ids.take(blocks) for blocks in shape.system_prompt_blocks]
    popularity = zipf(len(systems), 1.0)

    def task(number: int, start: EngineSeconds) -> Iterator[WorkloadRequest]:
        system = chance.choices(systems, cum_weights=popularity)[0]
        fresh = len(system) * TRACE_BLOCK_TOKENS
        arrival_s, context, length = start, system, fresh + exponential_length(shape.task_tokens, chance)
        for _ in range(chance.randint(shape.steps_min, shape.steps_max)):
            if length > shape.input_tokens_max:
                context, length = system, fresh + shape.summary_tokens
            context = ids.extended(context, length)
            step = WorkloadRequest(
                arrival_s=arrival_s,
                block_ids=context,
                input_length=length,
                output_tokens=min(exponential_length(shape.call_tokens, chance), shape.output_tokens_max),
                tenant=Tenant(f"company-{number % shape.companies + 1}"),
                session=SessionId(f"task-{number}"),
            )
            yield step
            long = chance.uniform(0.0, 1.0) < shape.long_result_share
            result = exponential_length(shape.long_result_tokens if long else shape.result_tokens, chance)
            length += step.output_tokens + result
            asks_person = chance.uniform(0.0, 1.0) < shape.person_share
            arrival_s = answered_s(step) + chance.expovariate(1 / (shape.person_s if asks_person else shape.tool_s))

    steps_mean = (shape.steps_min + shape.steps_max) / 2
    return interleaved(count, tasks_rate=rate / steps_mean, task=task, chance=chance)
