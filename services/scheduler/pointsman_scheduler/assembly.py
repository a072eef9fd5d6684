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
    """Its parts are made in the order in which they need each other. `name`: of this process in log and lease; never reused."""
    pool, forward = PoolName(settings.pool), ForwardClock(clock)
    recovery = Recovery(
        event_log=link.log,
        checkpoints=link.checkpoints,
        clock=forward,
        board=board,
        part=LEADERSHIP,
        empty_state=lambda: settings.empty_state(policies),
    )
    replica = Replica(settings.empty_state(policies), pool)
    log_liveness = LogLiveness(forward, suspect_seconds=settings.suspect_seconds)
    leader = Candidacy(
        event_log=link.log,
        clock=forward,
        board=board,
        leadership=Leadership(link.lease, forward, name=name, lease_seconds=settings.lease_seconds),
        policies=policies,
        name=name,
        replica=replica,
        log_liveness=log_liveness,
        rivals=settings.rivals,
        tracer=tracer,
    )
    overload = Overload(link.log, forward, board, name)
    tenants = TenantPoliciesKeeper(leader=leader, replica=replica, store=link.access, clock=forward)
    handlers = CommandHandlers(
        leader=leader,
        replica=replica,
        access=link.access,
        tenants=tenants,
        clock=forward,
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
        clock=forward,
        settings=settings,
        log_liveness=log_liveness,
        policies=policies,
    )
    url_guard = EngineUrlGuard(EngineUrls.of(settings.engine_urls))
    resync = Resync(
        leader=leader,
        replica=replica,
        commands=link.commands,
        clock=forward,
        pool=pool,
        is_refused=url_guard.is_refused,
    )
    overlap = OverlapService(
        replica=replica,
        leader=leader,
        event_log=link.log,
        clock=forward,
        pool=pool,
        name=name,
        secret=settings.secret,
    )
    board.missing(LEADERSHIP, "folding the log")
    service = SchedulerService(
        name=name,
        pool=pool,
        event_log=link.log,
        commands=link.commands,
        clock=forward,
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
    supervisor.start(service.run(), name="term")
    for task, work in service.background().items():
        supervisor.start(work, name=task)
    return service
