"""Prefixes carried between simulated engines, as an ingress has it done (`engine.prefix_fetch`): the source gets the
prefix and holds its blocks, the link carries them (one transfer after the other at each source), and the target takes
them in. With `fetch_path` "direct" the source's engine is not asked. In: grants with `fetch_from`, whose request is sent
after its fetch; requests with `copy_to` that have their first token. Out: PrefixFetchEnded, PrefixCopyEnded."""

from collections.abc import Callable
from dataclasses import dataclass

from pointsman.contracts.block_keys import unpack_keys
from pointsman.contracts.commands import RouteRequest
from pointsman.contracts.decisions import RequestGranted
from pointsman.contracts.requests import PrefixCopyEnded, PrefixFetchEnded
from pointsman.primitives import EngineSeconds, InstanceId, RequestId
from pointsman.simulation.engine_types import HashedPrompt
from pointsman.simulation.simulated_fleet import SimulatedEngine, SimulatedFleet
from pointsman.simulation.simulated_pool import SimulatedPool
from pointsman.state.workload import Request


@dataclass(slots=True, eq=False)
class _Transfer:
    request: RequestId
    attempt: int
    source: InstanceId
    target: InstanceId
    prompt: HashedPrompt
    began: EngineSeconds
    grant: RequestGranted | None = None
    """Whose request waits for it; None for a copy."""
    source_seconds: EngineSeconds = 0.0

    def part(self, name: str) -> RequestId:
        kind = "copy" if self.grant is None else "fetch"
        return RequestId(f"{self.request}.{self.attempt}.{kind}.{name}")


class SimulatedTransfers:
    def __init__(
        self,
        pool: SimulatedPool,
        fleet: SimulatedFleet,
        *,
        next_step: Callable[[SimulatedEngine, EngineSeconds], None],
        fetched: Callable[[RequestGranted, PrefixFetchEnded, EngineSeconds], None],
    ) -> None:
        self._pool = pool
        self._fleet = fleet
        self._next_step = next_step
        self._fetched = fetched
        self._direct = pool.scenario.fetch_path == "direct"
        self._tokens_per_s = pool.scenario.transfer_tokens_per_s
        self._free_at: dict[InstanceId, EngineSeconds] = {}
        """When the link of a source is free."""
        self._giving: dict[RequestId, _Transfer] = {}
        self._taking: dict[RequestId, _Transfer] = {}

    def fetch(self, grant: RequestGranted, command: RouteRequest, now: EngineSeconds) -> None:
        request = self._pool.state.workload.requests[grant.request]
        length = request.prompt_tokens - request.uncached_tokens + 1
        keys = unpack_keys(command.keys)[: length // self._pool.scenario.block_tokens]
        prompt = HashedPrompt(length, keys)
        fetch = _Transfer(grant.request, grant.attempt, grant.fetch_from, grant.instance, prompt, now, grant)
        if self._fleet.engines[fetch.source].alive:
            self._give(fetch, now)
        else:
            self._pool.agenda.at(now, lambda at: self._end(fetch, at, "the source refuses connections"))

    def copy(self, request: Request, now: EngineSeconds) -> None:
        blocks = request.copy_blocks
        prompt = HashedPrompt(blocks * self._pool.scenario.block_tokens + 1, request.keys[:blocks])
        self._give(_Transfer(request.id, request.attempt, request.instance, request.copy_to, prompt, now), now)

    def owns(self, request_id: RequestId) -> bool:
        return request_id in self._giving or request_id in self._taking

    def finished(self, request_id: RequestId, now: EngineSeconds) -> bool:
        """Whether it was a request of a transfer."""
        if transfer := self._giving.get(request_id):
            transfer.source_seconds = now - transfer.began
            self._carry(transfer, now)
        elif transfer := self._taking.pop(request_id, None):
            self._end(transfer, now)
        else:
            return False
        return True

    def failed(self, engine: SimulatedEngine, now: EngineSeconds) -> None:
        """What it was giving or taking fails. The requests that it had are lost before."""
        for which, part in (("source", self._giving), ("target", self._taking)):
            for key in [key for key, transfer in part.items() if getattr(transfer, which) == engine.id]:
                self._end(part.pop(key), now, f"the {which} died")

    def _give(self, transfer: _Transfer, now: EngineSeconds) -> None:
        give = transfer.part("give")
        self._giving[give] = transfer
        source = self._fleet.engines[transfer.source]
        if self._direct:
            source.model.hold_kv(give, transfer.prompt)
            self._carry(transfer, now)
        else:
            source.model.submit(give, transfer.prompt, max_tokens=1, now=now, held=True)
            # Not at once: the source may be ending the step that gave a copy's first token.
            self._pool.agenda.at(now, lambda at: self._next_step(source, at))

    def _carry(self, transfer: _Transfer, now: EngineSeconds) -> None:
        source, target = self._fleet.engines[transfer.source], self._fleet.engines[transfer.target]
        missing = max(0, transfer.prompt.length - target.model.cached_tokens(transfer.prompt))

        def take(at: EngineSeconds) -> None:
            give = transfer.part("give")
            source.model.release_kv(give)
            if self._giving.pop(give, None) is None or not self._is_wanted(transfer):
                return
            if not (source.alive and target.alive):
                self._end(transfer, at, "the target died" if source.alive else "the source died")
            elif self._direct and transfer.grant is not None:
                self._end(transfer, at)  # the request itself takes it in
            else:
                request_id = transfer.part("take")
                self._taking[request_id] = transfer
                length = transfer.prompt.length
                target.model.submit(request_id, transfer.prompt, max_tokens=1, now=at, received=length)
                self._next_step(target, at)

        free_at = max(now, self._free_at.get(source.id, now)) + missing / self._tokens_per_s
        self._free_at[source.id] = free_at
        self._pool.agenda.at(free_at, take)

    def _is_wanted(self, transfer: _Transfer) -> bool:
        if transfer.grant is None:
            return True
        request = self._pool.state.workload.requests.get(transfer.request)
        return request is not None and request.fetching and request.attempt == transfer.attempt

    def _end(self, transfer: _Transfer, now: EngineSeconds, failure: str = "") -> None:
        if not self._is_wanted(transfer):
            return
        tokens = 0 if failure else transfer.prompt.length - 1
        if transfer.grant is None:
            copied = PrefixCopyEnded(
                at=now,
                request=transfer.request,
                instance=transfer.target,
                source=transfer.source,
                attempt=transfer.attempt,
                tokens=tokens,
                seconds=now - transfer.began,
                failure=failure,
            )
            self._pool.outcome.note_copy(copied)
            self._pool.apply(copied, now)
            return
        fetched = PrefixFetchEnded(
            at=now,
            request=transfer.request,
            instance=transfer.target,
            source=transfer.source,
            attempt=transfer.attempt,
            tokens=tokens,
            seconds=now - transfer.began,
            source_seconds=transfer.source_seconds,
            failure=failure,
        )
        self._pool.apply(fetched, now)
        self._fetched(transfer.grant, fetched, now)
