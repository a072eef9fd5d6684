"""Which tenants got more of the pool's prefill work lately than their max-min fair share of it. In uncached tokens, which
halve every HALF_LIFE_SECONDS: demand counts at the placement, service at the grant. The fair level caps each demand so
that the sum is what was served; it is computed again after every LEVEL_GRANTS grants."""

from typing_extensions import override

from pointsman.primitives import EngineSeconds, Tenant
from pointsman.state.trackers.attainment import fair_level
from pointsman.state.trackers.base import Tracker
from pointsman.state.workload import Request, Stage

HALF_LIFE_SECONDS = 60.0
TOKENS_MIN = 1.0
"""A tenant whose demand has faded below is forgotten."""
RESCALED_AT = 2.0**30
LEVEL_GRANTS = 20
EQUAL_SHARES = 1.5


class TenantShares(Tracker):
    def __init__(self) -> None:
        self._demands: dict[Tenant, float] = {}
        """As of time `_since`: later tokens weigh more, so that earlier ones need not be faded."""
        self._served: dict[Tenant, float] = {}
        self._since: EngineSeconds = 0.0
        self._level = float("inf")
        self._excess = 0.0
        self._grants = 0

    def excess(self, tenant: Tenant) -> float:
        """Share of all service that went beyond fair shares; 0 for a tenant that has not more than its own."""
        return self._excess if self._served.get(tenant, 0.0) > self._level else 0.0

    @override
    def placed(self, request: Request, at: EngineSeconds) -> None:
        self._add(self._demands, request, at)

    @override
    def unplaced(self, request: Request, at: EngineSeconds) -> None:
        if request.stage is Stage.PENDING and request.tenant in self._demands:
            self._demands[request.tenant] -= self._weight(request.placed_at) * request.uncached_tokens

    @override
    def granted(self, request: Request, at: EngineSeconds) -> None:
        self._add(self._served, request, at)
        self._grants += 1
        if self._grants % LEVEL_GRANTS == 0:
            self._compare()

    def _compare(self) -> None:
        served = sum(self._served.values())
        fair = fair_level(self._demands.values(), served)
        self._level = max(fair, EQUAL_SHARES * served / max(1, len(self._demands)))
        beyond = sum(max(0.0, tokens - self._level) for tokens in self._served.values())
        self._excess = beyond / served if served else 0.0

    def _add(self, amounts: dict[Tenant, float], request: Request, at: EngineSeconds) -> None:
        amounts[request.tenant] = amounts.get(request.tenant, 0.0) + self._weight(at) * request.uncached_tokens
        if self._weight(at) > RESCALED_AT:
            self._rescale(at)

    def _rescale(self, at: EngineSeconds) -> None:
        weight = self._weight(at)
        self._demands = {t: left for t, tokens in self._demands.items() if (left := tokens / weight) >= TOKENS_MIN}
        self._served = {t: tokens / weight for t, tokens in self._served.items() if t in self._demands}
        self._level /= weight
        self._since = at

    def _weight(self, at: EngineSeconds) -> float:
        return float(2.0 ** ((at - self._since) / HALF_LIFE_SECONDS))
