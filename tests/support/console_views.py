"""Views as a console has them, of any size, for tests of pages. Numbers follow from a seed."""

from random import Random
from typing import Any

import msgspec

from pointsman.analysis.comparison import Regret
from pointsman.analysis.shadow import ShadowReport, ShadowSummary
from pointsman.analysis.shadow_figures import DecisionFigures, ShadowDecision
from pointsman.analysis.shadow_windows import ShadowFigures, WindowFigures, WindowResult
from pointsman.contracts.requests import RequestAttemptFailed
from pointsman.primitives import InstanceId, RequestId, Tenant
from pointsman_cli.console.jobs.views import (
    ArrivalView,
    DoctorView,
    EventView,
    FindingView,
    PhaseView,
    RefusedMoveView,
    RequestPageView,
    TimelineView,
    WhatIfChange,
    WhatIfRow,
    WhatIfRun,
    WhatIfView,
)
from pointsman_cli.console.views import (
    FleetEventView,
    FleetTotals,
    FleetView,
    HistoryView,
    InstanceView,
    LadderGroupView,
    LadderView,
    Lateness,
    MomentView,
    MoveView,
    ProblemView,
    RequestsView,
    RequestView,
    RungView,
    ScaleView,
    ShadowsView,
    SizeView,
    StatusView,
    TenantsView,
    TenantView,
)
from pointsman_cli.explain.candidates import ListedDecision
from pointsman_cli.explain.values import GrantRecord

AT = 1_795_400_000.0
ARRIVAL = ArrivalView(
    at=AT, request=RequestId("r"), arrived_at=AT, ingress="ingress-0", tenant=Tenant("acme"), prompt_tokens=6144,
    max_output_tokens=256, slo_ttft=1.0, slo_tpot=0.1, blocks=96,
)  # fmt: skip
FAILED = RequestAttemptFailed(at=AT, request=RequestId("r"), instance=InstanceId("engine-1"), failure="connect_failure")
REASON = "missed 3 heartbeats"
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)> \u202egnp.exe\n{{7*7}}"


def status(health: str = "live", **changes: Any) -> StatusView:
    made = StatusView(
        pool="default", origin="nats://127.0.0.1:4222", health="live", sequence=1_284_332, until=1_284_332, first=1, at=AT,
        term=4, scheduler="scheduler-1", policy="pointsman", admission="predicted_ttft", ordering="fcfs", speed=1.0,
        block_tokens=16, problems=[], silent_seconds=0, can_act=True,
    )  # fmt: skip
    return msgspec.structs.replace(made, health=health, **changes)


def fleet(engines: int, *, seed: int = 1, calm: bool = False, **changes: Any) -> FleetView:
    rng = Random(seed)
    instances = [_engine(rng, f"engine-{i}", calm=calm) for i in range(engines)]
    ready = sum(one.status == "ready" for one in instances)
    totals = FleetTotals(
        instances=engines, ready=ready, pending=sum(one.pending for one in instances),
        in_prefill=sum(one.in_prefill for one in instances), decoding=sum(one.decoding for one in instances),
        exact=sum(one.knowledge == "exact" for one in instances), requests_per_second=0.4 * engines, ended=24 * engines,
        goodput=None if not engines else 0.991 if calm else 0.932, hit_rate=0.612, predicted_hit_rate=0.634, ttft_p50=0.184,
        ttft_p95=1.21, rejected=0 if calm else 3, failed=0 if calm else 1,
        placed_alone=0,
    )  # fmt: skip
    moments = [MomentView(sequence=1000 * i, at=AT - 600 + 60 * i) for i in range(1, 9) if engines]
    view = FleetView(at=AT, sequence=1_284_332, totals=totals, instances=instances)
    return msgspec.structs.replace(view, moments=moments, **changes)


def _engine(rng: Random, name: str, *, calm: bool) -> InstanceView:
    luck = 1.0 if calm else rng.random()
    word = "suspected" if luck < 0.012 else "ejected" if luck < 0.02 else "draining" if luck < 0.03 else "ready"
    knowledge = "exact" if luck > 0.06 else "degraded" if luck > 0.045 else "exact"
    work = max(0.0, rng.gauss(0.6, 0.9))
    return InstanceView(
        instance=name, url=f"http://10.0.0.{len(name)}:8000", model="llama-3.1-8b", role="both", since=AT - 8000, status=word,
        status_reason="" if word == "ready" else REASON, knowledge=knowledge,
        knowledge_reason="" if knowledge == "exact" else "events 4,120 to 4,135 are missing", knowledge_since=AT - 40,
        pending=int(work * 3), in_prefill=rng.randrange(3), decoding=rng.randrange(4, 30), queue_tokens=int(work * 9000),
        queue_seconds=work, kv_usage=rng.uniform(0.3, 0.97), blocks=rng.randrange(9000, 22_000), blocks_max=22_000,
        pace=rng.uniform(0.9, 1.2) if luck > 0.015 or calm else 2.6, prediction_error=rng.uniform(0.03, 0.2),
        hit_rate=rng.uniform(0.4, 0.8), goodput=1.0 if calm else min(1.0, rng.uniform(0.9, 1.05)), ttft_p50=rng.uniform(0.1, 0.5),
        ended=rng.randrange(12, 34),
    )  # fmt: skip


def requests(number: int, *, seed: int = 2) -> RequestsView:
    rng = Random(seed)
    found = []
    for i in range(number):
        word: Lateness = rng.choices(("in time", "late", "unserved", "open"), (85, 7, 3, 5))[0]
        prompt = int(rng.lognormvariate(7.6, 0.9))
        cached = int(prompt * rng.random() ** 0.7)
        ttft = (
            None
            if word in {"open", "unserved"}
            else rng.uniform(0.05, 0.9)
            if word == "in time"
            else rng.uniform(1.1, 4.0)
        )
        stage = {"open": "prefill", "unserved": "rejected"}.get(word, "finished")
        found.append(
            RequestView(
                request=f"{rng.getrandbits(64):016x}", client_request_id="", arrived_at=AT - 0.05 * i, stage=stage,
                tenant=rng.choice(("acme", "globex", "initech", "")), priority="standard", adapter="",
                instance="" if word == "unserved" else f"engine-{rng.randrange(20)}", lateness=word, prompt_tokens=prompt,
                cached_tokens=-1 if ttft is None else cached, predicted_cached_tokens=cached + rng.choice((0, 0, 64)),
                output_tokens=rng.randrange(600) if ttft else 0, slo_ttft=1.0, predicted_ttft=rng.uniform(0.05, 0.9),
                queue_seconds=-1 if word == "unserved" else rng.uniform(0.0, 0.3), ttft=ttft, e2e=ttft and ttft + 4.0,
                moves=int(rng.random() > 0.95), attempts=1, reason="predicted TTFT 1.9 s" if word == "unserved" else "",
            )
        )  # fmt: skip
    return RequestsView(
        requests=found, kept=min(2000, number * 20), kept_max=2000, matching=number,
        tenants=["acme", "globex", "initech"], instances=["engine-0", "engine-1"],
    )  # fmt: skip


def _phase(kind: str, name: str, since: float, seconds: float, whole: float) -> PhaseView:
    return PhaseView(
        kind=kind, name=name, instance="engine-7", since_seconds=since, seconds=seconds, since_share=since / whole,
        share=seconds / whole,
    )  # fmt: skip


def _candidate(number: int, *, chosen: bool) -> dict[str, Any]:
    queue, prefill = 0.2 * number, 0.9 - 0.07 * number
    return {
        "instance": f"engine-{number}", "chosen": chosen, "weighed": number < 6, "recorded": True, "status": "ready", "knowledge": "exact",
        "doubt": "", "why_out": "", "hit_blocks": 300 - 30 * number, "held_blocks": 280 - 30 * number, "uncached_tokens": 900 + 400 * number,
        "queue_seconds": queue, "prefill_seconds": prefill, "predicted_ttft": queue + prefill, "pending": number,
        "in_prefill": 1, "decoding": 12, "correction": 1.04,
    }  # fmt: skip


def timeline(cause: str = "long_prompt_ahead", **changes: Any) -> TimelineView:
    whole = 9.912
    ahead = [
        {"request": f"{i:016x}", "tenant": "globex", "stage": "in prefill" if not i else "pending", "waited_seconds": 1.0,
         "inside_seconds": 0.4, "answers": 1, "uncached_tokens": 60_112 if not i else 900,
            "prompt_tokens": 61_000,
            "same_prefix": i > 1, "prefill_seconds": 5.2 if not i else 0.08}
        for i in range(4)
    ]  # fmt: skip
    decision = {
        "kind": "placed", "sequence": 88_101, "term": 4, "number": 12_877, "as_of": 88_096, "unseen_entries": 4,
        "after_seconds": 0.003, "attempt": 1, "excluded": [], "instance": "engine-7", "source": "", "policy": "pointsman",
        "settings": {"admission": "predicted_ttft"}, "reason": "costs least: 0.676 s of work behind 3.443 s", "detail": "",
        "retry_after": None, "predicted_ttft": 4.119, "predicted_ttft_upper": 5.4, "predicted_cached_tokens": 4800, "budget_seconds": 0.997,
        "candidates": [_candidate(i, chosen=i == 2) for i in range(8)], "ahead_at": "engine-7", "ahead": ahead,
        "ahead_seconds": 5.1, "ahead_tokens": 62_812, "cost": None, "prefix": None,
        "others": [{"weighed": True, "count": 2, "ttft_min": 6.1, "ttft_max": 7.2,
                    "sentence": "and 2 others: first token in 6.1 s to 7.2 s"}],
    }  # fmt: skip
    grant = {
        "sequence": 88_140, "after_seconds": 5.124, "instance": "engine-7", "instance_known": True, "attempt": 1,
        "by_leader": True, "overtaken_by": [], "overtaken_seconds": 0.0, "overtaken_tokens": 0, "in_engine": ahead[:1],
        "decoding": 12, "work_seconds": 5.9, "work_tokens": 61_456, "own_seconds": 0.7, "own_tokens": 1344,
        "correction": 1.04, "corrections": {}, "held_tokens": 0,
    }  # fmt: skip
    refused = RefusedMoveView(
        at=AT, request=RequestId("r"), source=InstanceId("engine-7"), instance=InstanceId("engine-3"), reason="overtaken",
        detail="it was granted", plan="plan-1", policy="planned", planned_as_of=88_110, benefit=0.5, sequence=88_120,
    )  # fmt: skip
    made = TimelineView(
        request="7f3a09c2be114d60", origin="nats://127.0.0.1:4222", note="", arrived_at=AT,
        headline="finished on engine-7: first token after 5.912 s, 4.912 s too late; 212 tokens in 9.912 s", cause=cause,
        verdict="slow because 60,112 tokens of one prompt were ahead of it on engine-7: it waited 5.1 s of 5.9 s for them",
        reasons=[
            "it waited 5.124 s in the queue of engine-7 (87% of the time to the first token)",
            "ahead of it were 4 requests with 62,812 tokens to compute, of which one prompt of globex had 60,112",
            "engine-3 was idle, but would have had to compute 7,300 tokens more: predicted 4.4 s instead of 4.1 s",
            "it took 1.793 s longer than predicted (4.119 s)",
        ],
        details=["its ingress sent it 2 ms after the grant", "2 requests that came later were granted before it"],
        ttft=5.912, slo_ttft=1.0, late=True, tenant="acme", instance="engine-7", prompt_tokens=6144, cached_tokens=4800,
        predicted_cached_tokens=4800, predicted_ttft=4.119, predicted_ttft_upper=5.4,
        phases=[
            _phase("way", "to the scheduler", 0.0, 0.003, whole),
            _phase("queue", "in the queue of engine-7", 0.003, 5.121, whole),
            _phase("way", "on its way to engine-7", 5.124, 0.004, whole),
            _phase("engine", "in engine-7, to the first token", 5.128, 0.784, whole),
            _phase("decoding", "decoding in engine-7", 5.912, 4.0, whole),
        ],
        arrival=ARRIVAL, decisions=[msgspec.convert(decision, ListedDecision)], grants=[msgspec.convert(grant, GrantRecord)],
        failed_attempts=[FAILED], refused_moves=[refused],
        events=[
            EventView(sequence=88_100, at=AT, after_seconds=0.0, kind="RequestArrived", text="arrived, 6,144 tokens", without_effect=False),
            EventView(sequence=88_099, at=AT, after_seconds=0.1, kind="RequestPlaced", text="placed", without_effect=True),
        ],
    )  # fmt: skip
    return msgspec.structs.replace(made, **changes)


def request_page(cause: str = "long_prompt_ahead", **changes: Any) -> RequestPageView:
    made = timeline(cause, **changes)
    return RequestPageView(request=made.request, row=None, state="done", timeline=made)


def reading() -> RequestPageView:
    row = requests(1).requests[0]
    return RequestPageView(request=row.request, row=row, state="running", timeline=None)


def doctor() -> DoctorView:
    findings = [
        FindingView(severity="serious", area="caches", what="the cache of engine-4 was emptied behind its back: 61% of the tokens predicted to be cached were not",
                    evidence=["since 14:02:11, entry 88,101", "predicted 1,204,112 tokens, delivered 469,004"], advice="Look for a restart without a new epoch, or /reset_prefix_cache, on engine-4."),
        FindingView(severity="warning", area="predictions", what="predicted prefill times are 34% too short", evidence=[f"{i} answers" for i in range(9)], advice="Run pointsman calibrate."),
        FindingView(severity="note", area="log", what="one leader was elected", evidence=[], advice=""),
    ]  # fmt: skip
    return DoctorView(
        state="done", at=AT, took_seconds=1.9, entries=128_332, first_at=AT - 3000, last_at=AT - 1,
        verdict="1 serious: the cache of engine-4 was emptied behind its back", summary=["12,877 requests, 98.1% in time"], findings=findings,
    )  # fmt: skip


def history() -> HistoryView:
    sizes = [
        SizeView(at=AT - 3000 + 60 * i, ready=2 + i // 14, wanted=2 + (i + 4) // 14, pending=(i * 7) % 40)
        for i in range(50)
    ]
    return HistoryView(
        wanted=6, ready=5, moved=12, refused=2, sizes=sizes,
        scaling=[
            ScaleView(sequence=9, at=AT - 30, policy="slo", by="", current=5, wanted=6, reason="goodput 88% over 60 s"),
            ScaleView(sequence=8, at=AT - 900, policy="slo", by="operator", current=4, wanted=5, reason="asked for", applied_at=AT - 890, applied_detail="started engine-5"),
        ],
        moves=[MoveView(sequence=20 + i, at=AT - i, request=f"{i:016x}", source="engine-1", instance="engine-2", cause="slo", policy="slo_guard",
                        reason="would be late where it is", benefit=0.8, rebound=i == 1, refusal="too late" if i == 2 else "") for i in range(4)],
        events=[FleetEventView(sequence=30, at=AT - 4, kind="ejected", instance="engine-4", detail="5 failures in a row"),
                FleetEventView(sequence=29, at=AT - 900, kind="leader", instance="", detail="scheduler-1 leads, term 4")],
    )  # fmt: skip


def tenants() -> TenantsView:
    def tenant(name: str, share: float, goodput: float) -> TenantView:
        return TenantView(
            tenant=name, priority="standard", weight=1.0, cache_group=name, in_flight=3, arrived=4000, finished=3900, in_time=3700,
            late=200, rejected=60, failed=2, cancelled=38, prompt_tokens=int(9e6 * share), cached_tokens=int(5e6 * share),
            output_tokens=700_000, share=share, hit_rate=0.55, goodput=goodput, ttft_p50=0.2, ttft_p95=1.4,
            limits=["40 requests/s", "2,000,000 tokens/min"] if name == "acme" else [],
        )  # fmt: skip

    return TenantsView(
        tenants=[tenant("acme", 0.62, 0.93), tenant("globex", 0.3, 0.99), tenant("", 0.08, 1.0)], policies=True
    )


RUNGS = (
    ("unbounded", "an unbounded cache", 0.742), ("capacity", "one cache of the fleet's size", 0.701),
    ("perfect", "the engine that held most", 0.668), ("known", "the engine known to hold most", 0.661),
    ("chosen", "predicted at the chosen engine", 0.634), ("delivered", "delivered by engines", 0.612),
)  # fmt: skip


def _group(kind: str, name: str, factor: float = 1.0) -> LadderGroupView:
    rungs, above = [], None
    for rung, title, value in RUNGS:
        share = value * factor
        rungs.append(
            RungView(
                rung=rung,
                title=title,
                tokens=int(9e6 * share),
                share=share,
                lost=None if above is None else above - share,
                why="" if above is None else "an engine held it, and the index did not know",
                advice="" if above is None else "Cache events come late or are lost.",
            )
        )
        above = share
    return LadderGroupView(kind=kind, name=name, requests=12_877, prompt_tokens=9_000_000, rungs=rungs)


def ladder() -> LadderView:
    return LadderView(
        pool=_group("pool", "default"), tenants=[_group("tenant", "acme"), _group("tenant", "globex", 0.7)],
        hours=[_group("hour", f"{h:02d}:00", 1 - 0.08 * (h % 4)) for h in range(8, 15)],
    )  # fmt: skip


def shadows() -> ShadowsView:
    figures = DecisionFigures(
        since=AT - 600, decided=12_877, same=3990, other=8800, shadow_rejects=60, shadow_places=20, both_reject=7, placed=12_790,
        prompt_tokens=9_000_000, running_cached_tokens=5_600_000, shadow_cached_tokens=4_100_000, running_predicted_ttft=5000.0,
        shadow_predicted_ttft=6200.0,
    )  # fmt: skip
    difference = ShadowDecision(
        sequence=88_101, at=AT, request=RequestId("7f3a09c2be114d60"), tenant=Tenant("acme"), agreement="other", prompt_tokens=6144,
        running_instance=InstanceId("engine-7"), running_reason="costs least", running_cached_tokens=4800, running_predicted_ttft=0.41,
        shadow_instance=InstanceId("engine-2"), shadow_reason="least loaded", shadow_cached_tokens=0, shadow_predicted_ttft=0.97,
    )  # fmt: skip
    ours = WindowFigures(
        ttft_p50_s=0.2, ttft_p90_s=0.9, hit_rate=0.61, effective_capacity=0.93, goodput=7.4, rejections=3
    )
    theirs = WindowFigures(
        ttft_p50_s=0.3, ttft_p90_s=1.3, hit_rate=0.45, effective_capacity=0.88, goodput=7.0, rejections=9
    )
    regret = Regret(
        requests=2400, ttft_mean_s=-0.2, ttft_p50_s=-0.1, ttft_p90_s=-0.4, hit_rate=-0.16, effective_capacity=-0.05, goodput=-0.4,
        on_time_gained=10, on_time_lost=120,
    )  # fmt: skip
    window = WindowResult(
        since=AT - 300, until=AT, warmup_seconds=60, closed_at=88_200, requests=2400, recorded=ours, running=ours, reproduced=True,
        fidelity="", notes=[], shadows={"least_loaded": ShadowFigures(figures=theirs, regret=regret)}, problems={},
    )  # fmt: skip
    report = ShadowReport(
        name="least_loaded", policy="least_loaded", settings={}, problem="", total=figures, buckets=[figures] * 3,
        differences=[difference], failed=0, failure="",
    )  # fmt: skip
    broken = msgspec.structs.replace(
        report,
        name="preble:x=1",
        policy="",
        problem="preble has no setting x",
        differences=[],
        total=DecisionFigures(since=0.0),
    )
    return ShadowsView(policy="pointsman", summary=ShadowSummary(
        shadows=[report, broken], windows=[window], sampled_out=0, simulated=3, waiting=1, shed=0, unusable=1, window_problem="no calibration",
    ))  # fmt: skip


def run(state: str = "done") -> WhatIfRun:
    rows = [
        WhatIfRow(
            name="effective capacity", recorded="93.2%", again="92.8%", changed="97.1%", change="+4.3%", better=True
        ),
        WhatIfRow(name="TTFT P90", recorded="0.91 s", again="0.88 s", changed="0.62 s", change="-0.26 s", better=True),
        WhatIfRow(name="hit rate", recorded="61.2%", again="61.0%", changed="58.4%", change="-2.6%", better=False),
        WhatIfRow(name="moved", recorded="12", again="14", changed="9", change="-5", better=None),
    ]
    made = WhatIfRun(
        id=3, state="done", change=WhatIfChange(policy="least_loaded", instances=8), text="routing least_loaded, 8 engines", started_at=AT,
        took_seconds=6.2, progress="4,200 of 12,877 requests", rows=rows if state == "done" else [], faithful=True,
        fidelity="the simulator reproduces the record: capacity -0.4 points, TTFT P90 -3%, TPOT P50 +1%, hit rate -0.2 points against the record", requests=12_877,
        notes=["3 requests failed; failures are not simulated"],
        problem="unknown policy" if state == "failed" else "",
    )  # fmt: skip
    return msgspec.structs.replace(made, state=state)


def what_if() -> WhatIfView:
    return WhatIfView(
        runs=[run("running"), msgspec.structs.replace(run(), id=2)], policies=["pointsman", "least_loaded"], orders=["fcfs", "edf"],
        admissions=["none", "predicted_ttft"], busy=True,
    )  # fmt: skip


EMPTY: dict[str, Any] = {
    "fleet": FleetView(at=0.0, sequence=0, totals=msgspec.structs.replace(fleet(0).totals, hit_rate=None, predicted_hit_rate=None,
                       ttft_p50=None, ttft_p95=None), instances=[]),
    "requests": RequestsView(requests=[], kept=0, kept_max=2000, matching=0, tenants=[], instances=[]),
    "doctor": DoctorView(state="waiting", at=0.0, took_seconds=0.0, entries=0, first_at=0.0, last_at=0.0, verdict="", summary=[], findings=[]),
    "history": HistoryView(wanted=None, ready=0, scaling=[], moves=[], moved=0, refused=0, events=[], sizes=[]),
    "tenants": TenantsView(tenants=[], policies=False),
    "hit_rate": LadderView(pool=None, tenants=[], hours=[]),
    "shadow": ShadowsView(policy="pointsman"),
    "what_if": WhatIfView(runs=[], policies=[], orders=[], admissions=[], busy=False),
    "request": request_page("unknown", phases=[], decisions=[], grants=[], reasons=[], details=[], events=[], failed_attempts=[], refused_moves=[], ttft=None, slo_ttft=None, predicted_ttft=None, late=False, arrival=None, verdict="", note="the log begins after it"),
    "what_if_run": run("failed"),
    "problem": ProblemView(status=404, error="not_found", detail="No request of this id is in the log."),
    "sign_in": ProblemView(status=200, error=""),
    "api": ({"paths": {}}),
}  # fmt: skip
FULL: dict[str, Any] = {
    "fleet": fleet(20), "requests": requests(100), "doctor": doctor(), "history": history(), "tenants": tenants(), "hit_rate": ladder(),
    "shadow": shadows(), "what_if": what_if(), "request": request_page(), "what_if_run": run(),
    "problem": ProblemView(status=400, error="since", detail="since: not a time"), "sign_in": ProblemView(status=403, error="wrong_token", detail="That is not the token."),
    "api": ({"paths": {"/api/fleet": {"get": {"summary": "The fleet", "parameters": [{"name": "at", "in": "query"}]}}}}),
}  # fmt: skip
