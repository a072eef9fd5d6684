"""The page at `/metrics`. With several processes (`--processes`) it sums up the files of all of them."""

import asyncio
import os
import time
from collections.abc import Collection, Iterator

from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from typing_extensions import override

from pointsman.primitives import Seconds

METRICS_DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"
RENDERING_SHARE_MAX = 0.1
"""Of the event loop, which does nothing else meanwhile: 6 ms a page with 16 instances, 60 ms with 512."""
PAUSE_SECONDS_MAX: Seconds = 1.0

shown_engines: dict[str, Collection[str]] = {}
"""By pool; series of others are left out. prometheus_client removes nothing from its files, and a process that is started again
goes on with those of the one before it."""


class SharedMetricsPage:
    """One rendering answers all who asked before it began, and after it others get a pause: many who ask at once cost
    a leader its lease otherwise."""

    def __init__(self) -> None:
        self._rendering = asyncio.Lock()
        self._renderings = 0
        self._page = b""
        self._not_before: Seconds = 0.0

    async def current(self) -> bytes:
        asked_after = self._renderings
        async with self._rendering:
            if self._renderings == asked_after:
                await asyncio.sleep(max(0.0, self._not_before - time.perf_counter()))
                self._render()
            return self._page

    def _render(self) -> None:
        began = time.perf_counter()
        self._page = metrics_page()
        self._renderings += 1
        ended = time.perf_counter()
        self._not_before = ended + min((ended - began) / RENDERING_SHARE_MAX, PAUSE_SECONDS_MAX)


def metrics_page() -> bytes:
    if METRICS_DIRECTORY not in os.environ:
        return generate_latest(REGISTRY)
    registry = CollectorRegistry()
    registry.register(_WithoutHidden(MultiProcessCollector(None)))  # type: ignore[no-untyped-call]
    return generate_latest(registry)


class _WithoutHidden(Collector):
    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    @override
    def collect(self) -> Iterator[Metric]:
        for family in self._collector.collect():
            family.samples = [sample for sample in family.samples if not _is_hidden(sample)]
            yield family


def _is_hidden(sample: Sample) -> bool:
    engine, shown = sample.labels.get("engine"), shown_engines.get(sample.labels.get("pool", ""))
    return engine is not None and shown is not None and engine not in shown
