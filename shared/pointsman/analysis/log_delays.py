"""When the log was slow. In: events, in order. Out: spells in which the leader had not yet read back a decision that it had
made DELAY_WALL_SECONDS or longer before. How far it had read is in each decision (`as_of`). Only dates of the leader are
compared."""

from collections import deque
from dataclasses import dataclass

from pointsman.contracts.codec import LogEvent
from pointsman.primitives import EngineSeconds, Sequence, Term, WallSeconds, engine_seconds

DELAY_WALL_SECONDS = WallSeconds(1.5)
"""Half of the default suspect time: from there on a leader suspects nobody."""
SPELL_WALL_SECONDS = WallSeconds(2.0)
"""A shorter one may be a leader that stood still."""
WAITING_MAX = 65_536
SPELLS_MAX = 1_000


@dataclass(slots=True)
class Spell:
    term: Term
    begun: EngineSeconds
    """When the first decision was made that did not come back in time."""
    noticed: EngineSeconds
    ended: EngineSeconds
    longest: EngineSeconds
    """Delay."""


class LogDelays:
    def __init__(self, speed: float) -> None:
        self._delay_min = engine_seconds(DELAY_WALL_SECONDS, speed)
        self._spell_min = engine_seconds(SPELL_WALL_SECONDS, speed)
        self._term = Term(0)
        self._unread: deque[tuple[Sequence, EngineSeconds]] = deque(maxlen=WAITING_MAX)
        """Decisions of this term that its leader had not read back, oldest first."""
        self._newest: deque[Spell] = deque(maxlen=SPELLS_MAX)
        self._goes_on = False

    def note(self, event: LogEvent, sequence: Sequence) -> None:
        if event.stamp is None:
            return
        if event.stamp.term != self._term:
            self._term, self._goes_on = event.stamp.term, False
            self._unread.clear()
        while self._unread and self._unread[0][0] <= event.stamp.as_of:
            self._unread.popleft()
        begun = self._unread[0][1] if self._unread else event.at
        delay = event.at - begun
        if delay < self._delay_min:
            self._goes_on = False
        elif self._goes_on:
            spell = self._newest[-1]
            spell.ended, spell.longest = event.at, max(spell.longest, delay)
        else:
            self._goes_on = True
            self._newest.append(Spell(self._term, begun, event.at, event.at, delay))
        self._unread.append((sequence, event.at))

    @property
    def spells(self) -> list[Spell]:
        return [spell for spell in self._newest if spell.ended - spell.noticed >= self._spell_min]

    def seconds_within(self, since: EngineSeconds, until: EngineSeconds) -> EngineSeconds:
        """For how long the log was slow in that time."""
        return sum(max(0.0, min(until, spell.ended) - max(since, spell.begun)) for spell in self.spells)
