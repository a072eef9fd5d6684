"""Fetches of prefixes between simulated engines, as an ingress makes them (`engine.prefix_fetch`): the source gets the
prefix and holds its blocks, the link carries them (one fetch after the other at each source), and the target takes the
prefix in; then the request itself is sent. In: grants with `fetch_from`. Out: PrefixFetchEnded."""

from collections.abc import Callable
from dataclasses import dataclass

from pointsman.contracts.block_keys import unpack_keys
from pointsman.contracts.commands import RouteRequest
from pointsman.contracts.decisions import RequestGranted
from pointsman.contracts.requests import PrefixFetchEnded
from pointsman.primitives import EngineSeconds, InstanceId, RequestId, Tokens
from pointsman.simulation.engine_types import HashedPrompt
from pointsman.simulation.simulated_fleet import SimulatedEngine, SimulatedFleet
from pointsman.simulation.simulated_pool import SimulatedPool


class SimulatedLinks:
    """One transfer after the other at each source."""

    def __init__(self, tokens_per_s: float) -> None:
        self._tokens_per_s = tokens_per_s
        self._free_at: dict[InstanceId, EngineSeconds] = {}

    def carry(self, source: InstanceId, tokens: Tokens, now: EngineSeconds) -> EngineSeconds:
        """When they arrive."""
        arrives = max(now, self._free_at.get(source, now)) + tokens / self._tokens_per_s
        self._free_at[source] = arrives
        return arrives


@dataclass(slots=True, eq=False)
class _Fetch:
    grant: RequestGranted
    prompt: HashedPrompt
    source_seconds: EngineSeconds = 0.0

    @property
    def key(self) -> str:
        return f"{self.grant.request}.{self.grant.attempt}"


class SimulatedFetches:
    def __init__(
        self,
        pool: SimulatedPool,
        fleet: SimulatedFleet,
        links: SimulatedLinks,
        *,
        next_step: Callable[[SimulatedEngine, EngineSeconds], None],
        ended: Callable[[RequestGranted, PrefixFetchEnded, EngineSeconds], None],
    ) -> None:
        self._pool = pool
        self._fleet = fleet
        self._links = links
        self._next_step = next_step
        self._direct = pool.scenario.fetch_path == "direct"
        self._ended = ended
        self._giving: dict[RequestId, _Fetch] = {}
        self._taking: dict[RequestId, _Fetch] = {}

    def start(self, grant: RequestGranted, command: RouteRequest, now: EngineSeconds) -> None:
        request = self._pool.state.workload.requests[grant.request]
        length = request.prompt_tokens - request.uncached_tokens + 1
        keys = unpack_keys(command.keys)[: length // self._pool.scenario.block_tokens]
        fetch = _Fetch(grant, HashedPrompt(length, keys))
        source = self._fleet.engines[grant.fetch_from]
        if not source.alive:
            self._pool.agenda.at(now, lambda at: self._end(fetch, at, "the source refuses connections"))
            return
        request_id = RequestId(f"{fetch.key}.give")
        if self._direct:
            source.model.hold_kv(request_id, fetch.prompt)
            self._carry(fetch, source, request_id, now)
            return
        self._giving[request_id] = fetch
        source.model.submit(request_id, fetch.prompt, max_tokens=1, now=now, held=True)
        self._next_step(source, now)

    def finished(self, engine: SimulatedEngine, request_id: RequestId, now: EngineSeconds) -> bool:
        """Whether it was a request of a fetch."""
        if fetch := self._giving.pop(request_id, None):
            fetch.source_seconds = now - fetch.grant.at
            self._carry(fetch, engine, request_id, now)
        elif fetch := self._taking.pop(request_id, None):
            self._end(fetch, now)
        else:
            return False
        return True

    def owns(self, request_id: RequestId) -> bool:
        return request_id in self._giving or request_id in self._taking

    def failed(self, engine: SimulatedEngine, now: EngineSeconds) -> None:
        """What it was giving or taking fails. The requests that it had are lost before."""
        lost = [key for key, fetch in self._giving.items() if fetch.grant.fetch_from == engine.id]
        for key in lost:
            self._end(self._giving.pop(key), now, "the source died")
        lost = [key for key, fetch in self._taking.items() if fetch.grant.instance == engine.id]
        for key in lost:
            self._end(self._taking.pop(key), now, "the target died")

    def _carry(self, fetch: _Fetch, source: SimulatedEngine, given: RequestId, now: EngineSeconds) -> None:
        target = self._fleet.engines[fetch.grant.instance]
        missing = max(0, fetch.prompt.length - target.model.cached_tokens(fetch.prompt))

        def take(at: EngineSeconds) -> None:
            source.model.release_kv(given)
            if not (source.alive and target.alive):
                self._end(fetch, at, "the target died" if source.alive else "the source died")
            elif self._direct:
                self._end(fetch, at)
            elif self._is_wanted(fetch):
                request_id = RequestId(f"{fetch.key}.take")
                self._taking[request_id] = fetch
                length = fetch.prompt.length
                target.model.submit(request_id, fetch.prompt, max_tokens=1, now=at, received=length)
                self._next_step(target, at)

        self._pool.agenda.at(self._links.carry(source.id, missing, now), take)

    def _is_wanted(self, fetch: _Fetch) -> bool:
        request = self._pool.state.workload.requests.get(fetch.grant.request)
        return request is not None and request.fetching and request.attempt == fetch.grant.attempt

    def _end(self, fetch: _Fetch, now: EngineSeconds, failure: str = "") -> None:
        if not self._is_wanted(fetch):
            return
        grant = fetch.grant
        event = PrefixFetchEnded(
            at=now,
            request=grant.request,
            instance=grant.instance,
            source=grant.fetch_from,
            attempt=grant.attempt,
            tokens=0 if failure else fetch.prompt.length - 1,
            seconds=now - grant.at,
            source_seconds=fetch.source_seconds,
            failure=failure,
        )
        self._pool.apply(event, now)
        self._ended(grant, event, now)
