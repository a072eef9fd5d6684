"""Requests: missing ends, second ends, failures, rejections, cancellations."""

from collections import Counter
from collections.abc import Iterator

from typing_extensions import override

from pointsman.analysis.client_faults import is_clients_fault
from pointsman.analysis.placed_alone import is_placed_alone
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import RequestEnd, RequestRejected
from pointsman.contracts.reasons import TENANT_LIMITS, CancelCause, RejectReason
from pointsman.contracts.requests import RequestCancelled, RequestFailed, RequestFinished, is_given_up
from pointsman.primitives import EngineSeconds, RequestId
from pointsman.state.state import PoolSettings, State
from pointsman.state.workload import Request, Stage
from pointsman_cli.discovery import fleet_as_given
from pointsman_cli.doctor.examination import Examiner
from pointsman_cli.doctor.findings import Finding, Severity
from pointsman_cli.doctor.late_causes import advice_for
from pointsman_cli.doctor.request_ends import Ended
from pointsman_cli.explain.causes import Cause
from pointsman_cli.formatting import plural, were
from pointsman_cli.options import as_given
from pointsman_cli.terminal import wall_span

OVERDUE_WALL_SECONDS = 60.0
ORPHAN_WALL_SECONDS = 600.0
LONGEST_FACTOR = 5.0
REJECTED_SHARE_MAX = 0.10
REJECTED_SERIOUS_SHARE = 0.2
FAILED_SHARE_MAX = 0.01
REFUSED_SHARE_MAX = 0.10
SHOWN_MAX = 8
TENANTS_MAX = 1_000
CUT_OFF = {
    CancelCause.INGRESS_SILENT: (
        f"given up: {CancelCause.INGRESS_SILENT.sentence}",
        "The ingress died, hung or lost its connection to NATS. Its log, or its machine's, says why.",
    ),
    CancelCause.ENGINE_IDLE: (
        f"given up: {CancelCause.ENGINE_IDLE.sentence}",
        "The engine hung or its step took seconds, it is gone behind a connection that is still open, or their ends were lost on the way into the log.",
    ),
    CancelCause.NEVER_ENDED: (
        f"given up: {CancelCause.NEVER_ENDED.sentence}",
        "Look at the engine: it neither answered nor broke off. The schedulers' --request-seconds-max is the bound; it must be longer "
        "than the ingresses' --request-timeout-seconds.",
    ),
    CancelCause.INGRESS_STOPPED: (
        "cut off: their ingress stopped",
        "A stop waits for them: raise --drain-seconds-max, and the grace of whatever stops the ingress (docs/operations.md). A second "
        "signal cuts at once.",
    ),
    CancelCause.TIMEOUT: (
        "cut off: the time limit of their ingress ended",
        "No engine took them until then: more engines, or an admission that refuses at once. The limit is the ingresses' "
        "--request-timeout-seconds.",
    ),
}
"""Cancellations that no client asked for: what they are called, and what to do."""


class Requests(Examiner):
    area = "requests"

    def __init__(self, settings: PoolSettings) -> None:
        super().__init__(settings)
        self._finished = 0
        self._longest: EngineSeconds = 0.0
        self._rejected: Counter[str] = Counter()
        self._limited: Counter[str] = Counter()
        """Requests beyond their tenant's limits, by tenant."""
        self._failed: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        """For what the client asked, by status of the engine."""
        self._examples: dict[str, str] = {}
        self._cancelled: Counter[str] = Counter()
        self._cut_off: dict[CancelCause, Counter[str]] = {cause: Counter() for cause in CUT_OFF}
        """By ingress or instance."""
        self._ended_after_all: Counter[CancelCause] = Counter()
        self._second_end_examples: list[str] = []
        self._second_ends = 0
        self._alone = 0
        self._alone_from: EngineSeconds = 0.0
        self._alone_to: EngineSeconds = 0.0
        self._refused_late: set[RequestId] = set()
        """Rejected by a leader that read the command after the ingress had placed the request alone; these run."""

    @override
    def before(self, event: LogEvent, state: State) -> None:
        if is_placed_alone(event, state):
            self._alone_from = event.at if not self._alone else self._alone_from
            self._alone, self._alone_to = self._alone + 1, event.at
            if state.workload.end_of(event.request) == RequestRejected.__name__:
                self._refused_late.add(event.request)

    @override
    def ended_again(self, event: RequestEnd, earlier: str) -> None:
        if is_given_up(event):
            return  # its leader had not read the end yet
        if event.request in self._refused_late:
            self._refused_late.remove(event.request)
            return  # its ingress gave the client this one answer
        self._second_ends += 1
        if len(self._second_end_examples) < SHOWN_MAX:
            self._second_end_examples.append(f"{event.request}: {earlier}, then {type(event).__name__}")

    @override
    def ended(self, end: Ended, state: State) -> None:
        event = end.event
        cut = end.given_up or event
        if isinstance(cut, RequestCancelled) and cut.cause in CUT_OFF:
            at_engine = cut.cause is CancelCause.ENGINE_IDLE
            self._cut_off[cut.cause][cut.instance if at_engine else end.ingress] += 1
            self._ended_after_all[cut.cause] += event is not cut
            self._examples.setdefault(cut.cause, cut.request)
        match event:
            case RequestFinished():
                self._finished += 1
                self._longest = max(self._longest, event.e2e)
            case RequestFailed() if is_clients_fault(event):
                refused = f"{event.reason} {event.status}"
                self._refused[refused] += 1
                self._examples.setdefault(refused, event.request)
            case RequestFailed():
                self._failed[event.reason] += 1
                self._examples.setdefault(event.reason, event.request)
            case RequestRejected():
                self._rejected[event.reason] += 1
                if event.reason in TENANT_LIMITS:
                    self._limit(end.request)
                self._examples.setdefault(event.reason, f"{event.request}: {event.detail}")
            case RequestCancelled() if event.cause not in CUT_OFF:
                self._cancelled[event.reason] += 1
            case _:
                pass

    @override
    def findings(self, state: State) -> Iterator[Finding]:
        yield from self._orphans(state)
        if self._second_ends:
            yield self.serious(
                f"{self._second_ends:,} requests ended twice",
                self._second_end_examples,
                "The second end changes nothing in any state, but a client may have received both. Export the log.",
            )
        ends = self._finished + self._failed.total() + self._refused.total() + self._rejected.total()
        yield from self._shares(ends)
        yield from self._of_cut_off()
        if self._alone:
            yield self.warning(
                f"{plural(self._alone, 'request')} {were(self._alone)} placed by ingresses alone, because no scheduler answered",
                [wall_span(self._alone_from, self._alone_to, self.settings.speed)],
                "If the leader changed then, a second scheduler (--schedulers 2) takes over within seconds. Else the schedulers "
                "stood still, or nats-server was away (nats_unreachable in their logs).",
            )

    def _of_cut_off(self) -> Iterator[Finding]:
        for cause, of in self._cut_off.items():
            if not of:
                continue
            where = "at" if cause is CancelCause.ENGINE_IDLE else "of"
            evidence = [
                f"{count:,} {where} {name or 'an ingress without a name'}" for name, count in of.most_common(SHOWN_MAX)
            ]
            if alive := self._ended_after_all[cause]:
                why = (
                    "their ingress had only hung"
                    if cause is CancelCause.INGRESS_SILENT
                    else "their ingress still had them"
                )
                evidence.append(f"{alive:,} of them ended after all: {why}")
            if cause is CancelCause.INGRESS_SILENT:
                evidence += [hang.line(self.settings.speed) for hang in self.hangs.seen[:SHOWN_MAX]]
            evidence.append(f"for example request {self._examples[cause]}")
            what, advice = CUT_OFF[cause]
            yield self.warning(f"{plural(of.total(), 'request')} {were(of.total())} {what}", evidence, advice)

    def _orphans(self, state: State) -> Iterator[Finding]:
        bound = max(OVERDUE_WALL_SECONDS * self.settings.speed, LONGEST_FACTOR * self._longest)
        overdue = [r for r in state.workload.requests.values() if self.time.now - r.arrived_at > bound]
        if not overdue:
            return
        overdue.sort(key=lambda request: request.arrived_at)
        oldest = self.wall(self.time.now - overdue[0].arrived_at)
        granted = sum(r.stage in (Stage.PREFILL, Stage.DECODING) for r in overdue)
        yield self.finding(
            Severity.SERIOUS if oldest > ORPHAN_WALL_SECONDS else Severity.WARNING,
            f"{len(overdue):,} requests have no end, {granted:,} of them were granted; the oldest is {oldest:.0f} s old",
            [self._orphan(request) for request in overdue[:SHOWN_MAX]],
            "Their ingress died, or the end was lost. A leader gives them up after 3 s, as soon as one leads.",
        )

    def _orphan(self, request: Request) -> str:
        where = f" on {request.instance}" if request.instance else ""
        return f"{request.id}: {request.stage}{where} for {self.wall(self.time.now - request.arrived_at):.0f} s"

    def _limit(self, request: Request | None) -> None:
        tenant = request.tenant if request and request.tenant else "tenants without a name"
        if tenant in self._limited or len(self._limited) < TENANTS_MAX:
            self._limited[tenant] += 1

    def _by_reason(self, reasons: Counter[str]) -> list[str]:
        return [
            f"{count:,} {reason}, for example request {self._examples[reason]}"
            for reason, count in reasons.most_common(SHOWN_MAX)
        ]

    def _shares(self, ends: int) -> Iterator[Finding]:
        limited = Counter({reason: count for reason, count in self._rejected.items() if reason in TENANT_LIMITS})
        if limited:
            by_tenant = ", ".join(f"{name} ({count:,})" for name, count in self._limited.most_common(SHOWN_MAX))
            yield self.note(
                f"{limited.total():,} of {ends:,} requests ({limited.total() / max(1, ends):.1%}) were beyond their tenant's limits",
                [*self._by_reason(limited), f"of {by_tenant}"],
                f"That is what limits are for; `pointsman tenants show{fleet_as_given()}` has them, and what is used of them.",
            )
        yield from self._loaded(self._rejected - limited, ends)
        if self._refused:
            share = self._refused.total() / max(1, ends)
            yield self.finding(
                Severity.WARNING if share > REFUSED_SHARE_MAX else Severity.NOTE,
                f"{self._refused.total():,} of {ends:,} requests ({share:.1%}) were refused by engines for what their clients asked",
                self._by_reason(self._refused),
                "The answer to the client says what was wrong."
                if share <= REFUSED_SHARE_MAX
                else "So many may have one cause: an option or a template that the engines lack. Look at the answer to one of them.",
            )
        if self._failed:
            share = self._failed.total() / max(1, ends)
            yield self.finding(
                Severity.SERIOUS if share > FAILED_SHARE_MAX else Severity.WARNING,
                f"{self._failed.total():,} of {ends:,} requests ({share:.1%}) failed",
                self._by_reason(self._failed),
                f"`pointsman explain{as_given()}` one of them. Of a running fleet `pointsman tap{fleet_as_given()} --since 1 --until now --type RequestFailed` shows all; "
                "of a bundle `zcat FILE | grep RequestFailed`.",
            )
        if self._cancelled:
            yield self.note(
                f"{plural(self._cancelled.total(), 'request')} {were(self._cancelled.total())} cancelled",
                [f"{count:,} {reason}" for reason, count in self._cancelled.most_common(SHOWN_MAX)],
            )

    def _loaded(self, rejected: Counter[str], ends: int) -> Iterator[Finding]:
        """Beyond what the pool can do within the objectives."""
        if not rejected:
            return
        share, alone = rejected.total() / max(1, ends), rejected[RejectReason.SLO_UNREACHABLE]
        severity = Severity.WARNING if share > REJECTED_SHARE_MAX else Severity.NOTE
        advice = f"Too much load for the objective: {advice_for(Cause.OVERLOAD)}"
        if alone > rejected.total() / 2:
            advice = "Most of their prompts alone take longer than their objective: no number of engines helps. Give them a longer one (x-slo-ttft-ms) or shorter prompts."
        elif alone:
            advice += f" Not for the {alone:,} whose prompt alone takes longer than their objective."
        yield self.finding(
            Severity.SERIOUS if share > REJECTED_SERIOUS_SHARE else severity,
            f"{rejected.total():,} of {ends:,} requests ({share:.1%}) were rejected",
            self._by_reason(rejected),
            advice,
        )
