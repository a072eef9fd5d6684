"""A what-if run started from the page, as a view. The same record, simulations and figures as `pointsman what-if`."""

from collections.abc import Callable

from pointsman.adapters.tenants_file import with_changes
from pointsman.analysis.comparison import fidelity
from pointsman.analysis.recorded_traffic import read_record
from pointsman.analysis.what_if import TENANTS_PREFIX, Change, WhatIf
from pointsman.contracts.tenants import TenantPolicies
from pointsman.simulation.metrics import Report
from pointsman_cli.console.jobs.views import WhatIfChange, WhatIfRow, WhatIfRun
from pointsman_cli.history.sources import History, HistoryError
from pointsman_cli.history.start_point import beginning_of
from pointsman_cli.history.time_options import Moment, moment_in
from pointsman_cli.what_if.comparison import ROWS, Row

NONE = "-"


def change_of(wanted: WhatIfChange) -> Change:
    return Change(
        policy=wanted.policy or None,
        texts=tuple(wanted.settings),
        ordering=wanted.order or None,
        admission=wanted.admission or None,
        instances=wanted.instances,
        limits=_limits(wanted.settings),
    )


def _limits(settings: list[str]) -> Callable[[TenantPolicies], TenantPolicies] | None:
    texts = [text.removeprefix(TENANTS_PREFIX) for text in settings if text.startswith(TENANTS_PREFIX)]
    return (lambda policies: with_changes(policies, texts)) if texts else None


def run_of(history: History, wanted: WhatIfChange, step: Callable[[str], None]) -> WhatIfRun:
    """Raises HistoryError, click.BadParameter."""
    step("reading the record")
    change = change_of(wanted)
    since, until = moment_in(history, wanted.since or None), moment_in(history, wanted.until or None)
    try:
        record = read_record(
            history,
            origin=history.origin,
            settings=history.settings,
            known=beginning_of(history, until).known,
            since=None if since == Moment() else since.is_before,
            until=until.is_before,
        )
        run = WhatIf(record, [change])
        shown = ""
        for progress in run.run():
            text = f"{progress.what} (run {progress.run} of {progress.runs}), {progress.share:.0%}"
            if text != shown:
                step(text)
            shown = text
    except (ValueError, ArithmeticError, LookupError) as error:
        raise HistoryError(str(error)) from error
    sides = (run.recorded, run.again, run.changed[0])
    reports = [one.report for one in sides]
    well, text = fidelity(reports[0], reports[1])
    return WhatIfRun(
        id=0,
        state="done",
        change=wanted,
        text=str(change),
        started_at=0.0,
        took_seconds=0.0,
        progress="",
        rows=[_row(row, reports) for row in ROWS if any(row[1](report) for report in reports)],
        faithful=well,
        fidelity=text,
        requests=reports[0].requests,
    )


def _row(row: Row, reports: list[Report]) -> WhatIfRow:
    name, value_of, text, more_is_better = row
    recorded, again, changed = (value_of(report) for report in reports)
    shown, better = NONE, None
    if again is not None and changed is not None:
        shown = text(abs(changed - again))
        if shown == text(0.0):
            shown = "same"
        else:
            shown = ("+" if changed > again else "-") + shown
            better = None if more_is_better is None else (changed > again) == more_is_better
    return WhatIfRow(
        name=name,
        recorded=NONE if recorded is None else text(recorded),
        again=NONE if again is None else text(again),
        changed=NONE if changed is None else text(changed),
        change=shown,
        better=better,
    )
