"""Faults of processes: killed, stopped, restarted, suspended, with a wrong date."""

from pointsman.primitives import Seconds
from pointsman_lab.torture.ghosts import GhostWatch
from pointsman_lab.torture.injector import Injector
from pointsman_lab.torture.processes import Life, Process
from pointsman_lab.torture.services import SchedulerProcess
from pointsman_scheduler.waiters import UNGRANTED

STALE_SECONDS_MAX: Seconds = 8.0
READY_SECONDS_MAX: Seconds = 5.0
"""For so long the next one of a rolling restart waits for the one before to be ready."""
LOOK_SECONDS: Seconds = 0.01
STOP_SECONDS_MAX: Seconds = 10.0
"""How long a process may take to end after a SIGTERM, beside what it serves."""


def kill(injector: Injector) -> None:
    process = injector.chance.choice(injector.world.services)
    injector.kill_process(process, injector.chance.expovariate(0.7))


def kill_engine(injector: Injector) -> None:
    injector.kill_process(injector.chance.choice(injector.world.engines), injector.chance.expovariate(0.7))


def kill_ingress(injector: Injector) -> None:
    ingress = injector.chance.choice(injector.world.ingresses)
    if ingress.life is not None:
        GhostWatch(injector.world).watch(ingress.link.name)
    injector.kill_process(ingress, injector.chance.expovariate(0.7))


def kill_two(injector: Injector) -> None:
    """Two processes die at the same moment."""
    for process in injector.chance.sample(injector.world.processes, 2):
        injector.kill_process(process, injector.chance.expovariate(0.7))


def kill_scheduler(injector: Injector) -> None:
    injector.kill_process(injector.chance.choice(injector.world.schedulers), injector.chance.expovariate(0.7))


def restart(injector: Injector) -> None:
    """A process is stopped in order, and started again when it has ended: soon, or some seconds later."""
    service = injector.chance.choice([*injector.world.workers, *injector.world.services])
    _restart(injector, [service], injector.chance.choice((0.2, 4.0)))


def rolling_restart(injector: Injector) -> None:
    """As for a new version: every service in turn."""
    world = injector.world
    groups: list[list[Process]] = [[*world.ingresses], [*world.schedulers], [*world.workers], [world.rebalancer]]
    injector.chance.shuffle(groups)
    _restart(injector, [process for group in groups for process in group], injector.chance.choice((0.1, 1.0)))


def _restart(injector: Injector, rest: list[Process], pause: Seconds) -> None:
    """Restart these one after the other. Each is away for `pause` after its end, and up for as long before the next."""
    if not rest or injector.over:
        return
    process, life = rest[0], rest[0].life
    if life is None or process.paused:
        _restart(injector, rest[1:], pause)
        return
    injector.world.note(f"SIGTERM {process.name}")
    if process in injector.world.ingresses:
        GhostWatch(injector.world).watch(process.link.name)
    process.stop()
    _look_for_end(
        injector,
        process,
        life,
        rest[1:],
        pause,
        STOP_SECONDS_MAX + injector.world.plan.ingress_settings["drain_seconds_max"],
    )


def _look_for_end(
    injector: Injector, process: Process, life: Life, rest: list[Process], pause: Seconds, patience: Seconds
) -> None:
    """When it has ended it is started again. `patience`: how long it may still take, as long as it can do anything."""
    if process.life is life and patience < 0:
        injector.world.violation(f"{process.name} does not end after a SIGTERM")
    elif process.life is life:
        spent = 0.0 if process.paused else LOOK_SECONDS
        injector.later(LOOK_SECONDS, _look_for_end, injector, process, life, rest, pause, patience - spent)
    else:
        injector.later(pause, injector.start, process)
        injector.later(2 * pause, _restart_next, injector, process, rest, pause, READY_SECONDS_MAX)


def _restart_next(injector: Injector, process: Process, rest: list[Process], pause: Seconds, patience: Seconds) -> None:
    ready = process.life is not None and process.life.board.ready
    if ready or patience < 0:
        _restart(injector, rest, pause)
    else:
        injector.later(LOOK_SECONDS, _restart_next, injector, process, rest, pause, patience - LOOK_SECONDS)


def pause(injector: Injector) -> None:
    process = injector.chance.choice(injector.world.processes)
    if process.life is None or process.paused:
        return
    seconds = injector.seconds(8.0)
    injector.world.note(f"SIGSTOP {process.name} for {seconds:.2f} s")
    process.pause()
    injector.later(seconds, process.resume)


def pause_engine(injector: Injector) -> None:
    """It keeps what it was given, and answers nothing."""
    engine, seconds = injector.chance.choice(injector.world.engines), 4.0 + injector.seconds(6.0)
    if engine.life is None or engine.paused:
        return
    injector.world.note(f"SIGSTOP {engine.name} for {seconds:.2f} s")
    engine.pause()
    injector.later(seconds, engine.resume)


def suspend(injector: Injector) -> None:
    """A machine is suspended: who ran on it takes up where it stood, a leader with a lease that ended long ago."""
    process = injector.chance.choice([*injector.world.schedulers, *injector.world.schedulers, *injector.world.services])
    if process.life is None or process.paused:
        return
    seconds = injector.seconds(8.0)
    injector.world.note(f"the machine of {process.name} is suspended for {seconds:.2f} s")
    process.suspend()
    injector.later(seconds, process.resume)


def ambush(injector: Injector) -> None:
    """The leader is killed, and who takes the lease after it stands still at that moment: for another to take it."""
    leader = next((s for s in injector.world.schedulers if s.life is not None and s.service.dispatcher), None)
    if leader is None:
        return
    injector.world.network.ambush = lambda link: _strike_successor(injector, link)
    injector.kill_process(leader, 0.5 + injector.chance.random())


def stale_leader(injector: Injector) -> None:
    """The leader's machine is suspended, and goes on at the worst moment: when requests wait at its successor, whose
    ingresses have asked both."""
    leader = next((s for s in injector.world.schedulers if s.life is not None and s.service.leading), None)
    if leader is None or leader.paused:
        return
    injector.world.note(f"the machine of the leader, {leader.name}, is suspended until requests wait at another")
    leader.suspend()
    _resume_in_the_way(injector, leader, injector.world.loop.time() + STALE_SECONDS_MAX)


def _resume_in_the_way(injector: Injector, leader: SchedulerProcess, deadline: Seconds) -> None:
    if leader.life is None or not leader.paused:
        return
    others = [s for s in injector.world.schedulers if s is not leader and s.life is not None and s.service.leading]
    waiting = any(request.stage in UNGRANTED for s in others for request in s.service.state.workload.requests.values())
    if waiting or injector.world.loop.time() > deadline:
        injector.world.note(f"{leader.name} goes on")
        leader.resume()
    else:
        injector.later(LOOK_SECONDS, _resume_in_the_way, injector, leader, deadline)


def _strike_successor(injector: Injector, link: str) -> None:
    successor = next((s for s in injector.world.schedulers if s.life is not None and s.link.name == link), None)
    if successor is None or successor.paused or injector.over:
        return
    injector.world.network.ambush = lambda _link: None
    seconds = 1.5 + injector.seconds(4.0)
    injector.world.note(f"{successor.name} takes the lease, and its machine is suspended for {seconds:.2f} s")
    successor.suspend()
    injector.later(seconds, successor.resume)


def clock_jump(injector: Injector) -> None:
    process = injector.chance.choice(injector.world.processes)
    process.clock.skew += injector.chance.choice((-1, 1)) * injector.chance.choice((0.2, 1.5, 6.0, 60.0))
    injector.world.note(f"date of {process.name} is off by {process.clock.skew:.1f} s")
