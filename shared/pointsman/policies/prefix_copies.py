"""Whether a request's prefix is copied to another instance after its first token, ahead of requests that need it there.
Source: Mooncake (FAST'25), section 4.2, replication of hot blocks. Only hot prefixes (one in n of all arrivals, n being
the number of instances) are copied, and only where a copy takes less than one prefill of it: each request that then
goes there saves that prefill, where the blocks that it may evict are the least recently used. The target is the
instance without it that has the least work; an instance gives or takes one copy at a time. Nothing is copied again when
the demand has faded: engines have no call that drops single blocks, so a copy ages out of their LRU order.

Bias: prefers more holders, since routing policies rarely open one for a long prefix. Limits: moderately hot prefixes
are not copied, though it pays where caches have room; the request must have told its tokens."""

from dataclasses import dataclass

from pointsman.policies.prefix_fetch import fits, gives
from pointsman.primitives import EngineSeconds, InstanceId
from pointsman.state.fleet import Instance
from pointsman.state.fold_versions import FETCHES_THAT_PAY
from pointsman.state.state import State
from pointsman.state.workload import EMPTY_QUEUE, Request


@dataclass(frozen=True, slots=True)
class PrefixCopyPlan:
    """`seconds`: predicted, until `target` has the first `blocks` blocks."""

    target: InstanceId
    blocks: int
    seconds: EngineSeconds


def copy_at_grant(state: State, request: Request, now: EngineSeconds) -> PrefixCopyPlan | None:
    if not state.fleet.fetches or not request.exact or request.decode or request.best_effort:
        return None
    source = state.fleet.get(request.instance)
    blocks = state.demand.hot_blocks(request.keys, len(state.fleet.ready), now)
    pays = state.settings.fold_version >= FETCHES_THAT_PAY
    if pays:  # the target is asked for one token more
        blocks = min(blocks, (request.prompt_tokens - 1) // state.settings.block_tokens)
    if source is None or not blocks or not gives(source):
        return None
    busy = state.copies.busy(now)
    if source.id in busy:
        return None
    hits = state.hits(request.keys)
    targets = [
        name
        for name in state.fleet.ready_for(request, ())
        if hits.get(name, 0) < blocks and name not in busy and not state.transfers.rests(source.id, name, now)
    ]
    able = [
        instance
        for instance in map(state.fleet.__getitem__, targets)
        if fits(source, instance) and instance.id not in state.fleet.on_trial and (instance.contents_known or not pays)
    ]
    if not able:
        return None
    target = min(able, key=lambda instance: (_work(state, instance, now), instance.id))
    return _worth(state, source, target, blocks, hits.get(target.id, 0), now)


def _worth(
    state: State, source: Instance, target: Instance, blocks: int, held: int, now: EngineSeconds
) -> PrefixCopyPlan | None:
    length = blocks * state.settings.block_tokens
    missing = length - held * state.settings.block_tokens
    saved = state.latency.prefill_seconds(target, length, length - missing)
    transfer = state.transfers.seconds(source.id, missing, target.transfer_tokens_per_s, now, wait=0.0)
    if transfer + state.step_seconds(source) + state.step_seconds(target) >= saved:
        return None
    waits = state.engine_wait(source, now) + state.engine_wait(target, now)
    return PrefixCopyPlan(target.id, blocks, waits + transfer)


def _work(state: State, instance: Instance, now: EngineSeconds) -> EngineSeconds:
    return state.workload.queues.get(instance.id, EMPTY_QUEUE).queue_seconds(now)
