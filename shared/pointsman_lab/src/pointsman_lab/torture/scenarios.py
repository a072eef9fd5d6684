"""Guarantees without other faults: one engine of four is bad, every service is restarted in turn, the log's disk is slow, or
heartbeats are lost. Judged by client results and by the log. Times are virtual wall seconds."""

from collections import Counter
from collections.abc import Callable, Iterator
from math import inf

from pointsman.contracts.decisions import LeaderElected, RequestGranted, RequestMigrated, RequestsRefused, WritesLost
from pointsman.contracts.fleet import (
    InstanceEjected,
    InstanceJoined,
    InstanceLeft,
    InstanceSuspected,
    InstanceUnejected,
)
from pointsman.contracts.reasons import RejectReason
from pointsman.contracts.requests import (
    PrefillFinished,
    RequestArrived,
    RequestAttemptFailed,
    RequestEvent,
    RequestFinished,
)
from pointsman.primitives import EngineSeconds, InstanceId, RequestId
from pointsman_lab.torture.cluster import Cluster
from pointsman_lab.torture.engine_host import EngineHost
from pointsman_lab.torture.plan import BAD_SECONDS

FIRST_SECONDS: EngineSeconds = 15.0
TOUCHED_SHARE_MAX = 0.02
TRIED_SHARE_MAX = 0.06
BACK_SECONDS_MAX: EngineSeconds = 30.0
EVIDENCE = 5
SLOW_SECONDS: EngineSeconds = 2.0
"""From the first sign of slowness to the last (docs/policies.md)."""
NOTICED_SECONDS: EngineSeconds = 0.25
EJECTED_SECONDS: EngineSeconds = 0.5
"""A leader looks for outliers every 0.25 s."""
SENT = (RequestAttemptFailed, PrefillFinished, RequestFinished)


def a_bad_engine_is_kept_away(cluster: Cluster) -> Iterator[str]:
    """What was sent to it before EVIDENCE requests had shown that it is bad, since it was last whole, or within
    EJECTED_SECONDS of then, and shows it only then, could not be kept away. How fast an engine is, answers without a
    stream do not show (docs/policies.md): their leader has assumed a first token before."""
    if cluster.plan.scenario != "bad engine":
        return
    bad = next(host for host in cluster.hosts.values() if host.well_since)
    hangs, from_then = bad.last_failure_mode == "hang", bad.well_since - BAD_SECONDS + FIRST_SECONDS
    asked, granted, trials, touched, evidence, excused, assumed = (set[RequestId]() for _ in range(7))
    half_open, evident_at, first_at = False, inf, inf
    for stored in cluster.network.history:
        event = stored.event
        if isinstance(event, RequestArrived) and from_then <= stored.at < bad.well_since:
            asked.add(event.request)
        elif isinstance(event, InstanceEjected | InstanceUnejected) and event.instance == bad.instance:
            half_open = isinstance(event, InstanceUnejected) and event.half_open
            if isinstance(event, InstanceUnejected) and not half_open:
                granted.clear()
                evidence.clear()
                evident_at = first_at = inf
        elif isinstance(event, PrefillFinished) and event.stamp is not None:
            assumed.add(event.request)
        elif isinstance(event, RequestGranted) and event.instance == bad.instance:
            granted.add(event.request)
            if evident_at <= stored.at <= evident_at + EJECTED_SECONDS:
                excused.add(event.request)
            if half_open:
                trials.add(event.request)
            if hangs and stored.at < bad.well_since:
                touched.add(event.request)
        elif isinstance(event, RequestEvent) and _shows(event, bad, cluster.plan.speed):
            slow = bad.last_failure_mode == "slow"
            if len(evidence) < EVIDENCE and not (slow and event.request in assumed):
                evidence.add(event.request)
                first_at = min(first_at, stored.at)
            lasts = SLOW_SECONDS if slow else 0.0
            if len(evidence) == EVIDENCE and stored.at >= first_at + lasts and evident_at == inf:
                excused |= granted - evidence
                evident_at = stored.at
            if not hangs:
                touched.add(event.request)
    touched = (touched & asked) - excused
    allowed = max(EVIDENCE, TOUCHED_SHARE_MAX * len(asked))
    if len(touched - trials) > allowed or len(touched) > max(allowed, TRIED_SHARE_MAX * len(asked)):
        yield (
            f"{bad.instance} still got {len(touched)} of {len(asked)} requests, {len(touched & trials)} of them to try it: "
            f"{sorted(touched)[:5]}"
        )


def _shows(event: RequestEvent, bad: EngineHost, speed: float) -> bool:
    """Whether the log says that it was bad to this request. An engine that hangs shows it only at a timeout, or when the
    leader redispatches the request."""
    if isinstance(event, RequestMigrated):
        return bad.last_failure_mode == "hang" and event.rebound and event.source == bad.instance
    if not isinstance(event, SENT) or event.instance != bad.instance:
        return False
    match bad.last_failure_mode:
        case "hang":
            return isinstance(event, RequestAttemptFailed)
        case "slow":
            return isinstance(event, PrefillFinished) and event.prefill > NOTICED_SECONDS * speed
        case _:
            return True


def a_well_engine_is_back_soon(cluster: Cluster) -> Iterator[str]:
    if cluster.plan.scenario != "bad engine":
        return
    bad = next(host for host in cluster.hosts.values() if host.well_since)
    changes = [
        stored
        for stored in cluster.network.history
        if isinstance(stored.event, InstanceEjected | InstanceUnejected) and stored.event.instance == bad.instance
    ]
    last = changes[-1] if changes else None
    if last is not None and not (isinstance(last.event, InstanceUnejected) and not last.event.half_open):
        yield f"{bad.instance} is well since {bad.well_since:.1f} s, and not whole again: {last.event}"
    elif last is not None and last.at > bad.well_since + BACK_SECONDS_MAX:
        yield f"{bad.instance} is well since {bad.well_since:.1f} s, and whole only at {last.at:.1f} s"
    for stored in cluster.network.history:
        event = stored.event
        if isinstance(event, InstanceEjected) and event.instance != bad.instance:
            yield f"{event.instance} is well, and was ejected: {event}"


def a_slow_disk_costs_no_term_and_no_decision(cluster: Cluster) -> Iterator[str]:
    """One leader throughout, nothing lost, every refused request counted in the log, and some served meanwhile."""
    if cluster.plan.scenario != "slow disk":
        return
    events = [stored.event for stored in cluster.network.history if not stored.duplicate]
    elected = [event for event in events if isinstance(event, LeaderElected)]
    if len(elected) > 1:
        yield f"{len(elected)} leaders were elected"
    lost = [event for event in events if isinstance(event, WritesLost)]
    if lost:
        yield f"writes were lost: {lost}"
    answered = Counter(request.outcome for request in cluster.traffic.requests)["answered"]
    refused = [request for request in cluster.traffic.requests if request.code == RejectReason.LOG_OVERLOADED]
    told = sum(event.count for event in events if isinstance(event, RequestsRefused))
    if told < len(refused):
        yield f"{len(refused)} clients were refused because of the log, which tells of {told}"
    if not answered:
        yield "no request was answered"


def heartbeats_are_not_needed(cluster: Cluster) -> Iterator[str]:
    """Whoever is not heard reports through the log: nobody is suspected, and one leader leads throughout."""
    if cluster.plan.scenario != "heartbeats":
        return
    elected = 0
    for stored in cluster.network.history:
        elected += isinstance(stored.event, LeaderElected)
        if isinstance(stored.event, InstanceSuspected | InstanceLeft | InstanceEjected):
            yield f"{stored.event.instance} is well, and the log has {type(stored.event).__name__} of it at {stored.sequence}"
    if elected > 1:
        yield f"{elected} leaders were elected"


def clients_notice_nothing(cluster: Cluster) -> Iterator[str]:
    """Every request is served, unless an engine broke off within a started answer or the log's disk is slow."""
    if not cluster.plan.scenario:
        return
    slow_disk = cluster.plan.scenario == "slow disk"
    resets = any(host.last_failure_mode == "resets" for host in cluster.hosts.values())
    for request in cluster.traffic.requests:
        late = request.code in (RejectReason.SLO_TTFT, RejectReason.SLO_UNREACHABLE)
        late = late or (slow_disk and request.code == RejectReason.LOG_OVERLOADED)
        fine = request.outcome in ("answered", "hung up") or (request.outcome == "broken off" and resets) or late
        if not fine:
            yield f"request {request.number} (asked at {request.begun_at:.3f}) was {request.outcome}: {request.status} {request.code}"


def restarted_workers_keep_their_caches(cluster: Cluster) -> Iterator[str]:
    """A restarted worker continues its epoch, and its instance stays in the fleet."""
    if cluster.plan.scenario != "rolling restart":
        return
    joined: Counter[InstanceId] = Counter()
    for stored in cluster.network.history:
        event = stored.event
        if (
            isinstance(event, InstanceJoined) and not event.cache_detail
        ):  # an engine may contradict its events at any time
            joined[event.instance] += 1
        elif isinstance(event, InstanceLeft | InstanceSuspected | InstanceEjected):
            yield f"{event.instance} is well, and the log has {type(event).__name__} of it at {stored.sequence}"
    for instance, count in joined.items():
        if count > 1:
            yield f"{instance} joined {count} times"


SCENARIOS: tuple[Callable[[Cluster], Iterator[str]], ...] = (
    a_bad_engine_is_kept_away,
    a_well_engine_is_back_soon,
    clients_notice_nothing,
    a_slow_disk_costs_no_term_and_no_decision,
    heartbeats_are_not_needed,
    restarted_workers_keep_their_caches,
)
