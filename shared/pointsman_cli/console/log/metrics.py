"""Prometheus metrics of shadow policies and of the hit-rate ladder, brought up to date when they are scraped. None is by
tenant: no label is a name that a client may have chosen."""

from pointsman.analysis.ladder_figures import RUNGS, LadderFigures, Tally
from pointsman.analysis.shadow import Shadow, ShadowReport
from pointsman.analysis.shadow_figures import DecisionFigures
from pointsman.analysis.shadow_windows import WindowFigures
from pointsman.primitives import PoolName
from pointsman.runtime import telemetry

RUNNING, SHADOW = "running", "shadow"
AGREEMENTS = ("same", "other", "shadow_rejects", "shadow_places", "both_reject")


class ShadowMetrics:
    def __init__(self, pool: PoolName) -> None:
        self._pool = pool
        self._shown: dict[str, DecisionFigures] = {}
        self._counts: dict[str, int] = {}

    def update(self, shadow: Shadow) -> None:
        summary = shadow.summary()
        for report in summary.shadows:
            self._count(report)
        telemetry.SHADOW_SAMPLED_OUT.labels(self._pool).inc(self._more("sampled_out", summary.sampled_out))
        for outcome in ("simulated", "shed", "unusable"):
            more = self._more(outcome, getattr(summary, outcome))
            telemetry.SHADOW_WINDOWS.labels(self._pool, outcome).inc(more)
        if not summary.windows:
            return
        last = summary.windows[-1]
        for name, shadow_figures in last.shadows.items():
            self._show(name, RUNNING, last.running)
            self._show(name, SHADOW, shadow_figures.figures)
            if (regret := shadow_figures.regret.ttft_mean_s) is not None:
                telemetry.SHADOW_WINDOW_REGRET.labels(self._pool, name).set(regret)

    def _more(self, what: str, now: int) -> int:
        more, self._counts[what] = now - self._counts.get(what, 0), now
        return more

    def _count(self, report: ShadowReport) -> None:
        pool, name, now = self._pool, report.name, report.total
        before = self._shown.get(name, DecisionFigures(since=0.0))
        self._shown[name] = now
        for agreement in AGREEMENTS:
            more = getattr(now, agreement) - getattr(before, agreement)
            telemetry.SHADOW_DECISIONS.labels(pool, name, agreement).inc(more)
        telemetry.SHADOW_PROMPT_TOKENS.labels(pool, name).inc(now.prompt_tokens - before.prompt_tokens)
        for side, tokens, seconds in (
            (
                RUNNING,
                now.running_cached_tokens - before.running_cached_tokens,
                now.running_predicted_ttft - before.running_predicted_ttft,
            ),
            (
                SHADOW,
                now.shadow_cached_tokens - before.shadow_cached_tokens,
                now.shadow_predicted_ttft - before.shadow_predicted_ttft,
            ),
        ):
            telemetry.SHADOW_CACHED_TOKENS.labels(pool, name, side).inc(tokens)
            telemetry.SHADOW_PREDICTED_TTFT.labels(pool, name, side).inc(seconds)

    def _show(self, name: str, side: str, figures: WindowFigures) -> None:
        labels = (self._pool, name, side)
        for quantile, seconds in (("0.5", figures.ttft_p50_s), ("0.9", figures.ttft_p90_s)):
            if seconds is not None:
                telemetry.SHADOW_WINDOW_TTFT.labels(*labels, quantile).set(seconds)
        for gauge, value in (
            (telemetry.SHADOW_WINDOW_HIT_RATE, figures.hit_rate),
            (telemetry.SHADOW_WINDOW_GOODPUT, figures.goodput),
        ):
            if value is not None:
                gauge.labels(*labels).set(value)


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
