"""Copies of hot prefixes between simulated engines, as an ingress makes them after the first token of the request whose
grant has `copy_to`: the source gets the prefix and holds its blocks, the link carries them, and the target takes them
in. With `fetch_path` "direct" the source's engine is not asked. Out: PrefixCopyEnded."""

from collections.abc import Callable
from dataclasses import dataclass

from pointsman.contracts.requests import PrefixCopyEnded
from pointsman.primitives import EngineSeconds, InstanceId, RequestId
from pointsman.simulation.engine_types import HashedPrompt
from pointsman.simulation.simulated_fetches import SimulatedLinks
from pointsman.simulation.simulated_fleet import SimulatedEngine, SimulatedFleet
from pointsman.simulation.simulated_pool import SimulatedPool
from pointsman.state.workload import Request


@dataclass(slots=True, eq=False)
class _Copy:
    request: RequestId
    attempt: int
    source: InstanceId
    target: InstanceId
    prompt: HashedPrompt
    began: EngineSeconds


class SimulatedCopies:
    def __init__(
        self,
        pool: SimulatedPool,
        fleet: SimulatedFleet,
        links: SimulatedLinks,
        *,
        next_step: Callable[[SimulatedEngine, EngineSeconds], None],
    ) -> None:
        self._pool = pool
        self._fleet = fleet
        self._links = links
        self._next_step = next_step
        self._direct = pool.scenario.fetch_path == "direct"
        self._giving: dict[RequestId, _Copy] = {}
        self._taking: dict[RequestId, _Copy] = {}

    def start(self, request: Request, now: EngineSeconds) -> None:
        blocks = request.copy_blocks
        prompt = HashedPrompt(blocks * self._pool.scenario.block_tokens + 1, request.keys[:blocks])
        copy = _Copy(request.id, request.attempt, request.instance, request.copy_to, prompt, now)
        give = RequestId(f"{request.id}.{request.attempt}.copy")
        self._giving[give] = copy
        source = self._fleet.engines[copy.source]
        if self._direct:
            source.model.hold_kv(give, prompt)
            self._carry(give, now)
        else:
            source.model.submit(give, prompt, max_tokens=1, now=now, held=True)
            # Not at once: the source may be ending the step that gave the first token.
            self._pool.agenda.at(now, lambda at: self._next_step(source, at))

    def owns(self, request_id: RequestId) -> bool:
        return request_id in self._giving or request_id in self._taking

    def finished(self, request_id: RequestId, now: EngineSeconds) -> bool:
        """Whether it was a request of a copy."""
        if request_id in self._giving:
            self._carry(request_id, now)
        elif copy := self._taking.pop(request_id, None):
            self._end(copy, now)
        else:
            return False
        return True

    def failed(self, engine: SimulatedEngine, now: EngineSeconds) -> None:
        for which, part in (("source", self._giving), ("target", self._taking)):
            for key in [key for key, copy in part.items() if getattr(copy, which) == engine.id]:
                self._end(part.pop(key), now, f"the {which} died")

    def _carry(self, give: RequestId, now: EngineSeconds) -> None:
        copy = self._giving[give]
        source, target = self._fleet.engines[copy.source], self._fleet.engines[copy.target]
        missing = max(0, copy.prompt.length - target.model.cached_tokens(copy.prompt))

        def take(at: EngineSeconds) -> None:
            source.model.release_kv(give)
            if self._giving.pop(give, None) is None:
                return
            if not (source.alive and target.alive):
                self._end(copy, at, "the target died" if source.alive else "the source died")
                return
            request_id = RequestId(f"{give}.take")
            self._taking[request_id] = copy
            target.model.submit(request_id, copy.prompt, max_tokens=1, now=at, received=copy.prompt.length)
            self._next_step(target, at)

        self._pool.agenda.at(self._links.carry(source.id, missing, now), take)

    def _end(self, copy: _Copy, now: EngineSeconds, failure: str = "") -> None:
        event = PrefixCopyEnded(
            at=now,
            request=copy.request,
            instance=copy.target,
            source=copy.source,
            attempt=copy.attempt,
            tokens=0 if failure else copy.prompt.length - 1,
            seconds=now - copy.began,
            failure=failure,
        )
        self._pool.outcome.note_copy(event)
        self._pool.apply(event, now)
