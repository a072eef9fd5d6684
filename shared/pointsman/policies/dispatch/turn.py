"""One call of the leader: stamps each decision, applies it and collects it."""

from collections.abc import Callable
from dataclasses import dataclass, field

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.envelope import Stamp
from pointsman.policies.dispatch.recording import Recording
from pointsman.policies.policy_set import PolicySet
from pointsman.primitives import EngineSeconds, Term
from pointsman.state.state import State

OnDecision = Callable[[LogEvent], LogEvent]


class DecisionContext:
    def __init__(
        self,
        state: State,
        policies: PolicySet,
        *,
        term: Term,
        policy_state: State | None = None,
        on_decision: OnDecision | None = None,
        recording: Recording | None = None,
    ) -> None:
        """`policy_state`: what policies read instead of `state`, to simulate stale views. `on_decision` may
        replace a decision before it is applied: replay returns the recorded one. `recording`: None: all is recorded."""
        self.state = state
        self.policy_state = policy_state or state
        self.policies = policies
        self.settings = policies.placement_settings  # gathered once
        self.recording = recording or Recording()
        self.term = term
        self.decided = 0
        self.on_decision = on_decision


@dataclass(slots=True)
class Turn:
    """State changes only by `decide`, so each decision sees those before it."""

    context: DecisionContext
    now: EngineSeconds
    state: State = field(init=False)
    policies: PolicySet = field(init=False)
    events: list[LogEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.state = self.context.state
        self.policies = self.context.policies

    @property
    def stamp(self) -> Stamp:
        context = self.context
        return Stamp(term=context.term, number=context.decided + 1, as_of=self.state.sequence)

    def decide(self, decision: LogEvent) -> None:
        context = self.context
        context.decided += 1
        if context.on_decision is not None:
            decision = context.on_decision(decision)
        self.state.apply(decision)
        self.events.append(decision)
