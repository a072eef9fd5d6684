"""The result of recomputing a log's decisions."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from typing_extensions import override

from pointsman.contracts.codec import LogEvent
from pointsman.primitives import RequestId, Sequence, Term
from pointsman.state.queue_figures import queue_figures
from pointsman.state.state import State

DIFFERENCES_KEPT_MAX = 100


@dataclass(frozen=True, slots=True)
class Recomputed:
    """A recorded decision and the recomputed one. `state`: before it was applied; valid only during the call."""

    sequence: Sequence
    recorded: LogEvent
    recomputed: LogEvent
    state: State


Watch = Callable[[Recomputed], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """`recorded` is None if the log lacks the decision, `recomputed` if there is none. `known`: inputs of the decision.
    `sequence`: of the log entry, or 0."""

    sequence: Sequence
    term: Term
    number: int
    recorded: LogEvent | None
    recomputed: LogEvent | None
    known: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        return {
            "sequence": self.sequence,
            "term": self.term,
            "number": self.number,
            "recorded": msgspec.to_builtins(self.recorded),
            "recomputed": msgspec.to_builtins(self.recomputed),
            "known": self.known,
        }


@dataclass(slots=True)
class TermSummary:
    term: Term
    scheduler: str
    policy: str
    elected: Sequence
    decisions: int = 0


@dataclass(slots=True)
class Verdict:
    """Counts of identical, different and unchecked decisions. `different` includes those that the log lacks. `problems`
    are faults of the log."""

    known_as_of: Sequence = 0
    entries: int = 0
    undecodable: int = 0
    unapplied: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    arrivals: int = 0
    decisions: int = 0
    identical: int = 0
    different: int = 0
    unchecked: Counter[str] = field(default_factory=Counter)
    differences: list[Difference] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    terms: list[TermSummary] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.different == 0

    @property
    def first(self) -> Difference | None:
        return self.differences[0] if self.differences else None

    def add(self, difference: Difference) -> None:
        self.different += 1
        if len(self.differences) < DIFFERENCES_KEPT_MAX:
            self.differences.append(difference)

    @override
    def __str__(self) -> str:
        counts = f"decisions {self.decisions:,}, identical {self.identical:,}, different {self.different:,}"
        unchecked = self.unchecked.total()
        return f"{counts}, unchecked {unchecked:,}" if unchecked else counts


def inputs_of(state: State, event: LogEvent) -> dict[str, Any]:
    """Inputs of a decision: the request, and every instance's queue and cache."""
    request = state.workload.requests.get(RequestId(getattr(event, "request", "")))
    return {
        "as_of": state.sequence,
        "now": event.at,
        "request": None if request is None else _request(state, request.id),
        "instances": [_instance(state, instance.id, event.at) for instance in state.fleet.instances],
    }


def _request(state: State, request_id: RequestId) -> dict[str, Any]:
    request = state.workload.requests[request_id]
    return {
        "stage": str(request.stage),
        "instance": request.instance,
        "attempt": request.attempt,
        "excluded": list(request.excluded),
        "prompt_tokens": request.prompt_tokens,
        "blocks": len(request.keys),
        "deadline": request.deadline,
    }


def _instance(state: State, instance_id: Any, now: float) -> dict[str, Any]:
    instance = state.fleet[instance_id]
    return {
        "instance": instance.id,
        "epoch": instance.epoch,
        "status": str(instance.status),
        **queue_figures(state, instance_id, now),
        "correction": state.latency.correction(instance_id),
        "blocks": state.index.blocks(instance_id),
        "heard_at": instance.heard_at,
    }
