"""The pools behind this address: which of them serves the model that a client names, and what the ingress has of each.

Nobody configures models, only pools are named (`--pools`). Which names a pool answers to, its engines say: the model's own,
its aliases, and those of LoRA adapters. Workers report them, `fleet_view` reads them from the pool's log.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from typing_extensions import override

from pointsman.ports import EventLog
from pointsman.primitives import PoolName
from pointsman.runtime.health import HealthBoard
from pointsman_ingress.http.openai_errors import Refusal, model_wanted, no_engines, unknown_model
from pointsman_ingress.placement.fleet_view import FleetView, Model
from pointsman_ingress.placement.heartbeat import Heartbeat
from pointsman_ingress.placement.holding import Hold
from pointsman_ingress.placement.in_flight import InFlightRequests
from pointsman_ingress.placement.rebinding import Rebinding
from pointsman_ingress.placement.retry_budget import RetryBudget
from pointsman_ingress.placement.routing import Router
from pointsman_ingress.placement.scheduler_liveness import SchedulerLiveness
from pointsman_ingress.prompt.keys import Keys
from pointsman_ingress.prompt.tokenization import Tokenizing


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """One pool, as the ingress needs it: who is in it, who decides for it, and what its prompts are made of."""

    name: PoolName
    fleet: FleetView
    silence: SchedulerLiveness
    under_way: InFlightRequests
    router: Router
    rebinding: Rebinding
    heartbeat: Heartbeat
    tokenising: Tokenizing
    keys: Keys
    events: EventLog
    retry_budget: RetryBudget


class Pools:
    """All pools of this ingress. A pool's own model has its name, whoever else lists it as an alias or an adapter. Where
    two pools serve the same otherwise, the one that was named first has it."""

    def __init__(self, pools: Sequence[Pool], hold: Hold) -> None:
        self._pools = tuple(pools)
        self._hold = hold

    async def await_model(self, name: str) -> tuple[Pool, Model]:
        """As `find`. Where it is too early to say that there is no such model, waits until that is known. Raises Refusal."""
        found = await self._hold.until(partial(self._find_or_wait, name))
        return found or self.find(name)

    def _find_or_wait(self, name: str) -> tuple[Pool, Model] | None:
        """Raises Refusal."""
        try:
            return self.find(name)
        except Refusal:
            if self._too_early:
                return None
            raise

    def find(self, name: str) -> tuple[Pool, Model]:
        """The model of this name and its pool; without a name, the only one there is. Raises Refusal."""
        if not name:
            return self._only()
        found = self._of_base(name)
        if found is not None:
            return found
        for pool in self._pools:
            model = pool.fleet.models.get(name)
            if model is not None:
                return pool, model
        raise self._unknown(name)

    def offered(self) -> Iterator[tuple[Pool, Model]]:
        """Every model that can be asked for, each name once: pool by pool, a base model before its adapters. Clients that
        are told no model take the first."""
        seen: set[str] = set()
        for pool in self._pools:
            for name, model in pool.fleet.models.items():
                owner, owned = self._of_base(name) or (pool, model)
                if name not in seen and owner is pool:
                    seen.add(name)
                    yield pool, owned

    def _of_base(self, name: str) -> tuple[Pool, Model] | None:
        """The pool whose own model has this name."""
        named = ((pool, pool.fleet.models.get(name)) for pool in self._pools)
        return next(((pool, model) for pool, model in named if model is not None and model.name == model.base), None)

    def _only(self) -> tuple[Pool, Model]:
        serving = [(pool, model) for pool in self._pools if (model := pool.fleet.base) is not None]
        if not serving:
            raise no_engines()
        if len(serving) > 1:
            raise model_wanted(self._names())
        return serving[0]

    def _unknown(self, name: str) -> Refusal:
        """A pool that no engine has joined yet, as far as is known here, may well be the one with this model: then it is too
        early to say no."""
        return no_engines() if self._too_early else unknown_model(name, self._names())

    @property
    def _too_early(self) -> bool:
        return any(pool.fleet.base is None or not pool.fleet.is_read for pool in self._pools)

    def _names(self) -> list[str]:
        return [model.name for _, model in self.offered()]


class PoolsBoard(HealthBoard):
    """What an ingress of several pools lacks. It is ready while one of its pools is, unless it lacks something itself: the
    others' clients are told by 503, and this pool's are not to suffer for them."""

    def __init__(self, pools: Sequence[PoolName]) -> None:
        super().__init__()
        self.pools = {pool: HealthBoard(of=pool if len(pools) > 1 else "") for pool in pools}
        """Where the parts of single pools say what they wait for."""

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

    def _of_pools(self, told: Callable[[HealthBoard], dict[str, str]]) -> dict[str, str]:
        return {part: reason for board in self.pools.values() for part, reason in told(board).items()}
