"""Caches: is what the index says of each engine's cache right, and how long was it in doubt?"""

from collections import Counter
from collections.abc import Iterator

from typing_extensions import override

from pointsman.contracts.cache import CacheEvent, CacheGap, CacheSnapshot
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.fleet import FleetEvent, InstanceJoined, InstanceProbed, InstanceReported
from pointsman.primitives import InstanceId, Seconds
from pointsman.state.state import PoolSettings, State
from pointsman.tooling.doctor.examination import Examiner
from pointsman.tooling.doctor.findings import Finding, Severity, number, times

AREA = "caches"
HEALED_WALL_SECONDS = 5.0
"""A doubt should not last longer."""


class Caches(Examiner):
    """Gaps, doubts and how they ended, resyncs, failed probes, engine events that nobody understood."""

    def __init__(self, settings: PoolSettings) -> None:
        super().__init__(settings)
        self._gaps: Counter[InstanceId] = Counter()
        self._missed: Counter[InstanceId] = Counter()
        self._gap_reasons: dict[InstanceId, str] = {}
        self._resyncs: Counter[InstanceId] = Counter()
        self._doubts: Counter[InstanceId] = Counter()
        self._doubted_since: dict[InstanceId, tuple[Seconds, str]] = {}
        self._longest: dict[InstanceId, tuple[Seconds, str]] = {}
        self._undecodable: dict[InstanceId, int] = {}
        self._disparity: dict[InstanceId, str] = {}
        self._unknown: set[InstanceId] = set()
        self._without_events: set[InstanceId] = set()

    @override
    def begin(self, state: State, *, blind: bool) -> None:
        for instance in state.fleet.instances:
            self._note_join(instance.id, instance.cache)
            if instance.parity is False:
                self._disparity[instance.id] = "a probe before this log's beginning failed"
            if instance.doubt:
                self._watch_doubt(instance.id, state.last_at, state)

    @override
    def after(self, event: LogEvent, state: State) -> None:
        if not isinstance(event, CacheEvent | FleetEvent):
            return
        match event:
            case CacheGap():
                self._gaps[event.instance] += 1
                self._missed[event.instance] += event.missed
                self._gap_reasons[event.instance] = event.reason
            case CacheSnapshot():
                self._resyncs[event.instance] += 1
            case InstanceReported():
                if event.undecodable:
                    self._undecodable[event.instance] = event.undecodable
            case InstanceProbed():
                if event.parity:
                    self._disparity.pop(event.instance, None)
                else:
                    self._disparity[event.instance] = event.detail
            case InstanceJoined():
                self._note_join(event.instance, event.cache)
            case _:
                pass
        self._watch_doubt(event.instance, event.at, state)

    def _note_join(self, name: InstanceId, cache: str) -> None:
        (self._unknown.add if cache == "unknown" else self._unknown.discard)(name)
        (self._without_events.add if cache == "no_events" else self._without_events.discard)(name)

    def _watch_doubt(self, name: InstanceId, at: Seconds, state: State) -> None:
        instance = state.fleet.get(name)
        doubt = instance.doubt if instance else ""
        since = self._doubted_since.get(name)
        if doubt and since is None:
            self._doubted_since[name] = at, doubt
            self._doubts[name] += 1
        elif not doubt and since is not None:
            del self._doubted_since[name]
            lasted = self.wall(at - since[0])
            if lasted > self._longest.get(name, (0.0, ""))[0]:
                self._longest[name] = lasted, since[1]

    @override
    def findings(self, state: State) -> Iterator[Finding]:
        yield from self._wrong_keys()
        yield from self._unhealed(state)
        yield from self._doubted()
        if self._undecodable:
            yield Finding(
                severity=Severity.WARNING,
                area=AREA,
                what=f"engine events that were not understood: {sum(self._undecodable.values()):,}",
                evidence=[f"{name}: {count:,}" for name, count in sorted(self._undecodable.items())],
                advice="The engine's version may be newer than what the worker knows; look into the worker's log.",
            )
        if self._without_events or self._unknown:
            names = sorted(self._without_events | self._unknown)
            yield Finding(
                severity=Severity.NOTE,
                area=AREA,
                what=f"of the caches of {', '.join(names)} not all was known from the start",
                evidence=[
                    f"{name}: {'publishes no KV events' if name in self._without_events else 'joined with unknown contents'}"
                    for name in names
                ],
                advice="KV events need --kv-events-config at the engine, with a replay endpoint (docs/cache-path.md).",
            )

    def _wrong_keys(self) -> Iterator[Finding]:
        if self._disparity:
            yield Finding(
                severity=Severity.SERIOUS,
                area=AREA,
                what=f"the keys of prompts are not those of the engine's events on {', '.join(sorted(self._disparity))}",
                evidence=[f"{name}: {detail}" for name, detail in sorted(self._disparity.items())],
                advice="No hit is found there. Tokenizer, chat template, block size or secret differ (docs/operations.md).",
            )

    def _unhealed(self, state: State) -> Iterator[Finding]:
        lasting = {
            name: (self.wall(state.last_at - at), doubt)
            for name, (at, doubt) in self._doubted_since.items()
            if self.wall(state.last_at - at) > HEALED_WALL_SECONDS and name in state.fleet
        }
        if lasting:
            yield Finding(
                severity=Severity.SERIOUS,
                area=AREA,
                what=f"what {', '.join(sorted(lasting))} holds is in doubt, and nothing has healed it",
                evidence=[
                    f"{name}: for {seconds:.1f} s: {doubt}" for name, (seconds, doubt) in sorted(lasting.items())
                ],
                advice="The worker should answer a resync within a second: look into its log, or restart it.",
            )

    def _doubted(self) -> Iterator[Finding]:
        if not (self._gaps or self._doubts):
            return
        slow = [name for name, (seconds, _) in self._longest.items() if seconds > HEALED_WALL_SECONDS]
        evidence = [
            f"{name}: doubted {times(self._doubts[name])}, for {self._longest[name][0]:.1f} s at most, "
            f"{number(self._resyncs[name], 'snapshot')}: {self._longest[name][1]}"
            for name in sorted(self._longest)
        ]
        evidence += [
            f"{name}: {number(count, 'gap')}, {self._missed[name]:,} missed: {self._gap_reasons[name]}"
            for name, count in sorted(self._gaps.items())
        ]
        yield Finding(
            severity=Severity.WARNING if self._gaps or slow else Severity.NOTE,
            area=AREA,
            what=f"cache events were missed or out of step {times(self._doubts.total() or self._gaps.total())}, and healed",
            evidence=evidence,
            advice="Gaps mean the engine's publisher drops: raise its buffer and give it a replay endpoint."
            if self._gaps
            else "",
        )
