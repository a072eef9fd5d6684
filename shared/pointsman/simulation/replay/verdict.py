"""What recomputing a log's decisions came to."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from typing_extensions import override

from pointsman.contracts.codec import LogEvent
from pointsman.primitives import RequestId, Sequence, Term
from pointsman.state.state import State
from pointsman.state.workload import InstanceQueue

DIFFERENCES_KEPT_MAX = 100
"""Differences that a verdict keeps; all are counted."""

_NO_LINE = InstanceQueue()


@dataclass(frozen=True, slots=True)
class Recomputed:
    """One decision of the log, and the same one decided again. `state` is what the leader knew, before the decision
    was applied: to be read only, and only now."""

    sequence: Sequence
    recorded: LogEvent
    recomputed: LogEvent
    state: State


Watch = Callable[[Recomputed], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where the log and the recomputation part.

    `recorded` is None where deciding again gives something that the log does not have, `recomputed` where it
    gives nothing. `known` is what the decision was made from; `sequence` the log's entry, or 0.
    """

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
    """One term of leadership as the log tells it. `elected` is its LeaderElected: there its leader's own order begins."""

    term: Term
    scheduler: str
    policy: str
    elected: Sequence
    decisions: int = 0


@dataclass(slots=True)
class Verdict:
    """Every decision of the log is identical, different or, for a named reason, unchecked.

    `different` also counts decisions that the log lacks. `problems` are faults of the log itself.
    """

    known_as_of: Sequence = 0
    """Up to which entry nothing was read: what they led to was known."""
    entries: int = 0
    undecodable: int = 0
    unapplied: int = 0
    """Entries that decode and that the fold failed on."""
    failed: Counter[str] = field(default_factory=Counter)
    """Calls that ended in an error when they were made again, by what it was."""
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
        """Nothing differs. Unchecked decisions are no difference, but no proof either."""
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
        said = f"decisions {self.decisions:,}, identical {self.identical:,}, different {self.different:,}"
        unchecked = self.unchecked.total()
        return f"{said}, unchecked {unchecked:,}" if unchecked else said


def known_to(state: State, event: LogEvent) -> dict[str, Any]:
    """What a decision is made from, as far as people can read it: the request and every instance's line and cache."""
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
    line = state.workload.queues.get(instance_id, _NO_LINE)
    return {
        "instance": instance.id,
        "epoch": instance.epoch,
        "status": str(instance.status),
        "pending": len(line.pending),
        "in_prefill": len(line.prefill),
        "decoding": len(line.decoding),
        "pending_tokens": line.pending_tokens,
        "prefill_tokens": line.prefill_tokens,
        "queue_seconds": line.queue_seconds(now),
        "correction": state.latency.correction(instance_id),
        "blocks": state.index.blocks(instance_id),
        "heard_at": instance.heard_at,
    }
