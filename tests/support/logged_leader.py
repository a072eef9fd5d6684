"""A dispatcher whose decisions and surroundings become a log in the order in which they happened."""

from dataclasses import asdict

from pointsman.contracts.codec import LogEvent, decode_event, encode
from pointsman.contracts.decisions import LeaderElected
from pointsman.contracts.subjects import subject_of
from pointsman.policies.dispatch import Dispatcher
from pointsman.policies.policy_set import PolicySet
from pointsman.ports import LogEntry
from pointsman.primitives import PoolName, Term
from pointsman.simulation.replay import verify
from pointsman.state.state import PoolSettings, State


class LoggedLeader:
    """Elected by `lead`."""

    def lead(self, policies: PolicySet, *, at: float) -> None:
        settings = PoolSettings()
        self.state = State(settings, policies.trackers())
        self.log: list[LogEntry] = []
        self.happens(
            LeaderElected(
                at=at, term=Term(1), scheduler="s", as_of=0, pool=asdict(settings),
                policy=policies.routing.name, settings=policies.settings,
            )
        )  # fmt: skip
        self.dispatcher = Dispatcher(self.state, policies, term=Term(1))

    def happens(self, event: LogEvent) -> None:
        self.state.apply(event, self._write(event))

    def decides(self, events: list[LogEvent]) -> list[LogEvent]:
        for event in events:
            self.state.skip(self._write(event))
        return events

    @property
    def proven(self) -> bool:
        """Whether deciding everything again from the log gives the same."""
        verdict = verify(self.log)
        return verdict.ok and not verdict.unchecked and not verdict.problems

    def _write(self, event: LogEvent) -> int:
        payload = encode(event)
        self.log.append(LogEntry(len(self.log) + 1, subject_of(PoolName("p"), event), payload, decode_event(payload)))
        return len(self.log)
