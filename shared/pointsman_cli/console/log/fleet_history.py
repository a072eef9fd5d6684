"""What happened to the fleet, newest last, in bounded memory: decisions about its size, moves of requests, and changes of
instances and leaders."""

from collections import deque
from dataclasses import dataclass, field

import msgspec

from pointsman.contracts import decisions, fleet
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.tenants import TenantPoliciesSet
from pointsman.primitives import EngineSeconds, InstanceId, Sequence
from pointsman_cli.console.views import FleetEventView, MoveView, ScaleView, unix_seconds
from pointsman_cli.doctor.samples import keep
from pointsman_cli.tap.event_lines import details

KEPT_MAX = 1_000
KINDS: dict[type, str] = {
    fleet.InstanceJoined: "joined",
    fleet.InstanceLeft: "left",
    fleet.InstanceSuspected: "suspected",
    fleet.InstanceDraining: "draining",
    fleet.InstanceUndrained: "undrained",
    fleet.InstanceRoleChanged: "role",
    fleet.InstanceEjected: "ejected",
    fleet.InstanceUnejected: "unejected",
    decisions.LeaderElected: "leader",
    decisions.WritesLost: "writes lost",
    decisions.RequestsRefused: "refused",
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
            case decisions.RequestMigrated():
                self.moved += 1
                self.moves.append(self._move(event, sequence))
            case decisions.MigrationRefused():
                self.refused += 1
                self.moves.append(self._move(event, sequence))
            case decisions.ScaleDecided() if event.number not in self.scaling:
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
            case decisions.ScaleApplied() if (
                decided := self.scaling.get(event.number)
            ) is not None and not decided.applied_at:
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
            case fleet.InstanceLeft() if event.stamp is not None and not event.refused:
                keep(self.lost, event.instance, event.at, KEPT_MAX)
            case fleet.InstanceLeft() | fleet.InstanceJoined():
                self.lost.pop(event.instance, None)
            case _:
                pass

    def _move(self, event: decisions.RequestMigrated | decisions.MigrationRefused, sequence: Sequence) -> MoveView:
        return MoveView(
            sequence=sequence,
            at=self._wall(event.at),
            request=event.request,
            source=event.source,
            instance=event.instance,
            cause="" if isinstance(event, decisions.MigrationRefused) else str(event.cause),
            policy=event.policy,
            reason=event.detail if isinstance(event, decisions.MigrationRefused) else event.reason,
            benefit=round(event.benefit, 3),
            rebound=event.rebind if isinstance(event, decisions.MigrationRefused) else event.rebound,
            refusal=event.reason if isinstance(event, decisions.MigrationRefused) else "",
        )

    def _wall(self, at: EngineSeconds) -> float:
        return unix_seconds(at, self.speed)
