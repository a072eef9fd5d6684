"""Removes the series of engines that left their pool: pods have new names at each rollout. Counters stay for
KEPT_WALL_SECONDS, so that Prometheus reads their last values."""

import os
from collections.abc import Collection

from pointsman.primitives import WallSeconds
from pointsman.runtime import telemetry
from pointsman.runtime.bounded_metrics import Bounded
from pointsman.runtime.metrics_page import METRICS_DIRECTORY, hidden_engines

KEPT_WALL_SECONDS: WallSeconds = WallSeconds(120.0)
"""Longer than any usual scrape interval."""
SWEEP_WALL_SECONDS: WallSeconds = WallSeconds(1.0)
"""A sweep looks at all series: 1 ms with 512 engines and one of each."""

_of_engines = [metric for metric in vars(telemetry).values() if isinstance(metric, Bounded) and metric.is_of_engines]


def forget(pool: str, engine: str) -> None:
    if METRICS_DIRECTORY in os.environ:
        hidden_engines.add((pool, engine))
        return
    for metric in _of_engines:
        metric.remove_by_labels({"pool": pool, "engine": engine})


class EngineSeries:
    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._absent_since: dict[str, WallSeconds] = {}
        self._swept_at = WallSeconds(float("-inf"))

    def update(self, present: Collection[str], now: WallSeconds) -> bool:
        """Call as often as you like. Returns whether series were removed: children kept of them count nothing."""
        if now - self._swept_at < SWEEP_WALL_SECONDS:
            return False
        self._swept_at = now
        absent = set().union(*(metric.engines_of(self._pool) for metric in _of_engines)).difference(present)
        hidden_engines.difference_update((self._pool, engine) for engine in present)
        absent.difference_update(engine for pool, engine in hidden_engines if pool == self._pool)
        self._absent_since = {engine: self._absent_since.get(engine, now) for engine in absent}
        due = [engine for engine, since in self._absent_since.items() if now - since >= KEPT_WALL_SECONDS]
        for engine in due:
            forget(self._pool, engine)
        return bool(due)
