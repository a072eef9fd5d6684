"""Removes the series of engines that left their pool: pods have new names at each rollout. Counters stay for
KEPT_WALL_SECONDS, so that Prometheus reads their last values."""

import os
from collections.abc import Collection

from pointsman.primitives import WallSeconds
from pointsman.runtime import telemetry
from pointsman.runtime.bounded_metrics import OTHER, Bounded
from pointsman.runtime.metrics_page import METRICS_DIRECTORY, shown_engines

KEPT_WALL_SECONDS: WallSeconds = WallSeconds(120.0)
"""Longer than any usual scrape interval."""
SWEEP_WALL_SECONDS: WallSeconds = WallSeconds(1.0)
"""A sweep looks at all series: 1 ms with 512 engines and one of each."""

_of_engines = [metric for metric in vars(telemetry).values() if isinstance(metric, Bounded) and metric.is_of_engines]


def forget(pool: str, engine: str) -> None:
    for metric in _of_engines:
        metric.remove_by_labels({"pool": pool, "engine": engine})


class EngineSeries:
    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._several = METRICS_DIRECTORY in os.environ
        self._present: set[str] = set()
        self._absent_since: dict[str, WallSeconds] = {}
        self._swept_at = WallSeconds(float("-inf"))

    def update(self, present: Collection[str], now: WallSeconds) -> bool:
        """Call as often as you like. Returns whether series were removed: children kept of them count nothing. Of several
        processes each shows what has been present for itself: the files also have what was there before it."""
        if now - self._swept_at < SWEEP_WALL_SECONDS:
            return False
        self._swept_at = now
        counted = [] if self._several else [metric.engines_of(self._pool) for metric in _of_engines]
        absent = self._present.union(self._absent_since, *counted).difference(present)
        absent_since = {engine: self._absent_since.get(engine, now) for engine in absent}
        due = [engine for engine, since in absent_since.items() if now - since >= KEPT_WALL_SECONDS]
        for engine in due:
            del absent_since[engine]
            if not self._several:
                forget(self._pool, engine)
        self._present, self._absent_since = set(present), absent_since
        if self._several:
            shown_engines[self._pool] = {*present, *absent_since, OTHER}
        return bool(due)
