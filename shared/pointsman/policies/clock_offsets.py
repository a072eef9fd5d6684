"""How far each ingress's clock is from the leader's, so that its dates can be compared with the leader's. In: commands, with
the time at which their ingress sent them. Delays only add to the difference, so the least of the last minutes is nearest
to the truth. Evidence from outside the log: RequestArrived carries the result. Forgotten with the term."""

from dataclasses import dataclass
from math import inf

from msgspec import structs

from pointsman.contracts.commands import FollowRequests, RouteRequest
from pointsman.primitives import EngineSeconds, WallSeconds, engine_seconds

WINDOW_WALL_SECONDS: WallSeconds = WallSeconds(60.0)
STEP_WALL_SECONDS: WallSeconds = WallSeconds(1.0)
"""A difference that exceeds the least one by more, and goes on doing so for LASTING_WALL_SECONDS, is of a clock that was set
back; else it is a delay, of which commands that come together have had more or less."""
LASTING_WALL_SECONDS: WallSeconds = WallSeconds(2.0)
INGRESSES_MAX = 1_000
"""The one not heard for longest is dropped first."""


@dataclass(slots=True)
class _Offset:
    """`least`: of the window that began at `since`; `before`: of the one before; `larger`: of those since `larger_since` that
    are a step larger than either."""

    least: EngineSeconds
    before: EngineSeconds
    since: EngineSeconds
    larger: EngineSeconds = inf
    larger_since: EngineSeconds = inf


class ClockOffsets:
    def __init__(self, speed: float) -> None:
        self._window = engine_seconds(WINDOW_WALL_SECONDS, speed)
        self._step = engine_seconds(STEP_WALL_SECONDS, speed)
        self._lasting = engine_seconds(LASTING_WALL_SECONDS, speed)
        self._of: dict[str, _Offset] = {}

    def forget(self) -> None:
        """The leader's own clock was set."""
        self._of.clear()

    def dated(self, command: RouteRequest, now: EngineSeconds) -> RouteRequest:
        """With a `sent_at` that is as far from `now` as the clock of its ingress is from the leader's."""
        self.note(command, now)
        if not command.sent_at:
            return command
        known = self._of[command.ingress]
        return structs.replace(command, sent_at=max(0.0, now - min(known.least, known.before)))

    def note(self, command: RouteRequest | FollowRequests, now: EngineSeconds) -> None:
        if not command.sent_at:
            return
        seen, known = now - command.sent_at, self._of.pop(command.ingress, None)
        if known is None:
            known = _Offset(seen, seen, now)
        elif seen > min(known.least, known.before) + self._step:
            known.larger, known.larger_since = min(known.larger, seen), min(known.larger_since, now)
            if now - known.larger_since >= self._lasting:
                known = _Offset(known.larger, known.larger, now)
        elif not 0 <= now - known.since < self._window:
            known = _Offset(seen, known.least, now)
        else:
            known.least, known.larger, known.larger_since = min(known.least, seen), inf, inf
        self._of[command.ingress] = known
        if len(self._of) > INGRESSES_MAX:
            del self._of[next(iter(self._of))]
