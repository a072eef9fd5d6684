"""One seed from start to verdict: load under faults; all must agree within a bound after the last fault; final requests
must be served; the checkers judge."""

import asyncio
import contextlib
import gc
import hashlib
from collections import Counter
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from random import Random
from typing import Any, NoReturn

import structlog

from pointsman.adapters import backoff
from pointsman.contracts.codec import LogEvent, encode
from pointsman.contracts.decisions import (
    HandOverRefused,
    MigrationRefused,
    RequestGranted,
    RequestMigrated,
    RequestRejected,
)
from pointsman.contracts.requests import RequestFailed
from pointsman.primitives import EngineSeconds
from pointsman_lab.torture.checkers import AGREEMENT, QUIET, SAFETY, Checker
from pointsman_lab.torture.clients import ClientRequest, send
from pointsman_lab.torture.cluster import Cluster
from pointsman_lab.torture.engines import vocabulary
from pointsman_lab.torture.faults import heal, schedule
from pointsman_lab.torture.injector import Injector
from pointsman_lab.torture.loop import StalledError, VirtualLoop
from pointsman_lab.torture.operator_faults import undrain_all
from pointsman_lab.torture.plan import FAULTS_BEGIN, plan_of
from pointsman_lab.torture.scenarios import SCENARIOS
from pointsman_lab.torture.services import IngressProcess
from pointsman_lab.torture.tenants import set_policies

EXPECTED_ERRORS = frozenset({"instance_unschedulable"})
START_SECONDS_MAX = 1.0
QUIET_SECONDS_MAX: EngineSeconds = 150.0
FINAL_REQUESTS = 8
BURSTS = (0, 0, 0, 0, 0, 0, 1, 3, 12)
POLL_SECONDS: EngineSeconds = 1.0
AGREED_POLLS = 4
TEAR_DOWN_ROUNDS_MAX = 20
TEAR_DOWN_SECONDS: EngineSeconds = 3.0


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """`problems`: empty where it passed; `digest`: of the log, entry by entry."""

    seed: int
    problems: list[str]
    digest: str
    entries: int
    steps: int
    virtual_seconds: EngineSeconds
    outcomes: dict[str, int] = field(default_factory=dict)
    events: dict[str, int] = field(default_factory=dict)
    trace: list[tuple[EngineSeconds, str]] = field(default_factory=list)


def run_seed(seed: int) -> Verdict:
    """The same seed gives an equal verdict, digest included."""
    plan = plan_of(seed)
    backoff.chance.seed(f"backoff {seed}")
    if not gc.get_freeze_count():
        vocabulary()
        gc.freeze()  # what was imported is looked through once, not at each seed
    gc.collect()
    gc.disable()
    loop = VirtualLoop(Random(f"loop {seed}"))
    cluster = Cluster(plan, loop)
    loop.set_exception_handler(lambda _loop, context: cluster.violation(f"unhandled: {context}"))
    try:
        with _captured_logs(cluster), loop.breaking_endless_steps(cluster.violation):
            return _judged(cluster, loop)
    finally:
        gc.enable()


@contextlib.contextmanager
def _captured_logs(cluster: Cluster) -> Iterator[None]:
    """No service log is printed; errors are violations."""
    before = structlog.get_config()

    def receive(_logger: Any, method: str, event: MutableMapping[str, Any]) -> NoReturn:
        if method in ("error", "exception", "critical") and event["event"] not in EXPECTED_ERRORS:
            details = {name: value for name, value in event.items() if name != "event"}
            cluster.violation(f"a service logs {event['event']}: {details!r}")
        raise structlog.DropEvent

    structlog.configure(
        processors=[receive], wrapper_class=structlog.make_filtering_bound_logger(40), cache_logger_on_first_use=False
    )
    try:
        yield
    finally:
        structlog.configure(**before)


def _judged(cluster: Cluster, loop: VirtualLoop) -> Verdict:
    asyncio.set_event_loop(loop)
    problems: list[str] = []
    try:
        problems += loop.run_until_complete(_acts(cluster))
    except StalledError as error:
        problems.append(f"the run stalled: {error}")
    verdict = Verdict(
        seed=cluster.plan.seed,
        problems=list(dict.fromkeys([*cluster.violations, *problems])),
        digest=log_digest(cluster),
        entries=len(cluster.network.history),
        steps=loop.steps,
        virtual_seconds=loop.time(),
        events=dict(sorted(Counter(kind_of(s.event) for s in cluster.network.history if not s.duplicate).items())),
        outcomes=dict(sorted(Counter(request.outcome for request in cluster.traffic.requests).items())),
        trace=list(cluster.trace),
    )
    _tear_down(cluster, loop)
    return verdict


def log_digest(cluster: Cluster) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for stored in cluster.network.history:
        payload = encode(stored.event) if stored.event is not None else b"unreadable"
        digest.update(b"%d %s " % (stored.sequence, stored.writer.encode()) + payload)
    for request in cluster.traffic.requests:
        digest.update(f"{request.number} {request.outcome} {request.status} {request.ended_at!r}".encode())
    return digest.hexdigest()


REASONED = (RequestRejected, MigrationRefused, RequestFailed, HandOverRefused)


def kind_of(event: LogEvent | None) -> str:
    if event is None:
        return "unreadable"
    name = type(event).__name__
    if isinstance(event, REASONED):
        return f"{name} {event.reason}"
    if isinstance(event, RequestMigrated):
        return f"{name} {'re-bound' if event.rebound else 'planned' if event.plan else 'relocated'}"
    return f"{name} by its ingress" if isinstance(event, RequestGranted) and event.stamp is None else name


async def _acts(cluster: Cluster) -> list[str]:
    chance = cluster.chance("start")
    for process in cluster.processes:
        if process.wanted:
            cluster.loop.outside(chance.random() * START_SECONDS_MAX, process.start)
    injector = Injector(cluster)
    schedule(injector)
    setting = asyncio.create_task(set_policies(cluster)) if cluster.plan.tenants else None
    clients = [asyncio.create_task(_client(cluster, request, at)) for request, at in _arrivals(cluster)]
    await asyncio.sleep(FAULTS_BEGIN + cluster.plan.fault_seconds)
    heal(injector)
    if setting is not None:
        await setting
    await _quiet(cluster, injector, clients)
    cluster.note("final requests")
    last = [cluster.traffic.new_request(last=True) for _ in range(FINAL_REQUESTS)]
    await asyncio.gather(*(_client(cluster, request, 0.2 * number) for number, request in enumerate(last)))
    await _quiet(cluster, injector, clients)
    problems = [problem for checker in (*SAFETY, *AGREEMENT, *SCENARIOS) for problem in _findings(checker, cluster)]
    problems += [
        f"final request {request.number} was not served: {request.outcome} {request.status} {request.code}"
        for request in last
        if request.outcome != "answered"
    ]
    return problems


def _findings(checker: Checker, cluster: Cluster) -> list[str]:
    try:
        return list(checker(cluster))
    except Exception as error:  # noqa: BLE001 - a broken system may break the checker
        return [f"{checker.__name__} could not judge: {error!r}"]


def _arrivals(cluster: Cluster) -> Iterator[tuple[ClientRequest, EngineSeconds]]:
    chance = cluster.chance("arrivals")
    if cluster.plan.scenario:
        every = cluster.plan.fault_seconds / cluster.plan.requests
        for number in range(cluster.plan.requests):
            yield cluster.traffic.new_request(), FAULTS_BEGIN + every * (number + chance.random())
        return
    at = FAULTS_BEGIN / 2
    burst = 0
    for _ in range(cluster.plan.requests):
        if burst:
            burst -= 1
        else:
            burst = chance.choice(BURSTS)
            at += chance.expovariate(
                cluster.plan.requests / (1 + sum(BURSTS) / len(BURSTS)) / cluster.plan.fault_seconds
            )
        yield cluster.traffic.new_request(), at


async def _client(cluster: Cluster, request: ClientRequest, wait: EngineSeconds) -> None:
    await asyncio.sleep(wait)
    await send(request, cluster.chance("choice").choice(_in_rotation(cluster)))


def _in_rotation(cluster: Cluster) -> list[IngressProcess]:
    ready = [i for i in cluster.ingresses if cluster.plan.scenario and i.takes_traffic]
    return ready or cluster.ingresses


async def _quiet(cluster: Cluster, injector: Injector, clients: list["asyncio.Task[None]"]) -> None:
    deadline = cluster.loop.time() + QUIET_SECONDS_MAX
    agreed = 0
    while agreed < AGREED_POLLS and cluster.loop.time() < deadline:
        await asyncio.sleep(POLL_SECONDS)
        undrain_all(injector)
        agrees = all(client.done() for client in clients) and not any(True for check in QUIET for _ in check(cluster))
        agreed = agreed + 1 if agrees else 0


def _tear_down(cluster: Cluster, loop: VirtualLoop) -> None:
    """Ends every task, those of killed processes too."""
    for process in cluster.processes:
        process.kill()
    loop.set_exception_handler(lambda *_: None)
    loop.allow_more()
    for run in cluster.runs:
        loop.release(run)
    for _ in range(TEAR_DOWN_ROUNDS_MAX):
        unfinished = loop.unfinished
        if not unfinished:
            break
        for task in unfinished:
            task.cancel()
        with contextlib.suppress(StalledError):
            loop.run_until_complete(asyncio.wait(unfinished, timeout=TEAR_DOWN_SECONDS))
    with contextlib.suppress(StalledError):
        loop.run_until_complete(loop.shutdown_asyncgens())
    asyncio.set_event_loop(None)
    loop.close()
    cluster.forget()
