"""Which tenants got more of the pool's prefill work lately than their max-min fair share. Counted in uncached tokens, which
halve every HALF_LIFE_SECONDS: demand at the placement, service at the grant. The fair level caps each demand so that the
sum is what was served; nobody with at most EQUAL_SHARES equal shares is beyond it. Compared after COMPARED_AFTER grants
or as many as there are tenants, at the cost of a sort of them."""

from math import inf

from typing_extensions import override

from pointsman.primitives import EngineSeconds, Tenant
from pointsman.state.trackers.attainment import fair_level
from pointsman.state.trackers.base import Tracker
from pointsman.state.workload import Request, Stage

HALF_LIFE_SECONDS = 60.0
EQUAL_SHARES = 1.5
COMPARED_AFTER = 20
TOKENS_MIN = 1.0
"""A tenant whose demand has faded below is forgotten."""
RESCALED_AFTER_SECONDS = 10 * HALF_LIFE_SECONDS


class TenantShares(Tracker):
    def __init__(self) -> None:
        self._demands: dict[Tenant, float] = {}
        """In tokens as of `_since`: later ones weigh more, so that earlier ones need not be faded."""
        self._served: dict[Tenant, float] = {}
        self._since: EngineSeconds = 0.0
        self._level = inf
        self._excess = 0.0
        self._grants = 0

    def excess(self, tenant: Tenant) -> float:
        """Share of all service that went beyond fair shares; 0 for a tenant within its own."""
        return self._excess if self._served.get(tenant, 0.0) > self._level else 0.0

    @override
    def placed(self, request: Request, at: EngineSeconds) -> None:
        self._rescale(at)
        self._add(self._demands, request, at)

    @override
    def unplaced(self, request: Request, at: EngineSeconds) -> None:
        known = self._demands.get(request.tenant)
        if known is not None and request.stage is Stage.PENDING:
            tokens = self._weight(request.placed_at) * request.uncached_tokens
            self._demands[request.tenant] = max(0.0, known - tokens)

    @override
    def granted(self, request: Request, at: EngineSeconds) -> None:
        self._rescale(at)
        self._add(self._served, request, at)
        self._grants += 1
        if self._grants >= max(COMPARED_AFTER, len(self._demands)):
            self._grants = 0
            self._compare()

    def _compare(self) -> None:
        served = sum(self._served.values())
        if not served or len(self._demands) < 2:
            self._level, self._excess = inf, 0.0
            return
        fair = fair_level(self._demands.values(), served)
        self._level = max(fair, EQUAL_SHARES * served / len(self._demands))
        self._excess = sum(max(0.0, tokens - self._level) for tokens in self._served.values()) / served

    def _add(self, amounts: dict[Tenant, float], request: Request, at: EngineSeconds) -> None:
        amounts[request.tenant] = amounts.get(request.tenant, 0.0) + self._weight(at) * request.uncached_tokens

    def _rescale(self, at: EngineSeconds) -> None:
        if at - self._since <= RESCALED_AFTER_SECONDS:
            return
        left = 1 / self._weight(at) if at - self._since < 2 * RESCALED_AFTER_SECONDS else 0.0
        self._demands = {t: tokens * left for t, tokens in self._demands.items() if tokens * left >= TOKENS_MIN}
        self._served = {t: tokens * left for t, tokens in self._served.items() if t in self._demands}
        self._since = at
        self._compare()

    def _weight(self, at: EngineSeconds) -> float:
        return float(2.0 ** ((at - self._since) / HALF_LIFE_SECONDS))
