"""`pointsman tap`: one readable line for each event, and only those that were asked for."""

import json
from typing import get_args

import pytest

from pointsman.adapters.clocks import ScaledClock
from pointsman.contracts.codec import LogEvent, encode
from pointsman.contracts.decisions import Candidate, RequestGranted, RequestMigrated, RequestPlaced
from pointsman.contracts.fleet import InstanceProbed
from pointsman.contracts.subjects import subject_of
from pointsman.ports import LogEntry, LogReset
from pointsman.primitives import ANCHOR_UNIX_SECONDS, Epoch, InstanceId, PoolName, RequestId
from pointsman_cli.history.time_options import Moment
from pointsman_cli.tap.command import Printer, follow_log
from pointsman_cli.tap.event_lines import STYLES, details, line, reset_line
from pointsman_cli.tap.filters import BadPatternError, Filter, subject_pattern
from pointsman_lab.memory.log import MemoryBroker
from tests.support.events import finished, joined, removed, reported, stored

POOL = PoolName("default")
ENGINE_1, ENGINE_2 = InstanceId("engine-1"), InstanceId("engine-2")


def placed(request: str = "r-1") -> RequestPlaced:
    candidates = [
        Candidate(instance=i, hit_blocks=h, uncached_tokens=u, queue_seconds=0.1, prefill_seconds=0.3, predicted_ttft=t)
        for i, h, u, t in ((ENGINE_1, 12, 90, 0.4), (ENGINE_2, 0, 858, 1.25))
    ]
    return RequestPlaced(
        at=0.0, request=RequestId(request), instance=ENGINE_1, hit_blocks=12, uncached_tokens=90, queue_seconds=0.1,
        prefill_seconds=0.3, predicted_ttft=0.4, policy="dualmap", settings={}, reason="more of it cached", candidates=candidates,
    )  # fmt: skip


def entry(event: LogEvent, sequence: int = 1) -> LogEntry:
    return LogEntry(sequence, subject_of(POOL, event), encode(event), event)


def pattern(text: str, subject: str) -> bool:
    return subject_pattern(text)[1].matches(subject)


# --- Wording ---


def test_a_decision_shows_the_choice_its_numbers_and_the_others() -> None:
    assert details(placed()) == (
        "-> engine-1  hit 12 blocks, 90 tokens to compute, TTFT 0.400 s (queue 0.100 s, prefill 0.300 s)  "
        "dualmap: more of it cached  | engine-2 1.250 s hit 0"
    )


def test_keys_are_shown_as_a_number_of_blocks() -> None:
    event = stored("engine-1", 5, [1, 2])

    assert details(event) == "2 blocks, seq 5"
    assert details(removed("engine-1", 6, [1])) == "1 block, seq 6"


def test_a_line_has_wall_time_sequence_short_subject_and_type() -> None:
    event = reported("engine-1", 7, [1], at=ANCHOR_UNIX_SECONDS + 20 * 1.5)

    shown = line(entry(event, 42), speed=20.0).plain

    assert shown[5:].startswith(":01.500       42  fleet.engine-1        InstanceReported  0 running, 0 waiting, KV 0%")


def test_what_does_not_decode_and_a_reset_are_shown_as_such() -> None:
    broken = LogEntry(9, "pm.default.kv.engine-1", b"?", None, "no JSON")

    assert "does not decode: no JSON" in line(broken, speed=1.0).plain
    assert "starts again at 3: recreated" in reset_line(LogReset(3, "recreated")).plain


def test_styles_are_for_events_that_exist() -> None:
    assert set(STYLES) <= set(get_args(LogEvent))


# --- Choosing ---


@pytest.mark.parametrize(
    ("text", "subject", "fits"),
    [
        ("", "pm.default.kv.engine-1", True),
        ("kv", "pm.default.kv.engine-1", True),
        ("kv", "pm.default.fleet.engine-1", False),
        ("kv.*", "pm.default.kv.engine-1", True),
        ("*.engine-1", "pm.default.fleet.engine-1", True),
        ("request.>", "pm.default.request.abc", True),
        (">", "pm.default.scale", True),
        ("scale", "pm.default.scale", True),
        ("scale.>", "pm.default.scale", False),
        ("pm.default.kv.engine-1", "pm.default.kv.engine-1", True),
        ("pm.default.kv.engine-1", "pm.default.kv.engine-10", False),
        ("pm.>", "pm.default.kv.engine-1", True),
        ("pm.*.kv.*", "pm.default.kv.engine-1", True),
    ],
)
def test_subjects_match_as_in_nats(text: str, subject: str, fits: bool) -> None:
    assert pattern(text, subject) is fits


def test_the_log_is_asked_for_no_more_than_a_pattern_can_match() -> None:
    def kinds(text: str) -> tuple[str, ...]:
        return subject_pattern(text)[1].kinds

    assert kinds("") == kinds(">") == kinds("*.engine-1") == ()
    assert kinds("kv.*") == kinds("kv") == ("kv",)
    assert kinds("pm.default.kv.engine-1") == ("kv.engine-1",)
    assert Filter(request="abc").kinds == ("request",)
    assert subject_pattern("pm.other.kv.*")[0] == "other"


def test_filters_by_type_request_and_instance_must_all_fit() -> None:
    moved = RequestMigrated(
        at=0.0, request=RequestId("r-2"), source=ENGINE_1, instance=ENGINE_2, hit_blocks=0, uncached_tokens=1,
        prefill_seconds=0.1, predicted_ttft=0.1, reason="overloaded",
    )  # fmt: skip
    events: list[LogEvent] = [stored("engine-1", 1, [1]), removed("engine-2", 1, [1]), placed("r-1"), moved]

    def shown(chosen: Filter) -> list[LogEvent | None]:
        return [e.event for e in map(entry, events) if chosen.matches(e)]

    assert shown(Filter()) == events
    assert shown(Filter(types=["blocks*"])) == events[:2]
    assert shown(Filter(request="r-2")) == shown(Filter(request="-2")) == [moved]
    assert shown(Filter(instance="engine-1")) == [events[0], events[2], moved]
    assert shown(Filter(instance="engine-1", types=["RequestPlaced"])) == [events[2]]


@pytest.mark.parametrize("text", ["kv..x", ">.kv", "kv.>.x", ".kv"])
def test_a_subject_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(BadPatternError, match="not a subject"):
        subject_pattern(text)


def test_a_type_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(BadPatternError, match="no event is a Blocked; there are: ApiKeyChanged, "):
        Filter(types=["Blocked"])


# --- Following ---


async def test_a_log_is_printed_to_its_end_as_json_with_events_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    log = MemoryBroker(POOL).client(ScaledClock(), name="test").log
    for event in (
        joined("engine-1"),
        placed("r-1"),
        RequestGranted(at=0.0, request=RequestId("r-1"), instance=ENGINE_1),
    ):
        await log.append(event)
    printer = Printer(1.0, Filter(request="r-1"), as_json=True)

    await follow_log(log, printer, since=Moment(sequence=1), until=Moment())

    rows = [json.loads(row) for row in capsys.readouterr().out.splitlines()]
    assert [(row["sequence"], row["subject"], row["event"]["type"]) for row in rows] == [
        (2, "pm.default.request.r-1", "RequestPlaced"),
        (3, "pm.default.request.r-1", "RequestGranted"),
    ]


async def test_following_starts_at_since_and_ends_at_until(capsys: pytest.CaptureFixture[str]) -> None:
    log = MemoryBroker(POOL).client(ScaledClock(), name="test").log
    for number in range(5):
        await log.append(stored("engine-1", number + 1, [number]))
    printer = Printer(1.0, Filter(), as_json=False)

    await follow_log(log, printer, since=Moment(sequence=3), until=Moment(sequence=4))

    assert [row.split()[1] for row in capsys.readouterr().out.splitlines()] == ["3", "4"]


async def test_an_empty_log_without_following_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    log = MemoryBroker(POOL).client(ScaledClock(), name="test").log

    await follow_log(log, Printer(1.0, Filter(), as_json=False), since=Moment(sequence=1), until=Moment())

    told = capsys.readouterr()
    assert told.out == ""
    assert told.err == "no entry of the log is between --since and --until: it is empty\n"


@pytest.mark.parametrize(
    ("since", "until"),
    [
        (Moment(sequence=99_999_999), Moment()),
        (Moment(sequence=3), Moment(sequence=2)),
        (Moment(at=1e9), Moment()),
        (Moment(sequence=1), Moment(at=-1.0)),
    ],
)
async def test_a_span_without_entries_is_told_with_what_the_log_has(
    since: Moment, until: Moment, capsys: pytest.CaptureFixture[str]
) -> None:
    log = MemoryBroker(POOL).client(ScaledClock(), name="test").log
    for number in range(5):
        await log.append(stored("engine-1", number + 1, [number]))

    await follow_log(log, Printer(1.0, Filter(), as_json=True), since=since, until=until)

    told = capsys.readouterr()
    assert told.out == ""
    assert told.err == "no entry of the log is between --since and --until: it has entries 1 to 5\n"


async def test_a_filter_that_lets_nothing_through_is_told_apart_from_an_empty_span(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = MemoryBroker(POOL).client(ScaledClock(), name="test").log
    await log.append(joined("engine-1"))

    await follow_log(
        log, Printer(1.0, Filter(request="nosuch"), as_json=False), since=Moment(sequence=1), until=Moment()
    )

    assert capsys.readouterr() == ("", "entries are there, but none of them matches\n")


def test_an_end_shows_the_engines_own_counts() -> None:
    counts = {"prompt_tokens": 900, "completion_tokens": 10, "cached_tokens": 832}
    event = finished("r", ENGINE_1, at=0.0, e2e=12.0, ttft=0.5, tpot=0.0305, **counts)

    assert details(event) == "engine-1  900 tokens (832 cached), 10 out, TTFT 0.500 s, TPOT 30.5 ms, end-to-end 12.0 s"


@pytest.mark.parametrize(
    ("parity", "detail", "said"),
    [
        (True, "the keys of a chat agree", "the keys of a chat agree"),
        (True, "", "keys agree"),
        (False, "check --block-tokens", "keys differ: check --block-tokens"),
    ],
)
def test_a_probe_says_once_whether_the_keys_agree(parity: bool, detail: str, said: str) -> None:
    probed = InstanceProbed(at=1.0, instance=ENGINE_1, epoch=Epoch(1), parity=parity, detail=detail)

    shown = details(probed)

    assert shown == said
