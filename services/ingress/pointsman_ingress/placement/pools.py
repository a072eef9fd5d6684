"""The pools of this ingress. Pools are configured; workers report their models, aliases and adapters."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from typing_extensions import override

from pointsman.ports import EventLog
from pointsman.primitives import PoolName
from pointsman.runtime.health import HealthBoard
from pointsman_ingress.http.errors import ApiError, model_required, no_engines, unknown_model
from pointsman_ingress.http.identity import Identity
from pointsman_ingress.placement.fleet_view import FleetView, Model
from pointsman_ingress.placement.hold_queue import HoldQueue
from pointsman_ingress.placement.in_flight import InFlightRequests
from pointsman_ingress.placement.retry_budget import RetryBudget
from pointsman_ingress.placement.scheduler_client import SchedulerClient
from pointsman_ingress.prompt.block_keys import BlockKeys
from pointsman_ingress.prompt.tokenization import PromptTokenizer

Shown = Callable[[str], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    name: PoolName
    fleet: FleetView
    in_flight: InFlightRequests
    scheduler: SchedulerClient
    tokenizer: PromptTokenizer
    block_keys: BlockKeys
    events: EventLog
    retry_budget: RetryBudget


class Pools:
    """A name is served by the pool that has served it longest without a break, as far as the logs reach: an engine takes no
    other pool's prompts by naming its models. Of equals a base model precedes, then configuration order counts."""

    def __init__(self, pools: Sequence[Pool], hold: HoldQueue) -> None:
        self._pools = tuple(pools)
        self._hold = hold
        for pool in self._pools:
            pool.fleet.on_models(self._report_conflicts)

    async def await_model(self, name: str, identity: Identity | None = None, *, owner: str) -> tuple[Pool, Model]:
        """`find`, but waits while models may still be missing. `owner`: whose place it takes. Raises ApiError."""
        shown = _models_shown(name, identity)

        def find() -> tuple[Pool, Model] | None:
            try:
                return self._find(name, shown)
            except ApiError:
                if self._too_early:
                    return None
                raise

        return _allowed(await self._hold.until(find, owner=owner) or self._find(name, shown), identity)

    def find(self, name: str, identity: Identity | None = None) -> tuple[Pool, Model]:
        """An empty name selects the only model. `identity`: who must be allowed to use it; None: anybody. Raises
        ApiError."""
        return _allowed(self._find(name, _models_shown(name, identity)), identity)

    def _find(self, name: str, shown: Shown) -> tuple[Pool, Model]:
        """`shown`: models that an error may name."""
        if not name:
            return self._only(shown)
        found = self._serving(name)
        if found is None:
            raise no_engines() if self._too_early else unknown_model(name, self._names(shown))
        if found[1].name != found[1].base and not all(
            pool.fleet.is_read for pool in self._pools if pool is not found[0]
        ):
            raise no_engines()  # a pool that is not read may have served the name first
        return found

    def offered(self) -> Iterator[tuple[Pool, Model]]:
        """Each name once; base models before adapters, because clients take the first."""
        for pool in self._pools:
            for name, model in pool.fleet.models.items():
                if self._serving(name) == (pool, model):
                    yield pool, model

    def _serving(self, name: str) -> tuple[Pool, Model] | None:
        named = ((pool, model) for pool in self._pools if (model := pool.fleet.models.get(name)) is not None)
        return min(named, key=lambda found: (found[1].since, found[1].name != found[1].base), default=None)

    def _report_conflicts(self) -> None:
        for pool in self._pools:
            serving = {name: self._serving(name) for name in pool.fleet.models}
            pool.fleet.served_elsewhere(
                {name: found[0].name for name, found in serving.items() if found is not None and found[0] is not pool}
            )

    def _only(self, shown: Shown) -> tuple[Pool, Model]:
        serving = [(pool, model) for pool in self._pools if (model := pool.fleet.base) is not None]
        if not serving:
            raise no_engines()
        if len(serving) > 1:
            raise model_required(self._names(shown))
        return serving[0]

    @property
    def _too_early(self) -> bool:
        """A pool without engines so far may have the model."""
        return any(pool.fleet.base is None or not pool.fleet.is_read for pool in self._pools)

    def _names(self, shown: Shown) -> list[str]:
        return [model.name for _, model in self.offered() if shown(model.name)]


def _models_shown(name: str, identity: Identity | None) -> Shown:
    """Raises ApiError, whether or not there is such a model."""
    if identity is None:
        return lambda _model: True
    if name:
        identity.check_model(name)
    return identity.may_use


def _allowed(found: tuple[Pool, Model], identity: Identity | None) -> tuple[Pool, Model]:
    """Raises ApiError."""
    if identity is not None:
        identity.check_model(found[1].name)
    return found


class PoolsBoard(HealthBoard):
    def __init__(self, pools: Sequence[PoolName]) -> None:
        super().__init__()
        self.pools = {pool: HealthBoard(pool=pool, of=pool if len(pools) > 1 else "") for pool in pools}

    @property
    @override
    def ready(self) -> bool:
        return super().ready and any(board.ready for board in self.pools.values())

    @property
    @override
    def missing_parts(self) -> dict[str, str]:
        return super().missing_parts | self._of_pools(lambda board: board.missing_parts)

    @property
    @override
    def degraded_parts(self) -> dict[str, str]:
        return super().degraded_parts | self._of_pools(lambda board: board.degraded_parts)

    @property
    @override
    def parts(self) -> list[str]:
        return [*super().parts, *(part for board in self.pools.values() for part in board.parts)]

    def _of_pools(self, parts: Callable[[HealthBoard], dict[str, str]]) -> dict[str, str]:
        return {part: reason for board in self.pools.values() for part, reason in parts(board).items()}
