"""Sums of the hit-rate ladder by hour and tenant, in bounded memory."""

from collections.abc import Iterable
from enum import StrEnum

import msgspec

from pointsman.primitives import EngineSeconds, Tokens

HOURS_MAX = 7 * 24
TENANTS_MAX = 200
"""In an hour; further ones are counted together, as OTHER."""
OTHER = "(other)"
HOUR_SECONDS = 3600


class Rung(StrEnum):
    """From the most that any cache could give to what was given. docs/data.md#hit-rate defines each."""

    UNBOUNDED = "unbounded"
    CAPACITY = "capacity"
    PERFECT = "perfect"
    KNOWN = "known"
    CHOSEN = "chosen"
    DELIVERED = "delivered"


RUNGS = tuple(Rung)
RUNG_HEADINGS = ("unbounded", "fleet size", "best engine", "best known", "chosen", "delivered")
"""Of RUNGS, in a table."""


class Tally(msgspec.Struct):
    """Of finished requests whose engine told its cached tokens. `tokens`: of their prompts, by rung."""

    requests: int = 0
    prompt_tokens: Tokens = 0
    tokens: list[Tokens] = msgspec.field(default_factory=lambda: [0] * len(RUNGS))
    missed_tokens: Tokens = 0
    """Predicted at the chosen engine, and not delivered."""
    loaded_tokens: Tokens = 0
    """Delivered, and loaded back from a slower tier."""
    untold: int = 0
    """Finished, and not told how much of the prompt was cached (`cached_of_keys`): in no other number."""

    def share(self, rung: Rung) -> float:
        return self.tokens[RUNGS.index(rung)] / self.prompt_tokens if self.prompt_tokens else 0.0

    def count(self, prompt_tokens: Tokens, tokens: list[Tokens]) -> None:
        self.requests += 1
        self.prompt_tokens += prompt_tokens
        self.tokens = [one + other for one, other in zip(self.tokens, tokens, strict=True)]
        self.missed_tokens += max(0, tokens[-2] - tokens[-1])

    def add(self, other: "Tally") -> None:
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        self.tokens = [one + more for one, more in zip(self.tokens, other.tokens, strict=True)]
        self.missed_tokens += other.missed_tokens
        self.loaded_tokens += other.loaded_tokens
        self.untold += other.untold


class LadderFigures:
    def __init__(self) -> None:
        self.ever = Tally()
        """Also of hours that are no longer kept."""
        self._hours: dict[int, dict[str, Tally]] = {}

    def tallies(self, unix_seconds: EngineSeconds, tenant: str) -> list[Tally]:
        """Where a request of that moment is counted."""
        counted = [self.ever]
        of_hour = self._hour(int(unix_seconds // HOUR_SECONDS))
        if of_hour is not None:
            if tenant not in of_hour and len(of_hour) >= TENANTS_MAX:
                tenant = OTHER
            counted.append(of_hour.setdefault(tenant, Tally()))
        return counted

    def _hour(self, hour: int) -> dict[str, Tally] | None:
        if hour not in self._hours:
            if len(self._hours) >= HOURS_MAX:
                oldest = min(self._hours)
                if hour < oldest:
                    return None
                del self._hours[oldest]
            self._hours[hour] = {}
        return self._hours[hour]

    def hours(self) -> list[tuple[int, Tally]]:
        """Unix time of each hour's beginning, in order."""
        return [(hour * HOUR_SECONDS, _sum(of_hour.values())) for hour, of_hour in sorted(self._hours.items())]

    def tenants(self) -> list[tuple[str, Tally]]:
        """Most prompt tokens first."""
        tallies: dict[str, Tally] = {}
        for of_hour in self._hours.values():
            for tenant, tally in of_hour.items():
                tallies.setdefault(tenant, Tally()).add(tally)
        return sorted(tallies.items(), key=lambda row: (-row[1].prompt_tokens, row[0]))


def _sum(tallies: Iterable[Tally]) -> Tally:
    total = Tally()
    for tally in tallies:
        total.add(tally)
    return total
