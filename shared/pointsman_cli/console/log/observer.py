"""Everything that the console knows of one log, folded entry by entry: the State, the newest requests, what happened to the
fleet, and counts. No I/O, no clock; bounded beside the State. `fleet_views` and `log_views` make views of it."""

from pointsman.analysis.ladder import HitRateLadder
from pointsman.analysis.placed_alone import is_placed_alone
from pointsman.analysis.shadow import Shadow
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import LeaderElected, RequestEnd, counts_as_end
from pointsman.contracts.envelope import is_fenced
from pointsman.contracts.requests import RequestArrived
from pointsman.ports import LogEntry
from pointsman.primitives import EngineSeconds, Sequence
from pointsman.state.recent_decisions import RecentDecisions
from pointsman.state.state import State
from pointsman_cli.console.log.fleet_history import Happenings
from pointsman_cli.console.log.recent_requests import RecentRequest, RecentRequests
from pointsman_cli.console.log.request_counts import WINDOW_WALL_SECONDS, LastMinute, Tenants
from pointsman_cli.console.log.size_history import size_of, sizes_of
from pointsman_cli.console.views import unix_seconds


class Observer:
    def __init__(self, state: State, ladder: HitRateLadder | None = None, shadow: Shadow | None = None) -> None:
        """`state`: empty, or from a checkpoint; it is changed. `ladder` and `shadow` know it already."""
        speed = state.settings.speed
        self.state = state
        self.ladder = ladder
        self.shadow = shadow
        self.requests = RecentRequests(state.settings.block_tokens)
        self.happenings = Happenings(speed)
        self.tenants = Tenants()
        self.minute = LastMinute(WINDOW_WALL_SECONDS * speed)
        self.sizes = sizes_of(speed)
        self.leader: LeaderElected | None = None
        self.began_at: EngineSeconds = 0.0
        """Time of the first entry that was read."""
        self.entries = 0
        self._repeats = RecentDecisions()

    @property
    def sequence(self) -> Sequence:
        return self.state.sequence

    @property
    def at(self) -> EngineSeconds:
        return self.state.last_at

    def wall(self, at: EngineSeconds) -> float:
        return unix_seconds(at, self.state.settings.speed)

    def apply(self, entry: LogEntry) -> None:
        event, state = entry.event, self.state
        counts = event is not None and not is_fenced(event.stamp, state.term)
        alone = event is not None and is_placed_alone(event, state)
        state.apply_entry(entry)
        self.entries += 1
        if self.ladder is not None and event is not None:
            self.ladder.apply(event, state)
        if self.shadow is not None:
            self.shadow.apply(entry)
        if event is None or not counts:
            return
        if not self._repeats.is_news(event, state.term):
            return
        self.began_at = self.began_at or event.at
        if isinstance(event, LeaderElected):
            if event.term < state.term:
                return
            self.leader = event
        if alone:
            self.minute.placed_alone.append(event.at)
        self._note(event, entry.sequence)
        if self.sizes.due(self.at):
            self.sizes.add(size_of(state), self.at)

    def _note(self, event: LogEvent, sequence: Sequence) -> None:
        self.happenings.apply(event, sequence)
        self._take_back(event)
        record = self.requests.apply(event, sequence)
        if record is None:
            return
        arrives = isinstance(event, RequestArrived) and record.sequence == sequence
        if isinstance(event, RequestArrived) and arrives and not self._comes_again(event):
            self.minute.arrivals.append(event.at)
            tally = self.tenants.of(record.tenant)
            tally.arrived += 1
            tally.prompt_tokens += event.prompt_tokens
        if record.ended_sequence and (arrives or record.ended_sequence == sequence):
            self.tenants.of(record.tenant).end(record)
            self.minute.end(record)

    def _take_back(self, event: LogEvent) -> None:
        """The leader's give-up, if its ingress ends the request now."""
        record = self.requests.get(event.request) if isinstance(event, RequestEnd) else None
        if record is not None and record.end is not None and counts_as_end(event, record.end):
            self._uncount(record)

    def _comes_again(self, event: RequestArrived) -> bool:
        """Whether it has arrived before, under another id. Takes back how it ended then."""
        request = self.state.workload.requests.get(event.request)
        record = self.requests.get(request.instead_of) if request is not None and request.instead_of else None
        if record is None or record.end is None:
            return False
        self._uncount(record)
        return True

    def _uncount(self, record: RecentRequest) -> None:
        self.tenants.of(record.tenant).take_back(record)
        self.minute.take_back(record)
