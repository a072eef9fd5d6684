"""What becomes of a job whose process fails."""

import asyncio
import sys
from pathlib import Path

import pytest

from pointsman.contracts.requests import RequestFinished
from pointsman.policies.policy_set import policy_set
from pointsman.ports import LogExtent
from pointsman_cli.console.jobs import jobs as jobs_module
from pointsman_cli.console.jobs import process
from pointsman_cli.console.jobs.examinations import examination_of
from pointsman_cli.console.jobs.jobs import SEARCHES_WAITING_MAX, Jobs
from pointsman_cli.console.jobs.process import Task
from pointsman_cli.console.jobs.views import DoctorView, TimelineView, WhatIfChange, WhatIfRun
from pointsman_cli.history.sources import open_history
from tests.support.commands import written
from tests.support.console_views import run
from tests.support.recorded_log import RecordedFleet
from tests.support.served_log import ServedLog

LONG_LINE = "#!/bin/sh\nhead -c 100000 /dev/zero | tr '\\0' x >&2\nexit 3\n"


@pytest.fixture(params=["cannot be started", "writes a line without end"])
def failing(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "program"
    if request.param != "cannot be started":
        program.write_text(LONG_LINE)
        program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))


@pytest.mark.usefixtures("failing")
async def test_a_process_that_fails_ends_its_job_so_that_the_next_may_begin() -> None:
    jobs = Jobs("log.pmlog", None, recorded=True, wall=lambda: 0.0)
    timeline = jobs.timeline("r-1", first=0, ended=0)
    jobs.examine()
    number = jobs.start(WhatIfChange(policy="random"), "random")
    assert number is not None
    async with asyncio.timeout(20):
        while jobs.busy or timeline.state != "failed" or jobs.examination().state != "failed":  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    failed = jobs.run(number)
    assert failed is not None
    assert failed.state == "failed"
    assert failed.problem.startswith("its process failed: ")
    await jobs.close()


async def test_what_is_worked_out_ends_where_the_console_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = RecordedFleet(policy_set(), seed=9).live(300).write_all().entries
    until, file = len(entries) // 2, written(entries, tmp_path)
    tasks: list[Task] = []

    async def keep(task: Task, *_rest: object, **_named: object) -> None:
        tasks.append(task)

    monkeypatch.setattr(jobs_module, "work", keep)
    jobs = Jobs(str(file), None, recorded=True, wall=lambda: 0.0, until=str(until))
    lasting = next(e.event.request for e in entries if e.sequence > until and isinstance(e.event, RequestFinished))
    jobs.timeline(lasting, first=0, ended=0)
    jobs.examine()
    await asyncio.sleep(0)
    await jobs.close()
    examined, told = (process._answer(task) for task in sorted(tasks, key=lambda task: task.kind))

    assert isinstance(examined, DoctorView)
    assert examined.entries == until
    assert isinstance(told, TimelineView)
    assert max(event.sequence for event in told.events) <= until


async def test_a_what_if_run_has_the_requests_up_to_where_the_console_ends(tmp_path: Path) -> None:
    entries = ServedLog(requests=120).entries
    file = written(entries, tmp_path)
    change, middle = WhatIfChange(policy="random"), str(len(entries) // 2)

    ended, asked = (
        process._answer(Task(kind="what-if", place=str(file), pool=None, until=until, change=wanted))
        for until, wanted in ((middle, change), (None, WhatIfChange(policy="random", until=middle)))
    )

    assert isinstance(ended, WhatIfRun)
    assert isinstance(asked, WhatIfRun)
    assert 0 <= asked.requests - ended.requests < 5  # requests in flight there
    assert ended.requests < 80


async def test_a_run_keeps_the_figures_and_notes_of_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    done = run()

    async def work(*_task: object, **_named: object) -> WhatIfRun:
        return done

    monkeypatch.setattr(jobs_module, "work", work)
    jobs = Jobs("log.pmlog", None, recorded=True, wall=lambda: 0.0)
    number = jobs.start(WhatIfChange(policy="random"), "random")
    assert number is not None
    async with asyncio.timeout(20):
        while jobs.busy:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await jobs.close()
    kept = jobs.run(number)

    assert kept is not None
    assert (kept.rows, kept.notes, kept.fidelity, kept.requests) == (
        done.rows,
        done.notes,
        done.fidelity,
        done.requests,
    )
    assert kept.notes


def test_a_log_that_is_full_is_told_by_the_console_too(tmp_path: Path) -> None:
    entries = ServedLog(requests=60).entries
    last = entries[-1].sequence
    with open_history(str(written(entries, tmp_path))) as history:
        history.extent = LogExtent("a", 1, last, bytes=99, bytes_max=100)
        found = examination_of(history).findings

    assert any(finding.what.startswith("the log is full and keeps") for finding in found)


@pytest.mark.usefixtures("failing")
async def test_made_up_ids_leave_places_for_requests_that_are_remembered() -> None:
    jobs = Jobs("log.pmlog", None, recorded=True, wall=lambda: 0.0)
    made_up = [jobs.timeline(f"x-{number}", first=0, ended=0) for number in range(100)]
    remembered = jobs.timeline("r-1", first=7, ended=9)
    states = [timeline.state for timeline in made_up]
    await jobs.close()

    assert states.count("waiting") == SEARCHES_WAITING_MAX
    assert all("too many" in timeline.problem for timeline in made_up[SEARCHES_WAITING_MAX:])
    assert remembered.state == "waiting"
