"""Decisions about instances: suspect and remove silent ones, eject outliers, drain, change roles."""

from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from pointsman.contracts.fleet import (
    InstanceDraining,
    InstanceEjected,
    InstanceLeft,
    InstanceRoleChanged,
    InstanceSuspected,
    InstanceUndrained,
    InstanceUnejected,
    LivenessTimeouts,
    Role,
)
from pointsman.policies.dispatch.migrations import relocate_pending
from pointsman.policies.dispatch.turn import Turn
from pointsman.policies.outliers import Ejection
from pointsman.policies.scaling.roles import future_role, staying
from pointsman.primitives import EngineSeconds, InstanceId
from pointsman.state.fleet import Instance, Status
from pointsman.state.fold_versions import CLOCKS_DIFFER
from pointsman.state.scaling import CLOCKS_APART_MAX
from pointsman.state.workload import EMPTY_QUEUE

SWITCH_SECONDS_MAX: EngineSeconds = 10.0
"""How long an instance drains before it changes its role."""
UNHEARD_STAYS = 10.0
"""Times the time after which an instance is gone, where it takes requests because no other does. Kubernetes, which tells a
lost node after 50 s, has started its worker elsewhere by then."""

REMOVED_MAX = 128
"""Silent instances removed in one turn: 3,000 at once take as long as a lease."""


def check_liveness(turn: Turn, timeouts: LivenessTimeouts, heard: Mapping[InstanceId, EngineSeconds]) -> None:
    """`heard`: from when silence counts (`HeardReports.silent_since`). A decision carries the time that it rests on, so that a
    replay decides alike."""
    # By the leader's time: what a worker's date says is `excused_until` in earlier fold versions, and in `heard` from then on.
    fleet = turn.state.fleet
    by_leader = turn.state.settings.fold_version >= CLOCKS_DIFFER
    removed = 0
    for instance in fleet.instances:
        since = max(timeouts.heard_since, heard.get(instance.id, 0.0))
        # A date that is far ahead does not tell when the worker was heard: its heartbeats do.
        heard_at = instance.heard_at if instance.heard_at <= turn.now + CLOCKS_APART_MAX else 0.0
        silent = turn.now - max(heard_at, since)
        if silent <= timeouts.suspect_after and silent <= timeouts.leave_after:
            continue
        evidence = msgspec.structs.replace(timeouts, heard_since=since)
        stays = UNHEARD_STAYS if instance.unheard and instance.id in fleet.able else 1.0
        if silent > stays * timeouts.leave_after:
            _remove(turn, instance, silent, evidence)
            removed += 1
            if removed == REMOVED_MAX:
                return
        elif by_leader or turn.now > instance.excused_until:
            _suspect(turn, instance, silent, evidence)


def eject_outliers(turn: Turn) -> None:
    """Eject and readmit instances, and move requests pending at ejected ones."""
    while (found := turn.policies.outliers.next(turn.state, turn.now)) is not None:
        name, epoch = found.instance.id, found.instance.epoch
        if isinstance(found, Ejection):
            turn.decide(
                InstanceEjected(
                    at=turn.now,
                    stamp=turn.stamp,
                    instance=name,
                    epoch=epoch,
                    cause=found.cause,
                    detail=found.detail,
                    seconds=found.seconds,
                    number=found.number,
                )
            )
        else:
            turn.decide(
                InstanceUnejected(at=turn.now, stamp=turn.stamp, instance=name, epoch=epoch, half_open=found.half_open)
            )
    if turn.events:
        relocate_pending(turn)


def drain(
    turn: Turn, instance: InstanceId, reason: str, *, leaving: bool, by: str, becomes: Role | Literal[""] = ""
) -> None:
    found = turn.state.fleet.get(instance)
    if found is None or found.drains_so(leaving=leaving, becomes=becomes):
        return
    _decide_drain(turn, found, reason, leaving=leaving, by=by, becomes=becomes)
    relocate_pending(turn)


def undrain(turn: Turn, instance: InstanceId, *, by: str) -> None:
    found = turn.state.fleet.get(instance)
    if found is None or not found.draining:
        return
    turn.decide(InstanceUndrained(at=turn.now, stamp=turn.stamp, instance=instance, epoch=found.epoch, by=by))
    relocate_pending(turn)


def change_roles(turn: Turn) -> None:
    """Of instances that have drained for it: none of their requests is left, or SWITCH_SECONDS_MAX are over. Requests
    that are left end there."""
    for instance in turn.state.fleet.instances:
        if not instance.becomes:
            continue
        queue = turn.state.workload.queues.get(instance.id, EMPTY_QUEUE)
        if queue.requests and turn.now - instance.draining_since < SWITCH_SECONDS_MAX:
            continue
        _decide_role(turn, instance, instance.becomes, left=queue.requests)
    _give_role_back(turn)
    if turn.events:
        relocate_pending(turn)


def _give_role_back(turn: Turn) -> None:
    """Where nobody is left who prefills, or who decodes, an instance takes the role again that its worker announces, if that
    helps. One at a time."""
    remaining = staying(turn.state.fleet)
    roles = {future_role(instance) for instance in remaining}
    lacking = {role for role in ("prefill", "decode") if roles and not roles & {"both", role}}
    for instance in remaining if lacking else ():
        back = instance.announced_role
        if instance.becomes or back == instance.role:
            continue
        if back == "both" or (back in lacking and instance.is_replaceable(remaining)):
            _decide_role(turn, instance, back)
            return


def repeat_roles_and_drains(turn: Turn, instances: Iterable[InstanceId]) -> None:
    """Drains, and roles that workers do not announce: a reader that begins behind the decision, which the log may have dropped,
    knows the announcement alone. A role comes before the drain, which it ends. Not drains for a role, which last seconds, nor the
    role of one that drains so."""
    for instance in instances:
        known = turn.state.fleet.get(instance)
        if known is None or known.becomes:
            continue
        draining, leaving = known.draining, known.leaving
        if known.role != known.announced_role:
            _decide_role(turn, known, known.role)
        if draining:
            _decide_drain(turn, known, "it drains already", leaving=leaving)


def _decide_role(turn: Turn, instance: Instance, role: Role, *, left: int = 0) -> None:
    turn.decide(
        InstanceRoleChanged(
            at=turn.now, stamp=turn.stamp, instance=instance.id, epoch=instance.epoch, role=role, left=left
        )
    )


def _decide_drain(
    turn: Turn, instance: Instance, reason: str, *, leaving: bool, by: str = "", becomes: Role | Literal[""] = ""
) -> None:
    turn.decide(
        InstanceDraining(
            at=turn.now,
            stamp=turn.stamp,
            instance=instance.id,
            epoch=instance.epoch,
            reason=reason,
            leaving=leaving,
            by=by,
            becomes=becomes,
        )
    )


def refuse(turn: Turn, instance: InstanceId, reason: str) -> None:
    found = turn.state.fleet.get(instance)
    if found is not None:
        turn.decide(
            InstanceLeft(
                at=turn.now, stamp=turn.stamp, instance=instance, epoch=found.epoch, reason=reason, refused=True
            )
        )
        relocate_pending(turn)


def _suspect(turn: Turn, instance: Instance, silent: EngineSeconds, timeouts: LivenessTimeouts) -> None:
    if instance.status is Status.SUSPECTED:
        return
    turn.decide(
        InstanceSuspected(
            at=turn.now,
            stamp=turn.stamp,
            instance=instance.id,
            epoch=instance.epoch,
            silent_seconds=silent,
            patience=timeouts,
        )
    )


def _remove(turn: Turn, instance: Instance, silent: EngineSeconds, timeouts: LivenessTimeouts) -> None:
    turn.decide(
        InstanceLeft(
            at=turn.now,
            stamp=turn.stamp,
            instance=instance.id,
            epoch=instance.epoch,
            reason=f"not heard of for {silent:.1f} s",
            patience=timeouts,
        )
    )
