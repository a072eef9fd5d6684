"""Which tenants got more of the pool's prefill work lately than their max-min fair share. Counted in uncached tokens, which
halve every HALF_LIFE_SECONDS: demand at the placement or refusal, service at the grant. What a refused prompt lacks in
caches is unknown: its tenant's usual part counts. The fair level caps each demand so that the sum is what was served;
nobody with at most EQUAL_SHARES equal shares is beyond it. Compared after COMPARED_AFTER grants or as many as there are
tenants, at the cost of a sort of them. Also whether many requests of those within their share are refused (decision 94)."""

from math import inf

from typing_extensions import override

from pointsman.primitives import EngineSeconds, Tenant, plain_sum
from pointsman.state.fold_versions import OTHERS_REFUSED, REFUSED_ONCE, TENANTS_BOUNDED
from pointsman.state.trackers.attainment import fair_level
from pointsman.state.trackers.base import LATE_ALONE, Tracker
from pointsman.state.workload import Request, Stage

HALF_LIFE_SECONDS = 60.0
EQUAL_SHARES = 1.5
COMPARED_AFTER = 20
ASKED_MIN = 50.0
MANY_REFUSED = 0.2
"""Share of the latest requests of tenants within their share."""
MANY_REFUSED_BEFORE = 0.15
"""Of all requests, before fold version 13."""
REFUSED_FADE = 0.998
"""Per placement or refusal."""
TOKENS_MIN = 1.0
"""A tenant whose demand has faded below is forgotten."""
TENANTS_MAX = 10_000
"""The one that asked for nothing for longest is forgotten first."""
RESCALED_AFTER_SECONDS = 10 * HALF_LIFE_SECONDS


class TenantShares(Tracker):
    def __init__(self) -> None:
        self._demands: dict[Tenant, float] = {}
        """In tokens as of `_since`: later ones weigh more, so that earlier ones need not be faded. Who asked last comes last."""
        self._served: dict[Tenant, float] = {}
        self._prompts: dict[Tenant, float] = {}
        """Prompt tokens of the demands, cached ones included."""
        self._since: EngineSeconds = 0.0
        self._fair = inf
        self._level = inf
        self._excess = 0.0
        self._grants = 0
        self._refused = 0.0
        self._asked = 0.0

    @property
    def many_refused(self) -> bool:
        """Of the latest requests, at least ASKED_MIN, of tenants within their share. Those of the others, which the limit of a
        tenant refuses, would keep it on."""
        many = MANY_REFUSED if self.fold_version >= OTHERS_REFUSED else MANY_REFUSED_BEFORE
        return self._asked >= ASKED_MIN and self._refused / self._asked > many

    def lack(self, tenant: Tenant) -> float:
        """What it did not get of its max-min fair share, over that share."""
        if len(self._demands) < 2:
            return 0.0
        due = min(self._demands.get(tenant, 0.0), self._fair)
        return max(0.0, 1 - self._served.get(tenant, 0.0) / due) if due else 0.0

    def excess(self, tenant: Tenant) -> float:
        """Share of all service that went beyond fair shares; 0 for a tenant within its own."""
        return self._excess if self._is_beyond(tenant) else 0.0

    def _is_beyond(self, tenant: Tenant) -> bool:
        return self._served.get(tenant, 0.0) > self._level

    @override
    def placed(self, request: Request, at: EngineSeconds) -> None:
        self._rescale(at)
        self._ask(request, at, request.uncached_tokens)

    @override
    def refused(self, request: Request, at: EngineSeconds, reason: str) -> None:
        once = self.fold_version >= REFUSED_ONCE
        if reason in LATE_ALONE or (once and request.best_effort):
            return
        self._rescale(at)
        if not (once and request.instance):  # a placement has asked
            self._ask_as_usual(request, at)
        if self._is_counted(request):
            self._refused += 1

    def _is_counted(self, request: Request) -> bool:
        return not (self.fold_version >= OTHERS_REFUSED and self._is_beyond(request.tenant))

    def _ask_as_usual(self, request: Request, at: EngineSeconds) -> None:
        asked = self._prompts.get(request.tenant, 0.0)
        uncached = self._demands.get(request.tenant, 0.0) / asked if asked else 1.0
        self._ask(request, at, uncached * request.prompt_tokens)

    @override
    def unplaced(self, request: Request, at: EngineSeconds) -> None:
        known = self._demands.get(request.tenant)
        if known is not None and request.stage is Stage.PENDING:
            weight = self._weight(request.placed_at)
            self._demands[request.tenant] = max(0.0, known - weight * request.uncached_tokens)
            prompts = self._prompts.get(request.tenant, 0.0) - weight * request.prompt_tokens
            self._prompts[request.tenant] = max(0.0, prompts)

    @override
    def granted(self, request: Request, at: EngineSeconds) -> None:
        self._rescale(at)
        if not self._is_bounded or request.tenant in self._demands:
            self._add(self._served, request.tenant, at, request.uncached_tokens)
        self._grants += 1
        if self._grants >= max(COMPARED_AFTER, len(self._demands)):
            self._grants = 0
            self._compare()

    def _compare(self) -> None:
        served = plain_sum(self._served.values())
        if not served or len(self._demands) < 2:
            self._fair, self._level, self._excess = inf, inf, 0.0
            return
        self._fair = fair_level(self._demands.values(), served)
        self._level = max(self._fair, EQUAL_SHARES * served / len(self._demands))
        self._excess = plain_sum(max(0.0, tokens - self._level) for tokens in self._served.values()) / served

    def _ask(self, request: Request, at: EngineSeconds, uncached_tokens: float) -> None:
        if self._is_bounded and (known := self._demands.pop(request.tenant, None)) is not None:
            self._demands[request.tenant] = known
        self._add(self._demands, request.tenant, at, uncached_tokens)
        self._add(self._prompts, request.tenant, at, request.prompt_tokens)
        if self._is_counted(request):
            self._refused *= REFUSED_FADE
            self._asked = REFUSED_FADE * self._asked + 1
        if self._is_bounded and len(self._demands) > TENANTS_MAX:
            quiet = next(iter(self._demands))
            for amounts in (self._demands, self._prompts, self._served):
                amounts.pop(quiet, None)

    @property
    def _is_bounded(self) -> bool:
        return self.fold_version >= TENANTS_BOUNDED

    def _add(self, amounts: dict[Tenant, float], tenant: Tenant, at: EngineSeconds, tokens: float) -> None:
        amounts[tenant] = amounts.get(tenant, 0.0) + self._weight(at) * tokens

    def _rescale(self, at: EngineSeconds) -> None:
        if at - self._since <= RESCALED_AFTER_SECONDS:
            return
        left = 1 / self._weight(at) if at - self._since < 2 * RESCALED_AFTER_SECONDS else 0.0
        self._demands = {t: tokens * left for t, tokens in self._demands.items() if tokens * left >= TOKENS_MIN}
        self._served = {t: tokens * left for t, tokens in self._served.items() if t in self._demands}
        self._prompts = {t: tokens * left for t, tokens in self._prompts.items() if t in self._demands}
        self._since = at
        self._compare()

    def _weight(self, at: EngineSeconds) -> float:
        return float(2.0 ** ((at - self._since) / HALF_LIFE_SECONDS))
