"""Nobody outside makes more than a bounded number of series, and no label is a name that a client chooses."""

import io
import sys
from typing import get_args

import pytest
import structlog
from prometheus_client.metrics import MetricWrapperBase

from pointsman.runtime import structured_logs, telemetry
from pointsman.runtime.bounded_metrics import HISTOGRAMS_MAX, OTHER, SERIES_MAX, Counter, Gauge, Histogram
from pointsman.runtime.metrics_page import metrics_page

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


def test_a_metric_is_by_pool_unless_its_labels_are_named_and_by_those_with_values() -> None:
    labels = [
        Counter("x", "x", registry=None)._labelnames,
        Counter("x", "x", [], registry=None)._labelnames,
        Counter("x", "x", values={"kind": "ab", "side": "lr"}, registry=None)._labelnames,
        Counter("x", "x", ["engine"], values={"kind": "ab"}, registry=None)._labelnames,
    ]

    assert labels == [("pool",), (), ("pool", "kind", "side"), ("engine", "kind")]


def test_series_are_shown_before_the_first_event_so_that_it_is_an_increase() -> None:
    values = {"kind": ("a", "b"), "side": ("left", "right")}
    counter = Counter("x", "x", registry=None, values=values)

    counter.show_zeros(pool="default")
    counter.show_zeros(pool="other", side="left")
    shown = {tuple(sample.labels.values()) for family in counter.collect() for sample in family.samples}

    assert {(pool, kind, side) for pool, kind, side in shown if pool == "default"} == {
        ("default", kind, side) for kind in "ab" for side in ("left", "right")
    }
    assert {one for one in shown if one[0] == "other"} == {("other", "a", "left"), ("other", "b", "left")}


def test_a_process_shows_every_step_that_may_fail_and_its_version() -> None:
    telemetry.show_process()
    page = metrics_page().decode()

    assert [step for step in get_args(telemetry.Step) if f'errors_total{{step="{step}"}}' not in page] == []
    assert 'pointsman_build_info{version="' in page


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_what_others_sent_is_harmless_in_a_log_line(log_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    hostile = "\x1b]0;t\x07\x9b2J\u202e"
    structured_logs.configure_logging("info", log_format)
    log = structlog.get_logger()
    try:
        raise ValueError(hostile)  # noqa: TRY301
    except ValueError:
        log.exception("failed", reason=hostile + "\nFORGED", tenant=hostile)

    assert not set(out.getvalue()) & set("\x1b\x07\x9b\u202e")
    assert not [line for line in out.getvalue().splitlines() if line.startswith("FORGED")]
    structlog.reset_defaults()
