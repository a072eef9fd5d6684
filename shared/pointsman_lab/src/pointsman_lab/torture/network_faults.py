"""Faults of the network and of the log server."""

from pointsman.primitives import EngineSeconds, InstanceId
from pointsman_lab.torture.injector import Injector
from pointsman_lab.torture.network import IDEAL, LinkConditions
from pointsman_lab.torture.plan import HEARTBEATS_SECONDS, SLOW_DISK_SECONDS
from pointsman_lab.torture.processes import Process

EXPIRY_SECONDS: EngineSeconds = 1.0
SLOW_WRITE_SECONDS: EngineSeconds = 0.3
BAD_HEARTBEATS = (
    LinkConditions(loss=1.0),
    LinkConditions(loss=0.5),
    LinkConditions(delay=0.3, duplication=0.3),
    LinkConditions(delay=1.0),
)
"""Lost, or later than a worker waits for the answer."""


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
    injector.cluster.note(f"bad network at {process.name}: {_said(conditions)}, for {seconds:.2f} s")
    process.link.conditions = conditions
    injector.later(seconds, _clear_up, process)


def server_away(injector: Injector) -> None:
    network = injector.cluster.network
    if not network.broker.available:
        return
    seconds = injector.seconds(8.0)
    injector.cluster.note(f"log server away for {seconds:.2f} s")
    network.server_down()
    injector.later(seconds, network.server_up)


def power_cut(injector: Injector) -> None:
    network = injector.cluster.network
    if not network.broker.available:
        return
    count, seconds = injector.chance.choice((1, 3, 10, 40, 200)), injector.seconds(3.0)
    injector.cluster.note(f"power cut at the log server: it loses {count} entries, and is away for {seconds:.2f} s")
    network.server_down()
    network.lose_newest(count)
    injector.later(seconds, network.server_up)


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


def bad_heartbeats(injector: Injector) -> None:
    """Core NATS is bad for them, while the log and all else works."""
    network, chance = injector.cluster.network, injector.chance
    hosts = sorted(injector.cluster.hosts)
    chosen = chance.choice((hosts, [chance.choice(hosts)]))
    conditions, seconds = chance.choice(BAD_HEARTBEATS), injector.seconds(12.0)
    injector.cluster.note(f"heartbeats of {', '.join(chosen)}: {_said(conditions)}, for {seconds:.2f} s")
    network.heartbeats |= dict.fromkeys(chosen, conditions)
    injector.later(seconds, _heartbeats_well, injector, chosen)


def bad_heartbeats_in_turn(injector: Injector) -> None:
    """Of all engines, in every way."""
    network, hosts, each = (
        injector.cluster.network,
        sorted(injector.cluster.hosts),
        HEARTBEATS_SECONDS / len(BAD_HEARTBEATS),
    )
    for number, conditions in enumerate(BAD_HEARTBEATS):
        injector.later(number * each, injector.cluster.note, f"all heartbeats: {_said(conditions)}, for {each:g} s")
        injector.later(number * each, network.heartbeats.update, dict.fromkeys(hosts, conditions))


def no_quorum(injector: Injector) -> None:
    """The reverse: JetStream does not answer, core NATS works."""
    network = injector.cluster.network
    if not network.broker.available or not network.quorum:
        return
    seconds = injector.seconds(8.0)
    injector.cluster.note(f"JetStream has no quorum for {seconds:.2f} s")
    network.lose_quorum()
    injector.later(seconds, network.regain_quorum)


def _heartbeats_well(injector: Injector, chosen: list[InstanceId]) -> None:
    for instance in chosen:
        injector.cluster.network.heartbeats.pop(instance, None)


def _said(conditions: LinkConditions) -> str:
    return f"delay {conditions.delay} s, loss {conditions.loss}, duplication {conditions.duplication}"


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


def expire(injector: Injector, kept: int) -> None:
    if not injector.over:
        injector.cluster.network.expire(kept)
        injector.later(EXPIRY_SECONDS, expire, injector, kept)
