"""A log on a real nats-server that has lost its beginning: what was known then comes from a checkpoint."""

import asyncio
import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nats
import pytest
from click.testing import CliRunner

from pointsman.adapters.clocks import ScaledClock
from pointsman.contracts.decisions import RequestPlaced
from pointsman.contracts.permissions import BusRole, BusUser
from pointsman.contracts.subjects import stream_name
from pointsman.policies.policy_set import policy_set
from pointsman.ports import CheckpointLabel, LogEntry
from pointsman.runtime.checkpoint_fingerprint import checkpoint_form, entry_digest
from pointsman.runtime.embedded_nats import start_nats
from pointsman.runtime.health import HealthBoard
from pointsman.runtime.log_connection import open_link
from pointsman.runtime.settings import FleetSettings
from pointsman.simulation.replay import fold
from pointsman.state.checkpoint import encode_state
from pointsman.state.state import State
from pointsman_cli.history.bundle import write_bundle
from pointsman_cli.history.entries import Header
from pointsman_cli.history.sources import HistoryError, open_history
from pointsman_cli.main import main
from tests.support.commands import told_by
from tests.support.recorded_log import POOL, SETTINGS, RecordedFleet

POLICIES = policy_set(prefill_window_tokens=900)
GONE, OLDEST, NEWEST = 250, 300, 350
"""Entries that retention has dropped, and what the two checkpoints are of."""


@pytest.fixture(scope="module")
def entries() -> list[LogEntry]:
    fleet = RecordedFleet(POLICIES, seed=7).live(500)
    fleet.take_over()
    return fleet.live(300).write_all().entries


@pytest.fixture(scope="module")
def live(entries: list[LogEntry], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The options that name the log on its server."""
    directory = tmp_path_factory.mktemp("retention")
    with asyncio.Runner() as runner:
        server = runner.run(start_nats(directory / "nats"))
        try:
            runner.run(_fill(server.url, entries))
            yield ("--from", server.url)
        finally:
            runner.run(server.stop())


@pytest.fixture(scope="module")
def whole(entries: list[LogEntry], tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The options that name the same log with its beginning."""
    file = tmp_path_factory.mktemp("whole") / "whole.pmlog"
    write_bundle(file, Header(pool=POOL, first=1, last=len(entries), entries=len(entries)), entries)
    return ("--from", str(file))


async def _fill(url: str, entries: list[LogEntry]) -> None:
    """Write the log, take checkpoints of it, and drop its beginning."""
    async with open_link(
        FleetSettings(nats=url), ScaledClock(1.0), HealthBoard(), name="test", user=BusUser(BusRole.SCHEDULER)
    ) as link:
        assert entries[0].event is not None
        assert await link.log.append(entries[0].event) == 1
        client = await nats.connect(url)
        stream = client.jetstream()
        for entry in entries[1:]:
            assert (await stream.publish(entry.subject, entry.payload)).seq == entry.sequence
        identity = (await link.log.extent()).identity
        form = checkpoint_form(State(SETTINGS, POLICIES.trackers()))
        for as_of in (OLDEST, NEWEST):
            state = fold(entries[:as_of], settings=SETTINGS, trackers=POLICIES.trackers())
            label = CheckpointLabel(identity=identity, as_of=as_of, entry=entry_digest(entries[as_of - 1]), form=form)
            await link.checkpoints.save(label, encode_state(state))
        await client.close()
    await _keep(url, len(entries) - GONE)


async def _keep(url: str, most: int) -> None:
    """Have retention drop all but the newest entries."""
    client = await nats.connect(url)
    stream = client.jetstream()
    config = (await stream.stream_info(stream_name(POOL))).config
    await stream.update_stream(config.evolve(max_msgs=most))
    await client.close()


def _answer(*arguments: str) -> dict[str, Any]:
    """Of a command that may have found something; without what depends on where and when it is asked."""
    result = CliRunner().invoke(main, [*arguments, "--json"])
    assert result.exit_code in (0, 1), result.output[-3000:]
    told = json.loads(result.stdout.replace(f" --from {arguments[-1]}", ""))
    if arguments[0] == "doctor":  # no scheduler runs, which a file does not tell
        told["findings"] = [found for found in told["findings"] if found["what"] != "no scheduler answers"]
        del told["verdict"]  # the worst of them
    return {name: value for name, value in told.items() if name not in ("origin", "bench")}


def _without_place(told: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in told.items() if name not in ("origin", "beginning")}


def test_what_is_decided_after_the_oldest_checkpoint_by_a_leader_elected_after_it_is_verified(
    live: tuple[str, str], whole: tuple[str, str]
) -> None:
    told, complete = (told_by("replay", "--verify", *place) for place in (live, whole))

    verdict, both = told["verdict"], complete["verdict"]
    begun = [decision for decision in both["terms"] if decision["term"] == 2]
    assert told["beginning"] == (
        f"the log begins at entry {GONE + 1}; this begins behind entry {OLDEST}, with a checkpoint of what was known then"
    )
    assert (verdict["known_as_of"], told["first"], told["last"]) == (OLDEST, OLDEST + 1, complete["last"])
    assert (both["unchecked"], verdict["different"], verdict["problems"]) == ({}, 0, both["problems"])
    assert verdict["terms"] == begun
    assert verdict["identical"] > 100
    assert list(verdict["unchecked"]) == [
        f"term 1 began before entry {OLDEST + 1}: in what order its leader applied what came before is gone"
    ]


def test_a_pool_that_has_no_log_is_given_none_by_who_only_reads(live: tuple[str, str]) -> None:
    for _ in range(2):
        result = CliRunner().invoke(main, ["state", "--pool", "elsewhere", *live])

        assert result.exit_code == 2
        assert "is not there" in result.output


def test_the_fleet_at_a_moment_behind_the_checkpoint_is_that_of_the_whole_log(
    live: tuple[str, str], whole: tuple[str, str]
) -> None:
    for at in (OLDEST, OLDEST + 200):
        told, complete = (told_by("state", "--until", str(at), *place) for place in (live, whole))

        assert _without_place(told) == _without_place(complete)


def test_a_moment_before_the_checkpoint_is_shown_with_what_is_missing_and_one_before_the_log_is_refused(
    live: tuple[str, str],
) -> None:
    before = told_by("state", "--until", str(OLDEST - 10), *live)
    refused = CliRunner().invoke(main, ["state", "--until", str(GONE - 10), *live])

    assert "what was known before is missing" in before["beginning"]
    assert refused.exit_code == 2
    assert f"begins at entry {GONE + 1}; what came before is gone" in refused.output


def test_a_log_that_loses_its_head_while_it_is_read_gives_what_is_left(entries: list[LogEntry], tmp_path: Path) -> None:
    with asyncio.Runner() as runner:
        server = runner.run(start_nats(tmp_path / "nats"))
        try:
            runner.run(_fill(server.url, entries))
            with open_history(server.url) as history:
                runner.run(_keep(server.url, len(entries) - GONE - 20))
                read, behind = list(history.entries(GONE)), history.entries(GONE + 10)

                assert [entry.sequence for entry in read] == list(range(GONE + 21, len(entries) + 1))
                with pytest.raises(HistoryError, match="changed while it was read"):
                    next(behind)
        finally:
            runner.run(server.stop())


def test_what_was_read_of_a_log_and_left_has_ended_with_the_command(live: tuple[str, str]) -> None:
    """The collector finds it while an event loop runs, and pytest fails of what it then cannot end."""
    with open_history(live[1]) as history:
        left: list[Any] = [iter(history)]
        next(left[0])
        left.append(left)
    del left

    asyncio.run(_collect())


async def _collect() -> None:
    gc.collect()


def test_an_export_carries_the_checkpoint_and_answers_as_the_log_itself(
    entries: list[LogEntry], live: tuple[str, str], tmp_path: Path
) -> None:
    out, again = tmp_path / "incident.pmlog", tmp_path / "again.pmlog"
    request = next(e.event.request for e in entries[OLDEST:] if isinstance(e.event, RequestPlaced))
    asked = [("replay", "--verify"), ("state", "--until", str(OLDEST + 1)), ("doctor",), ("explain", request)]

    exported = told_by("export", str(out), *live)
    copied = told_by("export", str(again), "--from", str(out))

    assert (exported["entries"], exported["checkpoint"]) == (len(entries) - GONE, OLDEST)
    assert (copied["entries"], copied["checkpoint"]) == (len(entries) - GONE, OLDEST)
    for question in asked:
        answers = [_answer(*question, *place) for place in (live, ("--from", str(out)), ("--from", str(again)))]
        assert answers[0]["beginning"].endswith(f"behind entry {OLDEST}, with a checkpoint of what was known then")
        assert answers[1:] == [answers[0]] * 2


def test_an_export_up_to_a_moment_before_the_checkpoint_goes_without_it(live: tuple[str, str], tmp_path: Path) -> None:
    out = tmp_path / "incident.pmlog"

    exported = told_by("export", str(out), "--until", str(OLDEST - 10), *live)
    told, itself = (told_by("state", "--until", str(OLDEST - 20), *place) for place in (("--from", str(out)), live))

    assert (exported["entries"], exported["checkpoint"]) == (OLDEST - 10 - GONE, None)
    assert "what was known before is missing" in told["beginning"]
    assert _without_place(told) == _without_place(itself)


def test_the_story_of_a_request_behind_the_checkpoint_is_that_of_the_whole_log(
    entries: list[LogEntry], live: tuple[str, str], whole: tuple[str, str]
) -> None:
    placed = (e.event for e in entries if isinstance(e.event, RequestPlaced))
    request = [event.request for event in placed if event.stamp and event.stamp.term == 2][10]

    told, complete = (told_by("explain", request, *place) for place in (live, whole))

    assert told["decisions"]
    assert _without_place(told) == _without_place(complete)
