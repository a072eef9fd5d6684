"""The life cycle of requests: applies request events and decisions to stages, queues, promises, trackers and outlier
detection. `TRANSITIONS` has every legal move; other events change nothing, since a log may have repeats and entries
that crossed each other. Functions over `StateParts`."""

from dataclasses import replace
from enum import StrEnum
from math import ceil

from pointsman.contracts.block_keys import unpack_keys
from pointsman.contracts.decisions import (
    HandOverRefused,
    RequestEnd,
    RequestGranted,
    RequestHandedOver,
    RequestMigrated,
    RequestPlaced,
    RequestRejected,
    may_come_again,
)
from pointsman.contracts.reasons import CancelCause
from pointsman.contracts.requests import (
    PrefillFinished,
    PrefixCopyEnded,
    PrefixFetchEnded,
    RequestArrived,
    RequestAttemptFailed,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
)
from pointsman.primitives import EngineSeconds, InstanceId, engine_seconds
from pointsman.state import fold_versions
from pointsman.state.fleet import Instance
from pointsman.state.holdings import learn_delivered, promise_until_confirmed
from pointsman.state.no_index import NoIndex
from pointsman.state.outliers import OVERDUE_SECONDS, Failure, Prefill
from pointsman.state.parts import StateParts
from pointsman.state.prefix_copies import COPY_WALL_SECONDS
from pointsman.state.promises import Promises
from pointsman.state.transfers import REST_WALL_SECONDS, FetchUnderWay
from pointsman.state.workload import NO_EPOCH, NO_INSTANCE, AttemptBefore, Rejection, Request, Stage


class Trigger(StrEnum):
    PLACED = "placed"
    RETRIED = "placed for a later attempt"
    MIGRATED = "migrated while pending"
    REBOUND = "taken out of its engine and queued elsewhere"
    CORRECTED = "queued elsewhere, as its ingress reports"
    KEPT = "its first token came from where it was re-bound from"
    GRANTED = "sent to its engine"
    PREFILLED = "prefilled, to be decoded elsewhere"
    DECODER_FOUND = "a decode instance, after none could take it"
    DECODING_ELSEWHERE = "handed over, as its ingress reports"
    FIRST_TOKEN = "first token"


def _from(trigger: Trigger, to: Stage, *stages: Stage) -> dict[tuple[Stage, Trigger], Stage]:
    return dict.fromkeys(((stage, trigger) for stage in stages), to)


TRANSITIONS: dict[tuple[Stage, Trigger], Stage] = {
    **_from(Trigger.PLACED, Stage.PENDING, Stage.ARRIVED),
    **_from(Trigger.RETRIED, Stage.PENDING, *Stage),
    **_from(Trigger.MIGRATED, Stage.PENDING, Stage.PENDING),
    **_from(Trigger.REBOUND, Stage.PENDING, Stage.PREFILL),
    **_from(Trigger.CORRECTED, Stage.PENDING, Stage.ARRIVED, Stage.PENDING, Stage.PREFILL, Stage.HANDED_OVER),
    **_from(Trigger.KEPT, Stage.PENDING, Stage.PENDING, Stage.PREFILL),
    **_from(Trigger.GRANTED, Stage.PREFILL, Stage.PENDING),
    **_from(Trigger.PREFILLED, Stage.HANDED_OVER, Stage.PREFILL),
    **_from(Trigger.DECODER_FOUND, Stage.HANDED_OVER, Stage.HANDED_OVER),
    **_from(
        Trigger.DECODING_ELSEWHERE, Stage.HANDED_OVER, Stage.ARRIVED, Stage.PENDING, Stage.PREFILL, Stage.HANDED_OVER
    ),
    **_from(Trigger.FIRST_TOKEN, Stage.DECODING, Stage.PREFILL, Stage.HANDED_OVER),
}


def arrive(parts: StateParts, event: RequestArrived) -> None:
    if event.request in parts.workload.requests or parts.workload.end_of(event.request):
        return
    before = parts.workload.pop_given_up(event.instead_of, event.tenant)
    offset = event.clock_offset if parts.settings.fold_version >= fold_versions.CLOCKS_DIFFER else 0.0
    request = parts.workload.requests[event.request] = Request(
        id=event.request,
        tenant=event.tenant,
        session=event.session,
        keys=unpack_keys(event.keys),
        prompt_tokens=event.prompt_tokens,
        max_output_tokens=event.max_output_tokens,
        slo_ttft=event.slo_ttft + parts.outages.allowance(event.held_up, event.at),
        slo_tpot=event.slo_tpot,
        arrived_at=event.arrived_at + offset,
        exact=event.exact,
        streaming=event.streaming,
        priority=event.priority,
        adapter=event.adapter,
        followed=event.followed,
        alias=event.alias,
        context_tokens=event.context_tokens,
        answers=event.answers,
        clock_offset=offset,
        arrived_by_ingress=event.arrived_at,
    )
    if before is not None:
        request.instead_of = event.instead_of
        request.charged_tokens, request.best_effort = before.charged_tokens, before.best_effort
        if parts.settings.fold_version >= fold_versions.LOST_DOUBTED:
            parts.outliers.came_again(event.instead_of, event.request)
    _take_in(parts, request, event.at, limited=before is None)


def _take_in(parts: StateParts, request: Request, at: EngineSeconds, *, limited: bool) -> None:
    """A request over a limit of its tenant, which the leader rejects, counts nowhere; one that comes again has counted."""
    if parts.tenants.policies is not None:
        parts.tenants.take_in(request, at, limited=limited)
    if request.over_limit is None and not request.instead_of:
        parts.hotness.arrived(request.keys, len(parts.fleet.ready))
        if parts.fleet.fetches:
            parts.demand.arrived(request.keys, at)
        for tracker in parts.trackers:
            tracker.arrived(request, at)


def place(parts: StateParts, event: RequestPlaced) -> None:
    request = parts.workload.requests.get(event.request)
    if request is None:
        return
    trigger = Trigger.RETRIED if event.attempt > request.attempt else Trigger.PLACED
    if (request.stage, trigger) not in TRANSITIONS:
        return
    if not event.instance:
        return  # forged: nobody would ever take it from there
    if trigger is Trigger.RETRIED and request.instance:
        request.attempts_before = (*request.attempts_before, request.newest_attempt)
    _unplace(parts, request, event.at)
    request.attempt = event.attempt
    request.excluded = tuple(event.excluded)
    request.slo_ttft += event.lost_seconds
    request.best_effort = event.best_effort
    _queue_as_decided(parts, request, event)
    if isinstance(parts.index, NoIndex):
        parts.index.record(request.id, event.candidates)
    parts.placements += 1


def migrate(parts: StateParts, event: RequestMigrated) -> None:
    request = parts.workload.requests.get(event.request)
    trigger = Trigger.REBOUND if event.rebound else Trigger.MIGRATED
    if request is None or (request.stage, trigger) not in TRANSITIONS or request.instance != event.source:
        return
    if event.rebound:
        parts.workload.queue(event.source).note_abort(event.at)
        if event.overdue > OVERDUE_SECONDS and parts.current(event.source, request.epoch) is not None:
            what = f"no first token, {event.overdue:.1f} s after it was due"
            failure = Failure(event.source, event.at, request.granted_at, parts.grant_place(request), what)
            parts.outliers.failed(event.request, failure, proven=False)
    _unplace(parts, request, event.at)
    _queue_as_decided(parts, request, event)
    if event.rebound:
        request.rebound_from = event.source


def _queue_as_decided(parts: StateParts, request: Request, event: RequestPlaced | RequestMigrated) -> None:
    request.stage = Stage.PENDING
    request.instance = event.instance
    request.hit_blocks = event.hit_blocks
    request.uncached_tokens = event.uncached_tokens
    request.loads, request.load_seconds = tuple(event.loads), event.load_seconds
    request.prefill_seconds = event.prefill_seconds
    ahead = max(0.0, event.predicted_ttft - event.prefill_seconds)
    request.step_seconds = min(ahead, parts.latency.step_seconds(event.instance))
    request.predicted_ttft = event.predicted_ttft
    request.predicted_ttft_upper = event.predicted_ttft * parts.ttft_intervals.factor(
        event.instance, event.predicted_ttft, event.prefill_seconds
    )
    request.placed_at = event.at
    request.prefilled_by = NO_INSTANCE
    request.fetch_from = event.fetch_from
    if parts.learns_from_deliveries:
        request.placed_as_of = event.stamp.as_of if event.stamp is not None else parts.sequence
        request.held_blocks = parts.index.depth(event.instance, request.keys)
        checked = parts.settings.fold_version >= fold_versions.RELIES_AS_OF
        if checked and parts.contradictions.stored_after(event.instance, request.placed_as_of):
            request.held_blocks = 0
    _enqueue(parts, request, event.at)
    if event.decode:
        parts.workload.expect(request, event.decode)


def _requeue_at(parts: StateParts, request: Request, instance: Instance, at: EngineSeconds) -> None:
    """Queue it where its ingress reports it, with an unknown cache."""
    _unplace(parts, request, at)
    request.stage = Stage.PENDING
    request.instance = instance.id
    request.hit_blocks = 0
    request.held_blocks, request.placed_as_of = 0, parts.sequence
    request.uncached_tokens = request.prompt_tokens
    request.loads, request.load_seconds = (), 0.0
    request.prefill_seconds = parts.latency.prefill_seconds(instance, request.prompt_tokens, 0)
    if parts.settings.fold_version >= fold_versions.NO_PREDICTION:
        request.predicted_ttft = request.predicted_ttft_upper = request.step_seconds = 0.0
    request.prefilled_by = request.fetch_from = NO_INSTANCE
    if request.rebound_from == instance.id:
        request.rebound_from = NO_INSTANCE  # the ingress kept it there before the re-binding reached it
    _enqueue(parts, request, at)


def _enqueue(parts: StateParts, request: Request, at: EngineSeconds) -> None:
    instance = request.instance
    parts.workload.queue(instance).enqueue(request)
    request.epoch = parts.newest_epoch(instance)
    if parts.current(instance, request.epoch) is not None:
        _promises_of(parts, request).promise(instance, request.keys)
    parts.session_affinity.placed(request.tenant, request.session, request.keys, instance)
    if parts.tenants.policies is not None:
        parts.tenants.placed(request, at)
    for tracker in parts.trackers:
        tracker.placed(request, at)


def _unplace(parts: StateParts, request: Request, at: EngineSeconds) -> None:
    if request.over_limit is not None:  # served all the same: its leader knew other limits
        _take_in(parts, request, at, limited=False)
    if request.stage is Stage.ARRIVED:
        return
    _stop_fetching(parts, request)
    if parts.tenants.policies is not None:
        parts.tenants.unplaced(request)
    for tracker in parts.trackers:
        tracker.unplaced(request, at)
    parts.decode_load.unplaced(request, at)
    parts.workload.queue(request.instance).remove(request)
    _expect_nowhere(parts, request)
    parts.drop_idle_queue(request.instance)
    if request.stage is not Stage.DECODING:
        _release(parts, request)
    request.stage = Stage.ARRIVED


def _expect_nowhere(parts: StateParts, request: Request) -> None:
    if decode := request.decode:
        parts.workload.expect(request, NO_INSTANCE)
        parts.drop_idle_queue(decode)


def _promises_of(parts: StateParts, request: Request) -> Promises:
    """A request that others overtake promises them nothing before its grant."""
    waits = request.best_effort and request.stage is Stage.PENDING
    return parts.deferred if waits else parts.promises


def _release(parts: StateParts, request: Request) -> None:
    if parts.current(request.instance, request.epoch) is not None:
        _promises_of(parts, request).release(request.instance, request.keys)


def grant(parts: StateParts, event: RequestGranted) -> None:
    request = parts.workload.requests.get(event.request)
    if request is None:
        return
    if event.stamp is None:
        _correct_location(parts, request, event)
    if (request.stage, Trigger.GRANTED) not in TRANSITIONS or request.instance != event.instance:
        return
    request.rebind = event.rebind
    if event.fetch_from or request.fetch_from:
        _take_fetch(parts, request, event)
    request.copy_to, request.copy_blocks, request.copy_seconds = event.copy_to, event.copy_blocks, event.copy_seconds
    if event.copy_to:
        until = event.at + engine_seconds(COPY_WALL_SECONDS, parts.settings.speed)
        parts.copies.begin(event.request, event.instance, event.copy_to, now=event.at, until=until)
    _enter_engine(parts, request, event.at)


def _take_fetch(parts: StateParts, request: Request, event: RequestGranted) -> None:
    """The grant's fetch replaces that of the placement; without one, what is not held will be computed."""
    request.fetch_from, request.fetch_blocks, request.fetch_seconds = (
        event.fetch_from,
        event.fetch_blocks,
        event.fetch_seconds,
    )
    request.fetching = bool(event.fetch_from) and (
        event.stamp is not None or parts.settings.fold_version < fold_versions.FETCH_ENDS
    )
    instance = parts.fleet.get(request.instance)
    if instance is None:
        return
    source = parts.fleet.get(event.fetch_from)
    if source is not None:
        wait, rate = parts.engine_wait(source, event.at), instance.transfer_tokens_per_s
        parts.transfers.begin(request.id, source.id, event.fetched_tokens, rate, wait=wait)
    _reprice(parts, request, instance, event.fetch_blocks if request.fetching else request.hit_blocks)


def _reprice(parts: StateParts, request: Request, instance: Instance, blocks: int) -> None:
    """Its prefill begins behind so many blocks, or behind those that the index knows, if they are more."""
    blocks = max(blocks, parts.index.depth(instance.id, request.keys))
    cached = parts.latency.cached_tokens(instance, blocks, request.prompt_tokens)
    seconds = parts.latency.prefill_seconds(instance, request.prompt_tokens, cached)
    waits_in = request.queue_class if parts.settings.fold_version >= fold_versions.QUEUE_CLASS else request.priority
    parts.workload.queue(instance.id).reprice(request, seconds, request.prompt_tokens - cached, waits_in=waits_in)


def end_fetch(parts: StateParts, event: PrefixFetchEnded) -> None:
    """The request enters its engine. After a failure it computes what it should have fetched."""
    request = parts.workload.requests.get(event.request)
    if (
        request is None
        or not request.fetching
        or (request.instance, request.attempt) != (event.instance, event.attempt)
    ):
        return
    fetch = _stop_fetching(parts, request)
    instance = parts.fleet.get(request.instance)
    learns = parts.settings.fold_version < fold_versions.RESTS_FORGOTTEN or event.source in parts.fleet
    if event.failure:
        _rest(parts, request.fetch_from, request.instance, event.at)
        if instance is not None:
            _reprice(parts, request, instance, 0)
    elif fetch is not None and instance is not None and learns:
        # Meanwhile the target's engine was at work on what it had before.
        ahead = request.engine_seconds - request.prefill_seconds
        ahead = parts.latency.expected_seconds(instance.id, ahead, request.engine_tokens - request.uncached_tokens)
        transferred = max(0.0, event.seconds - max(event.source_seconds, ahead))
        parts.transfers.learn(event.source, fetch, event.at, waited=event.source_seconds, transferred=transferred)
    parts.workload.queue(request.instance).enter_after_fetch(request, event.at)
    request.granted_at = event.at


def end_copy(parts: StateParts, event: PrefixCopyEnded) -> None:
    """What was copied is told by cache events."""
    if parts.copies.end(event.request) and event.failure:
        # Its request may have ended, so that nothing makes its date the leader's.
        now = parts.now if parts.settings.fold_version >= fold_versions.FETCHES_THAT_PAY else event.at
        _rest(parts, event.source, event.instance, now)


def _rest(parts: StateParts, source: InstanceId, target: InstanceId, now: EngineSeconds) -> None:
    if parts.settings.fold_version >= fold_versions.RESTS_FORGOTTEN:
        parts.transfers.forget_rests(now)
    parts.transfers.rest(source, target, until=now + engine_seconds(REST_WALL_SECONDS, parts.settings.speed))


def _stop_fetching(parts: StateParts, request: Request) -> FetchUnderWay | None:
    if not request.fetching:
        return None
    request.fetching = False
    return parts.transfers.end(request.id, request.fetch_from)


def _correct_location(parts: StateParts, request: Request, event: RequestGranted) -> None:
    """An ingress chose the instance itself: queue the request there unless it is there already."""
    instance = parts.fleet.get(event.instance)
    is_there = request.instance == event.instance and request.stage in (Stage.PENDING, Stage.PREFILL)
    if is_there or instance is None or (request.stage, Trigger.CORRECTED) not in TRANSITIONS:
        return
    request.attempt = event.attempt
    _requeue_at(parts, request, instance, event.at)
    if event.decode:
        parts.workload.expect(request, event.decode)


def _enter_engine(parts: StateParts, request: Request, at: EngineSeconds) -> None:
    if request.best_effort and parts.current(request.instance, request.epoch) is not None:
        parts.deferred.release(request.instance, request.keys)
        parts.promises.promise(request.instance, request.keys)
    request.stage = Stage.PREFILL
    request.granted_at = at
    parts.workload.grants += 1
    request.grant = parts.workload.grants
    parts.workload.queue(request.instance).grant(request, at, fold_version=parts.settings.fold_version)
    if parts.tenants.policies is not None:
        parts.tenants.granted(request)
    for tracker in parts.trackers:
        tracker.granted(request, at)


def finish_prefill(parts: StateParts, event: PrefillFinished) -> None:
    request = parts.workload.requests.get(event.request)
    if request is None:
        return
    learnable = event.stamp is None and not request.rebound_from  # else the time of sending is not known
    if request.rebound_from == event.instance and event.stamp is None:
        _keep_at_source(parts, request, event)
    if request.instance != event.instance or (request.stage, Trigger.FIRST_TOKEN) not in TRANSITIONS:
        return
    learnable = _stop_fetching(parts, request) is None and learnable
    if request.stage is Stage.PREFILL:
        queue = parts.workload.queue(event.instance)
        if learnable:
            _learn_prefill(parts, request, event.at, event.prefill)
        queue.finish_prefill(request, event.at)
        queue.aborted_at = queue.aborted_at if event.stamp else 0.0
        _expect_nowhere(parts, request)
    if learnable and _was_predicted(parts, request):
        if not request.best_effort:
            late = event.at - request.placed_at - request.predicted_ttft
            parts.latency.margin.learn(late, request.step_seconds)
        parts.ttft_intervals.learn(
            request.prefilled_by or request.instance,
            predicted=request.predicted_ttft,
            upper=request.predicted_ttft_upper,
            actual=event.at - request.placed_at,
            work=request.prefill_seconds,
            as_told=parts.settings.fold_version < fold_versions.UPPER_TRACKED,
        )
    request.stage = Stage.DECODING
    promise_until_confirmed(parts, request, event.at)
    if parts.fleet.split:
        parts.decode_load.first_token(request, event.at)
    for tracker in parts.trackers:
        tracker.first_token(request, event.at)


def _was_predicted(parts: StateParts, request: Request) -> bool:
    if parts.settings.fold_version < fold_versions.NO_PREDICTION:
        return bool(request.placed_at)
    return request.predicted_ttft > 0


def _keep_at_source(parts: StateParts, request: Request, event: PrefillFinished) -> None:
    """The first token came from the instance that it was re-bound from: the re-binding had not reached its ingress."""
    instance = parts.fleet.get(event.instance)
    if instance is not None and (request.stage, Trigger.KEPT) in TRANSITIONS:
        _requeue_at(parts, request, instance, event.at)
        _enter_engine(parts, request, event.at)


def _learn_prefill(parts: StateParts, request: Request, at: EngineSeconds, took: EngineSeconds) -> None:
    """Before it leaves the queue. `took`: by its ingress's clock, which may differ from the leader's."""
    prefill = Prefill(at, took, request.engine_seconds + request.load_seconds)
    parts.outliers.prefilled(request.instance, prefill, grant=parts.grant_place(request))
    if request.loads:
        _learn_load(parts, request, at - request.granted_at)
        return
    queue = parts.workload.queue(request.instance)
    beside = parts.latency.first_token(
        request.instance,
        passed=at - queue.working_since,
        work=request.prefill_seconds,
        tokens=request.uncached_tokens,
    )
    queue.learn_step(beside)
    parts.latency.learn(
        request.instance,
        predicted=request.engine_seconds,
        observed=at - request.granted_at,
        tokens=request.engine_tokens,
        own_tokens=request.uncached_tokens,
    )


def _learn_load(parts: StateParts, request: Request, observed: EngineSeconds) -> None:
    """Behind other prefills a load is hidden, so only an otherwise idle engine shows how long it takes."""
    instance = parts.current(request.instance, request.epoch)
    if instance is not None and request.engine_seconds == request.prefill_seconds:
        expected = parts.latency.expected_prefill(instance.id, request.engine_seconds, request.engine_tokens)
        parts.slower.learn(instance, request.loads, observed - expected, parts.now)


def hand_over(parts: StateParts, event: RequestHandedOver | HandOverRefused, to: InstanceId) -> None:
    """`to`: the decode instance, or, if none could take it, the one that prefilled it."""
    request = parts.workload.requests.get(event.request)
    if request is None or event.attempt < request.attempt:
        return
    is_news = request.instance == event.source and (request.stage, Trigger.PREFILLED) in TRANSITIONS
    if is_news:
        if parts.settings.fold_version >= fold_versions.FETCH_ENDS:
            _stop_fetching(parts, request)  # its end may be lost, or come later
        if event.prefill > 0:
            _learn_prefill(parts, request, event.at, event.prefill)
        parts.workload.queue(event.source).transfer_out(request, event.at)
        promise_until_confirmed(parts, request, event.at)
    elif request.awaits_decoder and request.instance == event.source != to:
        parts.workload.queue(event.source).remove(request)
        _release(parts, request)
    elif (
        event.stamp is None
        and (request.stage, Trigger.DECODING_ELSEWHERE) in TRANSITIONS
        and not _is_handed_over(request, to)
    ):
        _unplace(parts, request, event.at)
    else:
        return
    _transfer_in(parts, request, event, to)
    if is_news and event.prefill > 0:
        for tracker in parts.trackers:
            tracker.handed_over(request, event.at)
    parts.drop_idle_queue(event.source)


def _is_handed_over(request: Request, to: InstanceId) -> bool:
    return request.stage is Stage.HANDED_OVER and request.instance == to


def _transfer_in(
    parts: StateParts, request: Request, event: RequestHandedOver | HandOverRefused, to: InstanceId
) -> None:
    request.stage = Stage.HANDED_OVER
    request.attempt = event.attempt
    request.instance, request.prefilled_by = to, event.source
    request.handed_over_at = event.at
    request.prefill_epoch = parts.newest_epoch(event.source) if event.prefill > 0 else NO_EPOCH
    request.epoch = parts.newest_epoch(to)
    _expect_nowhere(parts, request)
    parts.workload.queue(to).transfer_in(request)
    if parts.current(to, request.epoch) is not None:
        parts.promises.promise(to, request.keys)


UNSERVED = (RequestRejected.__name__, RequestFailed.__name__)
"""Ends that accuse the engine that failed the request."""


def fail_attempt(parts: StateParts, event: RequestAttemptFailed) -> None:
    """Evidence against the engine, and where a KV cache should have come from another one, against that too."""
    instance, version = parts.fleet.get(event.instance), parts.settings.fold_version
    if instance is None:
        return
    known = event.request in parts.workload.requests
    at = event.at if known or version < fold_versions.ATTEMPTS_KEPT else parts.now  # nothing tells what its clock is
    prefiller = parts.fleet.get(event.prefilled_by)
    attempt = _failed_attempt(parts, event, instance, prefiller)
    if attempt.epoch != instance.epoch:
        return  # an earlier epoch failed it
    since, grant, request = at, parts.next_grant_place(at), event.request
    if attempt.granted_at:
        since, grant = attempt.granted_at, parts.grant_place(attempt)
    given_up = parts.outliers.pop_given_up(event.request, event.instance)
    if given_up is not None:
        since, grant, request = given_up.since, given_up.grant, given_up.comes_as or request
    proven = event.failure == "connect_failure" or (given_up is not None and version < fold_versions.LOST_DOUBTED)
    failure = Failure(event.instance, at, since, grant, event.what)
    blamed = version >= fold_versions.PREFILLERS_BLAMED
    if blamed and prefiller is not None and prefiller.epoch == attempt.prefill_epoch:
        what = f"{event.instance} got no KV cache of it: {event.what}"
        failure = replace(failure, prefiller=replace(failure, instance=prefiller.id, what=what))
    parts.outliers.failed(request, failure, proven=proven)
    ended = parts.workload.end_of(request)
    if ended in UNSERVED and version >= fold_versions.ATTEMPTS_COUNTED:
        parts.outliers.ended(request, cancelled=False)  # the command of its next attempt came before this


def _failed_attempt(
    parts: StateParts, event: RequestAttemptFailed, instance: Instance, prefiller: Instance | None
) -> AttemptBefore:
    """Of which the event tells. One that is not known counts as sent at the event's date, to the present epochs."""
    request, version = parts.workload.requests.get(event.request), parts.settings.fold_version
    if request is not None:
        earlier = request.attempts_before if version >= fold_versions.ATTEMPTS_COUNTED else ()
        for attempt in earlier if version >= fold_versions.ATTEMPTS_KEPT else earlier[-1:]:
            if (attempt.attempt, attempt.instance) == (event.attempt, event.instance):
                return attempt
        if event.instance == request.instance:
            return request.newest_attempt
        if event.instance == request.prefilled_by:
            return replace(request.newest_attempt, epoch=instance.epoch)
    prefill_epoch = prefiller.epoch if prefiller is not None else NO_EPOCH
    return AttemptBefore(
        event.attempt, event.instance, instance.epoch, granted_at=0.0, grant=0, prefill_epoch=prefill_epoch
    )


def end(parts: StateParts, event: RequestEnd) -> None:
    """Legal in every stage. Ends of unknown requests are remembered, in case the arrival comes later."""
    if not isinstance(event, RequestFinished):
        _note_end_for_outliers(parts, event)
    request = parts.workload.end(event.request, type(event).__name__)
    if request is None:
        return
    _expect_nowhere(parts, request)
    if parts.settings.fold_version < fold_versions.LEFT_FORGOTTEN:
        parts.drop_idle_queue(request.instance)
        _note_end(parts, request, event)
        return
    request.refused = isinstance(event, RequestRejected)
    _note_end(parts, request, event)
    counted = request.over_limit is None
    if counted and may_come_again(event) and parts.settings.fold_version >= fold_versions.RENAMED_ONCE:
        parts.workload.give_up(request)
    parts.drop_idle_queue(request.instance)
    parts.drop_idle_queue(request.prefilled_by)


def _note_end(parts: StateParts, request: Request, event: RequestEnd) -> None:
    """Behind its removal from its queue."""
    if isinstance(parts.index, NoIndex):
        parts.index.forget(request.id)
    _stop_fetching(parts, request)
    finished = event if isinstance(event, RequestFinished) else None
    if finished is not None:
        of_each = ceil(finished.completion_tokens / request.answers)
        parts.output_lengths.learn(request.tenant, of_each, request.max_output_tokens)
        if finished.instance == request.instance:
            parts.outliers.served(finished.instance, finished.at, grant=parts.grant_place(request))
            _note_served_prefill(parts, request, finished.at)
        if parts.learns_from_deliveries:
            learn_delivered(parts, request, finished)
    if isinstance(event, RequestRejected):
        rejection = Rejection(request.arrived_by_ingress, event.attempt, event.reason, event.detail, event.retry_after)
        parts.workload.reject(event.request, rejection)
    is_computed = finished is not None and finished.instance != request.rebound_from
    if is_computed and request.stage in (Stage.PREFILL, Stage.HANDED_OVER):
        promise_until_confirmed(parts, request, event.at)
    elif request.stage in (Stage.PENDING, Stage.PREFILL, Stage.HANDED_OVER):
        _release(parts, request)
    if parts.fleet.split or parts.settings.fold_version >= fold_versions.DECODE_LOAD:
        parts.decode_load.ended(request, event.at, finished)
    if request.over_limit is not None:
        return
    if parts.tenants.policies is not None:
        delivered = event.output_tokens if isinstance(event, RequestFailed | RequestCancelled) else -1
        parts.tenants.ended(request, event.at, finished, delivered)
    for tracker in parts.trackers:
        if isinstance(event, RequestRejected):
            tracker.refused(request, event.at, event.reason)
        tracker.ended(request, event.at, finished)


def _note_served_prefill(parts: StateParts, request: Request, at: EngineSeconds) -> None:
    blamed = parts.settings.fold_version >= fold_versions.PREFILLERS_BLAMED
    if blamed and parts.current(request.prefilled_by, request.prefill_epoch) is not None:
        parts.outliers.served(request.prefilled_by, at, grant=parts.grant_place(request))


def _note_end_for_outliers(parts: StateParts, event: RequestEnd) -> None:
    is_cancelled = isinstance(event, RequestCancelled)
    if isinstance(event, RequestCancelled) and event.stamp is not None and event.instance:
        request = parts.workload.requests.get(event.request)
        if request is not None and request.instance == event.instance:
            idle = event.cause is CancelCause.ENGINE_IDLE
            since, grant = request.granted_at, parts.grant_place(request)
            parts.outliers.gave_up(event.request, event.instance, since=since, grant=grant, idle=idle)
            if idle and parts.settings.fold_version >= fold_versions.LOST_DOUBTED:
                return  # it may come again
    parts.outliers.ended(event.request, cancelled=is_cancelled)
