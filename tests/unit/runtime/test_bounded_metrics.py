"""Nobody outside makes more than a bounded number of series, and no label is a name that a client chooses."""

import io
import sys

import pytest
import structlog
from prometheus_client.metrics import MetricWrapperBase

from pointsman.runtime import telemetry
from pointsman.runtime.bounded_metrics import HISTOGRAMS_MAX, OTHER, SERIES_MAX, Counter, Gauge, Histogram

LABELS = {
    "admission", "agreement", "cause", "engine", "failure", "kind", "knowledge", "model", "objective", "operation", "ordering", "outcome", "part",
    "policy", "pool", "quantile", "reason", "role", "route", "rung", "shadow", "side", "status", "step", "type", "version",
}  # fmt: skip
"""Each from a list in the source or from the configuration, but `engine` ([a-z0-9-], at most 63 characters) and `model`,
both from workers. Never `instance` or `job`: Prometheus gives those to what it scrapes."""
METRICS = [value for value in vars(telemetry).values() if isinstance(value, MetricWrapperBase)]


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric._name)
def test_labels_are_from_the_list_and_series_are_bounded(metric: MetricWrapperBase) -> None:
    assert set(metric._labelnames) <= LABELS
    assert isinstance(metric, Counter | Gauge | Histogram)


@pytest.mark.parametrize("kind", [Counter, Gauge, Histogram])
def test_further_series_are_counted_together(kind: type[Counter | Gauge | Histogram]) -> None:
    metric = kind("x", "x", ["pool", "engine"], registry=None)
    most = HISTOGRAMS_MAX if kind is Histogram else SERIES_MAX
    for number in range(most + 500):
        child = metric.labels("default", f"engine-{number}")
        child.observe(1) if isinstance(child, Histogram) else child.inc()

    assert len(metric._metrics) == most + 1
    other = metric.labels("default", OTHER)
    assert (other._sum if isinstance(other, Histogram) else other._value).get() == 500
    assert metric.labels("default", "engine-3") is metric._metrics["default", "engine-3"]


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_what_others_sent_is_harmless_in_a_log_line(log_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    hostile = "\x1b]0;t\x07\x9b2J\u202e"
    telemetry.configure_logging("info", log_format)
    log = structlog.get_logger()
    try:
        raise ValueError(hostile)  # noqa: TRY301
    except ValueError:
        log.exception("failed", reason=hostile + "\nFORGED", tenant=hostile)

    assert not set(out.getvalue()) & set("\x1b\x07\x9b\u202e")
    assert not [line for line in out.getvalue().splitlines() if line.startswith("FORGED")]
    structlog.reset_defaults()
