"""Composition root of `pointsman-worker`."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import click

from pointsman.adapters.calibration_file import Calibration, CalibrationError, read_calibration
from pointsman.adapters.clocks import ScaledClock
from pointsman.adapters.discovery.listed import ListedEngines
from pointsman.adapters.discovery.sources import source_of
from pointsman.adapters.http_engine import HttpEngine
from pointsman.adapters.kv_events.reader import KvEventReader
from pointsman.adapters.kv_events.sockets import EngineSockets, KvEndpoint, shared_sockets
from pointsman.contracts.permissions import ANY_INSTANCE, BusRole, BusUser
from pointsman.ports import EngineDiscovery, EngineTarget, unix_now
from pointsman.primitives import PoolName
from pointsman.runtime.environment_names import start_logs
from pointsman.runtime.health import HealthBoard, health_server
from pointsman.runtime.log_connection import open_link
from pointsman.runtime.open_files import raised_open_files
from pointsman.runtime.public_secret import note_public_secret
from pointsman.runtime.settings import command
from pointsman.runtime.supervision import Supervisor, run
from pointsman_worker.engine_fleet import EngineFleet
from pointsman_worker.followed_engine import WorkerContext
from pointsman_worker.saved_session import remove_expired
from pointsman_worker.settings import WorkerSettings
from pointsman_worker.targets import listed_targets

STOP_SECONDS_MAX = 28.0
"""Of a worker with several engines: to save what it knows of their caches. Below Kubernetes' 30 s."""


@command(WorkerSettings, name="pointsman-worker", table="worker")
def main(settings: WorkerSettings) -> None:
    """Follow the KV caches of engines and write them to the pool's log.

    Runs beside one engine, or apart from many. It reads the engines' KV events (vLLM's --kv-events-config) and their HTTP
    interface; each engine joins the fleet as an instance, whose load and cache digest are told to the leader every second. The
    instances of --engine-url leave when it stops (with --state-directory on SIGINT only), those of --discover on SIGINT only.

    \b
      pointsman-worker --engine-url http://127.0.0.1:8000 --kv-endpoint tcp://127.0.0.1:5557
        --kv-replay-endpoint tcp://127.0.0.1:5558 --nats nats://10.0.0.5:4222 --pool qwen
      pointsman-worker --discover file:engines.toml --discover dns:vllm.example:8000
        --kv-endpoint tcp://{host}:5557 --kv-replay-endpoint tcp://{host}:5558
    """
    start_logs(settings)
    try:
        calibration = read_calibration(Path(settings.engine_calibration)) if settings.engine_calibration else None
        sources = [source_of(text) for text in dict.fromkeys(settings.discover)]
    except (CalibrationError, ValueError) as error:
        raise click.UsageError(str(error)) from error
    listed = listed_targets(settings)
    run(lambda supervisor: _serve(settings, listed, sources, calibration, supervisor))


async def _serve(
    settings: WorkerSettings,
    listed: list[EngineTarget],
    discovered: list[EngineDiscovery],
    calibration: Calibration | None,
    supervisor: Supervisor,
) -> None:
    raised_open_files()
    clock, keys = ScaledClock(settings.speed), settings.engine_keys
    board = HealthBoard(pool=settings.pool)
    remove_expired(settings, now=unix_now(clock))
    alone = len(listed) == 1 and not discovered
    if not alone:
        supervisor.stop_seconds_max = STOP_SECONDS_MAX
    instance = listed[0].instance if alone else ANY_INSTANCE
    user = BusUser(BusRole.WORKER, instance, PoolName(settings.pool))
    note_public_secret(settings.secret, settings.host, board)
    supervisor.start(health_server(board, settings.host, settings.port).serve(), name="health")
    name = f"worker {instance}" if alone else "worker"
    async with contextlib.AsyncExitStack() as stack:
        sockets = stack.enter_context(shared_sockets())
        link = await stack.enter_async_context(open_link(settings, clock, board, name=name, user=user))
        context = WorkerContext(
            link=link,
            clock=clock,
            board=board,
            settings=settings,
            calibration=calibration,
            open_engine=lambda target: HttpEngine(target.url, api_key=keys.of(target.instance), dp_rank=target.rank),
            open_events=lambda target: _event_source(target, sockets),
            alone=alone,
        )
        fleet = EngineFleet(context, [*([ListedEngines(listed)] if listed else []), *discovered])
        supervisor.start(fleet.run(), name="engines")
        try:
            await supervisor.until_stopped()
        finally:
            in_order = supervisor.stopped_in_order and not supervisor.for_good
            await fleet.stop("worker stopped", pausing=in_order and bool(settings.state_directory or discovered))


def _event_source(target: EngineTarget, sockets: Callable[[KvEndpoint], EngineSockets]) -> KvEventReader | None:
    if not target.kv_endpoint:
        return None
    return KvEventReader(KvEndpoint(target.kv_endpoint, target.kv_replay_endpoint), sockets=sockets)
