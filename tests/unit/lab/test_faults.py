"""What `pointsman-lab faults` judges: answers as clients see them, and whether its checks find what is planted."""

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from pointsman.contracts.codec import LogEvent, encode
from pointsman.contracts.decisions import LeaderElected, RequestGranted
from pointsman.contracts.envelope import Stamp
from pointsman.ports import LogEntry
from pointsman.primitives import InstanceId, RequestId, Term, WallSeconds
from pointsman.simulation.workload import WorkloadRequest
from pointsman.state.state import PoolSettings, State
from pointsman_cli.discovery import FleetFile
from pointsman_lab.faults import checks
from pointsman_lab.faults.clients import Clients, Exchange, judged
from pointsman_lab.faults.observations import Evidence
from pointsman_lab.faults.schedule import DEFAULT_FAULTS, FaultError, checked, scheduled
from pointsman_scheduler.log_liveness import LogLiveness
from tests.support.events import finished
from tests.support.settable_clock import StandingClock

USAGE = b'data: {"choices":[],"usage":{"completion_tokens":2}}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("status", "answer", "ending"),
    [
        (200, USAGE + DONE, "completed"),
        (200, USAGE, "lost"),
        (200, USAGE + DONE + DONE, "lost"),
        (200, USAGE.replace(b"2", b"3") + DONE, "lost"),
        (200, b'data: {"choices":[{}]}\n\ndata: {"error":{"code":"engine_failed"}}\n\n', "cut"),
        (200, b"", "lost"),
        (429, b'{"error":{"code":"slo_ttft"}}', "refused"),
        (502, b'{"error":{"code":"engine_failed"}}', "failed"),
        (500, b'{"error":{"code":"internal_error"}}', "lost"),
        (503, b"Service Unavailable", "lost"),
    ],
)
def test_an_answer_is_whole_or_says_clearly_that_there_is_none(status: int, answer: bytes, ending: str) -> None:
    exchange = Exchange(request="r", streamed=True, asked_at=0.0, status=status)

    assert judged(exchange, answer, 2)[0] == ending


async def test_a_request_goes_by_the_id_that_its_answer_tells() -> None:
    """The log has no other of a request that was placed without a scheduler."""
    own = "0123456789abcdef01234567"

    async def refuses(_: web.Request) -> web.Response:
        return web.json_response({"error": {"code": "x"}}, status=503, headers={"x-pointsman-request-id": own})

    app = web.Application()
    app.router.add_post("/v1/completions", refuses)
    async with TestServer(app) as server:
        url = str(server.make_url("/"))
        fleet = FleetFile(
            nats="", ingress=url, pool="default", model="m", policy="", speed=1.0, slo_ttft=1.0, block_tokens=16,
            secret_file="", data="", pid=1, started_at=0.0,
        )  # fmt: skip
        clients = Clients(
            fleet,
            [WorkloadRequest(arrival_s=0.0, block_ids=(1,), input_length=8, output_tokens=4)],
            seed=1,
            tokens_max=4,
        )
        await clients.run()

    assert [(exchange.request, exchange.ending) for exchange in clients.exchanges] == [(own, "refused")]


def test_a_seed_gives_the_same_faults_again_and_no_others_are_known() -> None:
    first, again = (scheduled(DEFAULT_FAULTS, seed=4, seconds=100.0) for _ in range(2))

    assert first == again != scheduled(DEFAULT_FAULTS, seed=5, seconds=100.0)
    assert [fault.at for fault in first] == sorted(fault.at for fault in first)
    assert [fault.targets for fault in scheduled(["kill:ingress+leader"], seed=1, seconds=9.0)] == [
        ("ingress", "leader")
    ]
    with pytest.raises(FaultError, match="kill:ingres"):
        checked(["kill:ingres+leader"])


def evidence(*events: LogEvent, ending: str = "completed") -> Evidence:
    entries = [LogEntry(n, "", encode(event), event) for n, event in enumerate(events, 1)]
    exchange = Exchange(request="r", streamed=True, asked_at=0.0, ending=ending)  # type: ignore[arg-type]
    archived = {entry.sequence: entry.payload for entry in entries}
    return Evidence([exchange], [], entries, [], State(PoolSettings()), None, archived=archived)


def elected(term: int) -> LeaderElected:
    return LeaderElected(at=0.0, term=Term(term), scheduler=f"s{term}", as_of=0)


def granted(term: int, number: int) -> RequestGranted:
    stamp = Stamp(term=Term(term), number=number, as_of=0)
    return RequestGranted(at=0.0, stamp=stamp, request=RequestId("r"), instance=InstanceId("a"))


FINISHED = finished("r", "a", at=1.0)


def test_a_sound_run_is_not_faulted() -> None:
    sound = evidence(elected(1), granted(1, 1), FINISHED)

    for check in (
        *checks.LOST,
        checks.no_request_ran_twice,
        checks.one_leader_a_term,
        checks.the_archive_holds_the_log,
    ):
        assert list(check(sound)) == []


@pytest.mark.parametrize(
    ("check", "planted"),
    [
        (checks.every_request_got_one_answer, evidence(FINISHED, ending="lost")),
        (checks.every_request_has_one_end, evidence(elected(1))),
        (checks.every_request_has_one_end, evidence(FINISHED, FINISHED)),
        (checks.clients_and_log_tell_the_same, evidence(FINISHED, ending="cut")),
        (checks.no_request_ran_twice, evidence(elected(1), granted(1, 1), elected(2), granted(2, 1))),
        (checks.one_leader_a_term, evidence(elected(1), elected(2), granted(1, 1))),
        (checks.one_leader_a_term, evidence(elected(1), granted(1, 2))),
        (checks.one_leader_a_term, evidence(elected(2), elected(2))),
        (checks.index_equals_engines, evidence(elected(1))),
    ],
)
def test_what_must_not_be_is_found(check: checks.Check, planted: Evidence) -> None:
    assert list(check(planted)) != []


def test_an_entry_that_is_archived_otherwise_or_not_at_all_is_found() -> None:
    forged, short = evidence(FINISHED), evidence(FINISHED)
    forged.archived[1] = b"{}"
    short.archived.clear()

    assert "otherwise" in next(checks.the_archive_holds_the_log(forged))
    assert "not archived" in next(checks.the_archive_holds_the_log(short))


@pytest.mark.parametrize(
    ("instances", "wrote", "quiet", "silent"),
    [(1, 0, 60.0, False), (1, 1, 1.0, False), (1, 1, 2.0, True), (3, 0, 2.0, True), (3, 0, 60.0, False)],
    ids=[
        "one instance is silent by itself",
        "not yet",
        "our own decision does not come",
        "several at once",
        "for long",
    ],
)
def test_the_log_is_silent_when_our_own_decisions_or_several_instances_are(
    instances: int, wrote: int, quiet: float, silent: bool
) -> None:
    clock = StandingClock(1.0)
    heartbeats = LogLiveness(clock, suspect_seconds=WallSeconds(3.0))
    if wrote:
        heartbeats.decision_written(wrote)
    clock.at += quiet

    assert heartbeats.log_is_silent(instances) is silent
    heartbeats.entry_read(own_number=wrote)
    assert not heartbeats.log_is_silent(instances)


def test_while_our_own_decisions_come_back_late_nobody_is_suspected_though_the_log_is_not_silent() -> None:
    clock = StandingClock(1.0)
    heartbeats = LogLiveness(clock, suspect_seconds=WallSeconds(3.0))
    silent = []
    for number in range(1, 11):
        heartbeats.decision_written(number)
        clock.at += 0.4
        heartbeats.entry_read(own_number=max(0, number - 5))
        silent.append(heartbeats.log_is_silent(1))
    for number in range(6, 11):
        heartbeats.entry_read(own_number=number)

    assert silent == [False] * 3 + [True] * 7
    assert not heartbeats.log_is_silent(1)
