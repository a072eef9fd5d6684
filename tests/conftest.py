"""The worlds in which the log keeps the same promises, whatever it is: `world` is each of them in turn. And examples of
properties, which may take their time: how long says something of the machine only."""

import asyncio
import builtins
import gc
import itertools
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, settings

from pointsman.primitives import PoolName, WallSeconds
from pointsman.runtime.bounded_metrics import OTHER, Bounded
from tests.support.log_worlds import JetStreamWorld, LogWorld, MemoryWorld, SharedServer

TIMED = [HealthCheck.too_slow]  # a busy machine fails it
settings.register_profile("pointsman", deadline=None, suppress_health_check=TIMED, derandomize=True)
settings.register_profile("check", settings.get_profile("pointsman"), max_examples=20)  # of `make check`
settings.register_profile("fuzz", settings.get_profile("pointsman"), derandomize=False)  # of `make fuzz`
settings.load_profile("pointsman")

pools = (PoolName(f"pool-{number}") for number in itertools.count())


def pytest_collection_finish() -> None:
    """What was imported and collected stays: no garbage collection need look at it."""
    gc.freeze()


@pytest.fixture(autouse=True)
def _declared_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a metric counts in a test it counts under values that it declares."""
    labels = Bounded.labels

    def checked(metric: Bounded, *values: str, **named: str) -> Bounded:
        for label, value in zip(metric._labelnames, values, strict=False):
            declared = metric.values.get(label, (str(value),))
            assert value in (OTHER, *declared), f"{metric._name} does not declare that {label} may be {value}"
        return labels(metric, *values, **named)

    monkeypatch.setattr(Bounded, "labels", checked)


@pytest.fixture(autouse=True)
def _default_logging() -> Iterator[None]:
    """A command that runs in this process chooses the level of what follows; an engine beside it does not log into its
    standard output."""
    structlog.configure(logger_factory=lambda *_: structlog.PrintLogger(sys.stderr))
    yield
    structlog.reset_defaults()


@pytest.fixture
def plain_sums(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`sum` rounds floats otherwise since Python 3.12, so what folds and decides may add only whole numbers by it."""
    found: set[str] = set()
    added = sum

    def watched(values: Iterable[Any], /, start: Any = 0) -> Any:
        values = list(values)
        caller = sys._getframe(1)
        if caller.f_globals["__name__"].startswith(("pointsman.state.", "pointsman.policies.")) and any(
            isinstance(value, float) for value in values
        ):
            found.add(f"{caller.f_code.co_filename}:{caller.f_lineno}")
        return added(values, start)

    monkeypatch.setattr(builtins, "sum", watched)
    yield
    assert not found, "sums of floats: see plain_sum"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServer]:
    shared = SharedServer(tmp_path_factory.mktemp("nats"))
    asyncio.run(shared.start())
    yield shared
    asyncio.run(shared.running.stop())


@pytest.fixture(params=["memory", "jetstream", "jetstream-batches"])
def world(request: pytest.FixtureRequest) -> LogWorld:
    if request.param == "memory":
        return MemoryWorld(next(pools))
    every = WallSeconds(0.02 if request.param == "jetstream-batches" else 0.0)
    return JetStreamWorld(next(pools), request.getfixturevalue("server"), reads_every=every)
