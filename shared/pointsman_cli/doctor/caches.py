"""Caches: engine events lost, time the index was unverified, failed probes, blocks lost without an event."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from typing_extensions import override

from pointsman.contracts.cache import CacheCleared, CacheEvent, CacheGap, CacheSnapshot
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.fleet import FleetEvent, InstanceJoined, InstanceProbed, InstanceReported
from pointsman.contracts.requests import RequestFinished, cached_of_keys
from pointsman.primitives import EngineSeconds, InstanceId, RequestId, Tokens
from pointsman.state.fleet import Instance, Knowledge
from pointsman.state.state import PoolSettings, State
from pointsman.state.workload import Request
from pointsman_cli.doctor.examination import Examiner
from pointsman_cli.doctor.findings import Finding, Severity, times
from pointsman_cli.doctor.request_ends import Ended
from pointsman_cli.explain.causes import Cause
from pointsman_cli.formatting import plural
from pointsman_cli.terminal import wall_span

HEALED_WALL_SECONDS = 5.0
DECAYED_WALL_SECONDS = 60.0


ANSWERS_MIN = 2
NOTHING_LEFT_SHARE = 0.1


@dataclass(slots=True)
class _Loss:
    at: EngineSeconds
    gaps: int = 0
    missed: int = 0
    reason: str = ""


class Caches(Examiner):
    area = "caches"

    def __init__(self, settings: PoolSettings) -> None:
        super().__init__(settings)
        self._lost: dict[InstanceId, _Loss] = {}
        self._healed: list[str] = []
        self._resyncs: Counter[InstanceId] = Counter()
        self._doubts: Counter[InstanceId] = Counter()
        self._doubted_since: dict[InstanceId, tuple[EngineSeconds, str]] = {}
        self._left_in_doubt = 0
        self._longest: dict[InstanceId, tuple[EngineSeconds, str]] = {}
        self._undecodable: dict[InstanceId, int] = {}
        self._disparity: dict[InstanceId, str] = {}

    @override
    def begin(self, state: State, *, blind: bool) -> None:
        for instance in state.fleet.instances:
            if instance.cache == "unknown":
                self._lose(instance.id, self.time.now, instance.knowledge_reason)
            if instance.parity is False:
                self._disparity[instance.id] = "a probe before this log's beginning failed"
            if instance.doubt:
                self._watch_doubt(instance.id, self.time.now, state)

    @override
    def after(self, event: LogEvent, state: State) -> None:
        if not isinstance(event, CacheEvent | FleetEvent):
            return
        match event:
            case CacheGap():
                loss = self._lose(event.instance, event.at, event.reason)
                loss.gaps += 1
                loss.missed += event.missed
            case CacheCleared():
                self._heal(event.instance, event.at, "the engine cleared its cache")
            case CacheSnapshot():
                self._resyncs[event.instance] += 1
            case InstanceReported():
                if event.undecodable:
                    self._undecodable[event.instance] = event.undecodable
            case InstanceProbed() | InstanceJoined():
                present = state.fleet.get(event.instance)
                if present is not None and present.epoch == event.epoch:
                    self._note_probe(event) if isinstance(event, InstanceProbed) else self._note_join(event)
            case _:
                pass
        self._watch_doubt(event.instance, event.at, state)

    def _note_probe(self, event: InstanceProbed) -> None:
        if event.parity:
            self._disparity.pop(event.instance, None)
        else:
            self._disparity[event.instance] = event.detail

    def _note_join(self, event: InstanceJoined) -> None:
        self._disparity.pop(event.instance, None)
        if event.cache == "unknown":
            self._lose(event.instance, event.at, event.cache_detail or "its first events were missed")
        else:
            self._heal(event.instance, event.at, "the engine restarted")

    def _lose(self, name: InstanceId, at: EngineSeconds, reason: str) -> _Loss:
        loss = self._lost.setdefault(name, _Loss(at))
        loss.at, loss.reason = at, reason
        return loss

    def _heal(self, name: InstanceId, at: EngineSeconds, how: str) -> None:
        loss = self._lost.pop(name, None)
        if loss is not None:
            self._healed.append(f"{name}: {_described(loss)}; known again after {self.wall(at - loss.at):.1f} s: {how}")

    def _watch_doubt(self, name: InstanceId, at: EngineSeconds, state: State) -> None:
        instance = state.fleet.get(name)
        doubt = instance.doubt if instance else ""
        since = self._doubted_since.get(name)
        if doubt and since is None:
            self._doubted_since[name] = at, doubt
            self._doubts[name] += 1
        elif not doubt and since is not None:
            del self._doubted_since[name]
            self._left_in_doubt += instance is None
            lasted = self.wall(at - since[0])
            if lasted > self._longest.get(name, (0.0, ""))[0]:
                self._longest[name] = lasted, since[1]

    @override
    def findings(self, state: State) -> Iterator[Finding]:
        yield from self._wrong_keys()
        yield from self._unhealed(state)
        yield from self._doubted()
        if self._undecodable:
            yield self.warning(
                f"engine events that were not understood: {sum(self._undecodable.values()):,}",
                [f"{name}: {count:,}" for name, count in sorted(self._undecodable.items())],
                "The engine's version may be newer than what the worker knows; look into the worker's log.",
            )
        yield from self._not_known(state)

    def _wrong_keys(self) -> Iterator[Finding]:
        if self._disparity:
            yield self.serious(
                f"the keys of prompts are not those of the engine's events on {', '.join(sorted(self._disparity))}",
                [f"{name}: {detail}" for name, detail in sorted(self._disparity.items())],
                "No hit is found there. Tokenizer, chat template, block size or secret differ (docs/running.md).",
            )

    def _unhealed(self, state: State) -> Iterator[Finding]:
        lasting = {
            name: (self.wall(self.time.now - at), doubt)
            for name, (at, doubt) in self._doubted_since.items()
            if self.wall(self.time.now - at) > HEALED_WALL_SECONDS and name in state.fleet
        }
        if lasting:
            yield self.serious(
                f"what {', '.join(sorted(lasting))} holds is in doubt, and nothing has healed it",
                [f"{name}: for {seconds:.1f} s: {doubt}" for name, (seconds, doubt) in sorted(lasting.items())],
                "The worker should answer a resync within a second: look into its log, or restart it.",
            )

    def _doubted(self) -> Iterator[Finding]:
        if self._doubts:
            slow = [name for name, (seconds, _) in self._longest.items() if seconds > HEALED_WALL_SECONDS]
            open_ends = ((len(self._doubted_since), "to the end"), (self._left_in_doubt, "until the instance left"))
            lasting = "".join(f", {count} of them {until}" for count, until in open_ends if count) or ", and healed"
            yield self.finding(
                Severity.WARNING if slow else Severity.NOTE,
                f"what the log says of caches was out of step {times(self._doubts.total())}{lasting}",
                [
                    f"{name}: doubted {times(self._doubts[name])}, for {self._longest[name][0]:.1f} s at most, "
                    f"{plural(self._resyncs[name], 'snapshot')}: {self._longest[name][1]}"
                    for name in sorted(self._longest)
                ],
            )
        if self._healed:
            yield self.warning(
                f"engine events were lost for good {times(len(self._healed))}, and that has healed",
                self._healed,
                "Gaps mean the engine's publisher drops: raise its buffer and give it a replay endpoint.",
            )

    def _not_known(self, state: State) -> Iterator[Finding]:
        uncertain = [
            instance
            for instance in sorted(state.fleet.instances, key=lambda instance: instance.id)
            if instance.knowledge is Knowledge.BLIND or instance.doubt or not instance.relied_on
        ]
        if not uncertain:
            return
        lost = any(instance.id in self._lost and self._lost[instance.id].gaps for instance in uncertain)
        contradicted = any(instance.contradicted for instance in uncertain)
        yield self.finding(
            Severity.WARNING if lost or contradicted else Severity.NOTE,
            f"the caches of {', '.join(instance.id for instance in uncertain)} are not known exactly",
            [self._why(instance) for instance in uncertain],
            "KV events need --kv-events-config at the engine, with a replay endpoint (docs/cache-path.md).",
        )

    def _why(self, instance: Instance) -> str:
        since = self.wall(self.time.now - instance.known_since)
        text = f"{instance.id}: {instance.knowledge} for {since:.1f} s: {instance.knowledge_reason}"
        loss = self._lost.get(instance.id)
        if loss is None or instance.knowledge is Knowledge.BLIND:
            return text
        if not instance.certain:
            return f"{text}; every block is given up that nothing confirms for 45 s"
        if self.wall(self.time.now - loss.at) > DECAYED_WALL_SECONDS:
            return f"{text}; {_described(loss)}: what was believed before is confirmed or given up, the engine may hold more"
        return f"{text}; {_described(loss)}: not healed yet"


def _described(loss: _Loss) -> str:
    if not loss.gaps:
        return loss.reason
    return f"{plural(loss.gaps, 'gap')}, {loss.missed:,} missed: {loss.reason}"


@dataclass(slots=True)
class _Unannounced:
    first_at: EngineSeconds
    last_at: EngineSeconds
    example: RequestId
    answers: int = 0
    promised: Tokens = 0
    delivered: Tokens = 0


class EmptiedCaches(Examiner):
    """Caches that lost blocks without an event: an engine finds cached less than the log says it holds. Two answers are
    enough; one may be a race. The index is compared when the answer ends, without what was removed since the placement."""

    area = "caches"

    def __init__(self, settings: PoolSettings) -> None:
        super().__init__(settings)
        self._losses: dict[InstanceId, _Unannounced] = {}

    @override
    def ended(self, end: Ended, state: State) -> None:
        event, request = end.event, end.request
        if not isinstance(event, RequestFinished) or request is None or not _is_comparable(request, event, state):
            return
        claimed = _claimed(request, event, state)
        if claimed - event.cached_tokens <= self.settings.block_tokens:
            return
        loss = self._losses.setdefault(event.instance, _Unannounced(request.granted_at, event.at, event.request))
        loss.last_at = event.at
        loss.answers += 1
        loss.promised += claimed
        loss.delivered += event.cached_tokens

    @override
    def findings(self, state: State) -> Iterator[Finding]:
        for name, loss in sorted(self._losses.items()):
            if loss.answers < ANSWERS_MIN:
                continue
            emptied = loss.delivered < NOTHING_LEFT_SHARE * loss.promised
            how = "was emptied" if emptied else "lost blocks"
            yield self.warning(
                f"the cache of {name} {how} behind its back: in {plural(loss.answers, 'answer')} it found {loss.delivered:,} of "
                f"{loss.promised:,} tokens that its events say it holds",
                [f"{wall_span(loss.first_at, loss.last_at, self.settings.speed)}, for example request {loss.example}"],
                "Its requests are slow because they compute again what should be cached; the engine is not slow. Something resets "
                "its cache (/reset_prefix_cache, a sleep, weights loaded anew), or its removals are lost: look into the "
                "engine's log, and give its events a replay endpoint. Restarting its worker makes what it holds unknown, and so right.",
                cause=Cause.STALE_INDEX,
            )


def _is_comparable(request: Request, event: RequestFinished, state: State) -> bool:
    instance = state.fleet.get(event.instance)
    return (
        instance is not None
        and instance.epoch == request.epoch
        and instance.relied_on
        and not instance.doubt
        and event.instance == request.instance
        and request.exact
        and not request.rebound_from
        and not request.prefilled_by
        and cached_of_keys(event, request.answers) >= 0
    )


def _claimed(request: Request, event: RequestFinished, state: State) -> Tokens:
    """Tokens that the index had of its prompt when it was placed, and has still."""
    name, keys = event.instance, request.keys
    depth = min(request.held_blocks, state.index.depth(name, keys))
    delivered = min(event.cached_tokens // state.settings.block_tokens, len(keys))
    if delivered < depth and state.contradictions.explained(name, keys[delivered], request.placed_as_of):
        return 0
    return state.latency.cached_tokens(state.fleet[name], depth, request.prompt_tokens)
