"""Steps from the present pool to the decided one. Stateless: steps already taken are not found again."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from pointsman.adapters.discovery.targets import rank_name
from pointsman.policies.scaling.decider import in_service
from pointsman.policies.scaling.roles import (
    NOT_SIZED,
    RoleSizes,
    Switch,
    drained_by_operators,
    future_role,
    role_switches,
    staying,
)
from pointsman.ports import ProvidedInstance
from pointsman.primitives import InstanceId, Seconds, WallSeconds
from pointsman.state.fleet import Instance, Status
from pointsman.state.scaling import CLOCKS_APART_MAX
from pointsman.state.state import State

REJOIN_WALL_SECONDS: WallSeconds = WallSeconds(60.0)
BESIDE_MAX = 2
"""Engines above the largest size that are started beside those that do not join and cannot be stopped."""
NAMED_MAX = 3
NOT_JOINED = "it has not joined in time"
HUNG = "it has taken no requests for too long"
NOT_NEEDED = "the pool shrinks, and it has not joined"


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


@dataclass(frozen=True, slots=True)
class Report:
    """Why a step that is needed is not taken."""

    trouble: str


Step = Grow | Drain | Undrain | Switch | Stop | Report


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """`coming` have not joined yet; `starting` of them never have, the newest first; `leaving` drain; `switching` drain for
    another role, and stay; `overdue` should have joined, or take requests again, and do not count: why."""

    staying: tuple[Instance, ...]
    coming: tuple[InstanceId, ...]
    leaving: tuple[Instance, ...]
    overdue: Mapping[InstanceId, str]
    provided: tuple[InstanceId, ...]
    in_service: int
    switching: int = 0
    starting: tuple[InstanceId, ...] = ()

    @property
    def total(self) -> int:
        return len(self.staying) + len(self.coming)

    def settled(self, wanted: int) -> bool:
        return self.in_service == wanted == self.total and not self.leaving


def absent(state: State, provided: list[ProvidedInstance]) -> list[ProvidedInstance]:
    """Those that run and are not in the fleet."""
    return [p for p in provided if p.instance not in state.fleet]


def out_of_service(state: State, provided: list[ProvidedInstance]) -> list[ProvidedInstance]:
    """Those that run and are not in the fleet, or hang in it."""
    return [p for p in provided if (known := state.fleet.get(p.instance)) is None or _hangs(known)]


def with_ranks(state: State, provided: list[ProvidedInstance]) -> list[InstanceId]:
    """Those whose data-parallel ranks are the instances of the fleet."""
    return [p.instance for p in absent(state, provided) if rank_name(p.instance, 0) in state.epochs]


def pool_status(
    state: State,
    provided: list[ProvidedInstance],
    *,
    start_seconds_max: WallSeconds,
    out_seconds: Callable[[InstanceId], WallSeconds],
    unix_now: Seconds,
    served: Collection[InstanceId] = (),
) -> PoolStatus:
    """`start_seconds_max`: for a started instance to join. `out_seconds`: since when one is out of service. `served`: this
    scaler has seen them in service. A worker that restarts, or that has to join again since the log was lost, gets
    REJOIN_WALL_SECONDS at least."""
    instances, away = state.fleet.instances, absent(state, provided)
    joined = {p.instance for p in provided if p.instance in served or _has_joined(state, p, unix_now)}
    patience = float(max(REJOIN_WALL_SECONDS, start_seconds_max))
    late = [
        p.instance
        for p in out_of_service(state, provided)
        if min(p.age, float(out_seconds(p.instance))) > patience and not requests_at(state, p.instance)
    ]
    is_observed = _are_observed(state, provided, joined)
    overdue = {name: HUNG if name in state.fleet else NOT_JOINED for name in late if is_observed}
    coming = [p for p in away if p.instance not in overdue]
    never_in = [p for p in coming if p.instance not in joined and _out_since_start(p, out_seconds(p.instance))]
    return PoolStatus(
        staying=tuple(i for i in staying(state.fleet) if i.id not in overdue),
        coming=tuple(p.instance for p in coming),
        leaving=tuple(i for i in instances if i.leaving),
        overdue=overdue,
        provided=tuple(p.instance for p in provided),
        in_service=len(in_service(state)),
        switching=sum(bool(i.becomes) for i in instances),
        starting=tuple(p.instance for p in sorted(never_in, key=lambda p: p.age)),
    )


def next_steps(
    state: State,
    status: PoolStatus,
    *,
    wanted: int,
    stoppable: Callable[[list[InstanceId]], list[InstanceId]],
    may_stop: Callable[[Instance], str],
    highest: int,
    roles: RoleSizes = NOT_SIZED,
) -> list[Step]:
    """`may_stop` returns why a leaving instance may be stopped now, or "". `highest`: size of the pool."""
    stoppable_now = set(stoppable(list(status.provided)))
    stopped = [Stop(instance, reason) for instance, reason in status.overdue.items() if instance in stoppable_now]
    steps: list[Step] = [*stopped]
    running = [instance for instance in status.provided if instance not in {step.instance for step in stopped}]
    missing = wanted - status.total
    leaving = [i for i in status.leaving if i.id in status.provided]
    if missing > 0:
        back = leaving[:missing]
        steps += [Undrain(instance.id) for instance in back]
        leaving = leaving[missing:]
        if missing > len(back):
            steps += _growth(state, status, len(running), missing - len(back), highest=highest)
    elif missing < 0:
        starting = [instance for instance in status.starting if instance in stoppable_now][:-missing]
        steps += [Stop(instance, NOT_NEEDED) for instance in starting]
        if not starting and not status.leaving and len(status.staying) > wanted:
            candidate = _scale_down_candidate(state, status, set(stoppable(running)), roles, empties=wanted == 0)
            steps += [Drain(candidate)] if candidate is not None else []
    if missing >= 0:
        steps += role_switches(state, roles, status.overdue)
    return steps + [Stop(i.id, reason) for i in leaving if (reason := may_stop(i))]


def requests_at(state: State, instance: InstanceId) -> int:
    queue = state.workload.queues.get(instance)
    return queue.requests if queue else 0


def _hangs(instance: Instance) -> bool:
    """Not one that somebody drained, nor one whose worker is away."""
    return not instance.draining and instance.status in (Status.DOWN, Status.UNSCHEDULABLE)


def _has_joined(state: State, provided: ProvidedInstance, unix_now: Seconds) -> bool:
    """Since its start: an earlier one may have had its name. Epochs are Unix milliseconds of the worker, whose clock may be
    wrong."""
    epoch = state.epochs.get(provided.instance)
    return epoch is not None and epoch / 1000 > unix_now - provided.age - CLOCKS_APART_MAX


def _out_since_start(provided: ProvidedInstance, out: WallSeconds) -> bool:
    """As far as this scaler has seen. Of one that is older the log may have lost the join."""
    return float(out) > provided.age - CLOCKS_APART_MAX


def _are_observed(state: State, provided: list[ProvidedInstance], joined: Collection[InstanceId]) -> bool:
    """Whether workers follow these instances. If none is in the fleet, though some have been, it is the worker that is away:
    no reason to stop what it followed."""
    return not joined or any(p.instance in state.fleet for p in provided)


def _growth(state: State, status: PoolStatus, running: int, missing: int, *, highest: int) -> list[Step]:
    """Those that somebody drained are replaced in any case."""
    drained = sum(instance.id in status.provided for instance in drained_by_operators(state.fleet))
    most = highest + drained + BESIDE_MAX
    total = min(running + missing, most)
    steps: list[Step] = [Grow(total, total - running)] if total > running else []
    if running + missing > most:
        stuck = sorted(status.overdue)
        names = ", ".join([*stuck[:NAMED_MAX], *(["..."] if len(stuck) > NAMED_MAX else [])])
        trouble = f"{len(stuck)} engines run and have not joined, or hang ({names}), so no more than {most} are started: see their logs"
        steps.append(Report(trouble))
    return steps


def _scale_down_candidate(
    state: State,
    status: PoolStatus,
    allowed: Collection[InstanceId],
    roles: RoleSizes,
    *,
    empties: bool,
) -> InstanceId | None:
    """Of those allowed: a useless one, else one of a role with too many, else the least loaded; never the last of a needed
    role unless `empties`."""
    candidates = [i for i in status.staying if i.id in allowed and (empties or not _is_needed(state, status, i))]
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
    heard = instance.answered and not instance.suspected
    return heard and instance.serving and not instance.unschedulable and not instance.ejected


def _is_needed(state: State, status: PoolStatus, instance: Instance) -> bool:
    """Whether none could prefill, or none decode, without it: in service, or at all, if it is not in service itself."""
    serving = in_service(state)
    return not instance.is_replaceable(serving if instance in serving else status.staying)
