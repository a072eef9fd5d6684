"""Faults of processes: killed, paused, restarted, suspended, with a wrong date."""

from pointsman.primitives import Seconds
from pointsman_lab.torture.ghosts import GhostWatch
from pointsman_lab.torture.injector import Injector
from pointsman_lab.torture.processes import Life, Process
from pointsman_lab.torture.services import SchedulerProcess
from pointsman_scheduler.waiters import UNGRANTED

STALE_SECONDS_MAX: Seconds = 8.0
READY_SECONDS_MAX: Seconds = 5.0
LOOK_SECONDS: Seconds = 0.01
STOP_SECONDS_MAX: Seconds = 10.0


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
    for process in injector.chance.sample(injector.world.processes, 2):
        injector.kill_process(process, injector.chance.expovariate(0.7))


def kill_scheduler(injector: Injector) -> None:
    injector.kill_process(injector.chance.choice(injector.world.schedulers), injector.chance.expovariate(0.7))


def restart(injector: Injector) -> None:
    service = injector.chance.choice([*injector.world.workers, *injector.world.services])
    _restart(injector, [service], injector.chance.choice((0.2, 4.0)))


def rolling_restart(injector: Injector) -> None:
    world = injector.world
    groups: list[list[Process]] = [[*world.ingresses], [*world.schedulers], [*world.workers], [world.rebalancer]]
    injector.chance.shuffle(groups)
    _restart(injector, [process for group in groups for process in group], injector.chance.choice((0.1, 1.0)))


def _restart(injector: Injector, rest: list[Process], pause: Seconds) -> None:
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
    engine, seconds = injector.chance.choice(injector.world.engines), 4.0 + injector.seconds(6.0)
    if engine.life is None or engine.paused:
        return
    injector.world.note(f"SIGSTOP {engine.name} for {seconds:.2f} s")
    engine.pause()
    injector.later(seconds, engine.resume)


def suspend(injector: Injector) -> None:
    process = injector.chance.choice([*injector.world.schedulers, *injector.world.schedulers, *injector.world.services])
    if process.life is None or process.paused:
        return
    seconds = injector.seconds(8.0)
    injector.world.note(f"the machine of {process.name} is suspended for {seconds:.2f} s")
    process.suspend()
    injector.later(seconds, process.resume)


def ambush(injector: Injector) -> None:
    leader = next((s for s in injector.world.schedulers if s.life is not None and s.service.dispatcher), None)
    if leader is None:
        return
    injector.world.network.ambush = lambda link: _strike_successor(injector, link)
    injector.kill_process(leader, 0.5 + injector.chance.random())


def stale_leader(injector: Injector) -> None:
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
