"""Moves placed requests: by a rebalancer's plan, or because their instance takes no requests. Each planned move is
checked on the leader's State and gives RequestMigrated or MigrationRefused."""

from math import inf

from pointsman.contracts.decisions import MigrationRefused, RequestMigrated
from pointsman.contracts.reasons import MoveCause, MoveRefusal, relocated
from pointsman.policies.candidates import CandidateEstimate
from pointsman.policies.decode_placement import DecodeRefusal
from pointsman.policies.dispatch.granting import grant, grant_next
from pointsman.policies.dispatch.splitting import decode_after_move, decoder_for
from pointsman.policies.dispatch.turn import Turn
from pointsman.policies.pool_view import PoolView
from pointsman.policies.rebalancing.base import Migration, MigrationPlan
from pointsman.policies.rebalancing.migration_check import MigrationCheck, Veto
from pointsman.policies.rebalancing.redispatch import Redispatch, Redispatching, Window
from pointsman.primitives import NO_SECONDS, InstanceId
from pointsman.state.fold_versions import SHORT_TURNS
from pointsman.state.workload import EMPTY_QUEUE, NO_INSTANCE, Request

NOT_PLANNED = MigrationPlan(as_of=0)
RELOCATED_MAX = 128
"""In one turn, so that the leader can renew its lease: each is placed anew. The others follow in the next."""


def migrate(turn: Turn, plan: MigrationPlan) -> None:
    touched: set[InstanceId] = set()
    check = MigrationCheck(turn.state, turn.now)
    for migration in plan.migrations:
        moved = _redispatch(turn, migration, plan) if migration.rebind else _requeue(turn, migration, check, plan)
        if moved:
            touched |= {migration.source, migration.target}
    for instance in sorted(touched):
        grant_next(turn, instance)


def relocate_pending(turn: Turn) -> None:
    """Move requests that are pending at instances that take none. Those without an alternative stay."""
    state = turn.state
    ready = state.fleet.ready
    most = RELOCATED_MAX if state.settings.fold_version >= SHORT_TURNS else inf
    moved = 0
    for instance, queue in list(state.workload.queues.items()):
        if queue.pending and ready and instance not in ready:
            for request in list(queue.pending.values()):
                if moved < most:
                    moved += _relocate(turn, request)
    for instance in ready:
        queue = state.workload.queues.get(instance, EMPTY_QUEUE)
        if queue.queued_requests:
            grant_next(turn, instance)


def _redispatch(turn: Turn, migration: Migration, plan: MigrationPlan) -> bool:
    policies = turn.policies
    window = Window(policies.prefill_window_tokens, policies.running_max)
    judged: Redispatch | Veto = Veto(MoveRefusal.REBIND_OFF, "the scheduler was not told --rebind")
    if policies.rebind:
        judged = Redispatching(turn.state, turn.now, window).judge(migration)
    if isinstance(judged, Veto):
        _refuse(turn, migration, judged, plan)
        return False
    _move(turn, migration, judged.candidate, NO_INSTANCE, plan, MoveCause.REBOUND, judged)
    grant(turn, turn.state.workload.requests[migration.request])
    return True


def _requeue(turn: Turn, migration: Migration, check: MigrationCheck, plan: MigrationPlan) -> bool:
    offered = check.judge(migration)
    if isinstance(offered, CandidateEstimate):
        request = turn.state.workload.requests[migration.request]
        decode = decode_after_move(turn, request, offered.instance)
        if decode is not None:
            _move(turn, migration, offered, decode, plan, MoveCause.PLANNED)
            return True
        offered = Veto(MoveRefusal.TARGET_UNAVAILABLE, f"nobody could decode what {offered.instance} prefills")
    _refuse(turn, migration, offered, plan)
    return False


def _relocate(turn: Turn, request: Request) -> bool:
    decoder = decoder_for(turn, request, request.excluded, check_load=False)
    transfer = None if isinstance(decoder, DecodeRefusal) and not request.decode else 0.0
    view = PoolView(turn.state, request, turn.now, excluded=request.excluded, transfer_seconds=transfer)
    try:
        candidate = turn.policies.routing.choose(view).chosen
    except Exception:  # noqa: BLE001 - NoInstance, or one that no policy can take: it stays, and the others move
        return False
    if candidate.instance == request.instance:
        return False  # ejected, and no other instance can serve it
    decode = decode_after_move(turn, request, candidate.instance)
    if decode is None:
        return False
    own = Migration(request.id, request.instance, candidate.instance, 0.0, relocated(request.instance))
    _move(turn, own, candidate, decode, NOT_PLANNED, MoveCause.RELOCATED)
    return True


def _move(
    turn: Turn,
    migration: Migration,
    candidate: CandidateEstimate,
    decode: InstanceId,
    plan: MigrationPlan,
    cause: MoveCause,
    redispatch: Redispatch | None = None,
) -> None:
    turn.decide(
        RequestMigrated(
            at=turn.now,
            stamp=turn.stamp,
            request=migration.request,
            source=migration.source,
            instance=candidate.instance,
            hit_blocks=candidate.hit_blocks,
            uncached_tokens=candidate.uncached_tokens,
            fetch_from=candidate.fetch_from,
            prefill_seconds=candidate.work_seconds,
            predicted_ttft=candidate.predicted_ttft,
            reason=migration.reason,
            plan=plan.id,
            policy=plan.policy,
            planned_as_of=plan.as_of,
            benefit=migration.benefit or NO_SECONDS,
            decode=decode,
            rebound=migration.rebind,
            wasted=(redispatch.wasted if redispatch else 0.0) or NO_SECONDS,
            overdue=redispatch.overdue if redispatch else NO_SECONDS,
            cause=cause,
            loads=list(candidate.loads),
            load_seconds=candidate.load_seconds or NO_SECONDS,
        )
    )


def _refuse(turn: Turn, migration: Migration, veto: Veto, plan: MigrationPlan) -> None:
    turn.decide(
        MigrationRefused(
            at=turn.now,
            stamp=turn.stamp,
            request=migration.request,
            source=migration.source,
            instance=migration.target,
            reason=veto.reason.value,
            detail=veto.detail,
            plan=plan.id,
            policy=plan.policy,
            planned_as_of=plan.as_of,
            benefit=migration.benefit,
            rebind=migration.rebind,
        )
    )
