"""What happened to the fleet, newest last, in bounded memory: decisions about its size, moves of requests, and changes of
instances and leaders."""

from collections import deque
from dataclasses import dataclass, field

import msgspec

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
from pointsman_cli.console.views import FleetEventView, MoveView, ScaleView, unix_seconds
from pointsman_cli.doctor.samples import keep
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


@dataclass(slots=True)
class Happenings:
    speed: float
    scaling: dict[int, ScaleView] = field(default_factory=dict)
    """By number; of two decisions with one number the first counts."""
    moves: deque[MoveView] = field(default_factory=lambda: deque(maxlen=KEPT_MAX))
    events: deque[FleetEventView] = field(default_factory=lambda: deque(maxlen=KEPT_MAX))
    moved: int = 0
    refused: int = 0
    lost: dict[InstanceId, EngineSeconds] = field(default_factory=dict)
    """Instances that a leader gave up, and when, until they join again."""

    def apply(self, event: LogEvent, sequence: Sequence) -> None:
        match event:
            case RequestMigrated():
                self.moved += 1
                self.moves.append(self._move(event, sequence))
            case MigrationRefused():
                self.refused += 1
                self.moves.append(self._move(event, sequence))
            case ScaleDecided() if event.number not in self.scaling:
                view = ScaleView(
                    sequence=sequence,
                    at=self._wall(event.at),
                    policy=event.policy,
                    by=event.by,
                    current=event.current,
                    wanted=event.wanted,
                    reason=event.reason,
                    prefill=event.prefill,
                    decode=event.decode,
                )
                keep(self.scaling, event.number, view, KEPT_MAX)
            case ScaleApplied() if (decided := self.scaling.get(event.number)) is not None and not decided.applied_at:
                self.scaling[event.number] = msgspec.structs.replace(
                    decided, applied_at=self._wall(event.at), applied_detail=event.detail
                )
            case _:
                self._note_lost(event)
                kind = KINDS.get(type(event))
                if kind:
                    happened = FleetEventView(
                        sequence=sequence,
                        at=self._wall(event.at),
                        kind=kind,
                        instance=str(getattr(event, "instance", "")),
                        detail=details(event),
                    )
                    self.events.append(happened)

    def _note_lost(self, event: LogEvent) -> None:
        match event:
            case InstanceLeft() if event.stamp is not None and not event.refused:
                keep(self.lost, event.instance, event.at, KEPT_MAX)
            case InstanceLeft() | InstanceJoined():
                self.lost.pop(event.instance, None)
            case _:
                pass

    def _move(self, event: RequestMigrated | MigrationRefused, sequence: Sequence) -> MoveView:
        return MoveView(
            sequence=sequence,
            at=self._wall(event.at),
            request=event.request,
            source=event.source,
            instance=event.instance,
            cause="" if isinstance(event, MigrationRefused) else str(event.cause),
            policy=event.policy,
            reason=event.detail if isinstance(event, MigrationRefused) else event.reason,
            benefit=round(event.benefit, 3),
            rebound=event.rebind if isinstance(event, MigrationRefused) else event.rebound,
            refusal=event.reason if isinstance(event, MigrationRefused) else "",
        )

    def _wall(self, at: EngineSeconds) -> float:
        return unix_seconds(at, self.speed)
