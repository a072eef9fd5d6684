"""Whether to fetch a prefix from another instance instead of computing it. Source: Mooncake (FAST'25), Algorithm 1 lines 8
to 11 and 20 to 21, section 4.2. A fetch waits for the work inside the source's engine, then takes the transfers under
way there and its own (`state.transfers`), and costs both engines a step. It is chosen where it gives the first token
sooner. The source is the instance where most prefill is saved. Limit: a source that evicts the prefix before it is
asked computes it again."""

from collections.abc import Collection
from dataclasses import dataclass

from pointsman.primitives import EngineSeconds, InstanceId, Tokens
from pointsman.state.fleet import Instance, Status
from pointsman.state.fold_versions import FETCHES_THAT_PAY
from pointsman.state.state import State
from pointsman.state.workload import InstanceQueue, Request

GIVING = (Status.READY, Status.DRAINING)


@dataclass(frozen=True, slots=True)
class FetchSource:
    """`wait`: for its engine, uncorrected."""

    instance: Instance
    hit_blocks: int
    wait: EngineSeconds


@dataclass(frozen=True, slots=True)
class Fetch:
    """`tokens`: beyond those that the target has; then it has `blocks` leading blocks of the prompt. `seconds`: predicted."""

    source: InstanceId
    blocks: int
    tokens: Tokens
    seconds: EngineSeconds
    work_seconds: EngineSeconds
    """Prefill left, by the cost model alone."""
    prefill_seconds: EngineSeconds


def fetch_source(
    state: State, request: Request, now: EngineSeconds, excluded: Collection[InstanceId]
) -> FetchSource | None:
    """Only what events tell counts: a promised block cannot be fetched yet. `excluded`: instances that failed it."""
    if not state.fleet.fetches or not request.exact:
        return None
    failed = excluded if state.settings.fold_version >= FETCHES_THAT_PAY else ()
    best, most = None, 0.0
    for name, hit in state.index.hits(request.keys).items():
        instance = state.fleet.get(name)
        if instance is None or not hit or not gives(instance) or name in failed:
            continue
        source = FetchSource(instance, hit, state.engine_wait(instance, now))
        cached = state.latency.cached_tokens(instance, hit, request.prompt_tokens)
        saved = state.latency.prefill_seconds(instance, cached, 0)
        saved -= state.transfers.wait_seconds(name, source.wait, now)
        if saved > most:
            best, most = source, saved
    return best


def fetch_to(
    state: State, request: Request, source: FetchSource | None, target: Instance, held_blocks: int, now: EngineSeconds
) -> Fetch | None:
    """`held_blocks`: leading blocks that the target has. None: computing is sooner."""
    if source is None or source.hit_blocks <= held_blocks or not fits(source.instance, target):
        return None
    if state.transfers.rests(source.instance.id, target.id, now):
        return None
    total, latency = request.prompt_tokens, state.latency
    held = latency.cached_tokens(target, held_blocks, total)
    cached = latency.cached_tokens(target, source.hit_blocks, total)
    if cached <= held:
        return None
    own = latency.expected_prefill(target.id, latency.prefill_seconds(target, total, held), total - held)
    work = latency.prefill_seconds(target, total, cached)
    left = latency.expected_prefill(target.id, work, total - cached)
    rate = target.transfer_tokens_per_s
    seconds = state.transfers.seconds(source.instance.id, cached - held, rate, now, wait=source.wait)
    seconds += state.step_seconds(target)
    if seconds + left >= own:
        return None
    return Fetch(source.instance.id, source.hit_blocks, cached - held, seconds, work, left)


def fetch_at_grant(state: State, request: Request, now: EngineSeconds) -> Fetch | None:
    """Decided anew: source and target may have evicted or got blocks since the placement. None for a request that was
    taken out of another engine: its ingress goes on with the exchange, and fetches nothing."""
    if request.rebound_from and state.settings.fold_version >= FETCHES_THAT_PAY:
        return None
    source = fetch_source(state, request, now, request.excluded)
    target = state.fleet.get(request.instance)
    if source is None or target is None:
        return None
    held = max(request.hit_blocks, state.index.depth(target.id, request.keys))
    return fetch_to(state, request, source, target, held, now)


def shared_fetch(queue: InstanceQueue, request: Request) -> Request | None:
    """One that fetches blocks of this prompt to the same instance: a request sent now would compute them."""
    keys = request.keys
    for other in queue.prefill.values():
        if other.fetching:
            first = min(other.hit_blocks, other.fetch_blocks - 1)
            if 0 <= first < min(len(keys), len(other.keys)) and keys[first] == other.keys[first]:
                return other
    return None


def shared_fetch_seconds(queue: InstanceQueue, request: Request, now: EngineSeconds) -> EngineSeconds:
    """Until it should have ended."""
    other = shared_fetch(queue, request)
    return max(0.0, other.granted_at + other.fetch_seconds - now) if other is not None else 0.0


def gives(instance: Instance) -> bool:
    return instance.fetches and instance.role == "both" and instance.contents_known and instance.status in GIVING


def fits(source: Instance, target: Instance) -> bool:
    able = target.fetches and target.role == "both" and target.id != source.id
    return able and target.engine_block_tokens == source.engine_block_tokens
