"""Metrics of one request, by pool and model. Children are kept, since `labels` is slow."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

from prometheus_client import Counter, Gauge, Histogram

from pointsman.ports import Clock
from pointsman.primitives import EngineSeconds, InstanceId, PoolName, WallSeconds
from pointsman.runtime import telemetry
from pointsman.runtime.bounded_metrics import SERIES_MAX
from pointsman.runtime.engine_series import EngineSeries
from pointsman.state.fleet import Instance
from pointsman_ingress.http.call import HttpExchange
from pointsman_ingress.placement.fleet_view import FleetView

PERIOD_WALL_SECONDS: WallSeconds = WallSeconds(5.0)


class ModelMetrics:
    def __init__(self, pool: PoolName, model: str) -> None:
        self.in_flight: Gauge = telemetry.REQUESTS_IN_FLIGHT.labels(pool, model)
        self._ttft: Histogram = telemetry.TIME_TO_FIRST_TOKEN_SECONDS.labels(pool, model)
        self._tpot: Histogram = telemetry.TIME_PER_OUTPUT_TOKEN_SECONDS.labels(pool, model)
        self._e2e: Histogram = telemetry.E2E_REQUEST_LATENCY_SECONDS.labels(pool, model)
        self._queue: Histogram = telemetry.REQUEST_QUEUE_TIME_SECONDS.labels(pool, model)
        self._slo = cache(lambda objective, met: _slo_requests(pool, model, objective, met=met))

    def finished(self, e2e: EngineSeconds, queue: EngineSeconds) -> None:
        self._e2e.observe(e2e)
        self._queue.observe(queue)

    def first_token(self, ttft: EngineSeconds, slo: EngineSeconds) -> None:
        self._ttft.observe(ttft)
        self._slo("ttft", ttft <= slo).inc()

    def output(self, tpot: EngineSeconds, tbt: EngineSeconds, slo: EngineSeconds) -> None:
        """`tbt`: 0 if unknown. `slo`: of both; 0 for none."""
        self._tpot.observe(tpot)
        if slo > 0:
            self._slo("tpot", tpot <= slo).inc()
            if tbt > 0:
                self._slo("tbt", tbt <= slo).inc()


def _slo_requests(pool: PoolName, model: str, objective: str, *, met: bool) -> Counter:
    telemetry.SLO_REQUESTS.show_zeros(pool=pool, model=model, objective=objective)
    return telemetry.SLO_REQUESTS.labels(pool, model, objective, "met" if met else "missed")


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    prompt_tokens: Counter
    output_tokens: Counter
    cached_tokens: Counter
    predicted_cached_tokens: Counter


@lru_cache(maxsize=SERIES_MAX)
def of_model(pool: PoolName, model: str) -> ModelMetrics:
    return ModelMetrics(pool, model)


@lru_cache(maxsize=SERIES_MAX)
def of_engine(pool: PoolName, model: str, engine: InstanceId) -> EngineMetrics:
    return EngineMetrics(
        telemetry.PROMPT_TOKENS.labels(pool, model, engine),
        telemetry.OUTPUT_TOKENS.labels(pool, model, engine),
        telemetry.CACHED_TOKENS.labels(pool, model, engine),
        telemetry.PREDICTED_CACHED_TOKENS.labels(pool, model, engine),
    )


@lru_cache(maxsize=SERIES_MAX)
def cache_predictions(pool: PoolName, engine: InstanceId, outcome: str) -> Counter:
    return telemetry.CACHE_PREDICTIONS.labels(pool, engine, outcome)


@lru_cache(maxsize=SERIES_MAX)
def prefix_copies(pool: PoolName, target: InstanceId, outcome: str) -> Counter:
    return telemetry.PREFIX_COPIES.labels(pool, target, outcome)


@lru_cache(maxsize=SERIES_MAX)
def http_requests(pool: str, model: str, route: str, status: int) -> Counter:
    return telemetry.HTTP_REQUESTS.labels(pool, model, route, str(status))


def count_outcome(call: HttpExchange) -> None:
    facts = call.facts
    pool = facts.pool or ""
    model = (facts.model or "") if pool else ""  # a client's own word before a pool is found
    http_requests(pool, model, call.path, call.final_status).inc()
    if facts.reason:
        telemetry.REQUEST_ERRORS.labels(pool, model, facts.reason).inc()


def show_zeros(pool: PoolName) -> None:
    for metric in (
        telemetry.REQUEST_RETRIES,
        telemetry.REQUEST_RETRIES_REFUSED,
        telemetry.REQUESTS_REDISPATCHED,
        telemetry.FALLBACK_PLACEMENTS,
    ):
        metric.show_zeros(pool=pool)


async def forget_departed(
    fleet: FleetView, pool: PoolName, clock: Clock, others: Sequence[Callable[[Collection[Instance]], None]]
) -> None:
    """Runs without end. `others`: what else forgets all but the instances that there are."""
    show_zeros(pool)
    series = EngineSeries(pool)
    while True:
        await clock.sleep_wall(PERIOD_WALL_SECONDS)
        present = fleet.instances
        for forget in others:
            forget(present)
        if series.update([instance.id for instance in present], clock.wall()):
            of_engine.cache_clear()
            cache_predictions.cache_clear()
            prefix_copies.cache_clear()
