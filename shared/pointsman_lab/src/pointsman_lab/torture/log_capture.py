"""Captures service logs during a run: none is printed, and errors are violations."""

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, NoReturn

import structlog

from pointsman_lab.torture.cluster import Cluster

EXPECTED = frozenset({"instance_unschedulable"})


@contextmanager
def listening_for_errors(cluster: Cluster) -> Iterator[None]:
    before = structlog.get_config()

    def receive(_logger: Any, method: str, event: MutableMapping[str, Any]) -> NoReturn:
        if method in ("error", "exception", "critical") and event["event"] not in EXPECTED:
            details = {name: value for name, value in event.items() if name != "event"}
            cluster.violation(f"a service logs {event['event']}: {details!r}")
        raise structlog.DropEvent

    structlog.configure(
        processors=[receive], wrapper_class=structlog.make_filtering_bound_logger(40), cache_logger_on_first_use=False
    )
    try:
        yield
    finally:
        structlog.configure(**before)
