"""What every step of the leader works on: the State, the policies, and the decisions of one call.

In: a decision. Out: the same decision (or the recorded one, in replay), stamped, applied and appended to the turn.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.envelope import Stamp
from pointsman.policies.policy_set import PolicySet
from pointsman.primitives import Seconds, Term
from pointsman.state.state import State

OnDecision = Callable[[LogEvent], LogEvent]


class DecisionContext:
    """One term of leadership over one State."""

    def __init__(
        self,
        state: State,
        policies: PolicySet,
        *,
        term: Term,
        policy_state: State | None = None,
        on_decision: OnDecision | None = None,
    ) -> None:
        """`policy_state`: what policies read instead of `state`; only a simulation of stale knowledge has two.
        `on_decision` gets each decision before it is applied, and its result is applied: replay returns the recorded
        event, the leader notes what is not written yet."""
        self.state = state
        self.policy_state = policy_state or state
        self.policies = policies
        self.settings = policies.placement_settings  # gathered once: every placement records them
        self.term = term
        self.decided = 0
        """Decisions of this term so far."""
        self.on_decision = on_decision


@dataclass(slots=True)
class Turn:
    """One call of a Dispatcher. State changes only by `decide`, so each decision sees those before it."""

    leader: DecisionContext
    now: Seconds
    state: State = field(init=False)
    policies: PolicySet = field(init=False)
    events: list[LogEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.state = self.leader.state
        self.policies = self.leader.policies

    @property
    def stamp(self) -> Stamp:
        """Of the next decision."""
        leader = self.leader
        return Stamp(term=leader.term, number=leader.decided + 1, as_of=self.state.sequence)

    def decide(self, decision: LogEvent) -> None:
        leader = self.leader
        leader.decided += 1
        if leader.on_decision is not None:
            decision = leader.on_decision(decision)
        self.state.apply(decision)
        self.events.append(decision)
