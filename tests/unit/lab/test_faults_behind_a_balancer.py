"""The arithmetic of `bench-faults --haproxy`: what was out of rotation, who was touched, and what a report calls a failure."""

import asyncio
import io
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from rich.console import Console
from typing_extensions import override

from pointsman.contracts.decisions import RequestGranted
from pointsman.contracts.requests import RequestAttemptFailed
from pointsman.ports import LogEntry
from pointsman.primitives import EngineSeconds, InstanceId, RequestId
from pointsman_lab.faults.bad_engines import FIRST_SECONDS, Touched, count_touched
from pointsman_lab.faults.balancer import Balancer, haproxy_config
from pointsman_lab.faults.clients import Ending, Exchange, unserved
from pointsman_lab.faults.injector import Injection, Injector
from pointsman_lab.faults.load import SteadyClients
from pointsman_lab.faults.schedule import Fault, FaultError, checked, in_turn, rolling
from pointsman_lab.faults.trial import struck_in_turn

ROOT = Path(__file__).parents[3]
BEGAN, ENDED = 1000.0, 1030.0


def asked(request: str, at: float, *, instance: str = "", ending: Ending = "completed", status: int = 200) -> Exchange:
    return Exchange(
        request=request, streamed=True, asked_at=at, ended_at=at + 1, ending=ending, status=status, instance=instance
    )


def granted(request: str, instance: str) -> LogEntry:
    event = RequestGranted(at=0.0, request=RequestId(request), instance=InstanceId(instance))
    return LogEntry(1, "", b"", event)


def failed(request: str, instance: str) -> LogEntry:
    event = RequestAttemptFailed(
        at=0.0, request=RequestId(request), instance=InstanceId(instance), failure="http_5xx", status=500
    )
    return LogEntry(1, "", b"", event)


def test_the_documented_configuration_is_the_one_that_is_tested() -> None:
    servers = [("ingress", "10.0.0.1:8080", 8081), ("ingress-2", "10.0.0.2:8080", 8081)]

    assert f"```haproxy\n{haproxy_config(':8000', servers)}```" in (ROOT / "docs/ingress.md").read_text()


def test_requests_sent_to_a_bad_engine_count_as_early_then_as_touched_and_not_once_it_is_well() -> None:
    touched = Touched(instance="bad", whole_s=2.0)
    late = BEGAN + FIRST_SECONDS + 1
    exchanges = [
        asked("before", BEGAN - 1),
        asked("early", BEGAN + 1),
        asked("spared", late),
        asked("sent", late),
        asked("failed-blind", late),
        asked("after", ENDED + 3, instance="bad"),
    ]
    entries = [
        *(granted(request, "bad") for request in ("before", "early", "sent", "after")),
        granted("spared", "good"),
        failed("early", "bad"),
        failed("failed-blind", "bad"),
    ]

    count_touched(touched, began=BEGAN, ended=ENDED, exchanges=exchanges, entries=entries)

    assert (touched.early, touched.touched, touched.asked) == (1, 2, 3)
    assert touched.failures == {"http_5xx": 2}
    assert touched.back_s == pytest.approx(4.0)


def test_an_engine_that_answered_nobody_since_or_is_still_ejected_is_not_back() -> None:
    unserved_since = Touched(instance="bad", whole_s=1.0)
    ejected = Touched(instance="bad")
    served = [asked("after", ENDED + 1, instance="bad")]

    count_touched(unserved_since, began=BEGAN, ended=ENDED, exchanges=[], entries=[])
    count_touched(ejected, began=BEGAN, ended=ENDED, exchanges=served, entries=[])

    assert unserved_since.back_s is ejected.back_s is None


def test_time_out_of_rotation_counts_within_the_time_that_is_asked_for() -> None:
    balancer = Balancer("", Path())
    balancer.changes["a"] = [(0.0, True), (10.0, False), (14.0, True), (20.0, False)]
    balancer.changes["b"] = [(0.0, True)]

    assert balancer.out_of_rotation(12.0, 23.0) == {"a": pytest.approx(5.0)}


@pytest.mark.parametrize(
    ("ending", "status", "counts"),
    [
        ("completed", 200, False),
        ("refused", 429, False),
        ("refused", 503, True),
        ("cut", 200, True),
        ("dropped", 0, True),
    ],
)
def test_only_whole_answers_and_honest_refusals_are_no_failures(ending: Ending, status: int, counts: bool) -> None:
    assert unserved(asked("r", 0.0, ending=ending, status=status)) is counts


def test_a_rolling_restart_leaves_nobody_between_clients_and_engines_out() -> None:
    faults = in_turn(checked(rolling(ingresses=2, schedulers=2, engines=3)), seed=1)

    assert [fault.name.removeprefix("restart:") for fault in faults] == [
        *("ingress", "ingress"),
        *("follower", "leader"),
        *("worker", "worker", "worker"),
        "rebalancer",
    ]


@pytest.mark.parametrize("name", ["restart:engine", "down:leader", "errors:worker", "hang:any", "sulk:engine"])
def test_faults_that_there_are_not_are_refused(name: str) -> None:
    with pytest.raises(FaultError):
        checked([name])


class TimedClients(SteadyClients):
    def __init__(self, happened: list[str]) -> None:
        self._happened = happened
        self._stopped = asyncio.Event()

    @override
    async def run(self, tick: Callable[[], None] = lambda: None) -> None:
        self._happened.append("sending")
        await self._stopped.wait()
        self._happened.append("stopped")


class NamedFaults(Injector):
    def __init__(self, happened: list[str]) -> None:
        self._happened = happened

    @override
    async def run_in_turn(
        self, faults: Sequence[Fault], *, settle: EngineSeconds, on_injected: Callable[[Injection], None]
    ) -> None:
        for fault in faults:
            self._happened.append(fault.name)
            on_injected(Injection(fault=fault.name, victim="it", pids=[], at=0.0, began=0.0, lasted=0.0))
            await asyncio.sleep(0)


async def test_a_steady_load_rises_before_the_first_fault_and_lasts_until_after_the_last_one() -> None:
    happened: list[str] = []
    console = Console(file=io.StringIO())

    async def rise() -> None:
        await asyncio.sleep(0)
        happened.append("risen")

    faults = in_turn(["kill:leader", "kill:ingress"], seed=1)
    await struck_in_turn(TimedClients(happened), NamedFaults(happened), faults, console, rise=rise())

    assert happened == ["sending", "risen", "kill:leader", "kill:ingress", "stopped"]
    assert isinstance(console.file, io.StringIO)
    assert [line.split()[2] for line in console.file.getvalue().splitlines()] == ["kill:leader", "kill:ingress"]
