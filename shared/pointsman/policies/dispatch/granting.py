"""Grants pending requests into engine windows, and ends requests, which makes room there. The ordering policy chooses
among those of one priority class whose tenants are within their share of the KV capacity. A request whose prefix is
being fetched to the instance waits for it."""

from dataclasses import replace

from pointsman.contracts.commands import SentRequest
from pointsman.contracts.decisions import RequestGranted
from pointsman.contracts.reasons import CancelCause
from pointsman.contracts.requests import PrefillFinished, RequestCancelled
from pointsman.policies.dispatch.turn import Turn
from pointsman.policies.prefix_copies import copy_at_grant
from pointsman.policies.prefix_fetch import fetch_at_grant, shared_fetch
from pointsman.primitives import NO_SECONDS, EngineSeconds, InstanceId, RequestId, Tokens
from pointsman.state import kv_shares
from pointsman.state.fleet import Status
from pointsman.state.fold_versions import CACHED_STARTS, SHORT_TURNS
from pointsman.state.instance_status import has_trial_request
from pointsman.state.priority_classes import LOWER_WINDOW_SHARE, RANK, next_class
from pointsman.state.workload import NO_INSTANCE, UNGRANTED, InstanceQueue, Request, Stage

ENDED_BY_LEADER = frozenset({CancelCause.INGRESS_SILENT, CancelCause.ENGINE_IDLE, CancelCause.NEVER_ENDED})
"""Of which there may be thousands at once. Where each end granted the next request, that was often the next to be ended."""
GRANTING = (Status.READY, Status.DRAINING, Status.EJECTED)
"""An ejected instance keeps only requests that no other can serve."""
CACHED_SHARE = 0.05
"""Of its objective: what a best-effort request with a cached prefix may have left to prefill, to need no turn."""
SEEMING_SECONDS_MAX: EngineSeconds = 1.0
"""Of prefill work that an engine seems to have. To write of each first token would fill a log that is slow already."""


def grant_waiting(turn: Turn, instance_id: InstanceId) -> None:
    """Also elsewhere, if tenants may have waited for their share of the KV capacity, which is the pool's."""
    grant_next(turn, instance_id)
    if kv_shares.may_be_free(turn.state) or turn.state.best_effort.waits:
        pending = [name for name, queue in turn.state.workload.queues.items() if queue.pending]
        for other in sorted(pending):
            if other != instance_id:
                grant_next(turn, other)


def grant_everywhere(turn: Turn) -> None:
    """Also where prefills may have ended that nobody reports."""
    for name, queue in list(turn.state.workload.queues.items()):
        if queue.queued_requests:
            grant_next(turn, name)


def grant_next(turn: Turn, instance_id: InstanceId) -> None:
    """As many of those pending there as may go now. A half-open instance gets one at a time; one whose worker is silent gets
    those that no other can serve."""
    state = turn.state
    instance = state.fleet.get(instance_id)
    queue = state.workload.queues.get(instance_id)
    if instance is None or queue is None:
        return
    unheard = state.fleet.serves_unheard(instance)
    if instance.status not in GRANTING and not unheard:
        return
    _assume_prefills(turn, instance_id, queue)
    while queue.pending and not (instance_id in state.fleet.on_trial and has_trial_request(state, instance_id)):
        request = _next_to_grant(turn, queue)
        if request is None or (unheard and instance_id not in state.fleet.ready_for(request, request.excluded)):
            return
        grant(turn, request)
        if request.id in queue.pending:  # a grant that does not apply would be made for ever
            return


def _next_to_grant(turn: Turn, queue: InstanceQueue) -> Request | None:
    """None if none may go now. `queue`: with pending requests."""
    state, policies = turn.state, turn.policies
    if _has_no_room(turn, queue):
        return None
    eligible: InstanceQueue | None = queue
    chooses = state.tenants.limits_kv or state.fleet.fetches or queue.has_best_effort
    if chooses or queue.classes_pending > 1:
        eligible = _eligible(turn, queue)
    if eligible is None:
        return None
    pending = eligible.pending
    request = next(iter(pending.values())) if len(pending) == 1 else policies.ordering.first(eligible, turn.now, state)
    window = _window_tokens(turn, queue, request)
    has_room = queue.has_room(request.uncached_tokens, window_tokens=window, running_max=policies.running_max)
    return request if has_room else None


def _has_no_room(turn: Turn, queue: InstanceQueue) -> bool:
    """Whether there is none for any of those pending, so that none needs to be chosen."""
    policies = turn.policies
    least = min([request.uncached_tokens for request in queue.pending.values()]) if queue.prefill else 0
    return not queue.has_room(least, window_tokens=policies.prefill_window_tokens, running_max=policies.running_max)


def _eligible(turn: Turn, queue: InstanceQueue) -> InstanceQueue | None:
    """The queue with only those pending that may be granted next; None if none may."""
    state = turn.state
    pending = queue.pending
    if state.tenants.limits_kv:
        waits = kv_shares.waiters(state)
        pending = {r.id: r for r in pending.values() if not waits(r)}
    if state.fleet.fetches and any(r.fetching for r in queue.prefill.values()):
        pending = {r.id: r for r in pending.values() if shared_fetch(queue, r) is None}
    if queue.has_best_effort:
        waiting = [r for r in pending.values() if r.best_effort]
        pending = {r.id: r for r in pending.values() if not r.best_effort}
        if waiting:
            others = list(pending.values())
            oldest = state.best_effort.first(waiting)
            starts = _may_start(turn, queue, oldest, others)
            first = oldest if starts else _first_cached(turn, queue, waiting, others)
            if first is not None:
                return replace(queue, pending={first.id: first})
    if not pending:
        return None
    if queue.classes_pending > 1:
        present = {r.queue_class for r in pending.values()}
        following = next_class({name: waiting for name, waiting in queue.classes.items() if name in present})
        pending = {r.id: r for r in pending.values() if r.queue_class == following}
    return queue if pending is queue.pending else replace(queue, pending=pending)


def _may_start(turn: Turn, queue: InstanceQueue, request: Request, others: list[Request]) -> bool:
    """Whether a best-effort request goes next: where nobody waits and the pool has room, or if it is its turn. Then it
    waits only for those that were placed before, would be late behind it, and can still be on time."""
    best_effort, now = turn.state.best_effort, turn.now
    if not others and best_effort.may_start():
        return True
    due = kv_shares.best_effort_turn(turn.state, now)
    if due is None or due[0] is not request:
        return False
    factor = turn.state.latency.correction(request.instance)
    before = queue.engine_seconds_left(now)
    for other in others:
        alone = now + (before + other.prefill_seconds) * factor
        if other.placed_at <= due[1] and alone <= other.deadline < alone + request.prefill_seconds * factor:
            return False
    return True


def _first_cached(turn: Turn, queue: InstanceQueue, waiting: list[Request], others: list[Request]) -> Request | None:
    """Of the best-effort requests, one that needs no turn: the prefix that its placement counted on is cached by now, little
    is left to prefill, and none of the others is late by that."""
    state = turn.state
    if state.settings.fold_version < CACHED_STARTS:
        return None
    for request in waiting:
        if request.prefill_seconds <= CACHED_SHARE * request.slo_ttft:
            held = state.hits(request.keys, promised=False).get(request.instance, 0)
            if held >= request.hit_blocks and not _makes_late(turn, queue, request, others):
                return request
    return None


def _makes_late(turn: Turn, queue: InstanceQueue, request: Request, others: list[Request]) -> bool:
    """Whether one of the others, which go by their deadlines, is on time only before this one."""
    factor = turn.state.latency.correction(request.instance)
    work = queue.engine_seconds_left(turn.now)
    for other in sorted(others, key=lambda other: other.deadline):
        work += other.prefill_seconds
        if turn.now + work * factor <= other.deadline < turn.now + (work + request.prefill_seconds) * factor:
            return True
    return False


def _window_tokens(turn: Turn, queue: InstanceQueue, request: Request) -> Tokens:
    """A part for a class below one that may soon want the engine, unless this is its turn before such a class."""
    window, rank = turn.policies.prefill_window_tokens, RANK[request.queue_class]
    if not turn.state.pending.expects_above(request.queue_class, turn.now):
        return window
    waits_above = any(waiting.requests and RANK[name] > rank for name, waiting in queue.classes.items())
    return window if waits_above else int(LOWER_WINDOW_SHARE * window)


def grant(turn: Turn, request: Request) -> None:
    fetch = fetch_at_grant(turn.state, request, turn.now)
    copy = copy_at_grant(turn.state, request, turn.now) if turn.policies.copies else None
    turn.decide(
        RequestGranted(
            at=turn.now,
            stamp=turn.stamp,
            request=request.id,
            instance=request.instance,
            attempt=request.attempt,
            rebind=turn.policies.rebind and not request.rebound_from and not request.decode and fetch is None,
            fetch_from=fetch.source if fetch else NO_INSTANCE,
            fetch_blocks=fetch.blocks if fetch else 0,
            fetched_tokens=fetch.tokens if fetch else 0,
            fetch_seconds=fetch.seconds if fetch else NO_SECONDS,
            copy_to=copy.target if copy else NO_INSTANCE,
            copy_blocks=copy.blocks if copy else 0,
            copy_seconds=copy.seconds if copy else NO_SECONDS,
        )
    )


def note_first_token(turn: Turn, sent: SentRequest) -> None:
    """Frees the window for those that wait, before the log tells; and where none waits, an engine that seems to have so much to
    do that the next would be refused. Of what is not streamed the leader assumes the end of its prefill anyway."""
    workload = turn.state.workload
    request, queue = workload.requests.get(sent.request), workload.queues.get(sent.instance)
    if (
        request is not None
        and queue is not None
        and (queue.pending or queue.engine_seconds_left(turn.now) > SEEMING_SECONDS_MAX)
        and request.streaming
        and request.stage is Stage.PREFILL
        and (request.instance, request.attempt) == (sent.instance, sent.attempt)
    ):
        _finish_prefill(turn, request)
        grant_waiting(turn, sent.instance)


def cancel_ungranted(turn: Turn, request: RequestId, cause: CancelCause, reason: str) -> None:
    """An unknown request may still be on its way: it is ended too, and its arrival refused."""
    found = turn.state.workload.requests.get(request)
    if found is None and turn.state.workload.end_of(request) is None:
        _cancel(turn, request, cause, reason, sent_to=NO_INSTANCE)
    elif found is not None and found.stage in UNGRANTED:
        instance = found.instance
        _cancel(turn, request, cause, reason, sent_to=NO_INSTANCE)
        _grant_after(turn, instance, cause)


def cancel_any(turn: Turn, request: RequestId, cause: CancelCause, reason: str) -> None:
    """Nothing for an unknown request."""
    found = turn.state.workload.requests.get(request)
    if found is not None:
        instance = found.instance
        _cancel(turn, request, cause, reason, sent_to=instance)
        _grant_after(turn, instance, cause)


def _grant_after(turn: Turn, instance: InstanceId, cause: CancelCause) -> None:
    if cause not in ENDED_BY_LEADER or turn.state.settings.fold_version < SHORT_TURNS:
        grant_next(turn, instance)


def _cancel(turn: Turn, request: RequestId, cause: CancelCause, reason: str, *, sent_to: InstanceId) -> None:
    turn.decide(
        RequestCancelled(
            at=turn.now,
            stamp=turn.stamp,
            request=request,
            reason=reason or cause.sentence,
            instance=sent_to,
            cause=cause,
        )
    )


def _assume_prefills(turn: Turn, instance: InstanceId, queue: InstanceQueue) -> None:
    """Free the window of overdue prefills whose end is not reported: not streamed and not split."""
    factor = turn.state.latency.correction(instance)
    for request in list(queue.prefill.values()):
        over = turn.now >= request.granted_at + request.engine_seconds * factor
        if over and not request.streaming and not request.decode and not request.fetching:
            _finish_prefill(turn, request)


def _finish_prefill(turn: Turn, request: Request) -> None:
    turn.decide(
        PrefillFinished(
            at=turn.now,
            stamp=turn.stamp,
            request=request.id,
            instance=request.instance,
            ttft=turn.now - request.arrived_at,
            prefill=turn.now - request.granted_at,
        )
    )
