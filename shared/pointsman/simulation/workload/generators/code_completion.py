"""Code completion in editors: the context of a repository, then the open file up to the cursor. Most requests continue
the previous one by a few typed tokens. Now and then the cursor moves up, so that the file diverges in the middle, or
another file is opened. A commit renews the end of the context for everybody who works on the repository."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from pointsman.primitives import EngineSeconds, SessionId, Tenant, Tokens
from pointsman.simulation.workload.arrivals import answered_s
from pointsman.simulation.workload.generators.base import exponential_length, interleaved, zipf
from pointsman.simulation.workload.requests import TRACE_BLOCK_TOKENS, BlockIds, WorkloadRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionShape:
    """Lengths and pauses are means (exponential)."""

    repositories: int = 24
    """The n-th is worked on with weight 1/n."""
    context_blocks_min: int = 3
    context_blocks_max: int = 10
    commit_share: float = 0.1
    """Editing sessions that begin with a commit: the second half of the context is new."""
    file_blocks_max: int = 8
    """Evenly from 0 blocks above the cursor."""
    completions_min: int = 4
    completions_max: int = 28
    typed_tokens: float = 12.0
    completion_tokens: float = 24.0
    output_tokens_max: Tokens = 128
    accepted_share: float = 0.4
    moved_share: float = 0.08
    opened_share: float = 0.04
    pause_s: EngineSeconds = 2.5


class _Repository:
    def __init__(self, name: str, blocks: int, ids: BlockIds) -> None:
        self.name, self._ids = name, ids
        self.context = ids.take(blocks)

    def commit(self) -> None:
        kept = (len(self.context) + 1) // 2
        self.context = self.context[:kept] + self._ids.take(len(self.context) - kept)


def code_completion(
    count: int, *, rate: float, chance: random.Random, shape: CompletionShape | None = None
) -> list[WorkloadRequest]:
    shape = shape or CompletionShape()
    ids = BlockIds()
    repositories = [
        _Repository(f"repository-{number + 1}", chance.randint(shape.context_blocks_min, shape.context_blocks_max), ids)
        for number in range(shape.repositories)
    ]
    activity = zipf(shape.repositories, 1.0)

    def editing(number: int, start: EngineSeconds) -> Iterator[WorkloadRequest]:
        repository = chance.choices(repositories, cum_weights=activity)[0]
        if chance.uniform(0.0, 1.0) < shape.commit_share:
            repository.commit()
        context, session = repository.context, SessionId(f"editing-{number}")
        arrival_s, prompt = start, context
        length = _opened(context, shape, chance)
        for _ in range(chance.randint(shape.completions_min, shape.completions_max)):
            length += exponential_length(shape.typed_tokens, chance)
            prompt = ids.extended(prompt, length)
            completion = WorkloadRequest(
                arrival_s=arrival_s,
                block_ids=prompt,
                input_length=length,
                output_tokens=min(exponential_length(shape.completion_tokens, chance), shape.output_tokens_max),
                tenant=Tenant(repository.name),
                session=session,
            )
            yield completion
            arrival_s = answered_s(completion) + chance.expovariate(1 / shape.pause_s)
            done = chance.uniform(0.0, 1.0)
            if done < shape.opened_share:
                prompt, length = context, _opened(context, shape, chance)
            elif done < shape.opened_share + shape.moved_share:
                prompt = prompt[: chance.randint(len(context), len(prompt) - 1)]
                length = len(prompt) * TRACE_BLOCK_TOKENS
            elif done < shape.opened_share + shape.moved_share + shape.accepted_share:
                length += completion.output_tokens

    completions_mean = (shape.completions_min + shape.completions_max) / 2
    return interleaved(count, tasks_rate=rate / completions_mean, task=editing, chance=chance)


def _opened(context: tuple[int, ...], shape: CompletionShape, chance: random.Random) -> Tokens:
    return (len(context) + chance.randint(0, shape.file_blocks_max)) * TRACE_BLOCK_TOKENS
