"""What becomes of a job whose process fails."""

import asyncio
import sys
from pathlib import Path

import pytest

from pointsman_cli.console.jobs.jobs import SEARCHES_WAITING_MAX, Jobs
from pointsman_cli.console.jobs.views import WhatIfChange

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
    story = jobs.story("r-1", first=0, ended=0)
    jobs.examine()
    number = jobs.start(WhatIfChange(policy="random"), "random")
    assert number is not None
    async with asyncio.timeout(20):
        while jobs.busy or story.state != "failed" or jobs.examination().state != "failed":  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    run = jobs.run(number)
    assert run is not None
    assert run.state == "failed"
    assert run.problem.startswith("its process failed: ")
    await jobs.close()


@pytest.mark.usefixtures("failing")
async def test_made_up_ids_leave_places_for_requests_that_are_remembered() -> None:
    jobs = Jobs("log.pmlog", None, recorded=True, wall=lambda: 0.0)
    made_up = [jobs.story(f"x-{number}", first=0, ended=0) for number in range(100)]
    remembered = jobs.story("r-1", first=7, ended=9)
    states = [story.state for story in made_up]
    await jobs.close()

    assert states.count("waiting") == SEARCHES_WAITING_MAX
    assert all("too many" in story.problem for story in made_up[SEARCHES_WAITING_MAX:])
    assert remembered.state == "waiting"
