"""The page at `/metrics`. With several processes (`--processes`) it sums up the files of all of them."""

import os
from collections.abc import Iterator

from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from typing_extensions import override

METRICS_DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"

hidden_engines: set[tuple[str, str]] = set()
"""Pool and engine whose series are left out: prometheus_client removes nothing from its files."""


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
    return (sample.labels.get("pool", ""), sample.labels.get("engine", "")) in hidden_engines
