"""Faults of processes: killed, paused, restarted, suspended, with a wrong date."""

from pointsman.contracts.requests import RequestArrived
from pointsman.primitives import EngineSeconds, RequestId
from pointsman.state.workload import UNGRANTED
from pointsman_lab.torture.cluster import Cluster
from pointsman_lab.torture.injector import Injector
from pointsman_lab.torture.processes import Process, ProcessRun
from pointsman_lab.torture.services import SchedulerProcess

GONE_SECONDS: EngineSeconds = 6.0
GONE_POLL_SECONDS: EngineSeconds = 0.25
STALE_SECONDS_MAX: EngineSeconds = 8.0
READY_SECONDS_MAX: EngineSeconds = 5.0
LOOK_SECONDS: EngineSeconds = 0.01
STOP_SECONDS_MAX: EngineSeconds = 10.0


def kill(injector: Injector) -> None:
    process = injector.chance.choice(injector.cluster.services)
    injector.kill_process(process, injector.chance.expovariate(0.7))


def kill_engine(injector: Injector) -> None:
    injector.kill_process(injector.chance.choice(injector.cluster.engines), injector.chance.expovariate(0.7))


def kill_ingress(injector: Injector) -> None:
    ingress = injector.chance.choice(injector.cluster.ingresses)
    if ingress.run is not None:
        _watch_killed(injector.cluster, ingress.link.name)
    injector.kill_process(ingress, injector.chance.expovariate(0.7))


def kill_two(injector: Injector) -> None:
    for process in injector.chance.sample(injector.cluster.processes, 2):
        injector.kill_process(process, injector.chance.expovariate(0.7))


def kill_scheduler(injector: Injector) -> None:
    injector.kill_process(injector.chance.choice(injector.cluster.schedulers), injector.chance.expovariate(0.7))


def restart(injector: Injector) -> None:
    service = injector.chance.choice([*injector.cluster.workers, *injector.cluster.services])
    _restart(injector, [service], injector.chance.choice((0.2, 4.0)))


def rolling_restart(injector: Injector) -> None:
    cluster = injector.cluster
    groups: list[list[Process]] = [
        [*cluster.ingresses],
        [*cluster.schedulers],
        [*cluster.workers],
        [cluster.rebalancer],
    ]
    injector.chance.shuffle(groups)
    _restart(injector, [process for group in groups for process in group], injector.chance.choice((0.1, 1.0)))


def _restart(injector: Injector, rest: list[Process], pause: EngineSeconds) -> None:
    if not rest or injector.over:
        return
    process, run = rest[0], rest[0].run
    if run is None or process.paused:
        _restart(injector, rest[1:], pause)
        return
    injector.cluster.note(f"SIGTERM {process.name}")
    if process in injector.cluster.ingresses:
        _watch_killed(injector.cluster, process.link.name)
    process.stop()
    _look_for_end(
        injector,
        process,
        run,
        rest[1:],
        pause,
        STOP_SECONDS_MAX + injector.cluster.plan.ingress_settings["drain_seconds_max"],
    )


def _look_for_end(
    injector: Injector,
    process: Process,
    run: ProcessRun,
    rest: list[Process],
    pause: EngineSeconds,
    patience: EngineSeconds,
) -> None:
    if process.run is run and patience < 0:
        injector.cluster.violation(f"{process.name} does not end after a SIGTERM")
    elif process.run is run:
        spent = 0.0 if process.paused else LOOK_SECONDS
        injector.later(LOOK_SECONDS, _look_for_end, injector, process, run, rest, pause, patience - spent)
    else:
        injector.later(pause, injector.start, process)
        injector.later(2 * pause, _restart_next, injector, process, rest, pause, READY_SECONDS_MAX)


def _restart_next(
    injector: Injector, process: Process, rest: list[Process], pause: EngineSeconds, patience: EngineSeconds
) -> None:
    ready = process.run is not None and process.run.board.ready
    if ready or patience < 0:
        _restart(injector, rest, pause)
    else:
        injector.later(LOOK_SECONDS, _restart_next, injector, process, rest, pause, patience - LOOK_SECONDS)


def pause(injector: Injector) -> None:
    process = injector.chance.choice(injector.cluster.processes)
    if process.run is None or process.paused:
        return
    seconds = injector.seconds(8.0)
    injector.cluster.note(f"SIGSTOP {process.name} for {seconds:.2f} s")
    process.pause()
    injector.later(seconds, process.resume)


def pause_engine(injector: Injector) -> None:
    engine, seconds = injector.chance.choice(injector.cluster.engines), 4.0 + injector.seconds(6.0)
    if engine.run is None or engine.paused:
        return
    injector.cluster.note(f"SIGSTOP {engine.name} for {seconds:.2f} s")
    engine.pause()
    injector.later(seconds, engine.resume)


def suspend(injector: Injector) -> None:
    process = injector.chance.choice(
        [*injector.cluster.schedulers, *injector.cluster.schedulers, *injector.cluster.services]
    )
    if process.run is None or process.paused:
        return
    seconds = injector.seconds(8.0)
    injector.cluster.note(f"the machine of {process.name} is suspended for {seconds:.2f} s")
    process.suspend()
    injector.later(seconds, process.resume)


def ambush(injector: Injector) -> None:
    leader = next((s for s in injector.cluster.schedulers if s.run is not None and s.service.dispatcher), None)
    if leader is None:
        return
    injector.cluster.network.ambush = lambda link: _strike_successor(injector, link)
    injector.kill_process(leader, 0.5 + injector.chance.random())


def stale_leader(injector: Injector) -> None:
    leader = next((s for s in injector.cluster.schedulers if s.run is not None and s.service.leading), None)
    if leader is None or leader.paused:
        return
    injector.cluster.note(f"the machine of the leader, {leader.name}, is suspended until requests wait at another")
    leader.suspend()
    _resume_in_the_way(injector, leader, injector.cluster.loop.time() + STALE_SECONDS_MAX)


def _resume_in_the_way(injector: Injector, leader: SchedulerProcess, deadline: EngineSeconds) -> None:
    if leader.run is None or not leader.paused:
        return
    others = [s for s in injector.cluster.schedulers if s is not leader and s.run is not None and s.service.leading]
    waiting = any(request.stage in UNGRANTED for s in others for request in s.service.state.workload.requests.values())
    if waiting or injector.cluster.loop.time() > deadline:
        injector.cluster.note(f"{leader.name} goes on")
        leader.resume()
    else:
        injector.later(LOOK_SECONDS, _resume_in_the_way, injector, leader, deadline)


def _strike_successor(injector: Injector, link: str) -> None:
    successor = next((s for s in injector.cluster.schedulers if s.run is not None and s.link.name == link), None)
    if successor is None or successor.paused or injector.over:
        return
    injector.cluster.network.ambush = lambda _link: None
    seconds = 1.5 + injector.seconds(4.0)
    injector.cluster.note(f"{successor.name} takes the lease, and its machine is suspended for {seconds:.2f} s")
    successor.suspend()
    injector.later(seconds, successor.resume)


def clock_jump(injector: Injector) -> None:
    process = injector.chance.choice(injector.cluster.processes)
    process.clock.skew += injector.chance.choice((-1, 1)) * injector.chance.choice((0.2, 1.5, 6.0, 60.0))
    injector.cluster.note(f"date of {process.name} is off by {process.clock.skew:.1f} s")


def _watch_killed(cluster: Cluster, ingress: str) -> None:
    """After an ingress is killed, its requests must leave the leader's state within GONE_SECONDS. `ingress`: the link
    name of that process."""
    cluster.loop.outside(GONE_POLL_SECONDS, _check_requests_gone, cluster, ingress, 0.0, "")


def _check_requests_gone(cluster: Cluster, ingress: str, well_for: EngineSeconds, leader: str) -> None:
    """`well_for`: seconds since the kill during which the same leader was reachable and the log kept up: a leader that
    reads nothing new calls no ingress silent, since its ends may wait at the disk."""
    leading = [
        s for s in cluster.schedulers if s.run is not None and s.service.leading and s.link.open and not s.paused
    ]
    name = f"{leading[0].link.name} in term {leading[0].service.state.term}" if len(leading) == 1 else ""
    runs = (p.run.link for p in cluster.ingresses if p.run is not None and p.run.link is not None)
    ends = any(link.name == ingress for link in runs)  # in order, and serves meanwhile
    if not name or name != leader or ends or cluster.network.is_behind:
        well_for = 0.0
    if well_for < GONE_SECONDS:
        cluster.loop.outside(
            GONE_POLL_SECONDS, _check_requests_gone, cluster, ingress, well_for + GONE_POLL_SECONDS, name
        )
        return
    of_it: set[RequestId] = {
        s.event.request
        for s in cluster.network.history
        if isinstance(s.event, RequestArrived) and s.event.ingress == ingress
    }
    left = [
        request.id
        for request in leading[0].service.state.workload.requests.values()
        if request.id in of_it and request.stage not in UNGRANTED
    ]
    if left:
        cluster.violation(
            f"{well_for:g} s after {ingress} was killed {len(left)} of its requests are at engines: {left[:5]}"
        )
