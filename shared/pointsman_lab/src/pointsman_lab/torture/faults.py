"""The faults of a run: scheduled from the seed during the load; `heal` ends all of them."""

from collections.abc import Callable
from dataclasses import dataclass

from pointsman_lab.torture import engine_faults, network_faults, operator_faults, process_faults
from pointsman_lab.torture.engines import FAILURE_MODES
from pointsman_lab.torture.injector import Injector
from pointsman_lab.torture.plan import BAD_SECONDS, FAULTS_BEGIN, FAULTS_SECONDS

LOG_LOSSES = (0, 0, 0, 0, 1, 2)
GAPS = 3


@dataclass(frozen=True, slots=True)
class Fault:
    weight: float
    inject: Callable[[Injector], None]


def schedule(injector: Injector) -> None:
    """Draws everything in advance, so that it depends on the seed alone."""
    if injector.cluster.plan.scenario == "bad engine":
        injector.cluster.loop.outside(
            FAULTS_BEGIN, engine_faults.misbehave, injector, injector.chance.choice(FAILURE_MODES), BAD_SECONDS
        )
    elif injector.cluster.plan.scenario == "slow disk":
        injector.cluster.loop.outside(FAULTS_BEGIN, network_faults.slow_disk_for_long, injector)
    elif injector.cluster.plan.scenario == "heartbeats":
        injector.cluster.loop.outside(FAULTS_BEGIN, network_faults.bad_heartbeats_in_turn, injector)
    elif injector.cluster.plan.scenario:
        injector.cluster.loop.outside(FAULTS_BEGIN, process_faults.rolling_restart, injector)
    else:
        _schedule_faults(injector)


def _schedule_faults(injector: Injector) -> None:
    chance, loop = injector.chance, injector.cluster.loop
    injector.cluster.network.duplicates = chance.choice((0.0, 0.02, 0.1))
    if chance.random() < 0.3:
        network_faults.storm(injector)
    kept = chance.choice((0, 0, 60, 150, 400))
    if kept:
        injector.cluster.note(f"the log keeps {kept} entries and what the newest checkpoint needs")
        network_faults.expire(injector, kept)
    else:
        _schedule_log_losses(injector)
    if not all(injector.cluster.plan.replays):
        gaps = injector.cluster.chance("gaps")
        for _ in range(GAPS):
            loop.outside(
                FAULTS_BEGIN + gaps.random() * FAULTS_SECONDS, _inject, injector, Fault(1.0, engine_faults.drop_events)
            )
    kinds = list(FAULTS)
    for _ in range(chance.choice((2, 5, 10, 20, 30))):
        (name,) = chance.choices(kinds, weights=[FAULTS[kind].weight for kind in kinds])
        loop.outside(FAULTS_BEGIN + chance.random() * FAULTS_SECONDS, _inject, injector, FAULTS[name])


def _schedule_log_losses(injector: Injector) -> None:
    chance = injector.cluster.chance("log losses")
    for _ in range(chance.choice(LOG_LOSSES)):
        inject = chance.choice((network_faults.power_cut, network_faults.power_cut, network_faults.delete_stream))
        injector.cluster.loop.outside(
            FAULTS_BEGIN + chance.random() * FAULTS_SECONDS, _inject, injector, Fault(1.0, inject)
        )


def _inject(injector: Injector, fault: Fault) -> None:
    if not injector.over:
        fault.inject(injector)


def heal(injector: Injector) -> None:
    cluster = injector.cluster
    cluster.healed = True
    cluster.note("all faults end")
    cluster.network.duplicates = cluster.network.damage = 0.0
    cluster.network.server_up()
    cluster.network.disk_is_quick()
    cluster.network.regain_quorum()
    cluster.network.heartbeats.clear()
    for process in cluster.processes:
        process.clock.skew = process.lasting_skew
        process.resume()
        if process.run is None:
            if process.wanted:
                process.start()
        elif process.run.link is not None:
            network_faults.mend(injector, process)
    for ingress in cluster.ingresses:
        ingress.engines_cut.clear()
    for host in cluster.hosts.values():
        host.replay_failures = 0.0
        engine_faults.reconnect_worker(injector, host.instance)
    for engine in cluster.engines:
        engine_faults.stop_dropping_events(engine)
        engine_faults.replace_lying_engine(injector, engine)
        engine_faults.stop_misbehaving(injector, engine)
    cluster.recorder.archive.failing = 0.0
    if cluster.provider is not None:
        cluster.provider.failing = 0.0


FAULTS: dict[str, Fault] = {
    "kill": Fault(3.0, process_faults.kill),
    "kill scheduler": Fault(1.5, process_faults.kill_scheduler),
    "kill engine": Fault(2.0, process_faults.kill_engine),
    "restart": Fault(2.0, process_faults.restart),
    "rolling restart": Fault(0.7, process_faults.rolling_restart),
    "pause": Fault(2.0, process_faults.pause),
    "suspend": Fault(2.0, process_faults.suspend),
    "ambush": Fault(1.0, process_faults.ambush),
    "stale leader": Fault(2.0, process_faults.stale_leader),
    "partition": Fault(2.0, network_faults.partition),
    "bad network": Fault(3.0, network_faults.bad_network),
    "slow disk": Fault(1.0, network_faults.slow_disk),
    "heartbeats": Fault(1.0, network_faults.bad_heartbeats),
    "no quorum": Fault(1.0, network_faults.no_quorum),
    "server away": Fault(1.0, network_faults.server_away),
    "clock": Fault(1.0, process_faults.clock_jump),
    "drop events": Fault(3.0, engine_faults.drop_events),
    "worker cut from engine": Fault(1.0, engine_faults.cut_worker_from_engine),
    "ingress cut from engine": Fault(1.0, engine_faults.cut_ingress_from_engine),
    "drain": Fault(1.0, operator_faults.drain),
    "scale": Fault(2.0, operator_faults.scale),
    "provider away": Fault(0.5, operator_faults.provider_away),
    "clear cache": Fault(0.5, engine_faults.clear_cache),
    "restart unseen": Fault(0.7, engine_faults.restart_unseen),
    "damage": Fault(1.0, network_faults.damage_entries),
    "archive": Fault(0.5, operator_faults.archive_outage),
    "kill ingress": Fault(1.5, process_faults.kill_ingress),
    "kill two": Fault(1.0, process_faults.kill_two),
    "pause engine": Fault(2.5, process_faults.pause_engine),
    "engine errors": Fault(2.0, engine_faults.failing("errors")),
    "engine resets": Fault(1.5, engine_faults.failing("resets")),
    "engine hangs": Fault(1.5, engine_faults.failing("hang")),
    "engine slow": Fault(2.0, engine_faults.failing("slow")),
    "slow rebalancer": Fault(1.0, network_faults.slow_rebalancer),
    "lie about load": Fault(0.7, engine_faults.lie_about_load),
    "lie about cache": Fault(0.7, engine_faults.lie_about_cache),
    "lie about length": Fault(0.5, engine_faults.lie_about_length),
    "lie about name": Fault(0.5, engine_faults.lie_about_name),
    "garbage": Fault(0.7, operator_faults.garbage),
    "poison": Fault(0.7, operator_faults.poison),
}
