"""What no honest writer writes: the boundary refuses it, and what passes the boundary ends nobody."""

import asyncio
import gzip
import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import msgspec
import pytest
from click.testing import CliRunner
from typing_extensions import override

from pointsman.adapters.clocks import ScaledClock
from pointsman.adapters.log_listener import LogListener
from pointsman.contracts.block_keys import pack_keys
from pointsman.contracts.cache import BlocksStored, CacheCleared, Run
from pointsman.contracts.codec import (
    EVENT_PARTS_MAX,
    NESTING_MAX,
    PAYLOAD_BYTES_MAX,
    REASON_LENGTH_MAX,
    SMALL_BYTES_MAX,
    TooLargeError,
    UndecodableError,
    UnwritableError,
    decode_command,
    decode_event,
    encode,
    unreadable,
)
from pointsman.contracts.commands import CancelRequest, CommandRefused, DescribeFleet, RouteRequest
from pointsman.contracts.decisions import LeaderElected, ScaleDecided, WritesLost
from pointsman.contracts.fleet import InstanceReported
from pointsman.contracts.reasons import CommandRefusal
from pointsman.contracts.subjects import (
    admin_subject,
    cache_subject,
    command_subject,
    fleet_subject,
    heartbeat_subject,
    leader_subject,
    subject_of,
)
from pointsman.policies.dispatch import Dispatcher
from pointsman.policies.policy_set import policy_set
from pointsman.policies.routing import ROUTING_POLICIES
from pointsman.ports import CommandTimeoutError, LogEntry, LogReset, Reply
from pointsman.primitives import BlockKey, Epoch, InstanceId, PoolName, RequestId, Term, WallSeconds
from pointsman.runtime.engine_keys import EngineKeys
from pointsman.runtime.health import HealthBoard
from pointsman.runtime.log_follower import LogFollower
from pointsman.simulation.replay import fold, verify
from pointsman.state.checkpoint import decode_state, encode_state
from pointsman.state.dead_letters import NEWEST_MAX
from pointsman.state.state import PoolSettings, State
from pointsman.state.trackers.base import Tracker
from pointsman.state.workload import Request
from pointsman_cli.main import main
from pointsman_cli.terminal import SafeConsole
from pointsman_ingress.engine.answer import EngineFailedError
from pointsman_ingress.engine.client import EngineClient, EngineRequest
from pointsman_lab.memory.log import MemoryBroker
from pointsman_worker.event_sequencer import portions
from tests.golden.samples import COMMANDS, EVENTS
from tests.support.commands import written
from tests.support.engine_urls import ANY_URL
from tests.support.events import joined, reported, route, stored
from tests.support.poison import bad_fields, bad_utf8, deep, mutated
from tests.support.recorded_log import RecordedFleet, fresh_state, random_log
from tests.support.waiting import eventually

POOL = PoolName("default")
ENGINE = InstanceId("engine-1")


def refusal(payload: bytes, decode: Any) -> str:
    """Why it does not decode; empty where it does."""
    try:
        decode(payload)
    except UndecodableError as error:
        return str(error)
    return ""


def accepted(payload: bytes, decode: Any) -> bool:
    """Whether it decodes. Where it does not, the reason is short and fit to print."""
    reason = refusal(payload, decode)
    assert len(reason) <= REASON_LENGTH_MAX
    assert reason.isprintable()
    return not reason


MAY_BE = re.compile(r"settings\.\w+ = 5|.*predicted_tpot = null|runs = \[.*|secret_proof = .{2,46}", re.DOTALL)
"""A setting may be any number, a pace may be unknown, runs are bounded by the size of a message, and a proof of any length
up to a digest's is compared."""


@pytest.mark.parametrize("message", [*EVENTS, *COMMANDS], ids=lambda message: type(message).__name__)
def test_no_field_of_any_message_takes_what_is_beyond_belief(message: Any) -> None:
    decode = decode_event if message in EVENTS else decode_command

    taken = [w for w, payload in bad_fields(message) if accepted(payload, decode) and not MAY_BE.fullmatch(w)]

    assert taken == []


def test_a_long_string_without_an_end_is_refused_at_once() -> None:
    """Minutes, where the time grows with the square of the length."""
    for hostile in (b"[" * 40 + b'\\"' * 500_000, b"[" * 40 + b'"' + b'\\"' * 500_000, b'"' * 900_000 + b"[" * 40):
        assert not accepted(hostile, decode_event)


@pytest.mark.parametrize("message", [*EVENTS, *COMMANDS], ids=lambda message: type(message).__name__)
def test_deep_bad_and_long_messages_are_refused_whatever_they_are(message: Any) -> None:
    decode = decode_event if message in EVENTS else decode_command
    good = encode(message)

    assert not accepted(deep(good), decode)
    assert not accepted(bad_utf8(good), decode)
    assert not accepted(good[:-1] + b',"x":"' + b" " * PAYLOAD_BYTES_MAX + b'"}', decode)


@pytest.mark.parametrize(
    "subject",
    [
        fleet_subject(POOL, ENGINE),
        heartbeat_subject(POOL, ENGINE),
        command_subject(POOL, "fleet"),
        admin_subject(POOL, "drain", "alice"),
        admin_subject(POOL, "keys", "alice"),
    ],
)
def test_what_workers_and_people_send_is_small(subject: str) -> None:
    is_event = subject == fleet_subject(POOL, ENGINE)
    good = encode(
        next(event for event in EVENTS if isinstance(event, InstanceReported)) if is_event else DescribeFleet()
    )
    decode = partial(decode_event if is_event else decode_command, subject=subject)

    assert accepted(good[:-1] + b',"x":"' + b" " * (SMALL_BYTES_MAX - len(good) - 7) + b'"}', decode)
    assert not accepted(good[:-1] + b',"x":"' + b" " * (SMALL_BYTES_MAX - len(good) - 6) + b'"}', decode)


def test_an_event_about_an_instance_that_readers_would_refuse_is_not_written() -> None:
    large = joined(ENGINE, adapters=["a" * 1000 + str(number) for number in range(600)])

    with pytest.raises(TooLargeError):
        encode(large)


def test_events_of_caches_and_routed_requests_may_be_larger() -> None:
    """1 MiB and 8 MiB. The former was written by releases before this one, in whose logs it counts."""
    cleared = encode(next(event for event in EVENTS if isinstance(event, CacheCleared)))
    routed = encode(next(command for command in COMMANDS if isinstance(command, RouteRequest)))
    of_cache = partial(decode_event, subject=cache_subject(POOL, ENGINE))
    of_route = partial(decode_command, subject=command_subject(POOL, "route"))

    for good, decode, most in ((cleared, of_cache, 2**20), (routed, of_route, 2**23)):
        assert accepted(good[:-1] + b',"x":"' + b" " * (most - len(good) - 7) + b'"}', decode)
        assert not accepted(good[:-1] + b',"x":"' + b" " * (most - len(good) - 6) + b'"}', decode)


def test_an_event_of_a_cache_that_readers_would_refuse_is_not_written() -> None:
    written = [encode(stored(ENGINE, 1, list(range(1, count)))) for count in (4_096, 49_152)]

    assert [len(payload) > SMALL_BYTES_MAX for payload in written] == [False, True]
    with pytest.raises(TooLargeError):
        encode(stored(ENGINE, 1, list(range(1, 100_000))))


@pytest.mark.parametrize("part", [b'"",', b"[],", b"{},", b"1,", b'{"a":1},', b"[" * 20 + b"]" * 20 + b","])
def test_an_event_of_too_many_parts_is_not_decoded(part: bytes) -> None:
    """Decoding one of 8 MiB took more than a second."""
    good = encode(next(event for event in EVENTS if isinstance(event, CacheCleared)))
    few, many = (good[:-1] + b',"x":[' + part * count + b"0]}" for count in (10_000, EVENT_PARTS_MAX))

    assert accepted(few, decode_event)
    assert not accepted(many, decode_event)


def test_the_largest_events_that_a_worker_writes_are_within_the_bounds() -> None:
    runs = [Run(keys=pack_keys([BlockKey(2**64 - 1 - number)]), parent=BlockKey(2**64 - 1)) for number in range(40_000)]
    for portion in portions(runs):
        encode(BlocksStored(at=1e9, instance=ENGINE, epoch=Epoch(10**13), sequence=10**9, runs=portion))


def test_of_a_command_that_is_too_large_nothing_is_read() -> None:
    huge = b'{"type":"OfALaterRelease","x":"' + b" " * SMALL_BYTES_MAX + b'"}'

    with pytest.raises(UndecodableError) as refused:
        decode_command(huge, heartbeat_subject(POOL, ENGINE))

    assert unreadable(huge, refused.value).reason == CommandRefusal.INVALID


def test_nesting_is_judged_by_the_message_and_not_by_the_readers_stack() -> None:
    good = encode(EVENTS[0])
    allowed = deep(good, NESTING_MAX - 1).replace(b'"x":', b'"y":"' + b" " * 600 + b'","x":')
    beyond = deep(good, NESTING_MAX + 1).replace(b'"x":', b'"y":"' + b" " * 600 + b'","x":')

    def at_depth(frames: int) -> tuple[bool, bool]:
        if frames:
            return at_depth(frames - 1)
        return accepted(allowed, decode_event), accepted(beyond, decode_event)

    assert at_depth(0) == at_depth(500) == (True, False)


def test_brackets_within_strings_are_no_nesting() -> None:
    event = WritesLost(at=0.0, writer="w", count=1, reason='[{"\\[' * 500)

    assert decode_event(encode(event)) == event


@pytest.mark.parametrize(
    ("kind", "problem"),
    [("fleet.engine-2", "does not belong"), ("kv.engine-1", "does not belong"), ("fleet.a.b", "does not belong")],
)
def test_an_event_on_the_subject_of_another_is_no_event(kind: str, problem: str) -> None:
    payload = encode(reported("engine-1", 1, [1]))

    assert LogEntry.read(1, "pm.default.fleet.engine-1", payload).event is not None
    assert problem in LogEntry.read(1, f"pm.default.{kind}", payload).problem


def test_every_event_belongs_on_the_subject_that_it_is_written_to() -> None:
    entries = [LogEntry.read(1, subject_of(PoolName("p"), event), encode(event)) for event in EVENTS]

    assert [entry.problem for entry in entries] == [""] * len(EVENTS)


def test_a_leaders_settings_that_make_no_state_are_refused() -> None:
    good = msgspec.json.encode(LeaderElected(at=0.0, term=Term(1), scheduler="s", as_of=0, pool={"block_tokens": 64}))

    for bad in (b'"x"', b"0", b"-1", b"1.5", b"1e29"):
        assert not accepted(good.replace(b"64", bad), decode_event)


def test_what_nobody_could_read_cannot_be_written() -> None:
    for event in (
        msgspec.structs.replace(reported("a", 1, [1]), kv_usage=float("nan")),
        joined("a", at=float("inf")),
        msgspec.structs.replace(reported("a", 1, [1]), waiting=2**70),
        CancelRequest(request=RequestId("r"), reason="\ud800"),
    ):
        with pytest.raises(UnwritableError, match=type(event).__name__):
            encode(event)


class _Fragile(Tracker):
    """Stands for any defect of the fold."""

    @override
    def arrived(self, request: Request, at: float) -> None:
        raise KeyError(f"no {request.id}")


def test_what_the_fold_fails_on_is_a_dead_letter_and_the_fold_goes_on() -> None:
    state = State(PoolSettings(), [_Fragile()])
    arrived = next(event for event in EVENTS if type(event).__name__ == "RequestArrived")
    unstamped = msgspec.structs.replace(arrived, stamp=None)

    for number in range(1, 31):
        state.apply(msgspec.structs.replace(unstamped, request=RequestId(f"r{number}")), 2 * number)
        state.skip(2 * number + 1, subject="pm.default.kv.x\x1b", problem="y" * 10_000)
    state.apply(joined("a"), 100)

    letters = state.dead_letters
    assert (letters.unapplied, letters.undecodable, len(letters.newest)) == (30, 30, NEWEST_MAX)
    assert [letter.sequence for letter in letters.newest] == list(range(42, 62))
    assert letters.newest[0].reason == "KeyError: 'no r21'"
    assert len(letters.newest[1].reason) == REASON_LENGTH_MAX
    assert letters.newest[1].what.isprintable()
    assert [instance.id for instance in state.fleet.instances] == ["a"]


def test_a_checkpoint_carries_the_dead_letters() -> None:
    state = State(PoolSettings())
    state.skip(7, subject="pm.default.lost", problem="no JSON")

    assert decode_state(encode_state(state)).dead_letters == state.dead_letters


def test_garbage_where_leaders_say_that_they_lead_is_what_the_next_election_stands_behind() -> None:
    state = State(PoolSettings())
    state.apply(LeaderElected(at=0.0, term=Term(1), scheduler="s", as_of=0), 1)
    state.skip(2, subject=leader_subject(POOL), problem="no JSON")

    assert (state.elected, state.term) == (2, 1)


@pytest.mark.parametrize(
    "subject", [cache_subject(POOL, "leader"), fleet_subject(POOL, "leader"), f"pm.{POOL}.request.leader"]
)
def test_an_instance_or_a_request_called_leader_is_no_election(subject: str) -> None:
    state = State(PoolSettings())
    state.apply(LeaderElected(at=0.0, term=Term(1), scheduler="s", as_of=0), 1)
    state.skip(2, subject=subject)
    state.skip(3, subject=subject, problem="no JSON")

    assert state.elected == 1


def test_one_entry_uses_up_neither_terms_nor_epochs_nor_numbers() -> None:
    state, most = State(PoolSettings()), 2**53
    decided = next(event for event in EVENTS if isinstance(event, ScaleDecided))
    state.apply(LeaderElected(at=0.0, term=Term(most), scheduler="x", as_of=0), 1)
    state.apply(joined("a", epoch=most), 2)
    state.apply(msgspec.structs.replace(decided, number=most), 3)
    state.apply(LeaderElected(at=0.0, term=Term(1), scheduler="s", as_of=0), 4)
    state.apply(joined("a", epoch=1_767_225_600_000), 5)
    state.apply(msgspec.structs.replace(decided, number=1), 6)

    assert (state.term, state.elected, state.newest_epoch(InstanceId("a"))) == (1, 4, 1_767_225_600_000)
    assert state.scaling.number == 1
    assert [letter.sequence for letter in state.dead_letters.newest] == [1, 2, 3]


@pytest.mark.parametrize("seed", range(12))
def test_nothing_that_decodes_ends_a_fold(seed: int) -> None:
    chance, state = Random(seed), fresh_state()
    log = random_log(seed, 120)
    known = [encode(event) for event in [*log, *EVENTS]]
    real = iter(log)

    applied = 0
    for sequence in range(1, 400):
        event = next(real, None) if chance.random() < 0.4 else None
        try:
            event = event or decode_event(mutated(chance.choice(known), chance))
        except UndecodableError as error:
            state.skip(sequence, problem=str(error))
            continue
        state.apply(event, sequence)
        applied += 1

    assert applied > 100, f"seed {seed}"
    failed = [letter for letter in state.dead_letters.newest if letter.decoded and "too far ahead" not in letter.reason]
    assert failed == [], f"seed {seed}"
    assert decode_state(encode_state(state)).sequence == state.sequence


@pytest.mark.parametrize("seed", range(6))
def test_no_command_that_decodes_fails_at_a_leader_of_a_poisoned_log(seed: int) -> None:
    chance = Random(seed)
    policies = policy_set(routing=chance.choice(list(ROUTING_POLICIES)), prefill_window_tokens=400, rebind=True)
    state = State(PoolSettings(), policies.trackers())
    dispatcher = Dispatcher(state, policies, term=Term(2**31 + 7))  # no term that poison may name
    known = [encode(event) for event in [*random_log(seed, 80), *EVENTS]]
    for sequence, payload in enumerate(known, start=1):
        told = mutated(payload, chance) if chance.random() < 0.5 else payload
        if accepted(told, decode_event):
            state.apply(decode_event(told), sequence)
    state.apply(joined("a", at=60.0, epoch=90), 1000)

    answered = 0
    for number in range(150):
        payload = encode(route(f"q{number % 20}", [chance.randrange(600) for _ in range(4)], arrived_at=60.0))
        told = mutated(payload, chance) if chance.random() < 0.7 else payload
        command = decode_command(told) if accepted(told, decode_command) else None
        decided = dispatcher.route(command, 61.0 + number) if isinstance(command, RouteRequest) else []
        for line in list(state.workload.queues):
            decided += dispatcher.grant_waiting(line, 61.0 + number)
        for event in decided + dispatcher.relocate_pending(61.0 + number):
            assert decode_event(encode(event)) == event, f"seed {seed}"
        answered += bool(decided)

    assert answered > 10, f"seed {seed}"


def test_keys_that_are_no_chain_leave_an_index_that_can_be_cleared() -> None:
    state = fresh_state()
    for event in (
        joined("a"), joined("b"),
        stored("a", 1, [1, 2, 3, 4]), stored("b", 1, [1, 9, 3, 4]),
        joined("a", epoch=2), joined("b", epoch=2),
    ):  # fmt: skip
        state.apply(event)

    assert state.dead_letters.newest == []
    assert len(state.index) == 0


# Shells


async def test_a_follower_reads_on_behind_poison_of_every_kind() -> None:
    broker = MemoryBroker(POOL)
    link = broker.client(ScaledClock(), name="t")
    good = encode(reported("engine-1", 1, [1]))
    for kind in ("kv.engine-1", "fleet.engine-1", "request.r", "scale", "leader", "lost"):
        for payload in (b"", b"\xff", b"[" * 5000, deep(good), bad_utf8(good), good):
            broker.store_raw(f"pm.{POOL}.{kind}", payload)
    await link.log.append(joined("engine-9"))
    follower = LogFollower(
        link.log, link.checkpoints, clock=ScaledClock(), board=HealthBoard(), settings=PoolSettings()
    )

    reading = asyncio.create_task(follower.run())
    await eventually(lambda: follower.state.sequence == 37)
    reading.cancel()

    assert [instance.id for instance in follower.state.fleet.instances] == ["engine-9"]
    assert follower.state.dead_letters.undecodable == 35, "a report where it belongs is the one good entry of 36"


async def test_a_listener_that_fails_on_an_event_ends_no_follower() -> None:
    broker = MemoryBroker(POOL)
    link = broker.client(ScaledClock(), name="t")

    def fails(_event: object) -> None:
        raise ValueError

    follower = LogFollower(
        link.log, link.checkpoints, clock=ScaledClock(), board=HealthBoard(), settings=PoolSettings(), on_event=fails
    )
    reading = asyncio.create_task(follower.run())
    await link.log.append(joined("engine-1"))
    await link.log.append(joined("engine-2"))
    await eventually(lambda: follower.state.sequence == 2)

    assert not reading.done()
    reading.cancel()


class _Heard(LogListener):
    def __init__(self) -> None:
        self.failed: list[str] = []
        self.undecoded = 0
        self.losses: list[str] = []

    @override
    def handler_failed(self, subject: str, error: Exception) -> None:
        self.failed.append(repr(error))

    @override
    def undecodable(self, subject: str, problem: str) -> None:
        self.undecoded += 1

    @override
    def lost(self, count: int, reason: str) -> None:
        self.losses.append(reason)


async def test_a_write_that_nobody_could_read_is_lost_and_said_to_be() -> None:
    broker, heard = MemoryBroker(POOL), _Heard()
    link = broker.client(ScaledClock(), name="t", listener=heard)

    link.log.append_soon(msgspec.structs.replace(reported("a", 1, [1]), kv_usage=float("nan")))
    link.log.append_soon(reported("a", 1, [1]))

    reading = link.log.read(1)
    entries = [await anext(reading), await anext(reading)]
    events = [entry.event for entry in entries if not isinstance(entry, LogReset)]
    assert [type(event).__name__ for event in events] == ["WritesLost", "InstanceReported"]
    assert "cannot be written" in heard.losses[0]


async def test_a_handler_goes_on_behind_garbage_and_behind_an_error_of_its_own() -> None:
    broker, heard = MemoryBroker(POOL), _Heard()
    link = broker.client(ScaledClock(), name="t", listener=heard)
    asked = 0

    async def handler(command: object, reply: Reply) -> None:
        nonlocal asked
        if isinstance(command, CommandRefused):
            return
        asked += 1
        if asked == 1:
            raise KeyError(asked)
        await reply(DescribeFleet())

    async with link.commands.serve("pm.x", handler):
        for payload in (b"", b"\xff", deep(encode(DescribeFleet())), bad_utf8(encode(DescribeFleet())), b"[" * 9000):
            with pytest.raises(CommandTimeoutError):
                await link.commands.request_bytes("pm.x", payload, timeout=WallSeconds(0.02))
        with pytest.raises(CommandTimeoutError):
            await link.commands.request("pm.x", DescribeFleet(), timeout=WallSeconds(0.02))
        answer = await link.commands.request("pm.x", DescribeFleet(), timeout=WallSeconds(5.0))

    assert (answer, asked, heard.undecoded, len(heard.failed)) == (DescribeFleet(), 2, 5, 1)


@pytest.mark.parametrize("url", ["http://[", "http://" + "a" * 200, "nothing", "http://127.0.0.1:99999", "file:///etc"])
async def test_an_engine_whose_url_is_none_has_merely_failed(url: str) -> None:
    async with aiohttp.ClientSession() as session:
        engines = EngineClient(
            session, ANY_URL, keys=EngineKeys(""), forward_authorization=False, chunk_timeout_seconds=WallSeconds(60.0)
        )
        with pytest.raises(EngineFailedError):
            await engines.send(EngineRequest(InstanceId("engine-1"), url, "/v1/completions", b"{}", {}, "r-1"))


# Tools


@pytest.fixture(scope="module")
def poisoned() -> list[LogEntry]:
    """A recorded log with poison of every kind in between."""
    chance = Random(5)
    recorded = RecordedFleet(policy_set(prefill_window_tokens=900), seed=11).live(200).write_all().entries
    told: list[tuple[str, bytes]] = []
    for number, entry in enumerate(recorded):
        told.append((entry.subject, entry.payload))
        if number % 10 == 5 and entry.event is not None:
            payload = mutated(entry.payload, chance)
            told += [(entry.subject, payload), (entry.subject, deep(entry.payload)), (entry.subject, b"\xff\n")]
    return [LogEntry.read(sequence, subject, payload) for sequence, (subject, payload) in enumerate(told, start=1)]


@pytest.fixture
def bundle(poisoned: list[LogEntry], tmp_path: Path) -> str:
    return str(written(poisoned, tmp_path))


@pytest.mark.parametrize(
    "arguments",
    [["doctor"], ["replay"], ["replay", "--verify"], ["state"], ["explain", "--slowest", "3"]],
    ids=" ".join,
)
def test_every_tool_reads_a_poisoned_log(arguments: list[str], bundle: str, poisoned: list[LogEntry]) -> None:
    result = CliRunner().invoke(main, [*arguments, "--from", bundle])

    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    undecodable = sum(entry.event is None for entry in poisoned)
    if arguments[0] in ("doctor", "replay"):
        assert f"{undecodable:,} entries do not decode" in result.output


def test_doctor_says_where_dead_letters_are_and_why(bundle: str, poisoned: list[LogEntry]) -> None:
    result = CliRunner().invoke(main, ["doctor", "--from", bundle, "--json"])
    found = [f for f in json.loads(result.stdout)["findings"] if "do not decode" in f["what"]]

    first = next(entry for entry in poisoned if entry.event is None)
    assert found[0]["severity"] == "warning"
    assert f"entry {first.sequence:,} on {first.subject}: {first.problem}" in found[0]["evidence"]


def test_a_poisoned_bundle_gives_back_its_entries_byte_for_byte(
    bundle: str, poisoned: list[LogEntry], tmp_path: Path
) -> None:
    again = tmp_path / "again.pmlog"
    CliRunner().invoke(main, ["export", "--from", bundle, str(again)], catch_exceptions=False)

    with gzip.open(again) as left, gzip.open(bundle) as right:
        assert left.readlines()[1:] == right.readlines()[1:]


def test_a_bundle_that_unpacks_to_an_endless_line_is_refused_in_bounded_memory(tmp_path: Path) -> None:
    bomb = tmp_path / "bomb.pmlog"
    with gzip.open(bomb, "wb", compresslevel=9) as file:
        for _ in range(100):
            file.write(b" " * 1024**2)
    bounded = f"import resource; resource.setrlimit(resource.RLIMIT_AS, (600 * 2**20,) * 2); from pointsman_cli.main import main; main(['replay', '--from', {str(bomb)!r}])"

    result = subprocess.run([sys.executable, "-c", bounded], capture_output=True, text=True, check=False, timeout=60)

    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("Error: ")
    assert "has a line of more than 16 MiB" in result.stderr


@pytest.mark.parametrize(
    "line", [b"[" * 100_000, b'{"sequence":1,"subject":"x","payload":"!"}', b"\xff", b'{"sequence":-1,"subject":"x"}']
)
def test_a_line_that_is_no_entry_is_named_and_no_traceback(line: bytes, tmp_path: Path) -> None:
    file = tmp_path / "broken.pmlog"
    file.write_bytes(b'{"format":"pointsman-log","version":1,"header":{}}\n' + line + b"\n")

    result = CliRunner().invoke(main, ["replay", "--from", str(file)])

    assert isinstance(result.exception, SystemExit)
    assert "line 2, is no log entry" in result.output


def test_text_of_a_log_reaches_the_terminal_without_escapes_and_with_its_brackets(capsys: Any) -> None:
    SafeConsole(force_terminal=True, color_system=None, width=200).print("\x1b]0;title\x07[/red] [fd00::5] \x9b2J ok")

    out = capsys.readouterr().out
    assert "[/red] [fd00::5]" in out
    assert not set(out) & {"\x1b", "\x07", "\x9b"}


def test_a_poisoned_log_verifies_and_folds_alike_every_time(poisoned: list[LogEntry]) -> None:
    verdict = verify(poisoned)
    states = [fold(poisoned) for _ in range(2)]

    assert verdict.undecodable == sum(entry.event is None for entry in poisoned)
    assert states[0].dead_letters == states[1].dead_letters
    assert encode_state(states[0]) == encode_state(states[1])
