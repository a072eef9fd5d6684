"""The pages of requests, scaling and rebalancing history, tenants, and hit rates."""

from dataclasses import dataclass
from heapq import nlargest
from itertools import islice

from pointsman.analysis.ladder import HitRateLadder
from pointsman.analysis.ladder_figures import RUNGS, Rung, Tally
from pointsman.analysis.ladder_verdict import gaps_of, loaded_note, untold_note, verdict
from pointsman.contracts.tenants import TenantPolicy
from pointsman.simulation.metrics import percentile
from pointsman_cli.console.log.observer import Observer
from pointsman_cli.console.log.recent_requests import RecentRequest
from pointsman_cli.console.log.request_counts import TenantTally
from pointsman_cli.console.log.size_history import size_of
from pointsman_cli.console.views import (
    HistoryView,
    LadderGroupView,
    LadderView,
    RequestsView,
    RequestView,
    RungView,
    TenantsView,
    TenantView,
)
from pointsman_cli.terminal import wall_time

SHOWN_MAX = 500
NAMES_MAX = 1_000


TITLES = {
    Rung.UNBOUNDED: "an unbounded cache",
    Rung.CAPACITY: "one cache of the fleet's size",
    Rung.PERFECT: "the engine that held most",
    Rung.KNOWN: "the engine known to hold most",
    Rung.CHOSEN: "predicted at the chosen engine",
    Rung.DELIVERED: "delivered by engines",
}
TENANTS_SHOWN = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFilter:
    """`q`: part of an id. `late`: only those that were late or not served. `slowest`: longest wait first, for a
    first token or else for an end, instead of newest first; not those that still wait. `before`: of the log's entries."""

    tenant: str = ""
    instance: str = ""
    stage: str = ""
    q: str = ""
    late: bool = False
    slowest: bool = False
    before: int = 0
    limit: int = 100

    def takes(self, record: RecentRequest) -> bool:
        return (
            (not self.tenant or record.tenant == self.tenant)
            and (not self.instance or record.instance == self.instance)
            and (not self.stage or record.stage == self.stage)
            and (not self.late or record.lateness in ("late", "unserved"))
            and (not self.slowest or record.waited is not None)
            and (not self.before or record.sequence < self.before)
            and (not self.q or self.q in record.id or self.q in record.client_request_id)
        )


def requests_view(observer: Observer, wanted: RequestFilter) -> RequestsView:
    matching = [record for record in observer.requests.newest_first() if wanted.takes(record)]
    limit = min(wanted.limit, SHOWN_MAX)
    shown = nlargest(limit, matching, key=lambda record: record.waited or 0.0) if wanted.slowest else matching[:limit]
    return RequestsView(
        requests=[request_view(observer, record) for record in shown],
        kept=len(observer.requests),
        kept_max=observer.requests.requests_max,
        matching=len(matching),
        tenants=sorted(observer.tenants.tallies)[:NAMES_MAX],
        instances=sorted(str(one.id) for one in observer.state.fleet.instances)[:NAMES_MAX],
    )


def request_view(observer: Observer, record: RecentRequest) -> RequestView:
    waited = record.granted_at - record.arrived_at if record.granted_at else -1.0
    return RequestView(
        request=record.id,
        client_request_id=record.client_request_id,
        arrived_at=observer.wall(record.arrived_at),
        tenant=record.tenant,
        priority=record.priority,
        adapter=record.adapter,
        instance=record.instance,
        stage=record.stage,
        lateness=record.lateness,
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached_tokens,
        predicted_cached_tokens=record.predicted_cached_tokens,
        output_tokens=record.output_tokens,
        slo_ttft=round(record.slo_ttft, 3),
        predicted_ttft=round(record.predicted_ttft, 3),
        queue_seconds=round(waited, 3),
        ttft=None if record.ttft is None else round(record.ttft, 3),
        e2e=None if record.e2e is None else round(record.e2e, 3),
        moves=record.moves,
        attempts=record.attempts,
        reason=record.reason,
    )


def history_view(observer: Observer) -> HistoryView:
    happenings, state = observer.happenings, observer.state
    now = size_of(state)
    return HistoryView(
        wanted=state.scaling.wanted,
        ready=now.ready,
        scaling=list(islice(reversed(happenings.scaling.values()), SHOWN_MAX)),
        moves=list(islice(reversed(happenings.moves), SHOWN_MAX)),
        moved=happenings.moved,
        refused=happenings.refused,
        events=list(islice(reversed(happenings.events), SHOWN_MAX)),
        sizes=[*observer.sizes.kept, now],
    )


def tenants_view(observer: Observer) -> TenantsView:
    in_flight: dict[str, int] = {}
    for request in observer.state.workload.requests.values():
        in_flight[request.tenant] = in_flight.get(request.tenant, 0) + 1
    tallies = observer.tenants.tallies
    whole = sum(tally.prompt_tokens for tally in tallies.values()) or 1
    ordered = sorted(tallies.items(), key=lambda named: (-named[1].prompt_tokens, named[0]))
    policies = observer.state.tenants.policies
    return TenantsView(
        tenants=[
            _tenant(name, tally, observer.state.tenants.policy_of(name), in_flight.get(name, 0), whole)  # type: ignore[arg-type]
            for name, tally in ordered[:SHOWN_MAX]
        ],
        policies=policies is not None,
    )


def _tenant(name: str, tally: TenantTally, policy: TenantPolicy, in_flight: int, whole: int) -> TenantView:
    p50, p95 = percentile(tally.ttfts, 50), percentile(tally.ttfts, 95)
    return TenantView(
        tenant=name,
        priority=policy.priority,
        weight=policy.weight,
        cache_group=policy.cache_group,
        in_flight=in_flight,
        arrived=tally.arrived,
        finished=tally.finished,
        in_time=tally.in_time,
        late=tally.late,
        rejected=tally.rejected,
        failed=tally.failed,
        cancelled=tally.cancelled,
        prompt_tokens=tally.prompt_tokens,
        cached_tokens=tally.cached_tokens,
        output_tokens=tally.output_tokens,
        share=round(tally.prompt_tokens / whole, 3),
        hit_rate=round(tally.cached_tokens / tally.told_tokens, 3) if tally.told_tokens else None,
        goodput=round(tally.in_time / tally.judged, 3) if tally.judged else None,
        ttft_p50=None if p50 is None else round(p50, 3),
        ttft_p95=None if p95 is None else round(p95, 3),
        limits=_limits(policy),
    )


def _limits(policy: TenantPolicy) -> list[str]:
    found = []
    if policy.requests_per_second:
        found.append(f"{policy.requests_per_second:g} requests a second")
    if policy.concurrency:
        found.append(f"{policy.concurrency:,} requests at a time")
    if policy.tokens_per_minute:
        found.append(f"{policy.tokens_per_minute:,} tokens a minute")
    if policy.tokens_per_day:
        found.append(f"{policy.tokens_per_day:,} tokens a day")
    if policy.kv_share:
        found.append(f"{policy.kv_share:.0%} of the KV capacity")
    return found


def ladder_view(ladder: HitRateLadder | None) -> LadderView:
    if ladder is None:
        return LadderView(pool=None, tenants=[], hours=[])
    figures, total = ladder.figures, ladder.figures.ever
    judged = verdict(total)
    return LadderView(
        pool=_group("pool", "", total, explained=True) if total.prompt_tokens else None,
        tenants=[_group("tenant", name, tally) for name, tally in figures.tenants()[:TENANTS_SHOWN]],
        hours=[_group("hour", f"{wall_time(begin, 1.0):%m-%d %H:%M}", tally) for begin, tally in figures.hours()],
        verdict=judged.sentence,
        cause=judged.cause,
        note="; ".join(text for text in (judged.note, untold_note(total), loaded_note(total)) if text),
    )


def _group(kind: str, name: str, tally: Tally, *, explained: bool = False) -> LadderGroupView:
    gaps = {gap.rung: gap for gap in gaps_of(tally)}
    rungs: list[RungView] = []
    for rung, tokens in zip(RUNGS, tally.tokens, strict=True):
        gap = gaps.get(rung) if tally.prompt_tokens else None
        rungs.append(
            RungView(
                rung=str(rung),
                title=TITLES[rung],
                tokens=tokens,
                share=round(tally.share(rung), 4) if tally.prompt_tokens else None,
                lost=round(gap.share, 4) if gap else None,
                why=gap.why if gap and explained else "",
                advice=gap.advice if gap and explained else "",
            )
        )
    return LadderGroupView(
        kind=kind, name=name, requests=tally.requests, prompt_tokens=tally.prompt_tokens, rungs=rungs
    )
