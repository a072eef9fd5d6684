"""What placements, rejections and hand-overs record of what was weighed: the chosen candidate, its nearest rivals and the
number of the others; the settings only now and then, since LeaderElected has them. What is left out can be recomputed.
In: candidates as weighed; out: those to record. Replay takes the number of rivals from the recorded event (`rivals_of`),
so that it compares whatever was recorded."""

from collections.abc import Callable, Sequence
from math import inf
from typing import TypeVar

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import (
    Candidate,
    DecodeCandidate,
    HandOverRefused,
    RequestHandedOver,
    RequestPlaced,
    RequestRejected,
    Settings,
)
from pointsman.policies.candidates import CandidateEstimate, LazyCandidates
from pointsman.primitives import InstanceId
from pointsman.state.workload import NO_INSTANCE

RIVALS = 4
SETTINGS_EVERY = 256
"""Placements and rejections after which the settings are repeated, for readers of a log that lost the LeaderElected."""

C = TypeVar("C", CandidateEstimate, DecodeCandidate)
Key = Callable[[C], tuple[float, float]]


class Recording:
    """`rivals` may change at any time; None: all candidates. `settings_every`: 1: each event has the settings."""

    def __init__(self, rivals: int | None = None, *, settings_every: int = 1) -> None:
        self.rivals = rivals
        self._settings_every = settings_every
        self._without_settings = 0

    def settings(self, settings: Settings) -> Settings:
        self._without_settings += 1
        if self._without_settings < self._settings_every:
            return {}
        self._without_settings = 0
        return settings

    def candidates(self, weighed: Sequence[CandidateEstimate], chosen: InstanceId = NO_INSTANCE) -> list[Candidate]:
        """Half of the rivals have the least predicted TTFT, the others the longest hits of the rest."""
        rivals = self.rivals
        if rivals is not None and len(weighed) > rivals and isinstance(weighed, LazyCandidates):
            return weighed.recorded(chosen, by_ttft=(rivals + 1) // 2, by_hit=rivals // 2)
        return [candidate.recorded() for candidate in _nearest(weighed, chosen, self.rivals, _by_ttft, _by_hit)]

    def decode_candidates(
        self, weighed: Sequence[DecodeCandidate], chosen: InstanceId = NO_INSTANCE
    ) -> list[DecodeCandidate]:
        """Half of the rivals decode fastest, the others lack least of the prompt."""
        return list(_nearest(weighed, chosen, self.rivals, _by_pace, _by_transfer))


def rivals_of(event: LogEvent | None) -> int | None:
    """How many this event records; None: all."""
    match event:
        case RequestPlaced(others=0) | RequestRejected(others=0) if event.decode_others:
            chosen = event.decode if isinstance(event, RequestPlaced) else NO_INSTANCE
            return sum(candidate.instance != chosen for candidate in event.decode_candidates)
        case RequestPlaced() | RequestRejected() | RequestHandedOver() | HandOverRefused() if event.others:
            chosen = event.instance if isinstance(event, RequestPlaced | RequestHandedOver) else NO_INSTANCE
            return sum(candidate.instance != chosen for candidate in event.candidates)
        case _:
            return None


def _nearest(weighed: Sequence[C], chosen: InstanceId, rivals: int | None, *keys: Key[C]) -> Sequence[C]:
    """`keys`: each selects its part of the rivals. In the order in which they were weighed."""
    if rivals is None or len(weighed) <= rivals:
        return weighed
    kept = {chosen}
    for place, key in enumerate(keys):
        part = (rivals + len(keys) - 1 - place) // len(keys)
        rest = (candidate for candidate in weighed if candidate.instance not in kept)
        kept |= {candidate.instance for candidate in sorted(rest, key=key)[:part]}
    return [candidate for candidate in weighed if candidate.instance in kept]


def _by_ttft(candidate: CandidateEstimate) -> tuple[float, float]:
    return candidate.predicted_ttft, -candidate.hit_blocks


def _by_hit(candidate: CandidateEstimate) -> tuple[float, float]:
    return -candidate.hit_blocks, candidate.predicted_ttft


def _by_pace(candidate: DecodeCandidate) -> tuple[float, float]:
    """Unknown paces last, by load."""
    return (inf, candidate.requests) if candidate.predicted_tpot is None else (candidate.predicted_tpot, 0.0)


def _by_transfer(candidate: DecodeCandidate) -> tuple[float, float]:
    return candidate.transfer_tokens, -candidate.free_tokens
