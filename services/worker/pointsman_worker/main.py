"""Composition root of `pointsman-worker`."""

from pathlib import Path

import click

from pointsman.adapters.calibration_file import Calibration, CalibrationError, read_calibration
from pointsman.adapters.clocks import ScaledClock
from pointsman.adapters.http_engine import HttpEngine
from pointsman.adapters.kv_events.reader import KvEventReader
from pointsman.adapters.kv_events.sockets import KvEndpoint, rank_endpoint
from pointsman.contracts.permissions import BusRole, BusUser
from pointsman.primitives import InstanceId, PoolName
from pointsman.runtime.health import HealthBoard, health_server
from pointsman.runtime.log_connection import open_link
from pointsman.runtime.public_secret import note_public_secret
from pointsman.runtime.settings import command
from pointsman.runtime.supervision import Supervisor, run
from pointsman.runtime.telemetry import configure_logging
from pointsman_worker.service import WorkerService
from pointsman_worker.settings import SettingsError, WorkerSettings, instance_of


@command(WorkerSettings, name="pointsman-worker", table="worker")
def main(settings: WorkerSettings) -> None:
    """Follow the KV cache of one engine and write it to the pool's log.

    Runs beside each engine. It reads the engine's KV events (vLLM's --kv-events-config) and its HTTP interface, joins the fleet
    as an instance, reports load and cache digest every second, and leaves when it stops (with --state-directory on SIGINT only).

    \b
      pointsman-worker --engine-url http://127.0.0.1:8000 --kv-endpoint tcp://127.0.0.1:5557
        --kv-replay-endpoint tcp://127.0.0.1:5558 --nats nats://10.0.0.5:4222 --pool qwen
    """
    configure_logging(settings.log_level, settings.log_format)
    try:
        instance = instance_of(settings)
        events = _event_source(settings)
        calibration = read_calibration(Path(settings.engine_calibration)) if settings.engine_calibration else None
    except (SettingsError, CalibrationError, ValueError) as error:
        raise click.UsageError(str(error)) from error
    run(lambda supervisor: _serve(settings, instance, events, calibration, supervisor))


async def _serve(
    settings: WorkerSettings,
    instance: InstanceId,
    events: KvEventReader | None,
    calibration: Calibration | None,
    supervisor: Supervisor,
) -> None:
    clock = ScaledClock(settings.speed)
    board = HealthBoard(pool=settings.pool)
    note_public_secret(settings.secret, settings.host, board)
    supervisor.start(health_server(board, settings.host, settings.port).serve(), name="health")
    async with (
        open_link(settings, clock, board, name=f"worker {instance}", user=_user(settings, instance)) as link,
        HttpEngine(settings.engine_url, api_key=settings.engine_api_key, dp_rank=settings.dp_rank) as engine,
    ):
        service = WorkerService(
            event_log=link.log,
            commands=link.commands,
            clock=clock,
            board=board,
            settings=settings,
            instance=instance,
            engine=engine,
            events=events,
            calibration=calibration,
        )
        supervisor.start(service.run(), name="worker")
        try:
            await supervisor.until_stopped()
        finally:
            if settings.state_directory and supervisor.stopped_in_order and not supervisor.for_good:
                await service.pause()
            else:
                await service.leave("worker stopped")


def _user(settings: WorkerSettings, instance: InstanceId) -> BusUser:
    return BusUser(BusRole.WORKER, instance, PoolName(settings.pool))


def _event_source(settings: WorkerSettings) -> KvEventReader | None:
    if not settings.kv_endpoint:
        return None
    rank = max(0, settings.dp_rank)
    return KvEventReader(
        KvEndpoint(rank_endpoint(settings.kv_endpoint, rank), rank_endpoint(settings.kv_replay_endpoint, rank))
    )
