"""Explaining a request needs the part of the log around it, and says the same as with all of it."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from typing_extensions import override

from pointsman.contracts.decisions import LeaderElected
from pointsman.contracts.requests import RequestArrived, RequestEvent, RequestFinished
from pointsman.policies.policy_set import policy_set
from pointsman.ports import LogEntry
from pointsman.primitives import RequestId, Sequence, Term
from pointsman.simulation.replay import BaseState, pool_settings
from pointsman.simulation.replay.folding import fold
from pointsman_cli.explain import lookup, window
from pointsman_cli.explain.lookup import Found, request_named
from pointsman_cli.explain.page import timeline_as_json
from pointsman_cli.explain.timeline import timeline_of
from pointsman_cli.explain.window import timeline_around
from pointsman_cli.history.bundle import BundleHistory
from pointsman_cli.history.entries import NotInLogError
from pointsman_cli.history.sources import Header, History, open_history
from pointsman_cli.history.start_point import StartPoint
from pointsman_cli.main import main
from tests.support.commands import told_by, written
from tests.support.recorded_log import renumbered
from tests.support.served_log import ServedLog

CHECKPOINT_EVERY = 400


@pytest.fixture(scope="module")
def entries() -> list[LogEntry]:
    return ServedLog(requests=240, pace={"engine-2": 6.0}, gap=0.25, policies=policy_set(routing="round_robin")).entries


@pytest.fixture
def bundle(entries: list[LogEntry], tmp_path: Path) -> Path:
    return written(entries, tmp_path)


@pytest.fixture
def checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """One every CHECKPOINT_EVERY entries, as a running fleet has its newest."""

    def known_before(history: BundleHistory, sequence: Sequence) -> BaseState | None:
        as_of = (sequence - 1) // CHECKPOINT_EVERY * CHECKPOINT_EVERY
        if as_of <= 0:
            return None
        return BaseState(fold(history, settings=history.settings, until=lambda e: e.sequence > as_of), policy_set())

    monkeypatch.setattr(BundleHistory, "known_before", known_before)
    monkeypatch.setattr(window, "BEFORE_ENTRIES", 100)


@pytest.mark.usefixtures("checkpoints")
def test_a_part_of_the_log_tells_the_same_of_a_request_as_all_of_it(entries: list[LogEntry], bundle: Path) -> None:
    settings, from_checkpoints = pool_settings(entries), 0
    for entry, request in first_entries(entries)[::40]:
        read: list[Sequence] = []
        with open_history(str(bundle)) as history:

            def reading(start: Sequence, history: History = history, read: list[Sequence] = read) -> Iterable[LogEntry]:
                read.append(start)
                return history.entries(start)

            timeline = timeline_around(history, Found(request, entry.sequence), reading)

        as_of = max(0, (entry.sequence - 101) // CHECKPOINT_EVERY * CHECKPOINT_EVERY)
        assert timeline_as_json(timeline) == timeline_as_json(timeline_of(entries, request, settings))
        assert set(read) == {as_of + 1}
        assert (f"begins behind entry {as_of:,}" in timeline.note) == bool(as_of)
        from_checkpoints += bool(as_of)
    assert from_checkpoints > 3


def test_what_a_superseded_leader_wrote_does_not_count_where_its_successor_was_elected_before(
    entries: list[LogEntry],
) -> None:
    settings, request = pool_settings(entries), first_entries(entries)[-1][1]
    elected = next(entry.event for entry in entries if isinstance(entry.event, LeaderElected))
    successor = msgspec.structs.replace(elected, term=Term(elected.term + 1), stamp=None)
    log = renumbered([*entries[:500], msgspec.structs.replace(entries[0], event=successor), *entries[500:]])
    base = fold(log, settings=settings, until=lambda entry: entry.sequence > 600)

    timeline = timeline_of(log[600:], request, settings, base=StartPoint(BaseState(base, policy_set()), ""))

    stamped = {
        entry.sequence for entry in timeline.entries if entry.event is not None and entry.event.stamp is not None
    }
    assert timeline.fenced == stamped != set()


def test_what_came_long_after_its_end_is_not_read(
    entries: list[LogEntry], bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window, "BEYOND_ENTRIES", 30)
    end = next(entry for entry in entries if isinstance(entry.event, RequestFinished))
    assert isinstance(end.event, RequestFinished)
    with open_history(str(bundle)) as history:
        timeline = timeline_around(history, Found(end.event.request, 1), history.entries)

    assert timeline.last_at == max(entry.event.at for entry in entries[: end.sequence + 30] if entry.event is not None)


def test_a_recent_request_of_a_large_log_is_found_from_its_end(entries: list[LogEntry]) -> None:
    arrival = next(entry.event for entry in entries if isinstance(entry.event, RequestArrived))

    class Large(History):
        """A request in each entry; `read`: how many entries."""

        origin, header, is_seekable, read = "", Header(first=1, last=1_000_000), True, 0

        @override
        def entries(self, start: Sequence = 1) -> Any:
            for sequence in range(start, self.header.last + 1):
                self.read += 1
                event = msgspec.structs.replace(arrival, request=RequestId(f"{sequence:024x}"))
                yield LogEntry(sequence, "", b"", event)

    def found(history: Large, text: str) -> tuple[Sequence, int]:
        return request_named(history, text, history.entries).sequence, history.read

    assert found(Large(), f"{999_000:024x}") == (999_000, 49_000)  # of the last 50,000
    assert found(Large(), f"{800_123:024x}") == (800_123, 100_123)
    read_forward = Large()
    read_forward.is_seekable = False
    assert found(read_forward, f"{9_000:024x}") == (9_000, 9_000)
    nowhere = Large()
    nowhere.header = Header(first=1, last=300_000)
    with pytest.raises(NotInLogError):
        found(nowhere, "f" * 24)
    assert nowhere.read <= nowhere.header.last + 10, "each entry once, and one behind each part"


def test_reading_from_the_end_finds_what_reading_forward_finds(
    entries: list[LogEntry], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by what the client sent, and where the log has no arrival."""
    monkeypatch.setattr(lookup, "RECENT_ENTRIES", 7)
    names: dict[RequestId, RequestId] = {}
    renamed: list[LogEntry] = []
    for entry in entries:
        event = entry.event
        if isinstance(event, RequestEvent):
            number = int(event.request.rpartition("-")[2])
            own = names.setdefault(event.request, RequestId(f"{number:024x}"))
            if isinstance(event, RequestArrived):
                if number % 5 == 0:
                    continue
                event = msgspec.structs.replace(event, client_request_id=f"{number:08x}" * 3)
            event = msgspec.structs.replace(event, request=own)
        renamed.append(LogEntry(entry.sequence, entry.subject, entry.payload, event))

    class Part(History):
        origin, header, is_seekable = "", Header(first=renamed[0].sequence, last=renamed[-1].sequence), True

        @override
        def entries(self, start: Sequence = 1) -> Any:
            return (entry for entry in renamed if entry.sequence >= start)

    def found(text: str) -> Found:
        return request_named(history, text, history.entries)

    history = Part()
    first = {request: entry.sequence for entry, request in reversed(first_entries(renamed))}
    assert {request: found(request).sequence for request in first} == first
    sent = {e.event.client_request_id: e.event.request for e in renamed if isinstance(e.event, RequestArrived)}
    assert {text: found(text).request for text in sent} == sent
    assert len(sent) < len(first)


def test_the_slowest_since_a_moment_arrived_since_then(entries: list[LogEntry], bundle: Path) -> None:
    middle = entries[len(entries) // 2].sequence
    arrived = {e.event.request for e in entries if isinstance(e.event, RequestArrived) and e.sequence >= middle}
    ttft = {e.event.request: e.event.ttft for e in entries if isinstance(e.event, RequestFinished)}

    def slowest(*options: str) -> list[RequestId]:
        told = told_by("explain", "--from", str(bundle), "--slowest", "20", *options)
        return [RequestId(row["request"]) for row in told["slowest"]]

    found = slowest("--since", str(middle))

    assert [ttft[request] for request in found] == sorted(
        (ttft[request] for request in arrived & ttft.keys()), reverse=True
    )[:20]
    assert set(found) <= arrived
    assert not set(slowest()) <= arrived


def test_since_is_for_the_slowest(bundle: Path) -> None:
    told = CliRunner().invoke(main, ["explain", "--from", str(bundle), "r-1", "--since", "5"])

    assert told.exit_code == 2
    assert "--since is for --slowest" in told.stderr


def first_entries(entries: list[LogEntry]) -> list[tuple[LogEntry, RequestId]]:
    first: dict[RequestId, LogEntry] = {}
    for entry in entries:
        if isinstance(entry.event, RequestEvent):
            first.setdefault(entry.event.request, entry)
    return [(entry, request) for request, entry in first.items()]
