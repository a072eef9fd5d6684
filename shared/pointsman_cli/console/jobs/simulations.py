"""A what-if run started from the page, as a view. The same record, simulations and figures as `pointsman what-if`."""

from collections.abc import Callable

from pointsman.analysis.comparison import fidelity
from pointsman.analysis.what_if import Change, WhatIf
from pointsman_cli.console.jobs.views import WhatIfChange, WhatIfRow, WhatIfRun
from pointsman_cli.history.sources import History, HistoryError
from pointsman_cli.history.time_options import moment_in
from pointsman_cli.what_if.comparison import Compared, compared
from pointsman_cli.what_if.inputs import limits_of, record_of


def run_of(history: History, wanted: WhatIfChange, step: Callable[[str], None]) -> WhatIfRun:
    """Raises HistoryError, click.BadParameter."""
    step("reading the record")
    change = Change(
        policy=wanted.policy or None,
        texts=tuple(wanted.settings),
        ordering=wanted.order or None,
        admission=wanted.admission or None,
        instances=wanted.instances,
        limits=limits_of(wanted.settings),
    )
    since, until = moment_in(history, wanted.since or None, begins=True), moment_in(history, wanted.until or None)
    try:
        record = record_of(history, history, since, until)
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
    well, text = fidelity(run.recorded.report, run.again.report)
    return WhatIfRun(
        id=0,
        state="done",
        change=wanted,
        text=str(change),
        started_at=0.0,
        took_seconds=0.0,
        progress="",
        rows=[_row(row) for row in compared(*sides)],
        faithful=well,
        fidelity=text,
        notes=record.notes,
        requests=run.recorded.report.requests,
    )


def _row(row: Compared) -> WhatIfRow:
    recorded, again, changed = row.values
    return WhatIfRow(
        name=row.heading, recorded=recorded, again=again, changed=changed, change=row.change, better=row.better
    )
