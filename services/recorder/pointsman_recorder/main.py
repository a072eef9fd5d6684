"""The composition root of `pointsman-recorder`."""

from pointsman.adapters.clocks import ScaledClock
from pointsman.adapters.owner_only import create_owner_only
from pointsman.contracts.permissions import BusRole, BusUser
from pointsman.primitives import PoolName, WallSeconds
from pointsman.runtime.environment_names import start_logs
from pointsman.runtime.health import HealthBoard, health_server
from pointsman.runtime.log_connection import open_link
from pointsman.runtime.log_metrics import measure_log
from pointsman.runtime.settings import command
from pointsman.runtime.supervision import Supervisor, run
from pointsman_recorder.archive import open_archive
from pointsman_recorder.retention import DAY_SECONDS, Retention, RetentionLimits
from pointsman_recorder.service import Recorder
from pointsman_recorder.settings import RecorderSettings

BATCH_EVENTS_MAX = 500
BATCH_WALL_SECONDS = WallSeconds(0.1)


@command(RecorderSettings, name="pointsman-recorder", table="recorder")
def main(settings: RecorderSettings) -> None:
    """Archive the log into SQL: every event once, a row per request, and what could not be read.

    \b
    Example:
      pointsman-recorder --nats nats://127.0.0.1:4222 --archive-url sqlite+aiosqlite:///archive.sqlite
      sqlite3 archive.sqlite 'select end_type, count(*), avg(ttft) from requests group by 1'
    """
    create_owner_only()
    start_logs(settings)
    run(lambda supervisor: _serve(settings, supervisor))


async def _serve(settings: RecorderSettings, supervisor: Supervisor) -> None:
    clock = ScaledClock(settings.speed)
    board = HealthBoard(pool=settings.pool)
    supervisor.start(health_server(board, settings.host, settings.port).serve(), name="health")
    async with (
        open_archive(settings.archive_url) as archive,
        open_link(
            settings, clock, board, name="recorder", user=BusUser(BusRole.RECORDER), reads_every=BATCH_WALL_SECONDS
        ) as link,
    ):
        recorder = Recorder(
            link.log,
            archive,
            clock,
            board,
            batch_events=BATCH_EVENTS_MAX,
            batch_seconds=WallSeconds(0.0),  # entries come in batches
        )
        supervisor.start(recorder.collect(), name="collect")
        supervisor.start(recorder.archive(), name="archive")
        measures = measure_log(link.log, clock, PoolName(settings.pool), lambda: recorder.archived_sequence)
        supervisor.start(measures, name="log-metrics")
        limits = RetentionLimits(age=settings.archive_days * DAY_SECONDS, bytes=settings.archive_bytes_max)
        supervisor.start(Retention(archive, link.log, clock, board, limits).run(), name="retention")
        await supervisor.until_stopped()
        await recorder.finish()
