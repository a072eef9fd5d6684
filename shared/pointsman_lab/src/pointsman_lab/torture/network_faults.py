"""Faults of the network and of the log server."""

from pointsman.primitives import EngineSeconds
from pointsman_lab.torture.injector import Injector
from pointsman_lab.torture.network import IDEAL, LinkConditions
from pointsman_lab.torture.plan import SLOW_DISK_SECONDS
from pointsman_lab.torture.processes import Process

EXPIRY_SECONDS: EngineSeconds = 1.0
SLOW_WRITE_SECONDS: EngineSeconds = 0.3


def slow_rebalancer(injector: Injector) -> None:
    rebalancer, seconds = injector.cluster.rebalancer, injector.seconds(10.0)
    if rebalancer.run is not None:
        injector.cluster.note(f"the rebalancer is slow for {seconds:.2f} s")
        rebalancer.link.conditions = LinkConditions(delay=injector.chance.choice((0.1, 0.3, 1.0)))
        injector.later(seconds, _clear_up, rebalancer)


def partition(injector: Injector) -> None:
    process = injector.chance.choice(injector.cluster.services)
    if process.run is None:
        return
    seconds = injector.seconds(12.0)
    injector.cluster.note(f"partition {process.name} for {seconds:.2f} s")
    process.link.cut_off()
    injector.later(seconds, mend, injector, process)


def bad_network(injector: Injector) -> None:
    process = injector.chance.choice(injector.cluster.services)
    if process.run is None:
        return
    chance, seconds = injector.chance, injector.seconds(10.0)
    conditions = LinkConditions(
        delay=chance.choice((0.0004, 0.005, 0.05, 0.3)),
        loss=chance.choice((0.0, 0.02, 0.2)),
        duplication=chance.choice((0.0, 0.05, 0.3)),
    )
    injector.cluster.note(
        f"bad network at {process.name}: delay {conditions.delay} s, loss {conditions.loss}, duplication {conditions.duplication}, "
        f"for {seconds:.2f} s"
    )
    process.link.conditions = conditions
    injector.later(seconds, _clear_up, process)


def server_away(injector: Injector) -> None:
    network = injector.cluster.network
    if not network.broker.available:
        return
    seconds = injector.seconds(8.0)
    injector.cluster.note(f"log server away for {seconds:.2f} s")
    network.server_down()
    injector.later(seconds, _server_back, injector)


def power_cut(injector: Injector) -> None:
    network = injector.cluster.network
    if not network.broker.available:
        return
    count, seconds = injector.chance.choice((1, 3, 10, 40, 200)), injector.seconds(3.0)
    injector.cluster.note(f"power cut at the log server: it loses {count} entries, and is away for {seconds:.2f} s")
    network.server_down()
    network.lose_newest(count)
    injector.later(seconds, _server_back, injector)


def delete_stream(injector: Injector) -> None:
    if injector.cluster.network.broker.available:
        injector.cluster.note("an operator deletes the log")
        injector.cluster.network.note_restart()


def slow_disk(injector: Injector) -> None:
    network, seconds = injector.cluster.network, injector.seconds(12.0)
    network.write_seconds = injector.chance.choice((0.05, 0.3))
    injector.cluster.note(f"the log's disk takes {network.write_seconds:g} s a write for {seconds:.2f} s")
    injector.later(seconds, network.disk_is_quick)


def slow_disk_for_long(injector: Injector) -> None:
    network = injector.cluster.network
    network.write_seconds = SLOW_WRITE_SECONDS
    injector.cluster.note(f"the log's disk takes {SLOW_WRITE_SECONDS:g} s a write for {SLOW_DISK_SECONDS:g} s")
    injector.later(SLOW_DISK_SECONDS, network.disk_is_quick)


def damage_entries(injector: Injector) -> None:
    share, seconds = injector.chance.choice((0.1, 0.5)), injector.seconds(6.0)
    injector.cluster.note(f"the log server damages {share:.0%} of all cache events for {seconds:.2f} s")
    injector.cluster.network.damage = share
    injector.later(seconds, setattr, injector.cluster.network, "damage", 0.0)


def storm(injector: Injector) -> None:
    chance = injector.chance
    conditions = LinkConditions(delay=chance.choice((0.002, 0.02)), loss=chance.choice((0.0, 0.05)), duplication=0.05)
    injector.cluster.note(f"storm everywhere: {conditions}")
    for process in injector.cluster.services:
        if process.run is not None:
            process.link.conditions = conditions


def mend(injector: Injector, process: Process) -> None:
    if process.run is not None and process.run.link is not None:
        process.run.link.conditions = IDEAL if injector.over else process.run.link.conditions
        process.run.link.mend()


def _clear_up(process: Process) -> None:
    if process.run is not None and process.run.link is not None:
        process.run.link.conditions = IDEAL


def _server_back(injector: Injector) -> None:
    injector.cluster.network.server_up()


def expire(injector: Injector, kept: int) -> None:
    if not injector.over:
        injector.cluster.network.expire(kept)
        injector.later(EXPIRY_SECONDS, expire, injector, kept)
