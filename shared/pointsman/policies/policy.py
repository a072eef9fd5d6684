"""The base class of all policies."""

from abc import ABC
from dataclasses import asdict, dataclass
from typing import ClassVar

from pointsman.bounds import check_settings
from pointsman.contracts.decisions import Settings
from pointsman.state.trackers.base import Tracker


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
