"""Keeps libraries from importing optional dependencies that we never use."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without(name: str) -> Iterator[None]:
    """While it lasts, importing `name` fails as if it were not installed."""
    found = sys.modules.get(name)
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]
        if found is not None:
            sys.modules[name] = found
