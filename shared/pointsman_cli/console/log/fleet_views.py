"""The fleet page: instances, queues, hit rates and goodput as of the last entry that was read."""

from pointsman.state.fleet import Instance, Knowledge, Status
from pointsman.state.instance_status import status_reason
from pointsman.state.workload import EMPTY_QUEUE
from pointsman_cli.console.log.observer import Observer
from pointsman_cli.console.log.request_counts import Figures
from pointsman_cli.console.views import FleetTotals, FleetView, InstanceView
from pointsman_cli.formatting import by_name

NO_FIGURES = Figures()
NAMES_SHOWN = 50
LOST_WALL_SECONDS = 600.0
HALF_OPEN = "half-open"
"""Shown instead of `ready`: it takes one request at a time."""


def fleet_view(observer: Observer) -> FleetView:
    state = observer.state
    whole, of = observer.minute.figures(observer.at)
    instances = sorted(state.fleet.instances, key=lambda one: by_name(one.id))
    lost_since = observer.at - LOST_WALL_SECONDS * state.settings.speed
    rows = [_instance(observer, one, of.get(one.id, NO_FIGURES)) for one in instances]
    return FleetView(
        at=observer.wall(observer.at),
        sequence=observer.sequence,
        totals=_totals(observer, rows, whole),
        instances=rows,
        unregistered=sorted(map(str, state.unregistered))[:NAMES_SHOWN],
        lost=[str(name) for name, at in observer.happenings.lost.items() if at > lost_since][-NAMES_SHOWN:],
    )


def _totals(observer: Observer, rows: list[InstanceView], whole: Figures) -> FleetTotals:
    return FleetTotals(
        instances=len(rows),
        ready=sum(row.status == Status.READY for row in rows),
        pending=sum(row.pending for row in rows),
        in_prefill=sum(row.in_prefill for row in rows),
        decoding=sum(row.decoding for row in rows),
        exact=sum(row.knowledge == Knowledge.EXACT for row in rows),
        requests_per_second=observer.minute.arrivals_per_second(observer.at, observer.began_at),
        ended=whole.ended,
        goodput=whole.goodput,
        hit_rate=whole.hit_rate,
        predicted_hit_rate=whole.predicted_hit_rate,
        ttft_p50=whole.ttft(50),
        ttft_p95=whole.ttft(95),
        rejected=whole.rejected,
        failed=whole.failed,
        placed_alone=len(observer.minute.placed_alone),
    )


def _instance(observer: Observer, instance: Instance, figures: Figures) -> InstanceView:
    state = observer.state
    queue = state.workload.queues.get(instance.id, EMPTY_QUEUE)
    seconds, tokens = queue.work_ahead(state.last_at)
    error = state.latency.prediction_error(instance.id)
    block = instance.engine_block_tokens or 1
    return InstanceView(
        instance=instance.id,
        url=instance.url,
        model=instance.model,
        role=instance.role,
        since=round(instance.epoch / 1000, 3),
        status=HALF_OPEN if instance.half_open and instance.status is Status.READY else str(instance.status),
        status_reason=status_reason(state, instance),
        knowledge=str(instance.knowledge),
        knowledge_reason=instance.knowledge_reason,
        knowledge_since=observer.wall(instance.known_since),
        pending=len(queue.pending),
        in_prefill=len(queue.prefill),
        decoding=len(queue.decoding),
        queue_tokens=tokens,
        queue_seconds=round(state.latency.expected_seconds(instance.id, seconds, tokens), 2),
        kv_usage=round(instance.kv_usage, 2),
        blocks=state.index.blocks(instance.id),
        blocks_max=max(0, instance.kv_capacity_tokens) // block,
        pace=round(state.latency.correction(instance.id), 2),
        prediction_error=-1.0 if error is None else round(error, 2),
        hit_rate=figures.hit_rate,
        goodput=figures.goodput,
        ttft_p50=figures.ttft(50),
        ended=figures.ended,
    )
