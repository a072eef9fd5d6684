"""Logs that are kept: bundles, archives, moments, and what the commands say of them."""

import asyncio
import gzip
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from click.testing import CliRunner, Result, _NamedTextIOWrapper
from typing_extensions import override

from pointsman.contracts.codec import LogEvent, encode
from pointsman.contracts.decisions import LeaderElected, RequestPlaced
from pointsman.contracts.envelope import Stamp
from pointsman.contracts.subjects import subject_of
from pointsman.policies.policy_set import policy_set
from pointsman.ports import LogEntry, LogExtent
from pointsman.primitives import PoolName, Term, wall_time_of
from pointsman.simulation.replay import BaseState, fold, verify
from pointsman.state.checkpoint import state_digest
from pointsman_cli.history.bundle import write_bundle
from pointsman_cli.history.sources import Header, History, HistoryError, open_history
from pointsman_cli.history.start_point import beginning_at
from pointsman_cli.history.state_command import describe
from pointsman_cli.history.time_options import Moment, UpTo, moment_in, shortly_before
from pointsman_cli.main import main
from pointsman_cli.tap.command import Printer
from pointsman_cli.tap.filters import Filter
from pointsman_recorder.archive import Batch, open_archive
from tests.support.commands import written
from tests.support.events import reported
from tests.support.recorded_log import RecordedFleet, renumbered, rewritten


@pytest.fixture(scope="module")
def entries() -> list[LogEntry]:
    fleet = RecordedFleet(policy_set(prefill_window_tokens=900), seed=11).live(300)
    fleet.take_over()
    return fleet.live(300).write_all().entries


@pytest.fixture
def bundle(entries: list[LogEntry], tmp_path: Path) -> Path:
    return written(entries, tmp_path)


def archived(file: Path, *logs: tuple[str, int, list[LogEntry], str]) -> str:
    """An archive as the recorder leaves it. Each log has a name, a branch, entries, and the log it goes on from."""
    asyncio.run(_archive(f"sqlite+aiosqlite:///{file}", logs))
    return str(file)


async def _archive(url: str, logs: tuple[tuple[str, int, list[LogEntry], str], ...]) -> None:
    async with open_archive(url) as archive:
        await archive.prepare()
        for log, branch, entries, after in logs:
            identity = log.partition("#")[0]
            batch = Batch(logs=[{"log": log, "identity": identity, "branch": branch}])
            if after:
                gap = {
                    "log": log,
                    "sequence": entries[0].sequence,
                    "after_log": after,
                    "after_sequence": 1,
                    "reason": "cut",
                }
                batch.gaps.append(gap)
            for entry in entries:
                row: dict[str, Any] = {"log": log, "sequence": entry.sequence, "subject": entry.subject}
                if entry.event is None:
                    batch.dead_letters.append(row | {"payload": entry.payload, "problem": entry.problem})
                else:
                    told = {"at": entry.event.at, "type": type(entry.event).__name__, "instance": None, "request": None}
                    batch.events.append(row | told | {"payload": entry.payload.decode()})
            await archive.store(batch)


def told(entries: list[LogEntry]) -> list[tuple[int, str, bytes]]:
    return [(entry.sequence, entry.subject, entry.payload) for entry in entries]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


# --- Sources ---


def test_bundle_and_archive_give_the_very_entries_that_were_written_and_so_the_same_answers(
    entries: list[LogEntry], bundle: Path, tmp_path: Path
) -> None:
    archive = archived(tmp_path / "archive.sqlite", ("2026-11-21T07", 1, entries, ""))

    for place in (str(bundle), archive, f"sqlite:///{archive}", f"sqlite+aiosqlite:///{archive}"):
        with open_history(place) as history:
            assert told(list(history)) == told(entries), place
            assert [e.event for e in history.entries(50)] == [e.event for e in entries[49:]]
            assert str(verify(history)) == str(verify(entries))
            assert describe(fold(history)) == describe(fold(entries))


def test_the_entries_that_a_stream_lost_are_left_out_and_those_before_them_are_read(
    entries: list[LogEntry], tmp_path: Path
) -> None:
    lost, went_on = entries[:120], entries[100:]
    file = archived(tmp_path / "a.sqlite", ("2026", 1, lost, ""), ("2026#2", 2, went_on, "2026"), ("2025", 1, lost, ""))

    with open_history(file) as newest, open_history(file, pool="2026") as first:
        assert told(list(newest)) == told(entries)
        assert newest.header.entries == len(entries)
        assert told(list(first)) == told(lost)
    with pytest.raises(HistoryError, match=r"no log 2027; it has: 2025, 2026, 2026#2"), open_history(file, pool="2027"):
        pass


def test_a_url_with_a_port_that_is_none_is_refused_with_an_example() -> None:
    url = "postgresql+asyncpg://u@host:54x2/db"
    with pytest.raises(HistoryError, match="is not an SQLAlchemy URL, such as"), open_history(url):
        pass


def test_what_tap_prints_can_be_read_too(entries: list[LogEntry], tmp_path: Path, capsys: Any) -> None:
    decoded = [entry for entry in entries if entry.event is not None]
    printer = Printer(1.0, Filter(), as_json=True)
    for entry in decoded:
        printer.show(entry)
    (tmp_path / "tap.jsonl").write_text(capsys.readouterr().out)

    with open_history(str(tmp_path / "tap.jsonl")) as history:
        assert told(list(history)) == told(decoded)


def test_a_bundle_says_whose_log_it_is_and_is_json_lines(entries: list[LogEntry], bundle: Path) -> None:
    lines = gzip.decompress(bundle.read_bytes()).splitlines()

    assert json.loads(lines[0])["header"]["pool"] == "default"
    assert json.loads(lines[1])["event"] == json.loads(entries[0].payload)
    assert json.loads(lines[-1]) == {"entries": len(entries), "last": entries[-1].sequence}


@pytest.mark.parametrize("kept", [0.5, 0.999])
def test_a_bundle_that_was_cut_off_is_refused(bundle: Path, kept: float) -> None:
    content = bundle.read_bytes()
    bundle.write_bytes(content[: int(len(content) * kept)])

    with pytest.raises(HistoryError, match="cut off"), open_history(str(bundle)) as history:
        list(history)


def test_lines_that_end_without_the_count_are_refused(bundle: Path) -> None:
    lines = gzip.decompress(bundle.read_bytes()).splitlines(keepends=True)
    bundle.write_bytes(b"".join(lines[:-1]))

    with pytest.raises(HistoryError, match="cut off"), open_history(str(bundle)) as history:
        list(history)


def test_what_is_no_log_is_refused_with_what_would_be_one(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing\n")

    for place, message in (
        (str(tmp_path / "notes.txt"), "neither an SQLite archive, nor what `pointsman export` writes"),
        (str(tmp_path / "none"), "there is no file"),
        (f"sqlite:///{tmp_path / 'none'}", "there is no archive"),
        ("mysql://", "cannot be read|asynchronous driver"),
    ):
        with pytest.raises(HistoryError, match=message), open_history(place):
            pass


# --- Moments ---


class Kept(History):
    """A log in memory."""

    def __init__(self, entries: list[LogEntry]) -> None:
        self.origin, self.header, self._entries = "memory", Header(), entries

    @override
    def entries(self, start: int = 1) -> Any:
        yield from self._entries[start - 1 :]


def test_a_moment_is_a_sequence_a_time_of_day_a_date_or_engine_time(entries: list[LogEntry]) -> None:
    history = Kept(entries)
    assert entries[0].event is not None
    began = entries[0].event.at
    local = click.DateTime(["%Y-%m-%dT%H:%M:%S"])

    assert moment_in(history, None) == Moment()
    assert moment_in(history, "4711") == Moment(sequence=4711)
    assert moment_in(history, f"@{began + 2.5}") == Moment(at=began + 2.5)
    dated = moment_in(history, "1970-01-02T03:04:05").at
    assert dated is not None
    assert wall_time_of(dated, 1.0) == local.convert("1970-01-02T03:04:05", None, None).timestamp()
    for text in ("yesterday", "25:10", "07:61:00", "0001-01-01T00:00+14:00", "9999-12-31T23:59-14:00"):
        with pytest.raises(click.BadParameter, match="is no moment: give a sequence"):
            moment_in(history, text)


def test_an_entry_that_the_log_does_not_have_is_no_moment_in_it(bundle: Path, entries: list[LogEntry]) -> None:
    for sequence in ("0", str(len(entries) + 1)):
        result = CliRunner().invoke(main, ["state", "--from", str(bundle), "--until", sequence])

        assert result.exit_code == 2
        assert f"begins at entry 1 and ends at entry {len(entries):,}" in result.output


def test_a_time_of_day_is_on_the_day_that_the_log_began_or_on_the_next(entries: list[LogEntry]) -> None:
    history = Kept(entries)
    assert entries[0].event is not None
    began = entries[0].event.at  # 1000 s after midnight UTC, whatever the time zone of this machine
    day = 24 * 3600.0

    moments = [moment_in(history, f"{hour:02}:59:59").at for hour in range(24)]

    assert all(at is not None and began <= at < began + day for at in moments)
    assert len(set(moments)) == 24


def test_a_time_of_day_of_a_running_fleet_is_the_last_one(entries: list[LogEntry]) -> None:
    """Its log may be a week long, and who is on call means today."""
    history = Kept(entries)
    history.extent = LogExtent("log", 1, len(entries))
    day, now = 24 * 3600.0, datetime.now(UTC).timestamp()

    moments = [moment_in(history, f"{hour:02}:30:15").at for hour in range(24)]

    assert all(at is not None and now - day - 60 < wall_time_of(at, 1.0) <= now + 60 for at in moments)
    assert len(set(moments)) == 24


def test_a_time_of_day_before_a_running_fleets_log_is_its_beginning_for_since_and_to_come_for_until() -> None:
    now = datetime.now(UTC).timestamp()
    joined = reported("engine-1", 0, [], at=now - 60.0)
    history = Kept([LogEntry.read(1, subject_of(PoolName("default"), joined), encode(joined))])
    history.extent = LogExtent("log", 1, 1)
    earlier = datetime.fromtimestamp(now - 7200.0, UTC).astimezone().strftime("%H:%M:%S")

    begin, end = moment_in(history, earlier, begins=True).at, moment_in(history, earlier).at

    assert begin is not None
    assert end is not None
    assert abs(wall_time_of(begin, 1.0) - (now - 7200.0)) < 2.0
    assert abs(wall_time_of(end, 1.0) - (now - 7200.0 + 24 * 3600.0)) < 2.0


def test_a_time_of_day_before_a_recorded_log_is_its_beginning_for_since(entries: list[LogEntry]) -> None:
    """Of an incident that began at 07:05 who says 07:00 does not mean the next morning."""
    assert entries[0].event is not None
    began = wall_time_of(entries[0].event.at, 1.0)
    earlier = datetime.fromtimestamp(began - 300.0, UTC).astimezone().strftime("%H:%M:%S")
    later = datetime.fromtimestamp(began + 2.0, UTC).astimezone().strftime("%H:%M:%S")

    before, within = (moment_in(Kept(entries), text, begins=True).at for text in (earlier, later))

    assert before is not None
    assert within is not None
    assert abs(wall_time_of(before, 1.0) - (began - 300.0)) < 2.0
    assert abs(wall_time_of(within, 1.0) - (began + 2.0)) < 2.0


def test_a_moment_ends_before_the_first_entry_behind_it(entries: list[LogEntry]) -> None:
    at = entries[200].event.at  # type: ignore[union-attr]
    state = fold(entries, until=Moment(at=at).passed())

    assert state.last_at <= at
    assert fold(entries, until=Moment(sequence=77).passed()).sequence == 77


class WithCheckpoints(Kept):
    def __init__(self, entries: list[LogEntry], places: list[int]) -> None:
        super().__init__(entries)
        self.header = Header(first=1, last=len(entries), entries=len(entries))
        self.places, self.began_at = places, [0]

    @override
    def known_before(self, sequence: int) -> BaseState | None:
        older = [place for place in self.places if place < sequence]
        return BaseState(fold(self._entries[: max(older)]), policy_set()) if older else None

    @override
    def entries(self, start: int = 1) -> Any:
        self.began_at.append(start)
        return super().entries(start)


@pytest.mark.parametrize(("since", "checkpoint"), [(50, 0), (101, 100), (300, 100), (401, 400), (520, 500)])
def test_a_reading_since_a_moment_begins_with_the_state_of_then(
    entries: list[LogEntry], since: int, checkpoint: int
) -> None:
    at = entries[since - 1].event.at  # type: ignore[union-attr]
    by_sequence, by_time = WithCheckpoints(entries, [100, 400, 500]), WithCheckpoints(entries, [100, 400, 500])

    known = beginning_at(by_sequence, Moment(sequence=since)).state
    then = beginning_at(by_time, Moment(at=at)).state

    assert known is not None
    assert state_digest(known) == state_digest(fold(entries[: since - 1]))
    assert by_sequence.began_at[-1] == checkpoint + 1
    assert then is not None
    assert state_digest(then) == state_digest(fold(entries, until=Moment(at=at).passed()))


@pytest.mark.parametrize("place", [0, 1, 199, 320])
def test_an_event_with_a_wrong_clock_moves_no_moment(entries: list[LogEntry], place: int) -> None:
    at = entries[300].event.at  # type: ignore[union-attr]
    whole = [entry.event for entry in UpTo(entries, Moment(at=at))]
    wrong = reported("engine-1", 0, [], at=at + 10 * 365 * 24 * 3600.0)
    history = Kept(_with_event(entries, wrong, place))
    moment = moment_in(history, f"@{at}")

    found = [entry.event for entry in UpTo(history, moment) if entry.event != wrong]
    begins = next(entry.event for entry in filter(moment.reached(), history))

    assert len(whole) > 200
    assert found == whole
    assert begins == entries[len(whole)].event
    assert moment_in(history, "23:59:59").at == moment_in(Kept(entries), "23:59:59").at


def test_a_checkpoint_that_an_event_with_a_wrong_clock_was_folded_into_is_not_behind_every_moment(
    entries: list[LogEntry],
) -> None:
    at = entries[300].event.at  # type: ignore[union-attr]
    history = Kept(_with_event(entries, reported("engine-1", 0, [], at=at + 1e9), 50))
    state = fold(history, until=Moment(sequence=100).passed())

    assert not moment_in(history, f"@{at}").is_behind(state, history)
    assert moment_in(history, f"@{entries[20].event.at}").is_behind(state, history)  # type: ignore[union-attr]


STAMP = Stamp(term=Term(1), number=1, as_of=1)


class Large(Kept):
    """A log of `count` entries at two a second, written as they are read; every tenth is a leader's, and every 37th is an
    hour ahead. `read`: how many."""

    is_seekable = True

    def __init__(self, count: int) -> None:
        super().__init__([])
        self.header, self.read = Header(first=1, last=count, entries=count), 0

    @override
    def entries(self, start: int = 1) -> Any:
        for sequence in range(start, self.header.last + 1):
            self.read += 1
            at = 1000.0 + sequence / 2 + 3600.0 * (sequence % 37 == 0)
            event = reported("engine-1", 0, [], at=at)
            if sequence % 10 == 0:
                event = msgspec.structs.replace(event, at=1000.0 + sequence / 2, stamp=STAMP)
            yield LogEntry(sequence, "", b"", event)


@pytest.mark.parametrize("seconds", [0.0, 100.0, 3_000.5, 49_999.0])
def test_a_large_log_is_read_from_shortly_before_a_moment(seconds: float) -> None:
    history = Large(100_000)
    moment = Moment(at=1000.0 + seconds, leader_at=1005.0)
    reached = moment.reached()
    expected = next(entry.sequence for entry in history if reached(entry))
    history.read = 0

    start = shortly_before(history, moment)
    found = next(filter(moment.reached(), history.entries(start)))

    assert found.sequence == expected
    assert history.read < 5_000
    history.is_seekable = False
    assert shortly_before(history, moment) == 1


def _with_event(entries: list[LogEntry], event: LogEvent, place: int) -> list[LogEntry]:
    planted = LogEntry.read(1, subject_of(PoolName("default"), event), encode(event))
    return renumbered([*entries[:place], planted, *entries[place:]])


def test_a_log_that_has_lost_every_election_says_that_its_settings_are_guessed(
    entries: list[LogEntry], tmp_path: Path
) -> None:
    elections = [number for number, entry in enumerate(entries) if isinstance(entry.event, LeaderElected)]
    places = {
        guessed: archived(tmp_path / f"{guessed}.sqlite", ("2026", 1, entries[elections[-1] + guessed :], ""))
        for guessed in (False, True)
    }
    request = next(e.event.request for e in reversed(entries) if isinstance(e.event, RequestPlaced))

    for guessed, place in places.items():
        bundle = str(tmp_path / f"{guessed}.pmlog")
        for command in (["export", bundle], ["state"], ["hit-rate"], ["explain", request], ["usage"]):
            result = CliRunner().invoke(main, [*command, "--from", place])
            assert ("settings are guessed" in " ".join(result.output.split())) == guessed, (command, result.output)
        read = run("state", "--from", bundle)
        assert ("settings are guessed" in " ".join(read.output.split())) == guessed


# --- Commands ---


def test_replay_verify_says_how_many_are_identical(bundle: Path, entries: list[LogEntry]) -> None:
    result = run("replay", "--from", str(bundle), "--verify")

    written = json.loads(run("replay", "--from", str(bundle), "--verify", "--json").stdout)
    count = written["verdict"]["decisions"]
    assert result.exit_code == 0, result.output
    assert f"decisions {count:,}, identical {count:,}, different 0" in result.stdout
    assert written["bench"]["entries"] == len(entries)
    assert written["bench"]["entries_per_cpu_second"] > 0


def test_replay_verify_shows_a_forged_decision_beside_the_real_one_and_fails(
    entries: list[LogEntry], tmp_path: Path
) -> None:
    sequence, event = next((e.sequence, e.event) for e in entries[300:] if isinstance(e.event, RequestPlaced))
    forged = msgspec.structs.replace(event, reason="because I say so")
    write_bundle(tmp_path / "forged", Header(), rewritten(entries, sequence, forged))

    result = run("replay", "--from", str(tmp_path / "forged"), "--verify")

    assert result.exit_code == 1
    assert "different 1" in result.stdout
    assert f"RequestPlaced (entry {sequence:,})" in result.stdout
    beside = next(line for line in result.stdout.splitlines() if "because I say so" in line)
    assert event.reason in beside


def test_state_at_a_sequence_is_the_fold_stopped_there(bundle: Path, entries: list[LogEntry]) -> None:
    result = run("state", "--from", str(bundle), "--until", "250", "--json")

    shown = json.loads(result.stdout)
    expected = json.loads(msgspec.json.encode(describe(fold(entries[:250]))))
    assert {name: shown[name] for name in expected} == expected
    table = run("state", "--from", str(bundle), "--until", "250").stdout
    assert expected["instances"]
    assert all(instance["instance"] in table for instance in expected["instances"])


def test_export_writes_what_replays_alike_and_replaces_nothing_unasked(bundle: Path, tmp_path: Path) -> None:
    out = tmp_path / "copy.pmlog"

    first = run("export", str(out), "--from", str(bundle), "--until", "300")
    second = run("export", str(out), "--from", str(bundle))

    assert first.exit_code == 0, first.output
    assert second.exit_code == 2
    assert "--force" in second.stderr
    with open_history(str(out)) as copy, open_history(str(bundle)) as original:
        assert told(list(copy)) == told(list(original))[:300]
        assert copy.header.pool_settings["block_tokens"] == 64
        assert copy.header.pool == "default"


def test_export_to_standard_output_is_the_log_and_nothing_else(bundle: Path, tmp_path: Path) -> None:
    out = tmp_path / "copy.pmlog"

    streamed = run("export", "-", "--from", str(bundle))
    out.write_bytes(streamed.stdout_bytes)

    assert streamed.exit_code == 0, streamed.output
    assert "standard output" in streamed.stderr
    with open_history(str(out)) as copy, open_history(str(bundle)) as original:
        assert told(list(copy)) == told(list(original))


def test_export_to_standard_output_refuses_what_would_mix_with_the_log(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_json = run("export", "-", "--from", str(bundle), "--json")
    monkeypatch.setattr(_NamedTextIOWrapper, "isatty", lambda _: True)
    on_terminal = run("export", "-", "--from", str(bundle))

    assert (with_json.exit_code, on_terminal.exit_code) == (2, 2)
    assert (with_json.stdout_bytes, on_terminal.stdout_bytes) == (b"", b"")
    assert "--json" in with_json.stderr
    assert "terminal" in on_terminal.stderr


def test_without_a_fleet_and_without_a_place_people_are_told_both(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    result = run("replay", "--verify")

    assert result.exit_code == 2
    assert "pointsman up" in result.stderr
    assert "--from .pointsman/archive.sqlite" in result.stderr
