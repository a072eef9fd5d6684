"""Trees of thoughts, as in SGLang's benchmark `tree_of_thought_deep`: two branches, four levels, 30 requests a
question. The branches of a node begin with the *same* prompt, sent at once; all are compared (Yao et al., *Tree of
Thoughts*, 2023) before each continues. All prompts end with whole blocks."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from pointsman.primitives import EngineSeconds, SessionId, Tokens
from pointsman.simulation.workload.arrivals import answered_s
from pointsman.simulation.workload.generators.base import exponential_length, interleaved
from pointsman.simulation.workload.generators.clients import WELL_BEHAVED, Clients
from pointsman.simulation.workload.requests import TRACE_BLOCK_TOKENS, BlockIds, WorkloadRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeShape:
    branching: int = 2
    depth: int = 4
    instruction_blocks: int = 4
    question_blocks: int = 1
    thought_blocks: int = 1
    """Per level: the thought before and the next instruction."""
    thought_tokens: float = 160.0
    """Mean (exponential)."""
    thought_tokens_max: Tokens = 256
    step_s: EngineSeconds = 1.0
    """Mean pause from the last answer of a node to its continuations."""
    clients: Clients = WELL_BEHAVED

    def __post_init__(self) -> None:
        """Raises ValueError if there is no tree or a thought does not fit its blocks."""
        if min(self.branching, self.depth, self.question_blocks) < 1:
            raise ValueError(f"a tree needs branches, levels and a question, not {self}")
        if not 1 <= self.thought_tokens_max <= self.thought_blocks * TRACE_BLOCK_TOKENS:
            raise ValueError(f"thoughts of {self.thought_tokens_max} tokens do not fit {self.thought_blocks} blocks")

    def requests(self) -> int:
        return sum(self.branching**level for level in range(1, self.depth + 1))


def tree_of_thoughts(
    count: int, *, rate: float, chance: random.Random, shape: TreeShape | None = None
) -> list[WorkloadRequest]:
    shape = shape or TreeShape()
    ids = BlockIds()
    tenants = shape.clients.tenants()
    instructions = [
        ids.take(shape.clients.prefix_blocks(client, shape.instruction_blocks)) for client in range(len(tenants))
    ]

    def tree(number: int, start: EngineSeconds) -> Iterator[WorkloadRequest]:
        client = shape.clients.pick(chance)
        tenant, session = tenants[client], SessionId(f"tree-{number}")

        def thought(prompt: tuple[int, ...], arrival_s: EngineSeconds) -> WorkloadRequest:
            tokens = min(exponential_length(shape.thought_tokens, chance), shape.thought_tokens_max)
            return ids.request(prompt, 0, output_tokens=tokens, tenant=tenant, arrival_s=arrival_s, session=session)

        def thoughts(prompt: tuple[int, ...], arrival_s: EngineSeconds, levels: int) -> Iterator[WorkloadRequest]:
            """The branches of a node with this prompt, and `levels - 1` levels below them."""
            branches = [thought(prompt, arrival_s) for _ in range(shape.branching)]
            yield from branches
            if levels == 1:
                return
            compared_s = max(answered_s(branch) for branch in branches)
            for _ in branches:
                continued = prompt + ids.take(shape.thought_blocks)
                yield from thoughts(continued, compared_s + chance.expovariate(1 / shape.step_s), levels - 1)

        return thoughts(instructions[client] + ids.take(shape.question_blocks), start, shape.depth)

    return interleaved(count, tasks_rate=rate / shape.requests(), task=tree, chance=chance)
