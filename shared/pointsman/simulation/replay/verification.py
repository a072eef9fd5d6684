"""Recomputes every decision of a log and compares. The log is read once; each term is a `Tenure` that begins with the
state folded by a `_Follower` up to its LeaderElected. A term that another has followed is
watched for STRAGGLERS_MAX more entries.
Decisions after a hole, or of a term without its beginning, are unchecked."""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace

from pointsman.contracts.codec import LogEvent, short_reason
from pointsman.contracts.decisions import (
    LeaderElected,
)
from pointsman.contracts.requests import RequestArrived
from pointsman.policies.policy_set import PolicySet, UnknownPolicyError, recorded_policy_set
from pointsman.ports import LogEntry
from pointsman.primitives import Sequence, Term
from pointsman.simulation.replay.folding import (
    BaseState,
    copy_state,
    entries_after,
    recorded_pool_settings,
)
from pointsman.simulation.replay.tenure import Tenure
from pointsman.simulation.replay.verdict import TermSummary, Verdict, Watch
from pointsman.state.state import PoolSettings, State

STRAGGLERS_MAX = 20_000


def verify(entries: Iterable[LogEntry], *, watch: Watch | None = None, known: BaseState | None = None) -> Verdict:
    """`entries` are iterated once, and again up to each later takeover; they begin with the log, or after `known`.
    `watch` gets each decision before it is applied."""
    return _Verification(entries, watch, known).run()


class _Verification:
    def __init__(self, log: Iterable[LogEntry], watch: Watch | None, known: BaseState | None) -> None:
        self._log = log
        self._watch = watch
        self._known = known
        self._verdict = Verdict()
        self._tenures: dict[Term, Tenure] = {}
        self._successions: deque[tuple[Sequence, Term]] = deque()
        self._elected: dict[Term, LeaderElected] = {}
        self._refused: dict[Term, str] = {}
        self._follower: _Follower | None = None
        self._last: Sequence = 0
        self._incomplete = ""
        if known is not None:
            self._join(known)

    def run(self) -> Verdict:
        for entry in self._log if self._known is None else entries_after(self._known.state.sequence, self._log):
            self._take(entry)
        for tenure in self._tenures.values():
            tenure.close()
        return self._verdict

    def _join(self, known: BaseState) -> None:
        """Begin in mid-term, which cannot be judged: `known` is in log order."""
        state = known.state
        self._last = self._verdict.known_as_of = state.sequence
        self._follower = _Follower(self._log, state.settings, known.policies, copy_state(state))
        self._refused[state.term] = (
            f"term {state.term} began before entry {state.sequence + 1}: in what order its leader applied what came "
            "before is gone"
        )

    def _take(self, entry: LogEntry) -> None:
        verdict, event = self._verdict, entry.event
        verdict.entries += 1
        if entry.sequence != self._last + 1:
            self._miss(entry.sequence)
        self._last = entry.sequence
        for tenure in self._tenures.values():
            tenure.feed(entry)
        if event is None:
            verdict.undecodable += 1
        elif event.stamp is not None:
            self._count(event, event.stamp.term)
        elif isinstance(event, LeaderElected):
            self._begin(event, entry.sequence)
        if self._successions and entry.sequence > self._successions[0][0]:
            self._close(self._successions.popleft()[1])

    def _count(self, event: LogEvent, term: Term) -> None:
        if isinstance(event, RequestArrived):
            self._verdict.arrivals += 1
            return
        self._verdict.decisions += 1
        if term not in self._tenures:
            self._verdict.unchecked[self._why_unchecked(term)] += 1

    def _why_unchecked(self, term: Term) -> str:
        if self._incomplete:
            return self._incomplete
        return self._refused.get(term, f"the log does not say how term {term} began")

    def _begin(self, elected: LeaderElected, sequence: Sequence) -> None:
        term = elected.term
        known = self._elected.setdefault(term, elected)
        if known is not elected:
            if known.scheduler != elected.scheduler:
                self._verdict.problems.append(
                    f"two leaders in term {term}: {known.scheduler}, and {elected.scheduler} at entry {sequence}"
                )
            return
        summary = TermSummary(term, elected.scheduler, elected.policy, sequence)
        self._verdict.terms.append(summary)
        self._successions.extend((sequence + STRAGGLERS_MAX, earlier) for earlier in self._tenures)
        if self._incomplete:
            return
        try:
            policies = recorded_policy_set(elected.policy, elected.settings)
            follower = self._follower_for(elected, policies)
        except (UnknownPolicyError, TypeError, ValueError) as error:
            self._refused[term] = f"term {term}: {short_reason(error)}"
            return
        if follower is None:
            self._refused[term] = f"term {term}: with its policies, nothing is known of the entries that are gone"
            return
        self._tenures[term] = Tenure(follower.state_at(sequence), policies, summary, self._verdict, self._watch)

    def _follower_for(self, elected: LeaderElected, policies: PolicySet) -> "_Follower | None":
        """Reuses one with the same settings. None if the log's beginning is lost."""
        settings = recorded_pool_settings(elected.pool)
        follower = self._follower
        if follower is not None and follower.fits(settings, policies):
            return follower
        if self._known is not None:
            return None
        follower = self._follower = _Follower(self._log, settings, policies, State(settings, policies.trackers()))
        return follower

    def _miss(self, sequence: Sequence) -> None:
        """Entries are missing: the state is unknown from here on."""
        if self._last == 0:
            self._incomplete = f"the log begins at entry {sequence}: what was known before is not in it"
        else:
            self._incomplete = f"entries {self._last + 1} to {sequence - 1} are missing"
            self._verdict.problems.append(self._incomplete)
        for term in list(self._tenures):
            self._close(term)

    def _close(self, term: Term) -> None:
        tenure = self._tenures.pop(term, None)
        if tenure is not None:
            tenure.close()
            self._refused.setdefault(term, f"term {term} was over long before")


class _Follower:
    def __init__(self, log: Iterable[LogEntry], settings: PoolSettings, policies: PolicySet, state: State) -> None:
        self._settings = settings
        self._policies = policies
        self._entries: Iterator[LogEntry] = entries_after(state.sequence, log)
        self._state = state

    def fits(self, settings: PoolSettings, policies: PolicySet) -> bool:
        folded_alike = replace(policies, outliers=self._policies.outliers)
        return (settings, folded_alike) == (self._settings, self._policies)

    def state_at(self, sequence: Sequence) -> State:
        state = self._state
        while state.sequence < sequence:
            state.apply_entry(next(self._entries))
        return copy_state(state)
