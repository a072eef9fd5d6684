"""Prometheus metrics with a bounded number of series: labels are names of engines, which workers choose. Beyond
SERIES_MAX (histograms: HISTOGRAMS_MAX) the values of further series are counted together, as `other`. A metric declares the
values of a label that has few, so that a process can show all its series before the first event."""

import os
from collections.abc import Iterable, Mapping
from itertools import product
from types import MappingProxyType
from typing import Any, ClassVar, Self

import prometheus_client
from typing_extensions import override

from pointsman.runtime.metrics_page import METRICS_DIRECTORY

SERIES_MAX = 2_000
HISTOGRAMS_MAX = 200
"""Of one metric; each has some twenty series."""
OTHER = "other"
Values = Mapping[str, Iterable[str]]
"""Of labels that have few."""
NO_VALUES: Values = MappingProxyType({})


class Writer:
    """Names the files of this process among those of several. With process ids, as prometheus_client has it, each process that
    ends would leave files behind, which every page reads."""

    name: ClassVar[str] = "parent"


if METRICS_DIRECTORY in os.environ:  # before the first metric
    prometheus_client.values.ValueClass = prometheus_client.values.MultiProcessValue(lambda: Writer.name)  # type: ignore[no-untyped-call]


class Bounded(prometheus_client.metrics.MetricWrapperBase):
    series_max: ClassVar[int] = SERIES_MAX

    def __init__(
        self,
        name: str,
        documentation: str,
        labelnames: Iterable[str] = ("pool",),
        *,
        values: Values = NO_VALUES,
        **kwargs: Any,
    ) -> None:
        """`values`: of further labels."""
        super().__init__(name, documentation, (*labelnames, *values), **kwargs)
        self.values = {label: tuple(map(str, some)) for label, some in values.items()}

    def show_zeros(self, **known: str) -> None:
        """Call before the first event: `increase` and `rate` miss the first value of a series that appears with it. `known`:
        labels whose values are not declared."""
        for values in product(*((known[name],) if name in known else self.values[name] for name in self._labelnames)):
            self.labels(*values)

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
