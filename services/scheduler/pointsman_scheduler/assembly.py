"""Wires the parts of a scheduler. In: settings, policies, a link. Out: its service, with all tasks started."""

from pointsman.adapters.clocks import ForwardClock
from pointsman.policies.policy_set import PolicySet
from pointsman.ports import Clock, Link
from pointsman.primitives import PoolName
from pointsman.runtime.engine_urls import EngineUrls
from pointsman.runtime.health import HealthBoard
from pointsman.runtime.leadership import Leadership
from pointsman.runtime.recovery import Recovery
from pointsman.runtime.supervision import Supervisor
from pointsman.runtime.tracing import Tracer
from pointsman_scheduler.engine_url_guard import EngineUrlGuard
from pointsman_scheduler.fleet_status import FleetWarnings
from pointsman_scheduler.handlers import CommandHandlers
from pointsman_scheduler.housekeeping import Housekeeping
from pointsman_scheduler.leader import LEADERSHIP, Candidacy
from pointsman_scheduler.log_liveness import LogLiveness
from pointsman_scheduler.overlap import OverlapService
from pointsman_scheduler.overload import Overload
from pointsman_scheduler.replica import Replica
from pointsman_scheduler.resync import Resync
from pointsman_scheduler.service import SchedulerService
from pointsman_scheduler.settings import SchedulerSettings
from pointsman_scheduler.tenant_policies import TenantPoliciesKeeper


def start_scheduler(
    supervisor: Supervisor,
    link: Link,
    *,
    settings: SchedulerSettings,
    policies: PolicySet,
    clock: Clock,
    board: HealthBoard,
    name: str,
    tracer: Tracer | None = None,
) -> SchedulerService:
    """`name`: of this process in log and lease; never reused."""
    service = _assembled(
        link,
        settings=settings,
        policies=policies,
        clock=ForwardClock(clock),
        board=board,
        name=name,
        tracer=tracer,
    )
    supervisor.start(service.run(), name="term")
    for task, work in service.background().items():
        supervisor.start(work, name=task)
    return service


def _assembled(
    link: Link,
    *,
    settings: SchedulerSettings,
    policies: PolicySet,
    clock: ForwardClock,
    board: HealthBoard,
    name: str,
    tracer: Tracer | None,
) -> SchedulerService:
    """In the order in which the parts need each other."""
    pool = PoolName(settings.pool)
    recovery = Recovery(
        event_log=link.log,
        checkpoints=link.checkpoints,
        clock=clock,
        board=board,
        part=LEADERSHIP,
        empty_state=lambda: settings.empty_state(policies),
    )
    replica = Replica(settings.empty_state(policies), pool)
    log_liveness = LogLiveness(clock, suspect_seconds=settings.suspect_seconds)
    leader = Candidacy(
        event_log=link.log,
        clock=clock,
        board=board,
        leadership=Leadership(link.lease, clock, name=name, lease_seconds=settings.lease_seconds),
        policies=policies,
        name=name,
        replica=replica,
        log_liveness=log_liveness,
        rivals=settings.rivals,
        tracer=tracer,
    )
    overload = Overload(link.log, clock, board, name)
    tenants = TenantPoliciesKeeper(leader=leader, replica=replica, store=link.access, clock=clock)
    handlers = CommandHandlers(
        leader=leader,
        replica=replica,
        access=link.access,
        tenants=tenants,
        clock=clock,
        policies=policies,
        pool=pool,
        name=name,
        secret=settings.secret,
        log_liveness=log_liveness,
        overload=overload,
        board=board,
    )
    housekeeping = Housekeeping(
        overload=overload,
        leader=leader,
        replica=replica,
        commands=link.commands,
        clock=clock,
        settings=settings,
        log_liveness=log_liveness,
        policies=policies,
    )
    url_guard = EngineUrlGuard(EngineUrls.of(settings.engine_urls))
    resync = Resync(
        leader=leader,
        replica=replica,
        commands=link.commands,
        clock=clock,
        pool=pool,
        is_refused=url_guard.is_refused,
    )
    overlap = OverlapService(
        replica=replica,
        leader=leader,
        event_log=link.log,
        clock=clock,
        pool=pool,
        name=name,
        secret=settings.secret,
    )
    board.missing(LEADERSHIP, "folding the log")
    return SchedulerService(
        name=name,
        pool=pool,
        event_log=link.log,
        commands=link.commands,
        clock=clock,
        board=board,
        recovery=recovery,
        replica=replica,
        log_liveness=log_liveness,
        leader=leader,
        tenants=tenants,
        handlers=handlers,
        housekeeping=housekeeping,
        url_guard=url_guard,
        resync=resync,
        overlap=overlap,
        warnings=FleetWarnings(),
    )
