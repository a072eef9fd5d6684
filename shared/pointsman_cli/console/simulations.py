"""A what-if run started from the page, as a view. The same record, simulations and figures as `pointsman what-if`."""

from collections.abc import Callable

from pointsman.policies.policy_set import UnknownPolicyError
from pointsman.policies.setting_text import SettingTextError
from pointsman.simulation.metrics import Report
from pointsman_cli.console.views import WhatIfChange, WhatIfRow, WhatIfRun
from pointsman_cli.history.sources import History, HistoryError
from pointsman_cli.history.start_point import beginning_of
from pointsman_cli.history.time_options import moment_in
from pointsman_cli.what_if.comparison import ROWS, Row, fidelity, side
from pointsman_cli.what_if.recorded_traffic import read_record
from pointsman_cli.what_if.runs import Change, SimulatedFleet

NONE = "-"


def change_of(wanted: WhatIfChange) -> Change:
    return Change(
        policy=wanted.policy or None,
        texts=tuple(wanted.settings),
        ordering=wanted.order or None,
        admission=wanted.admission or None,
        instances=wanted.instances,
    )


def run_of(history: History, wanted: WhatIfChange, step: Callable[[str], None]) -> WhatIfRun:
    """Raises HistoryError, click.BadParameter."""
    step("reading the record")
    change, end = change_of(wanted), moment_in(history, wanted.until or None)
    record = read_record(
        history,
        origin=history.origin,
        settings=history.settings,
        beginning=beginning_of(history, end),
        since=moment_in(history, wanted.since or None),
        until=end,
    )
    try:
        fleet = SimulatedFleet(record)
        scenario = fleet.changed(change)
        step("calibrating the engines (run 1 of 3)")
        fleet.calibrate()
        step("the same policy again (run 2 of 3)")
        again = fleet.as_recorded()
        step("the change (run 3 of 3)")
        changed = fleet.with_change(change)
    except (UnknownPolicyError, SettingTextError, ValueError, ArithmeticError, LookupError) as error:
        raise HistoryError(str(error)) from error
    sides = (
        side("recorded", record.outcome, fleet.scenario, record),
        side("re-simulated", again, fleet.scenario, record),
        side(str(change), changed, scenario, record),
    )
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
