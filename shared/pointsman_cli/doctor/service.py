"""Service: share of first tokens within the SLO. Rejected, failed and cut off requests are late; those that their clients
cancelled, those beyond their tenant's limits and those that engines refused for what the client asked are left out. So
are those whose arrival, with the SLO, is not in the log; the summary counts them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from typing_extensions import override

from pointsman.analysis.client_faults import tells_of_fleet
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import RequestPlaced, RequestRejected
from pointsman.contracts.requests import (
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    tpot_of_each,
)
from pointsman.primitives import BlockKey, EngineSeconds, InstanceId, Tenant, Tokens
from pointsman.simulation.goodput import TARGET
from pointsman.simulation.metrics import percentile
from pointsman.state.state import PoolSettings, State
from pointsman.state.workload import Request
from pointsman_cli.doctor.examination import Examiner
from pointsman_cli.doctor.findings import Finding, Severity
from pointsman_cli.doctor.late_causes import advice_for
from pointsman_cli.doctor.request_ends import Ended
from pointsman_cli.doctor.samples import Heavy, Sample, Share, Stretch, Timeline
from pointsman_cli.explain.causes import Cause
from pointsman_cli.formatting import plural
from pointsman_cli.options import as_given
from pointsman_cli.terminal import wall_span, wall_time

SERIOUS_BELOW = 0.5
GROUP_MIN = 30
GROUP_BEHIND = 0.15
TENANTS_MAX = 1000
PREFIXES_MAX = 256
DECILES = 10
SHOWN_MAX = 8
STRETCH_WALL_SECONDS = 5.0
STRETCHES_SHOWN = 5


@dataclass(slots=True)
class _Prefix:
    on_time: Share = field(default_factory=Share)
    example: str = ""
    instances: set[InstanceId] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Band:
    """Prompts of `shortest` to `longest` tokens."""

    shortest: Tokens
    longest: Tokens
    on_time: Share

    def joined(self, longer: "_Band") -> "_Band":
        share = Share(self.on_time.part + longer.on_time.part, self.on_time.whole + longer.on_time.whole)
        return _Band(self.shortest, longer.longest, share)

    @property
    def line(self) -> str:
        lengths = f"{self.shortest:,} to {self.longest:,}" if self.shortest < self.longest else f"{self.longest:,}"
        return f"{lengths} tokens: {self.on_time.value:.1%} of {self.on_time.whole:,} in time"


class Service(Examiner):
    area = "service"

    def __init__(self, settings: PoolSettings) -> None:
        super().__init__(settings)
        self._level = max(1, settings.affinity_level_tokens // settings.block_tokens)
        self._all = Share()
        self._turned_away = 0
        self._unjudged = 0
        self._timeline = Timeline(STRETCH_WALL_SECONDS * settings.speed)
        self._ttfts: Sample[EngineSeconds] = Sample()
        self._instances: dict[InstanceId, Share] = {}
        self._tenants: dict[Tenant, Share] = {}
        self._lengths: Sample[tuple[Tokens, bool]] = Sample(4096)
        self._heavy: Heavy[BlockKey] = Heavy(PREFIXES_MAX)
        self._prefixes: dict[BlockKey, _Prefix] = {}
        self._arrivals = 0
        self._instances_most = 0
        self._gathers_late = False
        self._slow_tokens = Share()
        self._slow_example = ""

    @override
    def before(self, event: LogEvent, state: State) -> None:
        if isinstance(event, RequestPlaced):
            self._gathers_late = event.policy == "pointsman"

    @override
    def ended(self, end: Ended, state: State) -> None:
        event, request = end.event, end.request
        match event:
            case RequestFinished():
                self._unjudged += request is None
                if request is not None:
                    self._ttfts.add(event.ttft)
                    self._count(request, event.instance, on_time=event.ttft <= end.slo_ttft)
                    self._count_tokens(request, event)
            case RequestRejected() | RequestFailed() | RequestCancelled() if tells_of_fleet(event):
                self._unjudged += request is None
                if request is not None:
                    self._turned_away += 1
                    self._count(request, request.instance, on_time=False)
            case _:
                pass

    @override
    def after(self, event: LogEvent, state: State) -> None:
        if not isinstance(event, RequestArrived):
            return
        request = state.workload.requests.get(event.request)
        if request is not None and request.instead_of:
            return
        self._arrivals += 1
        self._instances_most = max(self._instances_most, len(state.fleet.ready))
        if request is not None and request.keys:
            forgotten = self._heavy.add(self._prefix_of(request))
            if forgotten is not None:
                self._prefixes.pop(forgotten, None)

    def _count(self, request: Request, instance: InstanceId, *, on_time: bool) -> None:
        self._all.count(hit=on_time)
        self._timeline.count(request.arrived_at, hit=on_time)
        self._lengths.add((request.prompt_tokens, on_time))
        if instance:
            self._instances.setdefault(instance, Share()).count(hit=on_time)
        if request.tenant in self._tenants or len(self._tenants) < TENANTS_MAX:
            self._tenants.setdefault(request.tenant, Share()).count(hit=on_time)
        if request.keys and (key := self._prefix_of(request)) in self._heavy.counts:
            prefix = self._prefixes.setdefault(key, _Prefix())
            prefix.on_time.count(hit=on_time)
            if not (on_time and prefix.example):
                prefix.example = request.id
            if instance:
                prefix.instances.add(instance)

    def _count_tokens(self, request: Request, event: RequestFinished) -> None:
        if request.slo_tpot > 0 and event.completion_tokens > 1 and request.streaming:
            slow = tpot_of_each(event.tpot, event.completion_tokens, request.answers) > request.slo_tpot
            self._slow_tokens.count(hit=slow)
            self._slow_example = request.id if slow else self._slow_example

    def _prefix_of(self, request: Request) -> BlockKey:
        return request.keys[min(self._level, len(request.keys)) - 1]

    @override
    def summary(self) -> Iterator[str]:
        unjudged = (
            f"{self._unjudged:,} more are not judged, as their arrival is not in the log: ingresses placed them alone, "
            "or they came before it"
        )
        if not self._all.whole:
            yield unjudged if self._unjudged else "no request was answered, refused, failed or cut off"
            return
        text = f"{plural(self._all.whole, 'request')}, {self._all.value:.1%} with the first token in time"
        p50, p99 = (percentile(self._ttfts.values, percent) for percent in (50, 99))
        if p50 is not None:
            text += f", after {p50:.2f} s at the median, {p99:.2f} s at P99"
        yield f"{text}; {unjudged}" if self._unjudged else text

    @override
    def findings(self, state: State) -> Iterator[Finding]:
        yield from self._late()
        yield from self._worse_groups("instance", self._instances)
        yield from self._worse_groups(
            "tenant", {tenant or "(no tenant)": share for tenant, share in self._tenants.items()}
        )
        yield from self._slow_lengths()
        yield from self._slow_answers()
        yield from self._hot(self._instances_most)

    def _late(self) -> Iterator[Finding]:
        whole = self._all
        overall = whole.whole >= GROUP_MIN and whole.value < TARGET
        stretches = self._timeline.below(TARGET, least=GROUP_MIN)
        if not overall and not stretches:
            return
        late = whole.whole - whole.part
        turned_away = [f"of {late:,} that were late {self._turned_away:,} were rejected, failed or cut off"] * bool(
            self._turned_away
        )
        yield self.finding(
            Severity.SERIOUS if overall and whole.value < SERIOUS_BELOW else Severity.WARNING,
            f"{whole.value:.1%} of {whole.whole:,} requests had their first token in time; {TARGET:.0%} should"
            if overall
            else f"for a while fewer than {TARGET:.0%} of the requests had their first token in time",
            [self._period_line(stretch) for stretch in stretches[:STRETCHES_SHOWN]]
            + turned_away
            + (self._worst_of(self._instances.items()) if overall else []),
            f"`pointsman explain{as_given()} --slowest 10` finds the latest; `pointsman what-if{as_given()}{self._span(stretches)}` tries another policy or fleet.",
        )

    def _span(self, stretches: Sequence[Stretch]) -> str:
        """The worst of them, as options: what-if simulates no large log as a whole."""
        moments = (wall_time(at, self.settings.speed) for one in stretches[:1] for at in (one.begun, one.ended))
        return "".join(
            f" {option} {at:%Y-%m-%dT%H:%M:%S}" for option, at in zip(("--since", "--until"), moments, strict=False)
        )

    def _period_line(self, stretch: Stretch) -> str:
        span = wall_span(stretch.begun, stretch.ended, self.settings.speed)
        return f"{span}: {stretch.share.value:.1%} of {stretch.share.whole:,} that arrived then"

    def _worse_groups(self, what: str, groups: "dict[InstanceId, Share] | dict[str, Share]") -> Iterator[Finding]:
        worse = [(n, s) for n, s in groups.items() if self._is_worse(s)]
        if worse and len(groups) > 1:
            how = "is late more often"
            advice = "If it is slow, the predictions above say so; if its prefixes are hot, a policy that spreads them helps."
            if what == "tenant":
                how, advice = "is served worse", "A fair ordering (--order vtc, fair_edf) shares what there is."
            elif self._gathers_late:
                advice = "Under pointsman late requests wait at one engine, so that the others stay in time: look at what makes them late."
            names = ", ".join(str(name) for name, _ in worse[:3])
            yield self.warning(f"{names} {how} than the others", self._worst_of(groups.items()), advice)

    def _is_worse(self, share: Share) -> bool:
        return share.whole >= GROUP_MIN and share.value < min(TARGET, self._all.value - GROUP_BEHIND)

    def _worst_of(self, groups: "Iterable[tuple[str, Share]]") -> list[str]:
        ordered = sorted(groups, key=lambda item: item[1].value)
        return [f"{name}: {share.value:.1%} of {share.whole:,} in time" for name, share in ordered[:SHOWN_MAX]]

    def _slow_lengths(self) -> Iterator[Finding]:
        ordered = sorted(self._lengths.values)
        worse: list[_Band] = []
        follows = False
        for band in _length_bands(ordered):
            if not self._is_worse(band.on_time):
                follows = False
                continue
            if follows:
                worse[-1] = worse[-1].joined(band)
            else:
                worse.append(band)
            follows = True
        if worse:
            yield self.warning(
                "some prompt lengths are served worse than the others",
                [band.line for band in worse],
                "Long prompts pay under shortest_prefill, short ones behind long ones under fcfs; edf weighs both.",
            )

    def _slow_answers(self) -> Iterator[Finding]:
        slow = self._slow_tokens
        if slow.whole < GROUP_MIN or slow.value <= 1 - TARGET:
            return
        yield self.finding(
            Severity.WARNING if slow.value > SERIOUS_BELOW else Severity.NOTE,
            f"{slow.part:,} of {slow.whole:,} streamed answers ({slow.value:.0%}) had their tokens slower than wanted",
            [f"for example request {self._slow_example}"],
            "Too many requests decode side by side, or the engine is slow: fewer at a time (--running-max), or more engines.",
            cause=Cause.SLOW_DECODE,
        )

    def _hot(self, instances: int) -> Iterator[Finding]:
        too_high = self._arrivals / PREFIXES_MAX  # as much as a count may be
        hot = [
            (key, count)
            for key, count in self._heavy.counts.most_common(SHOWN_MAX)
            if instances > 1 and self._arrivals >= GROUP_MIN and count - too_high > self._arrivals / instances
        ]
        if not hot:
            return
        late = [key for key, _ in hot if key in self._prefixes and self._is_worse(self._prefixes[key].on_time)]
        yield self.finding(
            Severity.WARNING if late else Severity.NOTE,
            f"{len(hot)} hot {'prefix draws' if len(hot) == 1 else 'prefixes each draw'} more than an instance's even share",
            [self._prefix_line(key, count) for key, count in hot],
            f"Its requests come late: {advice_for(Cause.HOT_PREFIX)}" if late else "",
        )

    def _prefix_line(self, key: BlockKey, count: int) -> str:
        prefix = self._prefixes.get(key, _Prefix())
        served = f"{prefix.on_time.value:.1%} in time, on {plural(len(prefix.instances), 'instance')}"
        example = f", for example request {prefix.example}" if prefix.example else ""
        tokens = self._level * self.settings.block_tokens
        return f"{key:016x} ({tokens} tokens): {count / self._arrivals:.0%} of arrivals, {served}{example}"


def _length_bands(ordered: list[tuple[Tokens, bool]]) -> Iterator[_Band]:
    """About DECILES bands, shortest first. Prompts of one length are in one band."""
    band: list[tuple[Tokens, bool]] = []
    for length, alike in groupby(ordered, key=lambda one: one[0]):
        band += alike
        if len(band) * DECILES >= len(ordered):
            yield _Band(band[0][0], length, Share(sum(on_time for _, on_time in band), len(band)))
            band = []
    if band:
        yield _Band(band[0][0], band[-1][0], Share(sum(on_time for _, on_time in band), len(band)))
