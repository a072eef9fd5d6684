"""Captures log lines of one module."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import ModuleType

import pytest
import structlog
from structlog.testing import capture_logs
from structlog.typing import EventDict

LinesOf = Callable[[ModuleType], list[EventDict]]


@pytest.fixture
def lines_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[LinesOf]:
    """What the module logs from now on, with a new logger: its own is bound once a test has configured logs."""
    with ExitStack() as stack:

        def capture(module: ModuleType) -> list[EventDict]:
            structlog.reset_defaults()
            monkeypatch.setattr(module, "log", structlog.get_logger())
            return stack.enter_context(capture_logs())

        yield capture
