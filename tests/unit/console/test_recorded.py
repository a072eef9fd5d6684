"""Recorded logs, of this version and older ones, as the console reads them to their end."""

import gzip
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from pointsman.policies.policy_set import policy_set
from pointsman.runtime.health import HealthBoard
from pointsman.simulation.replay import fold
from pointsman.state.checkpoint import state_digest
from pointsman_cli.console.jobs.jobs import Jobs
from pointsman_cli.console.log.recorded import RecordedLog
from pointsman_cli.console.page_views import PageViews
from pointsman_cli.console.pages.live import patch
from pointsman_cli.console.pages.rendering import Pages
from pointsman_cli.console.web.actions import Actions
from pointsman_cli.history.bundle import BundleHistory
from pointsman_cli.history.time_options import Moment
from tests.support.commands import written
from tests.support.hostile import HOSTILE, hostile_log
from tests.support.recorded_log import SETTINGS, RecordedFleet

OLD = sorted(Path("tests/golden/logs").glob("*.pmlog"))
PATHS = ("/", "/requests", "/doctor", "/history", "/tenants", "/hit-rate", "/shadow", "/what-if")


class NoJobs(Jobs):
    @override
    def _start(self, study: Coroutine[Any, Any, None]) -> Any:
        study.close()


async def read(file: Path, until: Moment = Moment()) -> RecordedLog:  # noqa: B008 - it is frozen
    source = RecordedLog(BundleHistory(file), board=HealthBoard(), until=until)
    await source.run()
    return source


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    entries = RecordedFleet(policy_set(), seed=9).live(300).write_all().entries
    return written(entries, tmp_path_factory.mktemp("recorded"))


@pytest.fixture
def whole_file(bundle: Path) -> bytes:
    return bundle.read_bytes()


@pytest.mark.parametrize("file", OLD, ids=lambda file: file.stem)
async def test_every_page_of_a_log_of_an_older_version_is_there(file: Path) -> None:
    source, pages = await read(file), Pages()
    console = PageViews(source, Actions(None), NoJobs(str(file), None, recorded=True, wall=time.monotonic))

    for path in PATHS:
        name, view = console.view(path, {})
        assert pages.render(name, view, status=console.status(), query={}).startswith("<!doctype html>")

    assert source.health == "recorded"
    first = BundleHistory(file).header.first
    gone = (
        [f"the log begins at entry {first}, and there is no checkpoint that this version can begin with"]
        if first > 1
        else []
    )
    assert [note.partition(":")[0] for note in source.notes] == gone
    assert source.observer.sequence == source.status(can_act=False, pools=[]).until


async def test_it_reads_no_further_than_the_moment(bundle: Path) -> None:
    source = await read(bundle, Moment(sequence=77))

    assert source.observer.sequence == 77
    whole = fold(BundleHistory(bundle), settings=SETTINGS, until=Moment(sequence=77).passed())
    assert state_digest(source.observer.state) == state_digest(whole)


async def test_an_earlier_moment_of_the_fleet_is_what_was_known_then(bundle: Path) -> None:
    source = await read(bundle)
    moments = source.fleet_at(0).moments
    chosen = moments[len(moments) // 2]

    shown = source.fleet_at(chosen.sequence)
    then = await read(bundle, Moment(sequence=chosen.sequence))

    assert shown.sequence == chosen.sequence
    assert shown.instances == then.fleet_at(0).instances


async def test_a_file_that_was_cut_off_is_shown_as_far_as_it_goes(whole_file: bytes, tmp_path: Path) -> None:
    cut = tmp_path / "cut.pmlog"
    cut.write_bytes(gzip.decompress(whole_file)[:-500])

    source = await read(cut)

    assert source.observer.sequence > 0
    assert source.notes


@pytest.mark.parametrize("text", [HOSTILE, '"><script>alert(1)</script>', "{{ 7*7 }}", "' onload='x"])
async def test_hostile_texts_of_a_log_are_texts_on_every_page(text: str, tmp_path: Path) -> None:
    fleet = RecordedFleet(policy_set(prefill_window_tokens=900), seed=11, failing=True, limited=True).live(400)
    entries = hostile_log(fleet.write_all().entries, policies_too=True, text=text)
    file = written(entries, tmp_path)
    source, pages = await read(file), Pages()
    console = PageViews(source, Actions(None), NoJobs(str(file), None, recorded=True, wall=time.monotonic))
    newest = [record.id for record in source.observer.requests.newest_first()][:3]

    for path in (*PATHS, *(f"/requests/{request}" for request in newest)):
        name, view = console.view(path, {})
        page = pages.render(name, view, status=console.status(), query={})
        parts = patch(None, pages.parts(name, view, status=console.status(), query={})) or b""

        for shown in (page, parts.decode()):
            assert "<script>alert" not in shown
            assert " onload='" not in shown
            assert not any(character in shown for character in "\x1b\x07\x9b\u202e\u2066\u200b")
        assert page.count("<script") == pages.render(name, view, status=console.status(), query={}).count(
            '<script src="/static/'
        )
