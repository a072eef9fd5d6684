"""Names of metrics and labels in PromQL, read from its text; and the series that a process of ours can show."""

import re

from prometheus_client.metrics import MetricWrapperBase

from pointsman.runtime import telemetry

METRIC = re.compile(r"\bpointsman_\w+")
SELECTOR = re.compile(r"\b(pointsman_\w+)\{([^}]*)\}")
LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"([^\"]*)\"")
TARGET_LABELS = {"job", "instance"}
"""Of what Prometheus scrapes."""


def _series() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for metric in vars(telemetry).values():
        if isinstance(metric, MetricWrapperBase):
            (family,) = metric.describe()
            labels = {*metric._labelnames} | TARGET_LABELS
            if family.type == "histogram":
                found |= {f"{family.name}_{part}": labels for part in ("count", "sum")}
                found[f"{family.name}_bucket"] = labels | {"le"}
            else:
                found[f"{family.name}_total" if family.type == "counter" else family.name] = labels
    return found


SERIES = _series()
"""Labels by name of series."""


def unknown_in(expression: str) -> list[str]:
    """Metrics that no process has, and labels that a metric does not have."""
    metrics = [name for name in METRIC.findall(expression) if name not in SERIES]
    labels = [
        f"{name}{{{label}}}"
        for name, selector in SELECTOR.findall(expression)
        for label, _ in LABEL.findall(selector)
        if label not in SERIES.get(name, {label})
    ]
    return metrics + labels
