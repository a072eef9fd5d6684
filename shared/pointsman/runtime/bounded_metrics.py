"""Prometheus metrics with a bounded number of series: labels are names of instances, which workers choose. Beyond
SERIES_MAX the values of further series are counted together, as `other`."""

from typing import Any, Self

import prometheus_client
from typing_extensions import override

SERIES_MAX = 2_000
OTHER = "other"


class _Bounded(prometheus_client.metrics.MetricWrapperBase):
    @override
    def labels(self, *labelvalues: Any, **labelkwargs: Any) -> Self:
        if len(self._metrics) >= SERIES_MAX and tuple(map(str, labelvalues)) not in self._metrics:
            labelvalues = (OTHER,) * len(labelvalues)
        return super().labels(*labelvalues, **labelkwargs)


class Counter(_Bounded, prometheus_client.Counter): ...


class Gauge(_Bounded, prometheus_client.Gauge): ...


class Histogram(_Bounded, prometheus_client.Histogram): ...
