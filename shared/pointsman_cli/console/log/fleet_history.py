"""What happened to the fleet, newest last, in bounded memory: decisions about its size, moves of requests, and changes of
instances and leaders."""

from collections import deque
from dataclasses import dataclass, field, replace

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import (
    LeaderElected,
    MigrationRefused,
    RequestMigrated,
    RequestsRefused,
    ScaleApplied,
    ScaleDecided,
    WritesLost,
)
from pointsman.contracts.fleet import (
    InstanceDraining,
    InstanceEjected,
    InstanceJoined,
    InstanceLeft,
    InstanceRoleChanged,
    InstanceSuspected,
    InstanceUndrained,
    InstanceUnejected,
)
from pointsman.contracts.tenants import TenantPoliciesSet
from pointsman.primitives import EngineSeconds, InstanceId, Sequence
from pointsman_cli.tap.event_lines import details

KEPT_MAX = 1_000
KINDS: dict[type, str] = {
    InstanceJoined: "joined",
    InstanceLeft: "left",
    InstanceSuspected: "suspected",
    InstanceDraining: "draining",
    InstanceUndrained: "undrained",
    InstanceRoleChanged: "role",
    InstanceEjected: "ejected",
    InstanceUnejected: "unejected",
    LeaderElected: "leader",
    WritesLost: "writes lost",
    RequestsRefused: "refused",
    TenantPoliciesSet: "tenants",
}


@dataclass(frozen=True, slots=True)
class Scaled:
    sequence: Sequence
    decided: ScaleDecided
    applied_at: EngineSeconds = 0.0
    applied_detail: str = ""


@dataclass(frozen=True, slots=True)
class Moved:
    sequence: Sequence
    event: RequestMigrated | MigrationRefused


@dataclass(frozen=True, slots=True)
class Happened:
    sequence: Sequence
    at: EngineSeconds
    kind: str
    instance: str
    detail: str


@dataclass(slots=True)
class Happenings:
    scaling: deque[Scaled] = field(default_factory=lambda: deque(maxlen=KEPT_MAX))
    moves: deque[Moved] = field(default_factory=lambda: deque(maxlen=KEPT_MAX))
    events: deque[Happened] = field(default_factory=lambda: deque(maxlen=KEPT_MAX))
    moved: int = 0
    refused: int = 0
    lost: dict[InstanceId, EngineSeconds] = field(default_factory=dict)
    """Instances that a leader gave up, and when, until they join again."""

    def apply(self, event: LogEvent, sequence: Sequence) -> None:
        match event:
            case RequestMigrated():
                self.moved += 1
                self.moves.append(Moved(sequence, event))
            case MigrationRefused():
                self.refused += 1
                self.moves.append(Moved(sequence, event))
            case ScaleDecided():
                if not any(known.decided.number == event.number for known in self.scaling):
                    self.scaling.append(Scaled(sequence, event))
            case ScaleApplied():
                self._applied(event)
            case _:
                self._note_lost(event)
                kind = KINDS.get(type(event))
                if kind:
                    instance = str(getattr(event, "instance", ""))
                    self.events.append(Happened(sequence, event.at, kind, instance, details(event)))

    def _note_lost(self, event: LogEvent) -> None:
        match event:
            case InstanceLeft() if event.stamp is not None and not event.refused:
                self.lost[event.instance] = event.at
                if len(self.lost) > KEPT_MAX:
                    del self.lost[next(iter(self.lost))]
            case InstanceLeft() | InstanceJoined():
                self.lost.pop(event.instance, None)
            case _:
                pass

    def _applied(self, event: ScaleApplied) -> None:
        for place, known in enumerate(self.scaling):
            if known.decided.number == event.number and not known.applied_at:
                self.scaling[place] = replace(known, applied_at=event.at, applied_detail=event.detail)
