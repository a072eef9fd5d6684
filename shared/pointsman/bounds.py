"""Bounds of numbers in settings: those of policies, and the options of processes and commands. In: a number. Out: why it
is refused, in one wording. Text is parsed elsewhere, and numbers on the wire have bounds of their own (`primitives`)."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import inf, isfinite
from typing import Any

from typing_extensions import override

BOUNDS = "bounds"
"""Key in the metadata of a dataclass field."""
FINITE_MAX = 1e30
"""Of every number, as in the log (`primitives.Number`)."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """`above`: the number may not be `least` itself. No number is infinite."""

    least: float = 0.0
    most: float = inf
    above: bool = False

    def refusal(self, number: float) -> str:
        """Why the number is refused, or ""."""
        if not abs(number) <= FINITE_MAX:
            return f"must be a finite number, not {number}"
        is_within = self.least <= number <= self.most and not (self.above and number == self.least)
        return "" if is_within else f"must be {self}, not {number}"

    @override
    def __str__(self) -> str:
        lower = f"{'above' if self.above else 'at least'} {self.least:g}"
        return f"{lower} and at most {self.most:g}" if isfinite(self.most) else lower


NOT_NEGATIVE = Bounds()
"""Of a number that declares none."""
POSITIVE = Bounds(above=True)
COUNT = Bounds(least=1)
SHARE = Bounds(most=1.0)
POSITIVE_SHARE = Bounds(most=1.0, above=True)
PORT_MAX = 65_535
PORT = Bounds(most=PORT_MAX)


def bounded(default: Any, bounds: Bounds) -> Any:
    """A field of a policy with other bounds than NOT_NEGATIVE."""
    return field(default=default, metadata={BOUNDS: bounds})


def bounds_of(metadata: Mapping[str, Any]) -> Bounds:
    found: Bounds = metadata.get(BOUNDS, NOT_NEGATIVE)
    return found


def check_settings(policy: Any) -> None:
    """Raises ValueError for a number outside its bounds."""
    for one in fields(policy):
        value = getattr(policy, one.name)
        if isinstance(value, int | float) and (refusal := bounds_of(one.metadata).refusal(value)):
            raise ValueError(f"{one.name} {refusal}")
