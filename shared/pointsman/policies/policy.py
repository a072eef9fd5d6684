"""The base class of all policies, and the bounds of their settings."""

from abc import ABC
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from math import inf, isfinite
from typing import Any, ClassVar

from typing_extensions import override

from pointsman.contracts.decisions import Settings
from pointsman.state.trackers.base import Tracker

BOUNDS = "bounds"


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of a number. `above`: it may not be `least` itself."""

    least: float = 0.0
    most: float = inf
    above: bool = False

    def contain(self, value: float) -> bool:
        return isfinite(value) and self.least <= value <= self.most and not (self.above and value == self.least)

    @override
    def __str__(self) -> str:
        lower = f"{'above' if self.above else 'at least'} {self.least:g}"
        return f"{lower} and at most {self.most:g}" if isfinite(self.most) else f"{lower} and finite"


NOT_NEGATIVE = Bounds()
POSITIVE = Bounds(above=True)
COUNT = Bounds(least=1)
SHARE = Bounds(most=1.0)
POSITIVE_SHARE = Bounds(most=1.0, above=True)


def bounded(default: Any, bounds: Bounds) -> Any:
    """A setting with narrower bounds than NOT_NEGATIVE, which each number has."""
    return field(default=default, metadata={BOUNDS: bounds})


def bounds_of(metadata: Mapping[str, Any]) -> Bounds:
    found: Bounds = metadata.get(BOUNDS, NOT_NEGATIVE)
    return found


def check_settings(policy: Any) -> None:
    """Raises ValueError for a number outside its bounds."""
    for one in fields(policy):
        value = getattr(policy, one.name)
        bounds = bounds_of(one.metadata)
        if isinstance(value, int | float) and not bounds.contain(value):
            message = f"{one.name} must be {bounds}, not {value}"
            raise ValueError(message)


@dataclass(frozen=True)
class Policy(ABC):
    """A frozen dataclass; its fields are its settings and have defaults. Raises ValueError for a number that is out of
    bounds."""

    name: ClassVar[str]
    absent: ClassVar[Settings] = {}
    """Settings that are not recorded with these values: older records, which lack them, mean these."""

    def __post_init__(self) -> None:
        check_settings(self)

    def trackers(self) -> tuple[Tracker, ...]:
        """Fresh trackers that State keeps for this policy."""
        return ()

    @property
    def settings(self) -> Settings:
        return {name: value for name, value in asdict(self).items() if (name, value) not in self.absent.items()}
