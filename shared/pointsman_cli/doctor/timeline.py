"""Shares by time, in bounded memory."""

from dataclasses import dataclass

from pointsman.primitives import Seconds
from pointsman_cli.doctor.samples import Share

STRETCHES_MAX = 2048


@dataclass(frozen=True, slots=True)
class Stretch:
    begun: Seconds
    ended: Seconds
    share: Share

    @property
    def missed(self) -> int:
        return self.share.whole - self.share.part


class Timeline:
    def __init__(self, stretch_seconds: Seconds) -> None:
        self._length = stretch_seconds
        self._shares: dict[int, Share] = {}

    def count(self, at: Seconds, *, hit: bool) -> None:
        self._shares.setdefault(int(at // self._length), Share()).count(hit=hit)
        if len(self._shares) > STRETCHES_MAX:
            self._coarsen()

    def below(self, target: float, *, least: int) -> list[Stretch]:
        """Periods below `target` with at least `least` requests, merged if adjacent, most misses first."""
        found: list[Stretch] = []
        for number, share in sorted(self._shares.items()):
            if share.value >= target:
                continue
            begun, ended = number * self._length, (number + 1) * self._length
            if found and found[-1].ended == begun:
                before = found.pop()
                share = Share(before.share.part + share.part, before.share.whole + share.whole)
                begun = before.begun
            found.append(Stretch(begun, ended, share))
        return sorted((f for f in found if f.share.whole >= least), key=lambda stretch: -stretch.missed)

    def _coarsen(self) -> None:
        shares, self._shares, self._length = self._shares, {}, 2 * self._length
        for number, share in shares.items():
            merged = self._shares.setdefault(number // 2, Share())
            merged.part, merged.whole = merged.part + share.part, merged.whole + share.whole
