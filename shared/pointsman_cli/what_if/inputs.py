"""What a what-if begins with: the record of a stretch of a log, and the changed limits of tenants."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from pointsman.adapters.tenants_file import with_changes
from pointsman.analysis.recorded_traffic import Record, read_record
from pointsman.analysis.what_if import TENANTS_PREFIX
from pointsman.contracts.tenants import TenantPolicies
from pointsman.ports import LogEntry
from pointsman_cli.history.sources import History
from pointsman_cli.history.start_point import beginning_of
from pointsman_cli.history.time_options import Moment


def record_of(
    history: History, entries: Iterable[LogEntry], since: Moment, until: Moment, warmup: float | None = None
) -> Record:
    """`entries`: of the history. `warmup`: engine seconds before `since`, which is a time then. Raises HistoryError,
    UnusableTrafficError."""
    return read_record(
        entries,
        origin=history.origin,
        settings=history.settings,
        known=beginning_of(history, until).known,
        begins=None if warmup is None or since.at is None else replace(since, at=since.at - warmup).passed(),
        since=None if since == Moment() else since.passed(),
        until=until.passed(),
    )


def limits_of(settings: Sequence[str]) -> Callable[[TenantPolicies], TenantPolicies] | None:
    """By the settings `tenants.NAME.KEY=VALUE`. None if no setting is of a tenant."""
    texts = [text.removeprefix(TENANTS_PREFIX) for text in settings if text.startswith(TENANTS_PREFIX)]
    return (lambda policies: with_changes(policies, texts)) if texts else None
