"""Invariants of every run. Safety is judged on the whole history and on client results; agreement once the faults have
ended. Checkers yield findings as sentences."""

from collections import defaultdict
from collections.abc import Callable, Iterator

from pointsman.contracts.decisions import LeaderElected, RequestEnd, RequestGranted, RequestRejected, WritesLost
from pointsman.contracts.fleet import InstanceJoined, InstanceLeft
from pointsman.contracts.reasons import RejectReason
from pointsman.contracts.requests import PrefillFinished, RequestArrived
from pointsman.ports import LogEntry
from pointsman.primitives import EngineSeconds, InstanceId, RequestId, Sequence, Term, Tokens
from pointsman.simulation.replay.folding import copy_state
from pointsman.simulation.replay.leader_order import Kind, LeaderOrder
from pointsman.state.checkpoint import state_digest
from pointsman.state.fleet import Instance, Knowledge, Status
from pointsman.state.state import State
from pointsman_lab.invariants import arrivals, different_decisions, ends_by_request, missing_decisions
from pointsman_lab.torture.audit import audit
from pointsman_lab.torture.clients import ClientRequest
from pointsman_lab.torture.cluster import Cluster
from pointsman_lab.torture.engines import MAX_MODEL_LEN, MODEL
from pointsman_lab.torture.network import Stored
from pointsman_lab.torture.pool_model import PoolModel
from pointsman_lab.torture.reference_model import ReferenceModel

REQUESTS = "list of requests"
FLEET = "fleet"
BEHIND_SECONDS_MAX = 2.0
SETTLED_SECONDS: EngineSeconds = 10.0
"""After which a decision ends all promises of computed prompts."""
NEWS_SECONDS_MAX: EngineSeconds = 15.0

Checker = Callable[[Cluster], Iterator[str]]


def one_end_a_request(cluster: Cluster) -> Iterator[str]:
    """Every accepted request has exactly one end. Entries of deposed leaders do not count."""
    counted = list(_counted(cluster))
    ends = ends_by_request(stored for stored in counted if not stored.duplicate)
    endless = [request for request in dict.fromkeys(arrivals(counted)) if request not in ends]
    if endless:
        yield f"{len(endless)} requests have no end: {endless[:5]}"
    for request, found in ends.items():
        if len(found) > 1 and not _are_concurrent(found):
            which = ", ".join(f"{type(s.event).__name__} by {s.writer} at {s.sequence}" for s in found)
            yield f"request {request} has {len(found)} ends: {which}"


def _counted(cluster: Cluster) -> Iterator[Stored]:
    newest = 0
    for stored in cluster.network.history:
        if isinstance(stored.event, LeaderElected):
            newest = max(newest, stored.event.term)
        if stored.stamp is None or stored.stamp.term >= newest:
            yield stored


def _are_concurrent(ends: list[Stored]) -> bool:
    """One end by a leader that had not read the other, and one by an ingress that had not received the leader's answer."""
    own = [s for s in ends if s.stamp is None]
    decided = [s for s in ends if s.stamp is not None]
    return len(own) == len(decided) == 1 and all(s.stamp.as_of < own[0].sequence for s in decided if s.stamp)


def told_first_tokens_had_come(cluster: Cluster) -> Iterator[str]:
    """A leader ends the prefill of a stream only if its ingress had the first token there, and wrote so itself."""
    events = [stored.event for stored in _counted(cluster)]
    if any(isinstance(event, WritesLost) for event in events):
        return
    tokens = [event for event in events if isinstance(event, PrefillFinished)]
    written = {(event.request, event.instance) for event in tokens if event.stamp is None}
    streams = {event.request for event in events if isinstance(event, RequestArrived) and event.streaming}
    ended = {event.request for event in events if isinstance(event, RequestEnd) and event.stamp is None}
    for told in tokens:
        if told.stamp is not None and told.request in streams & ended and (told.request, told.instance) not in written:
            yield f"{told.request} had no first token at {told.instance}, and a leader ended its prefill at {told.at}"


def one_id_a_rejection(cluster: Cluster) -> Iterator[str]:
    """A rejected request is not started again under another id, except when no engine accepted a connection and it may
    be held, or its leader had not read that its ingress, which heard from none, had brought it to an engine."""
    own = {
        s.event.request: s.sequence
        for s in cluster.network.history
        if s.stamp is None and isinstance(s.event, RequestGranted)
    }
    asked: dict[tuple[object, ...], RequestId] = {}
    rejected: dict[RequestId, Sequence] = {}
    for stored in _counted(cluster):
        event = stored.event
        if stored.stamp is None or stored.duplicate:
            continue
        if isinstance(event, RequestRejected):
            may_be_held = event.reason == RejectReason.NO_INSTANCE and event.excluded
            if not may_be_held and own.get(event.request, 0) <= stored.stamp.as_of:
                rejected.setdefault(event.request, stored.sequence)
        elif isinstance(event, RequestArrived):
            what = (event.ingress, event.arrived_at, event.keys, event.prompt_tokens, event.max_output_tokens)
            first = asked.setdefault(what, event.request)
            if first != event.request and first in rejected:
                yield f"{event.request} at {stored.sequence} is {first} again, rejected at {rejected[first]}"


def one_answer_a_client(cluster: Cluster) -> Iterator[str]:
    """Every client got one right answer, or hung up, or lost its ingress."""
    for request in cluster.traffic.requests:
        if request.outcome == "waits":
            yield f"request {request.number} (asked at {request.begun_at:.3f}) was never answered"
        elif request.status == 400 and not _fits_no_instance(cluster, request):
            yield f"request {request.number} was rejected as a bad request ({request.code}), and is none"
        elif request.problem:
            yield f"request {request.number} (asked at {request.begun_at:.3f}): {request.problem}"


def _fits_no_instance(cluster: Cluster, request: ClientRequest) -> bool:
    """Whether every instance with its model and adapter, as far as its ingress could know, reported a short context.
    With retention, an ingress may know only one instance after its start."""
    if request.code != "context_length_exceeded":
        return False
    contexts: dict[InstanceId, Tokens] = {}
    for stored in cluster.network.history:
        event = stored.event
        known = min if stored.first > 1 else max
        if stored.at > request.begun_at - NEWS_SECONDS_MAX and known(contexts.values(), default=0) < MAX_MODEL_LEN:
            return True
        if stored.at > request.ended_at:
            break
        if stored.duplicate:
            continue  # of an earlier epoch, perhaps after the instance left
        if isinstance(event, InstanceJoined) and _can_serve(event, request):
            contexts[event.instance] = event.max_model_len
        elif isinstance(event, InstanceJoined | InstanceLeft):
            contexts.pop(event.instance, None)
    return max(contexts.values(), default=0) < MAX_MODEL_LEN


def _can_serve(event: InstanceJoined, request: ClientRequest) -> bool:
    return event.model == MODEL and (not request.adapter or request.adapter in event.adapters)


def decisions_are_recomputed(cluster: Cluster) -> Iterator[str]:
    yield from different_decisions(_entries(cluster), complete=False)


def one_leader_a_term(cluster: Cluster) -> Iterator[str]:
    """One scheduler leads a term; its decisions are numbered without a gap, and none follows the next term's unless
    retention dropped the election, or its own election was lost: the server knows an election by its sequence alone, so one
    at the same place in the log after a loss lets the writes of the one before pass. Folds drop them."""
    leader: dict[int, str] = {}
    lost: set[int] = set()
    numbers: dict[int, dict[int, None]] = defaultdict(dict)
    newest, newest_at = 0, 0
    for stored in cluster.network.history:
        if stored.duplicate:
            continue
        event = stored.event
        if isinstance(event, LeaderElected):
            if event.term <= newest or event.term in leader:
                yield f"term {event.term} begins at {stored.sequence}, after {max(newest, *leader)}"
            newest, newest_at = max(newest, event.term), stored.sequence
            leader[event.term] = stored.writer
        stamp = stored.stamp
        if stamp is None:
            continue
        if cluster.network.losses and stamp.term not in leader:  # perhaps of its election
            leader[stamp.term] = stored.writer
            lost.add(stamp.term)
        if leader.get(stamp.term) != stored.writer:
            yield f"{stored.writer} wrote {stored.sequence} in term {stamp.term} of {leader.get(stamp.term)}"
        if stamp.term < newest and newest_at >= stored.first and stamp.term not in lost:
            yield f"{stored.writer} wrote {stored.sequence} in term {stamp.term}, which ended"
        if stamp.number in numbers[stamp.term]:
            yield f"decision {stamp.number} of term {stamp.term} was made twice, again at {stored.sequence}"
        numbers[stamp.term][stamp.number] = None
    # earlier leaders may have died with decisions that never reached the log
    yield from missing_decisions(newest, numbers[newest])


def the_fold_equals_the_reference_model(cluster: Cluster) -> Iterator[str]:
    model = ReferenceModel(empty_state(cluster), empty_model(cluster))
    for stored in cluster.network.history:
        yield from model.apply(stored)


def decisions_keep_the_rules(cluster: Cluster) -> Iterator[str]:
    """Every decision is allowed by `audit`."""
    yield from audit(cluster.network.history, lambda: empty_model(cluster), lapses=cluster.lapses)


def index_equals_engines(cluster: Cluster) -> Iterator[str]:
    """The leader's index equals each engine's cache. Without a replay socket it may differ, but is not `exact`."""
    leader = leading(cluster)
    if leader is None:
        yield "no scheduler leads"
        return
    for engine in cluster.engines:
        instance, host = engine.host.instance, engine.host
        known = leader.fleet.get(instance)
        if not engine.wanted:
            if known is not None:
                yield f"{instance} is in the leader's fleet, and was stopped"
            continue
        if known is None or host.running is None:
            yield f"{instance} is not in the leader's fleet"
            continue
        truth, index = host.running.truth.keys(), leader.index.keys(instance)
        certain = known.cache != "unknown" if host.replays else known.knowledge is Knowledge.EXACT
        if index != truth and certain:
            yield f"{instance}: the index misses {len(truth - index)} keys and has {len(index - truth)} too many"
        if known.doubt:
            yield f"{instance} is in doubt: {known.doubt}"
        if known.status is not Status.READY:
            yield f"{instance} is {known.status}"


def nothing_is_left_over(cluster: Cluster) -> Iterator[str]:
    leader = leading(cluster)
    if leader is None:
        return
    for request in leader.workload.requests.values():
        yield f"the leader still has request {request.id}, {request.stage} at {request.instance}"
    later = copy_state(leader)
    later.settle(later.now + SETTLED_SECONDS * cluster.plan.speed)
    for instance, host in cluster.hosts.items():
        promised = later.promises.blocks(instance)
        if promised:
            yield f"{promised} blocks are still promised at {instance}"
        if host.running is not None and not host.running.model.idle:
            yield f"{instance} still computes: {host.running.model.counts}"


def the_log_equals_its_followers(cluster: Cluster) -> Iterator[str]:
    """Every follower's state equals a fold from the first entry, the rebalancer's one without an index. With retention
    they start from a checkpoint; the rebalancer, which does not wait for the first one, folds the rest."""
    folds = [(s.name, s.service.state, 1) for s in cluster.schedulers if s.run is not None]
    rebalancer = cluster.rebalancer.service
    folds.append((cluster.rebalancer.name, rebalancer.state, rebalancer.first_sequence))
    history = cluster.network.history
    due = sum(stored.at < cluster.loop.time() - BEHIND_SECONDS_MAX for stored in history)
    for who, state, first in folds:
        folded = empty_state(cluster)
        if not state.knows_keys:
            folded.drop_index()
        for stored in history[first - 1 : state.sequence]:
            folded.apply_entry(stored)
        if state.sequence < due:
            yield f"{who} has folded {state.sequence} of {len(history)} entries"
        for what, mine, theirs in _facts(folded, state):
            if mine != theirs:
                yield f"{who} knows another {what} than the log tells: {theirs}, not {mine}"


def replay_equals_the_leader(cluster: Cluster) -> Iterator[str]:
    """Replay in the leader's order gives the leader's state bit by bit, floating-point sums and trackers included."""
    leader = leading(cluster)
    if leader is None:
        return
    replayed = _replayed(cluster, leader)
    if cluster.plan.releases:  # an earlier one counts events that are new among them
        replayed.dead_letters = leader.dead_letters
    if replayed.fleet.ready != leader.fleet.ready:  # both keep the answer from here on, which is part of what they are
        yield f"replay finds {replayed.fleet.ready} ready, the leader {leader.fleet.ready}"
    if state_digest(replayed) != state_digest(leader):
        for name, value in vars(replayed).items():
            mine, theirs = _plain(value), _plain(vars(leader)[name])
            if mine != theirs:
                yield f"replay gives the leader another {name}: {mine[:300]}, not {theirs[:300]}"
                return
        yield "replay gives the leader another state"


def _plain(value: object) -> str:
    return repr(vars(value) if hasattr(value, "__dict__") else value)


def _replayed(cluster: Cluster, leader: State) -> State:
    """The log up to the election, then every decision after the entries that its leader had read."""
    history, state, term = cluster.network.history, empty_state(cluster), leader.term
    elected = next(s for s in history if isinstance(s.event, LeaderElected) and s.event.term == term)
    for stored in history[: elected.sequence]:
        state.apply_entry(stored)
    order: LeaderOrder[Stored] = LeaderOrder(term, held_max=len(history))
    following = [
        s for s in history[elected.sequence :] if not (s.duplicate if _is_of(s, term) else s.sequence > leader.sequence)
    ]
    for step in [*(step for stored in following for step in order.feed(stored)), *order.finish()]:
        if step.kind is Kind.DECIDED or not _is_of(step.entry, term):
            order.apply(step, state)
    state.skip(leader.sequence)
    return state


def _is_of(stored: Stored, term: Term) -> bool:
    return stored.stamp is not None and stored.stamp.term == term


def the_archive_holds_the_log(cluster: Cluster) -> Iterator[str]:
    """Every entry is in SQL once, or in a gap. When the log loses entries, the archive keeps them and stores the new
    log under another name."""
    archive, losses = cluster.recorder.archive, cluster.network.losses
    archived = archive.events | archive.dead_letters
    logs = list(archive.logs)[-1:] if losses else archive.logs
    due = cluster.loop.time() - BEHIND_SECONDS_MAX
    missing = [
        stored
        for stored in cluster.network.history
        if stored.at < due
        and not any((log, stored.sequence) in archived for log in logs)
        and not any(gap["after_sequence"] < stored.sequence < gap["sequence"] for gap in archive.gaps.values())
    ]
    if missing:
        yield f"{len(missing)} entries are not archived, the first is {missing[0].sequence}"
    if len(archived) > len(cluster.network.history) and not losses:
        yield f"{len(archived)} entries are archived, {len(cluster.network.history)} were written"


def everyone_is_ready(cluster: Cluster) -> Iterator[str]:
    for process in cluster.services:
        if process.run is None:
            if process.wanted:
                yield f"{process.name} does not run"
        elif not process.run.board.whole and process is not cluster.checkpointer:  # which nobody can ask
            yield f"{process.name} lacks {process.run.board.lacks}"


def the_pool_has_its_size(cluster: Cluster) -> Iterator[str]:
    running = sum(engine.wanted for engine in cluster.engines)
    for scaler in cluster.scalers if cluster.provider is not None else ():
        if scaler.run is None:
            continue
        scaling = scaler.service.state.scaling
        if scaling.wanted != running or not scaling.is_applied:
            yield f"{scaler.name} knows that {scaling.wanted} are wanted (applied: {scaling.is_applied}), {running} run"
    if cluster.provider is not None and not any(s.run is not None and s.service.acts for s in cluster.scalers):
        yield "no scaler acts"


SAFETY: tuple[Checker, ...] = (
    one_end_a_request,
    told_first_tokens_had_come,
    one_id_a_rejection,
    one_answer_a_client,
    one_leader_a_term,
    decisions_are_recomputed,
    decisions_keep_the_rules,
    the_fold_equals_the_reference_model,
)
QUIET: tuple[Checker, ...] = (everyone_is_ready, nothing_is_left_over, index_equals_engines, the_pool_has_its_size)
AGREEMENT: tuple[Checker, ...] = (
    *QUIET,
    the_log_equals_its_followers,
    replay_equals_the_leader,
    the_archive_holds_the_log,
)


def leading(cluster: Cluster) -> State | None:
    states = [s.service.state for s in cluster.schedulers if s.run is not None and s.service.leading is not None]
    return states[0] if len(states) == 1 else None


def empty_state(cluster: Cluster) -> State:
    settings = cluster.plan.scheduler
    return settings.empty_state(settings.policies())


def empty_model(cluster: Cluster) -> PoolModel:
    settings = cluster.plan.scheduler
    return PoolModel(block_tokens=settings.block_tokens, speed=settings.speed, model=MODEL)


def _entries(cluster: Cluster) -> list[LogEntry]:
    problem = "damaged by a fault"
    return [
        LogEntry(stored.sequence, "", b"", stored.event, "" if stored.event is not None else problem)
        for stored in cluster.network.history
    ]


def _facts(first: State, second: State) -> Iterator[tuple[str, object, object]]:
    yield FLEET, _by_name(first), _by_name(second)
    for instance in first.fleet.instances:
        yield (
            f"cache of {instance.id}",
            (first.index.blocks(instance.id), first.index.digest(instance.id)),
            (second.index.blocks(instance.id), second.index.digest(instance.id)),
        )
    yield REQUESTS, sorted(first.workload.requests), sorted(second.workload.requests)
    yield "term", first.term, second.term
    yield "count of lost writes", first.writes_lost, second.writes_lost


def _by_name(state: State) -> list[Instance]:
    return sorted(state.fleet.instances, key=lambda instance: instance.id)
