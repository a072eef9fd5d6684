"""Prometheus counters of the hit-rate ladder. The console calls `update` when it likes; a request costs nothing here.
Tenants have none: no label is a name that a client may have chosen."""

from pointsman.analysis.ladder_figures import RUNGS, LadderFigures, Tally
from pointsman.primitives import PoolName
from pointsman.runtime import telemetry


class LadderMetrics:
    def __init__(self, pool: PoolName) -> None:
        self._prompt_tokens = telemetry.HIT_RATE_LADDER_PROMPT_TOKENS.labels(pool)
        self._tokens = [telemetry.HIT_RATE_LADDER_TOKENS.labels(pool, rung.value) for rung in RUNGS]
        self._shown = Tally()

    def update(self, figures: LadderFigures) -> None:
        total, shown = figures.ever, self._shown
        self._prompt_tokens.inc(total.prompt_tokens - shown.prompt_tokens)
        for counter, now, before in zip(self._tokens, total.tokens, shown.tokens, strict=True):
            counter.inc(now - before)
        self._shown = Tally(prompt_tokens=total.prompt_tokens, tokens=list(total.tokens))
