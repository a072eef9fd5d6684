"""Attributes that follow from the others of their object. A checkpoint leaves them out and sets them to what their
factory gives; their owner computes them again when they are needed."""

from collections.abc import Callable, Mapping
from typing import Any

Derived = Mapping[str, Callable[[], Any]]
"""Of a class variable `DERIVED`: attribute to factory."""
