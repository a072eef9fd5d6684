"""Steps from the present pool to the decided one. Stateless: steps already taken are not found again."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from pointsman.adapters.discovery.targets import rank_name
from pointsman.policies.scaling.decider import in_service
from pointsman.policies.scaling.roles import NOT_SIZED, RoleSizes, Switch, future_role, role_switches, staying
from pointsman.ports import ProvidedInstance
from pointsman.primitives import InstanceId, WallSeconds
from pointsman.state.fleet import Instance
from pointsman.state.state import State

REJOIN_WALL_SECONDS: WallSeconds = WallSeconds(60.0)


@dataclass(frozen=True, slots=True)
class Grow:
    total: int
    missing: int


@dataclass(frozen=True, slots=True)
class Drain:
    instance: InstanceId


@dataclass(frozen=True, slots=True)
class Undrain:
    instance: InstanceId


@dataclass(frozen=True, slots=True)
class Stop:
    instance: InstanceId
    reason: str


Step = Grow | Drain | Undrain | Switch | Stop


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """`coming` have not joined yet; `leaving` drain; `switching` drain for another role, and stay; `overdue` should have
    joined, and do not count."""

    staying: tuple[Instance, ...]
    coming: tuple[InstanceId, ...]
    leaving: tuple[Instance, ...]
    overdue: tuple[InstanceId, ...]
    provided: tuple[InstanceId, ...]
    in_service: int
    switching: int = 0

    @property
    def total(self) -> int:
        return len(self.staying) + len(self.coming)

    def settled(self, wanted: int) -> bool:
        return self.in_service == wanted == self.total and not self.leaving


def absent(state: State, provided: list[ProvidedInstance]) -> list[ProvidedInstance]:
    """Those that run and are not in the fleet."""
    return [p for p in provided if p.instance not in state.fleet]


def with_ranks(state: State, provided: list[ProvidedInstance]) -> list[InstanceId]:
    """Those whose data-parallel ranks are the instances of the fleet."""
    return [p.instance for p in absent(state, provided) if rank_name(p.instance, 0) in state.epochs]


def pool_status(
    state: State,
    provided: list[ProvidedInstance],
    *,
    start_seconds_max: WallSeconds,
    absent_seconds: Callable[[InstanceId], WallSeconds],
) -> PoolStatus:
    """`start_seconds_max`: for a started instance to join. `absent_seconds`: since when one that runs is not in
    the fleet. A worker that restarts, or that has to join again since the log was lost, gets REJOIN_WALL_SECONDS at
    least."""
    instances, away = state.fleet.instances, absent(state, provided)
    patience = float(max(REJOIN_WALL_SECONDS, start_seconds_max))
    late = [p.instance for p in away if min(p.age, float(absent_seconds(p.instance))) > patience]
    overdue = {name for name in late if not requests_at(state, name)} if _are_observed(state, provided) else set()
    return PoolStatus(
        staying=tuple(staying(state.fleet)),
        coming=tuple(p.instance for p in away if p.instance not in overdue),
        leaving=tuple(i for i in instances if i.leaving),
        overdue=tuple(p.instance for p in away if p.instance in overdue),
        provided=tuple(p.instance for p in provided),
        in_service=len(in_service(state)),
        switching=sum(bool(i.becomes) for i in instances),
    )


def next_steps(
    state: State,
    status: PoolStatus,
    *,
    wanted: int,
    stoppable: Callable[[list[InstanceId]], list[InstanceId]],
    may_stop: Callable[[Instance], str],
    roles: RoleSizes = NOT_SIZED,
) -> list[Step]:
    """`may_stop` returns why a leaving instance may be stopped now, or ""."""
    stoppable_now = set(stoppable(list(status.provided)))
    overdue = [instance for instance in status.overdue if instance in stoppable_now]
    steps: list[Step] = [Stop(instance, "it has not joined in time") for instance in overdue]
    missing = wanted - status.total
    leaving = [i for i in status.leaving if i.id in status.provided]
    if missing > 0:
        back = leaving[:missing]
        steps += [Undrain(instance.id) for instance in back]
        leaving = leaving[missing:]
        if missing > len(back):
            steps.append(Grow(len(status.provided) - len(overdue) + missing - len(back), missing - len(back)))
    elif missing < 0 and not status.leaving:
        running = [instance for instance in status.provided if instance not in overdue]
        candidate = _scale_down_candidate(state, status, running, stoppable, roles, empties=wanted == 0)
        if candidate is not None:
            steps.append(Drain(candidate))
    if missing >= 0:
        steps += role_switches(state, roles)
    return steps + [Stop(i.id, reason) for i in leaving if (reason := may_stop(i))]


def requests_at(state: State, instance: InstanceId) -> int:
    queue = state.workload.queues.get(instance)
    return queue.requests if queue else 0


def _are_observed(state: State, provided: list[ProvidedInstance]) -> bool:
    """Whether workers follow these instances. If none is in the fleet, though some have been, it is the worker that is away:
    no reason to stop what it followed."""
    present = any(p.instance in state.fleet for p in provided)
    return present or not any(p.instance in state.epochs for p in provided)


def _scale_down_candidate(
    state: State,
    status: PoolStatus,
    running: list[InstanceId],
    stoppable: Callable[[list[InstanceId]], list[InstanceId]],
    roles: RoleSizes,
    *,
    empties: bool,
) -> InstanceId | None:
    """A useless one, else one of a role with too many, else the least loaded; never the last of a needed role unless
    `empties`."""
    allowed = set(stoppable(running))
    candidates = [i for i in status.staying if i.id in allowed and (empties or not _is_needed(state, i))]
    if not candidates:
        return None
    have = Counter(future_role(instance) for instance in status.staying)
    over = {"prefill": have["prefill"] > roles.prefill, "decode": have["decode"] > roles.decode}
    return min(
        candidates,
        key=lambda i: (
            _is_usable(i),
            bool(roles.total) and not over.get(future_role(i), False),
            requests_at(state, i.id),
            state.index.blocks(i.id),
            i.id,
        ),
    ).id


def _is_usable(instance: Instance) -> bool:
    return instance.answered and instance.serving and not instance.unschedulable and not instance.ejected


def _is_needed(state: State, instance: Instance) -> bool:
    serving = in_service(state)
    others = {other.role for other in serving if other.id != instance.id}
    return instance in serving and not (others & {"prefill", "both"} and others & {"decode", "both"})
