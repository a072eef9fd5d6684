"""One of each wire struct, every field set. `wire.jsonl` holds their bytes, a line each, in this order."""

from pointsman.contracts.block_keys import pack_keys
from pointsman.contracts.cache import BlocksRemoved, BlocksStored, CacheCleared, CacheGap, CacheSnapshot, Run
from pointsman.contracts.codec import AnyCommand, LogEvent
from pointsman.contracts.commands import (
    CancelAnswered,
    CancelRequest,
    DescribeFleet,
    FleetDescribed,
    InstanceDescribed,
    MigrateRequests,
    MigrationAnswered,
    MoveAnswered,
    PlannedMove,
    ResyncAnswered,
    ResyncCache,
    RouteGranted,
    RouteRejected,
    RouteRequest,
)
from pointsman.contracts.decisions import (
    Candidate,
    LeaderElected,
    MigrationRefused,
    RequestGranted,
    RequestMigrated,
    RequestPlaced,
    RequestRejected,
    ScaleApplied,
    ScaleDecided,
    WritesLost,
)
from pointsman.contracts.envelope import Stamp
from pointsman.contracts.fleet import (
    InstanceDraining,
    InstanceJoined,
    InstanceLeft,
    InstanceProbed,
    InstanceReported,
    InstanceSuspected,
    InstanceUndrained,
    Patience,
    PrefillCost,
)
from pointsman.contracts.requests import (
    PrefillFinished,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
)
from pointsman.primitives import BlockKey, Epoch, InstanceId, RequestId, SessionId, Tenant, Term

AT = 1767225600.25
KEYS = pack_keys([BlockKey(1), BlockKey(2**64 - 1)])
RUNS = [Run(KEYS), Run(KEYS, BlockKey(2**64 - 2))]
STAMP = Stamp(term=Term(3), number=7, as_of=41)
REQUEST = RequestId("req-1")
ENGINE = InstanceId("engine-1")
EPOCH = Epoch(1767225600000)
CANDIDATE = Candidate(
    instance=ENGINE, hit_blocks=2, uncached_tokens=17, queue_seconds=0.5, prefill_seconds=0.25, predicted_ttft=0.75
)
PATIENCE = Patience(heard_since=1767225590.5, suspect_after=3.0, leave_after=30.0)
SETTINGS: dict[str, bool | float | str] = {"ttft_slo_threshold": 1.0, "both_over": "affine"}

EVENTS: list[LogEvent] = [
    BlocksStored(at=AT, instance=ENGINE, epoch=EPOCH, sequence=1, runs=RUNS),
    BlocksRemoved(at=AT, instance=ENGINE, epoch=EPOCH, sequence=2, keys=KEYS),
    CacheCleared(at=AT, instance=ENGINE, epoch=EPOCH, sequence=3),
    CacheGap(at=AT, instance=ENGINE, epoch=EPOCH, sequence=4, missed=2, reason="dropped"),
    CacheSnapshot(at=AT, instance=ENGINE, epoch=EPOCH, sequence=5, runs=RUNS),
    InstanceJoined(
        at=AT,
        instance=ENGINE,
        epoch=EPOCH,
        url="http://127.0.0.1:8101",
        model="m",
        block_tokens=64,
        engine_block_tokens=16,
        kv_capacity_tokens=1000000,
        max_model_len=131072,
        prefill=PrefillCost(fixed_s=0.004, per_token_s=0.0001, per_token_squared_s=3e-9, floor_s=0.027),
        speed=4.0,
        engine_version="0.32.0",
        cache="unknown",
    ),
    InstanceReported(
        at=AT,
        instance=ENGINE,
        epoch=EPOCH,
        serving=True,
        waiting=1,
        running=2,
        kv_usage=0.5,
        sequence=5,
        blocks=2,
        digest=2**64 - 2,
        undecodable=1,
    ),
    InstanceProbed(at=AT, instance=ENGINE, epoch=EPOCH, parity=True, detail="chat"),
    InstanceSuspected(at=AT, stamp=STAMP, instance=ENGINE, epoch=EPOCH, silent_seconds=3.5, patience=PATIENCE),
    InstanceDraining(at=AT, instance=ENGINE, epoch=EPOCH, reason="scale down"),
    InstanceUndrained(at=AT, instance=ENGINE, epoch=EPOCH),
    InstanceLeft(at=AT, instance=ENGINE, epoch=EPOCH, reason="shutdown", patience=PATIENCE),
    RequestArrived(
        at=AT,
        stamp=STAMP,
        request=REQUEST,
        arrived_at=AT,
        ingress="ingress-1",
        tenant=Tenant("t"),
        keys=KEYS,
        prompt_tokens=140,
        max_output_tokens=16,
        slo_ttft=5.0,
        slo_tpot=0.1,
        session=SessionId("s"),
        exact=False,
        streaming=False,
    ),
    RequestPlaced(
        at=AT,
        stamp=STAMP,
        request=REQUEST,
        instance=ENGINE,
        hit_blocks=2,
        uncached_tokens=17,
        queue_seconds=0.5,
        prefill_seconds=0.25,
        predicted_ttft=0.75,
        policy="dualmap",
        settings=SETTINGS,
        reason="holds 128 tokens",
        candidates=[CANDIDATE],
        attempt=2,
        excluded=[InstanceId("engine-2")],
    ),
    RequestGranted(at=AT, stamp=STAMP, request=REQUEST, instance=ENGINE, attempt=2),
    RequestMigrated(
        at=AT,
        stamp=STAMP,
        request=REQUEST,
        source=InstanceId("engine-2"),
        instance=ENGINE,
        hit_blocks=2,
        uncached_tokens=17,
        prefill_seconds=0.25,
        predicted_ttft=0.75,
        reason="overloaded",
        plan="rebalancer-1.7",
        policy="dualmap_pair",
        planned_as_of=40,
        benefit=1.5,
    ),
    MigrationRefused(
        at=AT,
        stamp=STAMP,
        request=REQUEST,
        source=InstanceId("engine-2"),
        instance=ENGINE,
        reason="target_late",
        detail="first token in 6.00 s, 5.00 s are left",
        plan="rebalancer-1.7",
        policy="dualmap_pair",
        planned_as_of=40,
        benefit=1.5,
    ),
    RequestRejected(
        at=AT,
        stamp=STAMP,
        request=REQUEST,
        reason="slo_ttft",
        detail="too late",
        retry_after=1.5,
        policy="dualmap",
        settings=SETTINGS,
        candidates=[CANDIDATE],
        attempt=2,
        excluded=[InstanceId("engine-2")],
    ),
    PrefillFinished(at=AT, request=REQUEST, instance=ENGINE, ttft=0.75, prefill=0.25),
    RequestFinished(
        at=AT,
        request=REQUEST,
        instance=ENGINE,
        e2e=2.5,
        prompt_tokens=140,
        completion_tokens=16,
        cached_tokens=128,
        ttft=0.75,
        tpot=0.05,
    ),
    RequestFailed(at=AT, request=REQUEST, reason="engine went away", status=502, instance=ENGINE),
    RequestCancelled(at=AT, stamp=STAMP, request=REQUEST, reason="client went away", instance=ENGINE),
    LeaderElected(
        at=AT,
        term=Term(3),
        scheduler="scheduler-1",
        as_of=40,
        pool={"block_tokens": 64},
        policy="dualmap",
        settings=SETTINGS,
    ),
    WritesLost(at=AT, writer="scheduler-1", count=3, reason="no answer"),
    ScaleDecided(
        at=AT, policy="slo_attainment", settings={"target": 0.9}, current=4, wanted=5, reason="attainment is 0.8"
    ),
    ScaleApplied(at=AT, current=4, wanted=5, detail="started engine-5"),
]

COMMANDS: list[AnyCommand] = [
    RouteRequest(
        request=REQUEST,
        ingress="ingress-1",
        arrived_at=AT,
        tenant=Tenant("t"),
        keys=KEYS,
        prompt_tokens=140,
        max_output_tokens=16,
        slo_ttft=5.0,
        slo_tpot=0.1,
        session=SessionId("s"),
        exact=False,
        streaming=False,
        attempt=2,
        excluded=[ENGINE],
    ),
    RouteGranted(
        request=REQUEST,
        attempt=2,
        instance=ENGINE,
        url="http://127.0.0.1:8101",
        hit_tokens=128,
        predicted_ttft=0.75,
        knowledge="exact",
        term=Term(3),
    ),
    RouteRejected(
        request=REQUEST, attempt=2, status=429, reason="slo_ttft", detail="too late", retry_after=1.5, term=Term(3)
    ),
    CancelRequest(request=REQUEST, reason="client went away"),
    CancelAnswered(request=REQUEST, ended=True),
    ResyncCache(instance=ENGINE, reason="digest differs", rejoin=True),
    ResyncAnswered(instance=ENGINE, accepted=True, detail="snapshot follows"),
    DescribeFleet(),
    FleetDescribed(
        instances=[
            InstanceDescribed(
                instance=ENGINE,
                url="http://127.0.0.1:8101",
                epoch=EPOCH,
                status="ready",
                knowledge="exact",
                pending=1,
                in_prefill=2,
                decoding=3,
                cached_blocks=4,
                digest=5,
                doubt="none",
                correction=1.25,
            )
        ],
        pool="default",
        policy="dualmap",
        admission="predicted_ttft",
        ordering="fcfs",
        scheduler="scheduler-1",
        term=Term(3),
        as_of=41,
        speed=4.0,
    ),
    MigrateRequests(
        plan="rebalancer-1.7",
        policy="dualmap_pair",
        term=Term(3),
        as_of=40,
        moves=[
            PlannedMove(
                request=REQUEST, source=InstanceId("engine-2"), target=ENGINE, benefit=1.5, reason="overloaded"
            )
        ],
    ),
    MigrationAnswered(
        plan="rebalancer-1.7",
        term=Term(3),
        as_of=41,
        decided=8,
        moves=[MoveAnswered(request=REQUEST, refusal="target_late")],
        refusal="other_term",
        detail="made in term 2, this is term 3",
    ),
]
