"""Prometheus metrics with a bounded number of series: labels are names of engines, which workers choose. Beyond
SERIES_MAX (histograms: HISTOGRAMS_MAX) the values of further series are counted together, as `other`."""

from typing import Any, ClassVar, Self

import prometheus_client
from typing_extensions import override

SERIES_MAX = 2_000
HISTOGRAMS_MAX = 200
"""Of one metric; each has some twenty series."""
OTHER = "other"


class Bounded(prometheus_client.metrics.MetricWrapperBase):
    series_max: ClassVar[int] = SERIES_MAX

    @override
    def labels(self, *labelvalues: Any, **labelkwargs: Any) -> Self:
        if len(self._metrics) >= self.series_max and tuple(map(str, labelvalues)) not in self._metrics:
            named = zip(self._labelnames, labelvalues, strict=True)
            labelvalues = tuple(value if name == "pool" else OTHER for name, value in named)
        return super().labels(*labelvalues, **labelkwargs)

    @property
    def is_of_engines(self) -> bool:
        return {"pool", "engine"} <= set(self._labelnames)

    def engines_of(self, pool: str) -> set[str]:
        of, engine = self._labelnames.index("pool"), self._labelnames.index("engine")
        return {values[engine] for values in list(self._metrics) if values[of] == pool} - {OTHER}


class Counter(Bounded, prometheus_client.Counter): ...


class Gauge(Bounded, prometheus_client.Gauge): ...


class Histogram(Bounded, prometheus_client.Histogram):
    series_max = HISTOGRAMS_MAX
