"""Trees of thoughts: one question in branches that share everything up to where they part.

The tree of SGLang's benchmark `tree_of_thought_deep`: two branches, four levels, 30 requests a question. The branches
of a node begin with the *same* prompt, sent at once; all are compared (Yao et al., *Tree of Thoughts*, 2023) before
each continues with its answer and the next instruction. All prompts end with whole blocks. A client's own instructions
come before all its questions.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from pointsman.primitives import Seconds, SessionId, Tenant, Tokens
from pointsman.simulation.workload.arrivals import answered_s
from pointsman.simulation.workload.generators.base import exponential_length, interleaved
from pointsman.simulation.workload.generators.clients import WELL_BEHAVED, Clients
from pointsman.simulation.workload.requests import TRACE_BLOCK_TOKENS, BlockIds, WorkloadRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeShape:
    """The tree, the lengths of its parts, and who asks."""

    branching: int = 2
    depth: int = 4
    instruction_blocks: int = 4
    """What a client puts before all its questions; `clients` may lengthen it."""
    question_blocks: int = 1
    thought_blocks: int = 1
    """How much each level adds to the prompt: the thought before and the next instruction."""
    thought_tokens: float = 160.0
    """Mean (exponential)."""
    thought_tokens_max: Tokens = 256
    """At most what `thought_blocks` hold."""
    step_s: Seconds = 1.0
    """From the last answer of a node to its continuations; mean."""
    clients: Clients = WELL_BEHAVED

    def __post_init__(self) -> None:
        """Raises ValueError when there is no tree or a thought does not fit its blocks."""
        if min(self.branching, self.depth, self.question_blocks) < 1:
            msg = f"a tree needs branches, levels and a question, not {self}"
            raise ValueError(msg)
        if not 1 <= self.thought_tokens_max <= self.thought_blocks * TRACE_BLOCK_TOKENS:
            msg = f"thoughts of {self.thought_tokens_max} tokens do not fit {self.thought_blocks} blocks"
            raise ValueError(msg)

    def requests(self) -> int:
        """Requests of one tree."""
        return sum(self.branching**level for level in range(1, self.depth + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tree:
    session: SessionId
    tenant: Tenant
    ids: BlockIds
    shape: TreeShape
    chance: random.Random

    def thoughts(self, prompt: tuple[int, ...], arrival_s: Seconds, levels: int) -> Iterator[WorkloadRequest]:
        """The branches of a node with this prompt, and `levels - 1` levels below them."""
        branches = [self._thought(prompt, arrival_s) for _ in range(self.shape.branching)]
        yield from branches
        if levels == 1:
            return
        compared_s = max(answered_s(branch) for branch in branches)
        for _ in branches:
            continued = prompt + self.ids.take(self.shape.thought_blocks)
            next_s = compared_s + self.chance.expovariate(1 / self.shape.step_s)
            yield from self.thoughts(continued, next_s, levels - 1)

    def _thought(self, prompt: tuple[int, ...], arrival_s: Seconds) -> WorkloadRequest:
        tokens = min(exponential_length(self.shape.thought_tokens, self.chance), self.shape.thought_tokens_max)
        return self.ids.request(
            prompt, 0, output_tokens=tokens, tenant=self.tenant, arrival_s=arrival_s, session=self.session
        )


def tree_of_thoughts(
    count: int, *, rate: float, chance: random.Random, shape: TreeShape | None = None
) -> list[WorkloadRequest]:
    """`count` requests of trees that begin at random so that about `rate` requests arrive a second."""
    shape = shape or TreeShape()
    ids = BlockIds()
    tenants = shape.clients.tenants()
    instructions = [
        ids.take(shape.clients.prefix_blocks(client, shape.instruction_blocks)) for client in range(len(tenants))
    ]

    def tree(number: int, start: Seconds) -> Iterator[WorkloadRequest]:
        client = shape.clients.pick(chance)
        trunk = instructions[client] + ids.take(shape.question_blocks)
        grown = _Tree(session=SessionId(f"tree-{number}"), tenant=tenants[client], ids=ids, shape=shape, chance=chance)
        return grown.thoughts(trunk, start, shape.depth)

    return interleaved(count, tasks_rate=rate / shape.requests(), task=tree, chance=chance)
