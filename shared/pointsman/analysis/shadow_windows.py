"""Simulates the arrivals of a log under the policy in force and under others, one window after the other, as `what-if`
does. Each window has the numbers that `pointsman what-if --since --until --warmup` gives for it, on the log as read when
the window was closed.

`take` follows the log; `work` simulates, in slices, and may run in another thread. A window is closed when all its
requests have ended, or after SETTLE_WALL_SECONDS: what has no end then is left out. If simulating falls behind, whole
windows are shed and counted, so what is shown was never sampled within a window."""

from collections import deque
from collections.abc import Iterator

import msgspec

from pointsman.analysis.comparison import Regret, Side, fidelity, regret
from pointsman.analysis.log_time import LogTime, Passed
from pointsman.analysis.recorded_traffic import TrafficBounds, TrafficReader
from pointsman.analysis.what_if import Change, Progress, ReplayedFleet, WhatIf
from pointsman.contracts.codec import LogEvent, short_reason
from pointsman.contracts.requests import RequestArrived
from pointsman.policies.policy_set import PolicySet
from pointsman.ports import LogEntry
from pointsman.primitives import EngineSeconds, WallSeconds, engine_seconds
from pointsman.primitives import Sequence as LogSequence
from pointsman.state.state import State

WINDOW_WALL_SECONDS_MIN: WallSeconds = WallSeconds(30.0)
WINDOW_WALL_SECONDS_MAX: WallSeconds = WallSeconds(480.0)
WINDOW_REQUESTS = 1000
"""Windows are as long as so many requests take, within the bounds."""
BOUNDS = TrafficBounds(requests=20_000, key_bytes=64 * 2**20)
"""Of a window: it is simulated while the next one is read."""
SETTLE_WALL_SECONDS: WallSeconds = WallSeconds(120.0)
WAITING_MAX = 2
"""Closed windows that wait to be simulated; beyond, the oldest is shed."""
RESULTS_MAX = 100


class WindowFigures(msgspec.Struct, frozen=True, kw_only=True):
    """`effective_capacity`: share of requests answered on time; `goodput`: those requests per engine second."""

    ttft_p50_s: EngineSeconds | None
    ttft_p90_s: EngineSeconds | None
    hit_rate: float | None
    effective_capacity: float | None
    goodput: float | None
    rejections: int


class ShadowFigures(msgspec.Struct, frozen=True, kw_only=True):
    figures: WindowFigures
    regret: Regret


class WindowResult(msgspec.Struct, frozen=True, kw_only=True):
    """Arrivals after `since` up to `until`; those of the `warmup_seconds` before only warm the caches. `closed_at`: the
    last entry read. `shadows`: by name; those whose policy or settings do not fit are in `problems`."""

    since: EngineSeconds
    until: EngineSeconds
    warmup_seconds: EngineSeconds
    closed_at: LogSequence
    requests: int
    recorded: WindowFigures
    running: WindowFigures
    """Simulated, as are the shadows'."""
    reproduced: bool
    fidelity: str
    notes: list[str]
    shadows: dict[str, ShadowFigures]
    problems: dict[str, str]


class _Window:
    """A reader from `since - warmup` on."""

    def __init__(
        self,
        state: State,
        policies: PolicySet | None,
        since: EngineSeconds,
        until: EngineSeconds,
        warmup: EngineSeconds,
    ) -> None:
        self.since, self.until, self.warmup = since, until, warmup
        self.closed_at: LogSequence = 0
        self.reader = TrafficReader(state, policies=policies, since=passed(since), until=passed(until), bounds=BOUNDS)

    @property
    def name(self) -> str:
        return f"@{self.since:.0f} to @{self.until:.0f}"


class ShadowWindows:
    def __init__(
        self,
        changes: dict[str, Change],
        state: State,
        running: PolicySet | None,
        *,
        seconds: WallSeconds | None = None,
        waiting_max: int = WAITING_MAX,
    ) -> None:
        """`state` is the caller's, who applies each entry before `take`. `seconds`: a fixed length of windows."""
        self._waiting_max = waiting_max
        self._changes = changes
        self._fixed = seconds
        self.results: deque[WindowResult] = deque(maxlen=RESULTS_MAX)
        self.simulated = self.shed = self.unusable = 0
        self.problem = ""
        """Why the last window without figures has none."""
        self._waiting: deque[_Window] = deque()
        self._job: Iterator[Progress] | None = None
        self.begin_again(state, running)

    def begin_again(self, state: State, running: PolicySet | None) -> None:
        """Results are kept; windows that are not closed are given up."""
        self._state, self._running = state, running
        self._open: deque[_Window] = deque()
        self._arrivals, self._counted_from = 0, 0.0
        self._cold = bool(state.sequence)
        """Nothing is known of what arrived before: the first window needs its whole warm-up."""
        speed = state.settings.speed
        self._time = LogTime(speed)
        self._length_min = engine_seconds(self._fixed or WINDOW_WALL_SECONDS_MIN, speed)
        self._length_max = engine_seconds(self._fixed or WINDOW_WALL_SECONDS_MAX, speed)
        self._settle = engine_seconds(SETTLE_WALL_SECONDS, speed)
        self._length = self._warmup = self._length_min
        self._next: EngineSeconds | None = None
        """Where the next window begins."""

    @property
    def waiting(self) -> int:
        return len(self._waiting) + (self._job is not None)

    def take(self, entry: LogEntry) -> None:
        """After the entry was applied to the state."""
        event = entry.event
        if event is None:
            return
        if not self._tells_time(event):
            return
        self._arrivals += isinstance(event, RequestArrived)
        self._begin_window()
        for window in self._open:
            window.reader.take(entry)
        while self._open and self._is_over(self._open[0]):
            self._close(self._open.popleft(), entry.sequence)

    def finish(self) -> None:
        """No entry follows."""
        while self._open:
            window = self._open.popleft()
            self._close(window, self._state.sequence)

    def work(self) -> bool:
        """One slice of a simulation. Returns whether there was anything to do."""
        if self._job is None:
            if not self._waiting:
                return False
            self._job = self._simulated(self._waiting.popleft())
        if next(self._job, None) is None:
            self._job = None
        return True

    def _tells_time(self, event: LogEvent) -> bool:
        """Windows begin again where the time went back."""
        before = self._time.now
        if not self._time.tells(event):
            return False
        if self._time.now < before:
            self._next = None
            self._open.clear()
        return True

    def _begin_window(self) -> None:
        """The next one, as soon as its warm-up begins; also plans the one after it."""
        if self._next is None:
            self._counted_from = self._time.now
            self._next = self._time.now // self._length * self._length + (2 * self._length if self._cold else 0.0)
        if self._time.now <= self._next - self._warmup:
            return
        if self._time.now > self._next + self._length:  # the log was silent
            self._next = self._time.now // self._length * self._length
        until = self._next + self._length
        self._open.append(_Window(self._state, self._running, self._next, until, self._warmup))
        self._next = until
        length = self._length_for_rate()
        self._length, self._warmup = length, min(self._length, length)

    def _length_for_rate(self) -> EngineSeconds:
        """Doubled or halved at most, so that windows begin at multiples of their length."""
        seconds = self._time.now - self._counted_from
        wanted = WINDOW_REQUESTS * seconds / self._arrivals if self._arrivals and seconds else self._length
        self._arrivals, self._counted_from = 0, self._time.now
        length = self._length
        if wanted >= 2 * length and self._next is not None and not self._next % (2 * length):
            length *= 2
        elif wanted <= length / 2:
            length /= 2
        return min(self._length_max, max(self._length_min, length))

    def _is_over(self, window: _Window) -> bool:
        if window.reader.is_too_large:
            return True
        if self._time.now <= window.until:
            return False
        return window.reader.is_complete or self._time.now > window.until + self._settle

    def _close(self, window: _Window, sequence: LogSequence) -> None:
        window.closed_at = sequence
        if not window.reader.counted:
            return
        if window.reader.is_too_large:
            self.shed += 1
            self.problem = f"{window.name}: more than {BOUNDS}"
        else:
            self._waiting.append(window)
        if len(self._waiting) > self._waiting_max:
            oldest = self._waiting.popleft()
            self.shed += 1
            self.problem = f"{oldest.name}: simulating is behind"

    def _simulated(self, window: _Window) -> Iterator[Progress]:
        try:
            yield from self._compared(window)
            self.simulated += 1
        except Exception as error:  # noqa: BLE001 - what a log holds may not end its follower
            self.unusable += 1
            self.problem = f"{window.name}: {short_reason(error)}"

    def _compared(self, window: _Window) -> Iterator[Progress]:
        record = window.reader.record(f"the log from {window.name}")
        fitting: dict[str, Change] = {}
        problems: dict[str, str] = {}
        for name, change in self._changes.items():
            try:
                ReplayedFleet(record).changed(change)
                fitting[name] = change
            except ValueError as error:
                problems[name] = str(error)
        what_if = WhatIf(record, list(fitting.values()))
        yield from what_if.run()
        reproduced, sentence = fidelity(what_if.recorded.report, what_if.again.report)
        self.results.append(
            WindowResult(
                since=window.since,
                until=window.until,
                warmup_seconds=window.warmup,
                closed_at=window.closed_at,
                requests=what_if.recorded.report.requests,
                recorded=_figures(what_if.recorded),
                running=_figures(what_if.again),
                reproduced=reproduced,
                fidelity=sentence,
                notes=record.notes,
                shadows={
                    name: ShadowFigures(figures=_figures(changed), regret=regret(what_if.again, changed))
                    for name, changed in zip(fitting, what_if.changed, strict=True)
                },
                problems=problems,
            )
        )


def passed(moment: EngineSeconds) -> Passed:
    return lambda entry: entry.event is not None and entry.event.at > moment


def _figures(one: Side) -> WindowFigures:
    report = one.report
    return WindowFigures(
        ttft_p50_s=report.ttft.p50_s,
        ttft_p90_s=report.ttft.p90_s,
        hit_rate=report.hit_rate,
        effective_capacity=report.effective_capacity,
        goodput=one.goodput,
        rejections=report.rejections,
    )
