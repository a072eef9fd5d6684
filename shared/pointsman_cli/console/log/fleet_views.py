"""The fleet page: instances, queues, hit rates and goodput as of the last entry that was read."""

from pointsman.state.fleet import Instance, Knowledge
from pointsman.state.state import State
from pointsman.state.workload import EMPTY_QUEUE
from pointsman_cli.console.log.observer import Observer
from pointsman_cli.console.log.request_counts import Figures
from pointsman_cli.console.log.times import wall
from pointsman_cli.console.views import FleetTotals, FleetView, InstanceView

NO_FIGURES = Figures()
UNREGISTERED_SHOWN = 50


def fleet_view(observer: Observer) -> FleetView:
    state = observer.state
    whole, of = observer.minute.figures(observer.at)
    instances = sorted(state.fleet.instances, key=lambda one: (len(one.id), one.id))  # engine-2 before engine-10
    rows = [_instance(state, one, of.get(one.id, NO_FIGURES)) for one in instances]
    return FleetView(
        at=wall(observer, observer.at),
        sequence=observer.sequence,
        totals=_totals(observer, rows, whole),
        instances=rows,
        unregistered=sorted(map(str, state.unregistered))[:UNREGISTERED_SHOWN],
    )


def _totals(observer: Observer, rows: list[InstanceView], whole: Figures) -> FleetTotals:
    state = observer.state
    return FleetTotals(
        instances=len(rows),
        ready=len(state.fleet.ready),
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
    )


def _instance(state: State, instance: Instance, figures: Figures) -> InstanceView:
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
        status=str(instance.status),
        status_reason=_status_reason(state, instance),
        knowledge=str(instance.knowledge),
        knowledge_reason=instance.knowledge_reason,
        knowledge_since=wall(state, instance.known_since),
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


def _status_reason(state: State, instance: Instance) -> str:
    if instance.unschedulable:
        return instance.unschedulable
    if instance.suspected:
        return "its worker is silent"
    if not instance.serving:
        return "its engine does not answer"
    if instance.becomes:
        return f"its role becomes {instance.becomes} once it is idle"
    if instance.draining:
        return "it leaves once it is idle" if instance.leaving else "it takes no new requests"
    return state.ejection_reason(instance)
