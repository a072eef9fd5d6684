"""Applies cache events, reports, and the cached tokens that engines report (*deliveries*) to the prefix index, the doubts
about caches (`Instance.doubt`, `Instance.contradicted`) and the promises of placed prompts. Functions over `StateParts`. Events
of an older epoch and repeats change nothing."""

from math import inf

from pointsman.contracts.block_keys import KEY_BYTES, unpack_keys
from pointsman.contracts.cache import BlocksRemoved, BlocksStored, CacheCleared, CacheEvent, CacheGap, CacheSnapshot
from pointsman.contracts.fleet import InstanceReported
from pointsman.contracts.requests import RequestFinished
from pointsman.primitives import BlockKey, EngineSeconds, Epoch, InstanceId, WallSeconds, engine_seconds
from pointsman.state import fold_versions
from pointsman.state.fleet import Instance
from pointsman.state.no_index import NoIndex
from pointsman.state.parts import StateParts, check_step
from pointsman.state.slower_tiers import REFUTED_WALL_SECONDS, TIERS
from pointsman.state.workload import Request

CONFIRMATION_WALL_SECONDS: WallSeconds = WallSeconds(2.0)
"""How long a promise is kept after the first token, for cache events to confirm it."""
DELIVERED_WALL_SECONDS: WallSeconds = WallSeconds(45.0)
DEVICE_BLOCKS_MAX = 2**22
DETACHED_MAX = 2**15
"""Blocks of an instance below others that are missing: what one event can detach, or connect again."""
SLOWER_BLOCKS_MAX = 2**24
"""Of an instance in each slower tier, and of the shared store. An event that would exceed it stores nothing."""


def store(parts: StateParts, event: BlocksStored) -> None:
    instance = _next_cache_event(parts, event)
    if instance is None:
        return
    if event.tier != "device":
        _check_room(event, parts.slower.blocks(event.tier, event.instance), SLOWER_BLOCKS_MAX)
        for run in event.runs:
            parts.slower.store(event.tier, event.instance, unpack_keys(run.keys))
    else:
        _check_room(event, parts.index.blocks(event.instance), DEVICE_BLOCKS_MAX)
        detached = 0
        for run in event.runs:
            detached = parts.index.store(event.instance, run.parent, unpack_keys(run.keys))
        if detached > DETACHED_MAX:
            _forget_detached(parts, instance)
        parts.contradictions.stored(event.instance, parts.sequence)


def _forget_detached(parts: StateParts, instance: Instance) -> None:
    """Engines evict the last blocks of a prefix first. Of one whose events say otherwise nothing is known before the next
    snapshot: to detach two million blocks takes longer than a lease."""
    if parts.settings.fold_version >= fold_versions.DETACHED_BOUNDED:
        parts.index.clear(instance.id)
        instance.doubt = f"more than {DETACHED_MAX} blocks follow blocks that were removed or never stored"


def _check_room(event: BlocksStored | CacheSnapshot, held: int, most: int) -> None:
    """Raises ValueError if the instance would hold more blocks than engines do."""
    told = sum(len(run.keys) for run in event.runs) // KEY_BYTES
    if held + told > most:
        raise ValueError(f"{told} more blocks than {held} are more than {most}")


def count(parts: StateParts, event: CacheEvent) -> None:
    """In a State without an index."""
    instance, index = parts.current(event.instance, event.epoch), parts.index
    assert isinstance(index, NoIndex)
    whole = isinstance(event, CacheSnapshot)
    if instance is None or event.sequence < instance.sequence + (not whole):
        return
    check_step("sequence", instance.sequence, event.sequence)
    instance.sequence = event.sequence
    if whole or isinstance(event, CacheCleared):
        index.clear(event.instance)
    match event:
        case CacheSnapshot() | BlocksStored(tier="device"):
            index.add_blocks(event.instance, sum(len(run.keys) for run in event.runs) // KEY_BYTES)
        case BlocksRemoved(tier="device"):
            index.add_blocks(event.instance, -(len(event.keys) // KEY_BYTES))
            if not event.expired:
                _release_computed(parts, event.instance, unpack_keys(event.keys))
        case CacheCleared():
            _release_computed(parts, event.instance)
            instance.cache, instance.cache_detail = "empty", ""
        case CacheGap():
            instance.cache_detail = event.reason
        case _:
            pass


def remove(parts: StateParts, event: BlocksRemoved) -> None:
    instance = _next_cache_event(parts, event)
    if instance is None:
        return
    removed = unpack_keys(event.keys)
    if event.tier != "device":
        parts.slower.remove(event.tier, event.instance, removed)
        return
    bounded = parts.settings.fold_version >= fold_versions.DETACHED_BOUNDED
    most = DETACHED_MAX if bounded else DEVICE_BLOCKS_MAX
    if parts.index.remove(event.instance, removed, detached_max=most) > DETACHED_MAX:
        _forget_detached(parts, instance)
    if not event.expired:
        _release_computed(parts, event.instance, removed)
        parts.delivered.remove(event.instance, removed)
    if parts.learns_from_deliveries:
        parts.contradictions.removed(event.instance, event.keys, parts.sequence)


def clear(parts: StateParts, event: CacheCleared) -> None:
    instance = _next_cache_event(parts, event)
    if instance is None:
        return
    parts.index.clear(event.instance)
    parts.slower.clear(event.instance)
    _release_computed(parts, event.instance)
    parts.delivered.drop(event.instance)
    parts.contradictions.begin(event.instance, parts.sequence)
    instance.cache, instance.cache_detail = "empty", ""


def note_gap(parts: StateParts, event: CacheGap) -> None:
    instance = _next_cache_event(parts, event)
    if instance is not None:
        instance.doubt = f"engine events missed: {event.reason}"
        instance.cache_detail = event.reason


def replace(parts: StateParts, event: CacheSnapshot) -> None:
    instance = parts.current(event.instance, event.epoch)
    if instance is None or event.sequence < instance.sequence:
        return
    check_step("sequence", instance.sequence, event.sequence)
    _check_room(event, 0, DEVICE_BLOCKS_MAX)
    detached = 0
    parts.index.clear(event.instance)
    parts.slower.clear(event.instance)
    for run in event.runs:
        detached = parts.index.store(event.instance, run.parent, unpack_keys(run.keys))
    parts.contradictions.begin(event.instance, parts.sequence)
    instance.sequence = event.sequence
    instance.doubt = instance.contradicted = ""
    if detached > DETACHED_MAX:
        _forget_detached(parts, instance)


def forget(parts: StateParts, instance: InstanceId) -> None:
    parts.index.drop(instance)
    parts.slower.drop(instance)
    parts.promises.drop(instance)
    parts.deferred.drop(instance)
    parts.delivered.drop(instance)
    parts.contradictions.drop(instance)
    parts.forget_speed(instance)
    parts.ttft_intervals.forget(instance)
    parts.transfers.forget(instance)


def compare_with_report(parts: StateParts, instance: Instance, event: InstanceReported, *, is_new: bool) -> None:
    if isinstance(parts.index, NoIndex) and event.sequence == instance.sequence:
        parts.index.set_blocks(instance.id, event.blocks)
    if instance.cache == "no_events" or not parts.knows_keys:
        return
    if event.sequence < instance.sequence:
        if is_new and parts.learns_from_deliveries:
            instance.forged = True
            instance.doubt = f"the log has cache events up to {instance.sequence}, its worker wrote {event.sequence}"
        return
    if event.sequence > instance.sequence:
        instance.doubt = f"cache events up to {event.sequence} are missing"
        return
    instance.doubt = difference(parts, event)
    if not instance.doubt:
        found = parts.contradictions.settle(
            instance.id, event.at / parts.settings.speed, lambda key: parts.index.holds(instance.id, key)
        )
        if found and instance.relied_on:
            instance.contradicted = found


def difference(parts: StateParts, event: InstanceReported) -> str:
    """How the index differs from a report as of the same cache event; empty if it does not."""
    blocks, digest = parts.index.blocks(event.instance), parts.index.digest(event.instance)
    if event.blocks != blocks or event.digest != digest:
        return f"the engine holds {event.blocks} blocks, the index {blocks}, or others"
    return _tiers_differ(parts, event) if parts.slower or event.tiers else ""


def _tiers_differ(parts: StateParts, event: InstanceReported) -> str:
    """How a slower tier differs from the report; a shared store, of which no worker knows all, is not compared."""
    reported = {tier.tier: (tier.blocks, tier.digest) for tier in event.tiers}
    for tier in TIERS:
        blocks, digest = reported.get(tier, (0, 0))
        known = parts.slower.blocks(tier, event.instance), parts.slower.digest(tier, event.instance)
        if tier != "external" and known != (blocks, digest):
            return f"the engine holds {blocks} blocks in its {tier} tier, the index {known[0]}, or others"
    return ""


def _next_cache_event(
    parts: StateParts, event: BlocksStored | BlocksRemoved | CacheCleared | CacheGap
) -> Instance | None:
    """The instance, if the event applies: not a repeat. After a gap it applies, and the cache is unverified."""
    instance = parts.current(event.instance, event.epoch)
    if instance is None or event.sequence <= instance.sequence:
        return None
    check_step("sequence", instance.sequence, event.sequence)
    if event.sequence > instance.sequence + 1:
        instance.doubt = f"cache events {instance.sequence + 1} to {event.sequence - 1} are missing"
    instance.sequence = event.sequence
    return instance


def release(parts: StateParts, instance: InstanceId, epoch: Epoch, keys: list[BlockKey]) -> None:
    """No-op if the instance has restarted or left since."""
    if parts.current(instance, epoch) is not None:
        parts.promises.release(instance, keys)


def promise_until_confirmed(parts: StateParts, request: Request, at: EngineSeconds) -> None:
    """The prompt was computed: keep its promise until cache events should have confirmed it."""
    deadline = at + engine_seconds(CONFIRMATION_WALL_SECONDS, parts.settings.speed)
    parts.promises.unconfirmed.append((deadline, request.instance, request.epoch, request.keys))


def settle_promises(parts: StateParts, now: EngineSeconds) -> None:
    """Also one whose end is too far ahead: the clock that dated it was wrong."""
    unconfirmed = parts.promises.unconfirmed
    longest = parts.clock_step if parts.settings.fold_version >= fold_versions.CLOCKS_DIFFER else inf
    while unconfirmed and not now < unconfirmed[0][0] <= now + longest:
        _, instance, epoch, keys = unconfirmed.popleft()
        release(parts, instance, epoch, keys)


def _release_computed(parts: StateParts, instance: InstanceId, removed: list[BlockKey] | None = None) -> None:
    """Release promises of computed prompts that lost a block of `removed` (None: any)."""
    unconfirmed = parts.promises.unconfirmed
    lost = [promise for promise in unconfirmed if promise[1] == instance]
    if lost and removed is not None:
        gone = set(removed)
        lost = [promise for promise in lost if not gone.isdisjoint(promise[3])]
    for promise in lost:
        unconfirmed.remove(promise)
        release(parts, instance, promise[2], promise[3])


def learn_delivered(parts: StateParts, request: Request, event: RequestFinished) -> None:
    """What the engine says that it had cached of a prompt, compared with what its events tell: an instance whose events are
    not relied on holds it, another has contradicted them."""
    instance = parts.current(request.instance, request.epoch)
    if instance is None or not _is_comparable(request, event):
        return
    keys, name, tokens, block_tokens = request.keys, instance.id, event.cached_tokens, parts.settings.block_tokens
    delivered = min(tokens // block_tokens, len(keys))
    if not instance.contents_known:
        _learn_hit(parts, instance, keys[:delivered], event.at)
        return
    held = parts.index.depth(name, keys)
    if parts.slower and held <= delivered:
        reached = parts.slower.depth(name, keys, held)
        claimed = parts.latency.cached_tokens(instance, reached, request.prompt_tokens)
        if request.loads and claimed - tokens > block_tokens:
            until = event.at + engine_seconds(REFUTED_WALL_SECONDS, parts.settings.speed)
            parts.slower.refute(name, keys[delivered:reached], until)
        held = min(reached, delivered)
    claimed = parts.latency.cached_tokens(instance, min(held, request.held_blocks), request.prompt_tokens)
    if claimed - tokens > block_tokens:
        reason = f"the engine had {tokens} tokens of a prompt cached, its events tell of {claimed}"
        parts.contradictions.suspect(name, keys[delivered], request.placed_as_of, reason, held=True)
    elif held < delivered and not parts.contradictions.explained(name, keys[held], request.placed_as_of):
        _learn_hit(parts, instance, keys[:delivered], event.at)
        claimed = parts.latency.cached_tokens(instance, held, request.prompt_tokens)
        if tokens - claimed > block_tokens and not parts.slower.reports(name):
            reason = f"the engine had {tokens} tokens of a prompt cached, its events tell of {claimed}"
            parts.contradictions.suspect(name, keys[held], request.placed_as_of, reason, held=False)


def _is_comparable(request: Request, event: RequestFinished) -> bool:
    """Only prompts with exact keys, computed whole by the instance where they were placed."""
    return (
        event.instance == request.instance
        and request.exact
        and not request.rebound_from
        and not request.prefilled_by
        and event.prompt_tokens == request.prompt_tokens
        and event.predicted_cached_tokens >= 0
        and event.cached_tokens >= 0
    )


def _learn_hit(parts: StateParts, instance: Instance, keys: list[BlockKey], at: EngineSeconds) -> None:
    parts.delivered.learn(instance.id, keys, at + engine_seconds(DELIVERED_WALL_SECONDS, parts.settings.speed))
