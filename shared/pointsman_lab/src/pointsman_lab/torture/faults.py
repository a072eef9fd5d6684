"""The faults of a run: scheduled from the seed during the load; `heal` ends all of them."""

from collections.abc import Callable
from dataclasses import dataclass

from pointsman_lab.torture.engine_faults import (
    clear_cache,
    cut_ingress_from_engine,
    cut_worker_from_engine,
    drop_events,
    engine_errors,
    engine_hangs,
    engine_resets,
    engine_slow,
    lie_about_cache,
    lie_about_length,
    lie_about_load,
    lie_about_name,
    misbehave,
    reconnect_worker,
    replace_lying_engine,
    restart_unseen,
    stop_dropping_events,
    stop_misbehaving,
)
from pointsman_lab.torture.engines import FAILURE_MODES
from pointsman_lab.torture.injector import Injector
from pointsman_lab.torture.network_faults import (
    bad_network,
    damage_entries,
    delete_stream,
    expire,
    mend,
    partition,
    power_cut,
    server_away,
    slow_rebalancer,
    storm,
)
from pointsman_lab.torture.operator_faults import (
    archive_outage,
    drain,
    garbage,
    poison,
    provider_away,
    scale,
)
from pointsman_lab.torture.plan import BAD_SECONDS, FAULTS_BEGIN, FAULTS_SECONDS
from pointsman_lab.torture.process_faults import (
    ambush,
    clock_jump,
    kill,
    kill_engine,
    kill_ingress,
    kill_scheduler,
    kill_two,
    pause,
    pause_engine,
    restart,
    rolling_restart,
    stale_leader,
    suspend,
)

LOG_LOSSES = (0, 0, 0, 0, 1, 2)
GAPS = 3


@dataclass(frozen=True, slots=True)
class Fault:
    weight: float
    strike: Callable[[Injector], None]


def schedule(injector: Injector) -> None:
    """Draws everything in advance, so that it depends on the seed alone."""
    if injector.cluster.plan.scenario == "bad engine":
        injector.cluster.loop.outside(
            FAULTS_BEGIN, misbehave, injector, injector.chance.choice(FAILURE_MODES), BAD_SECONDS
        )
    elif injector.cluster.plan.scenario:
        injector.cluster.loop.outside(FAULTS_BEGIN, rolling_restart, injector)
    else:
        _schedule_faults(injector)


def _schedule_faults(injector: Injector) -> None:
    chance, loop = injector.chance, injector.cluster.loop
    injector.cluster.network.duplicates = chance.choice((0.0, 0.02, 0.1))
    if chance.random() < 0.3:
        storm(injector)
    kept = chance.choice((0, 0, 60, 150, 400))
    if kept:
        injector.cluster.note(f"the log keeps {kept} entries and what the newest checkpoint needs")
        expire(injector, kept)
    else:
        _schedule_log_losses(injector)
    if not all(injector.cluster.plan.replays):
        gaps = injector.cluster.chance("gaps")
        for _ in range(GAPS):
            loop.outside(FAULTS_BEGIN + gaps.random() * FAULTS_SECONDS, _strike, injector, Fault(1.0, drop_events))
    kinds = list(FAULTS)
    for _ in range(chance.choice((2, 5, 10, 20, 30))):
        (name,) = chance.choices(kinds, weights=[FAULTS[kind].weight for kind in kinds])
        loop.outside(FAULTS_BEGIN + chance.random() * FAULTS_SECONDS, _strike, injector, FAULTS[name])


def _schedule_log_losses(injector: Injector) -> None:
    chance = injector.cluster.chance("log losses")
    for _ in range(chance.choice(LOG_LOSSES)):
        strike = chance.choice((power_cut, power_cut, delete_stream))
        injector.cluster.loop.outside(
            FAULTS_BEGIN + chance.random() * FAULTS_SECONDS, _strike, injector, Fault(1.0, strike)
        )


def _strike(injector: Injector, fault: Fault) -> None:
    if not injector.over:
        fault.strike(injector)


def heal(injector: Injector) -> None:
    cluster = injector.cluster
    cluster.healed = True
    cluster.note("all faults end")
    cluster.network.duplicates = cluster.network.damage = 0.0
    cluster.network.server_up()
    for process in cluster.processes:
        process.clock.skew = 0.0
        process.resume()
        if process.run is None:
            if process.wanted:
                process.start()
        elif process.run.link is not None:
            mend(injector, process)
    for ingress in cluster.ingresses:
        ingress.engines_cut.clear()
    for host in cluster.hosts.values():
        host.replay_failures = 0.0
        reconnect_worker(injector, host.instance)
    for engine in cluster.engines:
        stop_dropping_events(engine)
        replace_lying_engine(injector, engine)
        stop_misbehaving(injector, engine)
    cluster.recorder.archive.failing = 0.0
    if cluster.provider is not None:
        cluster.provider.failing = 0.0


FAULTS: dict[str, Fault] = {
    "kill": Fault(3.0, kill),
    "kill scheduler": Fault(1.5, kill_scheduler),
    "kill engine": Fault(2.0, kill_engine),
    "restart": Fault(2.0, restart),
    "rolling restart": Fault(0.7, rolling_restart),
    "pause": Fault(2.0, pause),
    "suspend": Fault(2.0, suspend),
    "ambush": Fault(1.0, ambush),
    "stale leader": Fault(2.0, stale_leader),
    "partition": Fault(2.0, partition),
    "bad network": Fault(3.0, bad_network),
    "server away": Fault(1.0, server_away),
    "clock": Fault(1.0, clock_jump),
    "drop events": Fault(3.0, drop_events),
    "worker cut from engine": Fault(1.0, cut_worker_from_engine),
    "ingress cut from engine": Fault(1.0, cut_ingress_from_engine),
    "drain": Fault(1.0, drain),
    "scale": Fault(2.0, scale),
    "provider away": Fault(0.5, provider_away),
    "clear cache": Fault(0.5, clear_cache),
    "restart unseen": Fault(0.7, restart_unseen),
    "damage": Fault(1.0, damage_entries),
    "archive": Fault(0.5, archive_outage),
    "kill ingress": Fault(1.5, kill_ingress),
    "kill two": Fault(1.0, kill_two),
    "pause engine": Fault(2.5, pause_engine),
    "engine errors": Fault(2.0, engine_errors),
    "engine resets": Fault(1.5, engine_resets),
    "engine hangs": Fault(1.5, engine_hangs),
    "engine slow": Fault(2.0, engine_slow),
    "slow rebalancer": Fault(1.0, slow_rebalancer),
    "lie about load": Fault(0.7, lie_about_load),
    "lie about cache": Fault(0.7, lie_about_cache),
    "lie about length": Fault(0.5, lie_about_length),
    "lie about name": Fault(0.5, lie_about_name),
    "garbage": Fault(0.7, garbage),
    "poison": Fault(0.7, poison),
}
