"""Click types of options that are numbers within `Bounds`. A settings file also gives numbers, which click would round."""

from collections.abc import Callable
from math import isfinite
from typing import Any, TypeVar

import click
from typing_extensions import override

from pointsman.bounds import Bounds

T = TypeVar("T")


class Whole(click.IntRange):
    def __init__(self, allowed: Bounds) -> None:
        self._allowed = allowed
        super().__init__(min=int(allowed.least), max=_most(allowed, int), min_open=allowed.above)

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, bool | float):
            self.fail(f"{_as_written(value)} is not a whole number", param, ctx)
        number = int(click.INT.convert(value, param, ctx))
        if refusal := self._allowed.refusal(number):
            self.fail(refusal, param, ctx)
        return number


class Finite(click.FloatRange):
    def __init__(self, allowed: Bounds) -> None:
        self._allowed = allowed
        super().__init__(min=allowed.least, max=_most(allowed, float), min_open=allowed.above)

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, bool):
            self.fail(f"{_as_written(value)} is not a number", param, ctx)
        number = float(click.FLOAT.convert(value, param, ctx))
        if refusal := self._allowed.refusal(number):
            self.fail(refusal, param, ctx)
        return number


def _most(allowed: Bounds, kind: Callable[[float], T]) -> T | None:
    return kind(allowed.most) if isfinite(allowed.most) else None


def _as_written(value: float) -> str:
    return str(value).lower()
