"""Prometheus counters of the hit-rate ladder. The console calls `update` when it likes; a request costs nothing here."""

from pointsman.analysis.ladder_figures import RUNGS, LadderFigures, Tally
from pointsman.primitives import PoolName
from pointsman.runtime import telemetry


class LadderMetrics:
    def __init__(self, pool: PoolName) -> None:
        self._pool = pool
        self._shown: dict[str, Tally] = {}

    def update(self, figures: LadderFigures) -> None:
        for tenant, tally in figures.ever.items():
            shown = self._shown.setdefault(tenant, Tally())
            if tally.prompt_tokens != shown.prompt_tokens:
                self._add(tenant, tally, shown)
                self._shown[tenant] = Tally(prompt_tokens=tally.prompt_tokens, tokens=list(tally.tokens))

    def _add(self, tenant: str, tally: Tally, shown: Tally) -> None:
        prompt = tally.prompt_tokens - shown.prompt_tokens
        telemetry.HIT_RATE_LADDER_PROMPT_TOKENS.labels(self._pool).inc(prompt)
        telemetry.TENANT_HIT_RATE_LADDER_PROMPT_TOKENS.labels(self._pool, tenant).inc(prompt)
        for rung, now, before in zip(RUNGS, tally.tokens, shown.tokens, strict=True):
            telemetry.HIT_RATE_LADDER_TOKENS.labels(self._pool, rung.value).inc(now - before)
            telemetry.TENANT_HIT_RATE_LADDER_TOKENS.labels(self._pool, tenant, rung.value).inc(now - before)
