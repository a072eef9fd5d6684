"""The faults: what a seed does to the fleet while clients ask, and how everything is made whole again."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pointsman.contracts.subjects import cache_subject, fleet_subject, leader_subject
from pointsman.primitives import InstanceId, Seconds
from pointsman_lab.torture.cluster import Cluster
from pointsman_lab.torture.engines import MISDEEDS, Lies, Misdeed
from pointsman_lab.torture.network import CALM, Link, LinkConditions
from pointsman_lab.torture.plan import BAD_SECONDS, FAULTS_BEGIN, FAULTS_SECONDS
from pointsman_lab.torture.processes import EngineProcess, Life, Process, SchedulerProcess
from pointsman_scheduler.waiters import UNGRANTED

STEPS_BEFORE_KILL_MAX = 12
"""Turns of the loop by which a kill is put off, so that it can come between any two steps."""
STALE_SECONDS_MAX: Seconds = 8.0
READY_SECONDS_MAX: Seconds = 5.0
"""For so long the next one of a rolling restart waits for the one before to be ready."""
LOOK_SECONDS: Seconds = 0.01
STOP_SECONDS_MAX: Seconds = 10.0
"""How long a process may take to end after a SIGTERM, beside what it serves."""
LOG_LOSSES = (0, 0, 0, 0, 1, 2)
"""How often a log without retention loses what it had confirmed, each as likely."""
GAPS = 3
"""How often more events are dropped where an engine cannot tell again what was missed."""
EXPIRY_SECONDS: Seconds = 1.0
"""How often retention looks for what it may drop."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A kind of trouble. `weight`: how often, compared with the others."""

    weight: float
    strike: Callable[["FaultInjector"], None]


class FaultInjector:
    """Makes trouble in a world, from a seed."""

    def __init__(self, world: Cluster) -> None:
        self.world = world
        self.chance = world.chance("faults")

    @property
    def over(self) -> bool:
        return self.world.healed

    def schedule(self) -> None:
        """Plan all of it now, so that it depends on the seed alone."""
        if self.world.plan.scenario == "bad engine":
            self.world.loop.outside(FAULTS_BEGIN, self._misbehave, self.chance.choice(MISDEEDS), BAD_SECONDS)
        elif self.world.plan.scenario:
            self.world.loop.outside(FAULTS_BEGIN, self.rolling_restart)
        else:
            self._schedule_faults()

    def _schedule_faults(self) -> None:
        chance, loop = self.chance, self.world.loop
        self.world.network.echoes = chance.choice((0.0, 0.02, 0.1))
        if chance.random() < 0.3:
            self._storm()
        kept = chance.choice((0, 0, 60, 150, 400))
        if kept:
            self.world.note(f"the log keeps {kept} entries and what the newest checkpoint needs")
            self._expire(kept)
        else:
            self._schedule_log_losses()
        if not all(self.world.plan.replays):
            gaps = self.world.chance("gaps")
            for _ in range(GAPS):
                loop.outside(
                    FAULTS_BEGIN + gaps.random() * FAULTS_SECONDS, self._strike, Fault(1.0, FaultInjector.drop_events)
                )
        kinds = list(FAULTS)
        for _ in range(chance.choice((2, 5, 10, 20, 30))):
            (name,) = chance.choices(kinds, weights=[FAULTS[kind].weight for kind in kinds])
            loop.outside(FAULTS_BEGIN + chance.random() * FAULTS_SECONDS, self._strike, FAULTS[name])

    def _schedule_log_losses(self) -> None:
        """The log loses entries that it had confirmed; not where retention drops the oldest, too."""
        chance = self.world.chance("log losses")
        for _ in range(chance.choice(LOG_LOSSES)):
            strike = chance.choice((FaultInjector.power_cut, FaultInjector.power_cut, FaultInjector.delete_stream))
            self.world.loop.outside(FAULTS_BEGIN + chance.random() * FAULTS_SECONDS, self._strike, Fault(1.0, strike))

    def _strike(self, fault: Fault) -> None:
        if not self.over:
            fault.strike(self)

    def heal(self) -> None:
        """End all trouble: everything runs, everything can be reached, the dates are right."""
        world = self.world
        world.healed = True
        world.note("all faults end")
        world.network.echoes = world.network.damage = 0.0
        world.network.server_up()
        for process in world.processes:
            process.clock.skew = 0.0
            process.resume()
            if process.life is None:
                if process.wanted:
                    process.start()
            elif process.life.link is not None:
                self._mend(process)
        for ingress in world.ingresses:
            ingress.engines_cut.clear()
        for host in world.hosts.values():
            host.replay_trouble = 0.0
            self._mend_engine_way(host.instance)
        for engine in world.engines:
            self._calm_events(engine)
            self._end_lies(engine)
            self._behave(engine)
        world.recorder.archive.failing = 0.0
        if world.provider is not None:
            world.provider.failing = 0.0

    # Kinds of trouble

    def kill(self) -> None:
        process = self.chance.choice(self.world.services)
        self._kill(process, self.chance.expovariate(0.7))

    def kill_engine(self) -> None:
        self._kill(self.chance.choice(self.world.engines), self.chance.expovariate(0.7))

    def kill_ingress(self) -> None:
        ingress = self.chance.choice(self.world.ingresses)
        if ingress.life is not None:
            self.world.ghosts.watch(ingress.link.name)
        self._kill(ingress, self.chance.expovariate(0.7))

    def kill_two(self) -> None:
        """Two processes die at the same moment."""
        for process in self.chance.sample(self.world.processes, 2):
            self._kill(process, self.chance.expovariate(0.7))

    def kill_scheduler(self) -> None:
        self._kill(self.chance.choice(self.world.schedulers), self.chance.expovariate(0.7))

    def restart(self) -> None:
        """A process is stopped in order, and started again when it has ended: soon, or some seconds later."""
        service = self.chance.choice([*self.world.workers, *self.world.services])
        self._restart([service], self.chance.choice((0.2, 4.0)))

    def rolling_restart(self) -> None:
        """As for a new version: every service in turn."""
        world = self.world
        groups: list[list[Process]] = [[*world.ingresses], [*world.schedulers], [*world.workers], [world.rebalancer]]
        self.chance.shuffle(groups)
        self._restart([process for group in groups for process in group], self.chance.choice((0.1, 1.0)))

    def _restart(self, rest: list[Process], pause: Seconds) -> None:
        """Restart these one after the other. Each is away for `pause` after its end, and up for as long before the next."""
        if not rest or self.over:
            return
        process, life = rest[0], rest[0].life
        if life is None or process.paused:
            self._restart(rest[1:], pause)
            return
        self.world.note(f"SIGTERM {process.name}")
        if process in self.world.ingresses:
            self.world.ghosts.watch(process.link.name)
        process.stop()
        self._look_for_end(
            process, life, rest[1:], pause, STOP_SECONDS_MAX + self.world.plan.ingress_settings["drain_seconds_max"]
        )

    def _look_for_end(
        self, process: Process, life: Life, rest: list[Process], pause: Seconds, patience: Seconds
    ) -> None:
        """When it has ended it is started again. `patience`: how long it may still take, as long as it can do anything."""
        if process.life is life and patience < 0:
            self.world.violation(f"{process.name} does not end after a SIGTERM")
        elif process.life is life:
            spent = 0.0 if process.paused else LOOK_SECONDS
            self._later(LOOK_SECONDS, self._look_for_end, process, life, rest, pause, patience - spent)
        else:
            self._later(pause, self._start, process)
            self._later(2 * pause, self._restart_next, process, rest, pause, READY_SECONDS_MAX)

    def _restart_next(self, process: Process, rest: list[Process], pause: Seconds, patience: Seconds) -> None:
        """When the one before is ready, or has had time enough."""
        ready = process.life is not None and process.life.board.ready
        if ready or patience < 0:
            self._restart(rest, pause)
        else:
            self._later(LOOK_SECONDS, self._restart_next, process, rest, pause, patience - LOOK_SECONDS)

    def pause(self) -> None:
        process = self.chance.choice(self.world.processes)
        if process.life is None or process.paused:
            return
        seconds = self._seconds(8.0)
        self.world.note(f"SIGSTOP {process.name} for {seconds:.2f} s")
        process.pause()
        self._later(seconds, self._resume, process)

    def pause_engine(self) -> None:
        """It keeps what it was given, and answers nothing."""
        engine, seconds = self.chance.choice(self.world.engines), 4.0 + self._seconds(6.0)
        if engine.life is None or engine.paused:
            return
        self.world.note(f"SIGSTOP {engine.name} for {seconds:.2f} s")
        engine.pause()
        self._later(seconds, self._resume, engine)

    def slow_rebalancer(self) -> None:
        """It plans on what was long ago, and its plans come late."""
        rebalancer, seconds = self.world.rebalancer, self._seconds(10.0)
        if rebalancer.life is not None:
            self.world.note(f"the rebalancer is slow for {seconds:.2f} s")
            rebalancer.link.weather = LinkConditions(delay=self.chance.choice((0.1, 0.3, 1.0)))
            self._later(seconds, self._clear_up, rebalancer)

    def suspend(self) -> None:
        """A machine is suspended: who ran on it takes up where it stood, a leader with a lease that ended long ago."""
        process = self.chance.choice([*self.world.schedulers, *self.world.schedulers, *self.world.services])
        if process.life is None or process.paused:
            return
        seconds = self._seconds(8.0)
        self.world.note(f"the machine of {process.name} is suspended for {seconds:.2f} s")
        process.suspend()
        self._later(seconds, self._resume, process)

    def ambush(self) -> None:
        """The leader is killed, and who takes the lease after it stands still at that moment: for another to take it."""
        leader = next((s for s in self.world.schedulers if s.life is not None and s.service.dispatcher), None)
        if leader is None:
            return
        self.world.network.ambush = self._strike_successor
        self._kill(leader, 0.5 + self.chance.random())

    def stale_leader(self) -> None:
        """The leader's machine is suspended, and goes on at the worst moment: when requests wait at its successor, whose
        ingresses have asked both."""
        leader = next((s for s in self.world.schedulers if s.life is not None and s.service.leading), None)
        if leader is None or leader.paused:
            return
        self.world.note(f"the machine of the leader, {leader.name}, is suspended until requests wait at another")
        leader.suspend()
        self._resume_in_the_way(leader, self.world.loop.time() + STALE_SECONDS_MAX)

    def _resume_in_the_way(self, leader: SchedulerProcess, deadline: Seconds) -> None:
        if leader.life is None or not leader.paused:
            return
        others = [s for s in self.world.schedulers if s is not leader and s.life is not None and s.service.leading]
        waiting = any(
            request.stage in UNGRANTED for s in others for request in s.service.state.workload.requests.values()
        )
        if waiting or self.world.loop.time() > deadline:
            self.world.note(f"{leader.name} goes on")
            leader.resume()
        else:
            self._later(LOOK_SECONDS, self._resume_in_the_way, leader, deadline)

    def _strike_successor(self, link: Link) -> None:
        successor = next((s for s in self.world.schedulers if s.life is not None and s.life.link is link), None)
        if successor is None or successor.paused or self.over:
            return
        self.world.network.ambush = lambda _link: None
        seconds = 1.5 + self._seconds(4.0)
        self.world.note(f"{successor.name} takes the lease, and its machine is suspended for {seconds:.2f} s")
        successor.suspend()
        self._later(seconds, self._resume, successor)

    def partition(self) -> None:
        process = self.chance.choice(self.world.services)
        if process.life is None:
            return
        seconds = self._seconds(12.0)
        self.world.note(f"partition {process.name} for {seconds:.2f} s")
        process.link.cut_off()
        self._later(seconds, self._mend, process)

    def bad_weather(self) -> None:
        process = self.chance.choice(self.world.services)
        if process.life is None:
            return
        chance, seconds = self.chance, self._seconds(10.0)
        weather = LinkConditions(
            delay=chance.choice((0.0004, 0.005, 0.05, 0.3)),
            loss=chance.choice((0.0, 0.02, 0.2)),
            doubling=chance.choice((0.0, 0.05, 0.3)),
        )
        self.world.note(
            f"weather at {process.name}: delay {weather.delay} s, loss {weather.loss}, doubling {weather.doubling}, "
            f"for {seconds:.2f} s"
        )
        process.link.weather = weather
        self._later(seconds, self._clear_up, process)

    def server_away(self) -> None:
        network = self.world.network
        if not network.broker.available:
            return
        seconds = self._seconds(8.0)
        self.world.note(f"log server away for {seconds:.2f} s")
        network.server_down()
        self._later(seconds, self._server_back)

    def power_cut(self) -> None:
        """The log server's machine loses power, and with it what had not been flushed to its disk."""
        network = self.world.network
        if not network.broker.available:
            return
        count, seconds = self.chance.choice((1, 3, 10, 40, 200)), self._seconds(3.0)
        self.world.note(f"power cut at the log server: it loses {count} entries, and is away for {seconds:.2f} s")
        network.server_down()
        network.lose_newest(count)
        self._later(seconds, self._server_back)

    def delete_stream(self) -> None:
        if self.world.network.broker.available:
            self.world.note("somebody deletes the log")
            self.world.network.note_restart()

    def clock_jump(self) -> None:
        process = self.chance.choice(self.world.processes)
        process.clock.skew += self.chance.choice((-1, 1)) * self.chance.choice((0.2, 1.5, 6.0, 60.0))
        self.world.note(f"date of {process.name} is off by {process.clock.skew:.1f} s")

    def drop_events(self) -> None:
        """Most often of an engine that cannot tell again what was missed, where there is one."""
        forgetful = [engine for engine in self.world.engines if not engine.host.replays]
        engine = self.chance.choice([*self.world.engines, *forgetful * 4])
        share, seconds = self.chance.choice((0.1, 0.5, 1.0)), self._seconds(6.0)
        self.world.note(f"{engine.name} drops {share:.0%} of its KV events for {seconds:.2f} s")
        engine.host.replay_trouble = self.chance.choice((0.0, 0.3, 0.9))
        if engine.host.life is not None:
            engine.host.life.publisher.dropping = share
        self._later(seconds, self._calm_events, engine)

    def cut_worker_from_engine(self) -> None:
        host = self.chance.choice(list(self.world.hosts.values()))
        seconds = self._seconds(6.0)
        self.world.note(f"the worker of {host.instance} cannot reach it for {seconds:.2f} s")
        host.worker_cut = True
        self._later(seconds, self._mend_engine_way, host.instance)

    def cut_ingress_from_engine(self) -> None:
        ingress, engine = self.chance.choice(self.world.ingresses), self.chance.choice(self.world.engines)
        seconds = self._seconds(6.0)
        self.world.note(f"{ingress.name} cannot reach {engine.name} for {seconds:.2f} s")
        ingress.engines_cut.add(engine.name)
        self._later(seconds, ingress.engines_cut.discard, engine.name)

    def drain(self) -> None:
        """An operator drains an instance, and thinks better of it."""
        instance = self.chance.choice(list(self.world.hosts))
        seconds = self._seconds(8.0)
        self.world.note(f"{instance} drains for {seconds:.2f} s")
        self.world.operator.drain(instance)
        self._later(seconds, self.world.operator.undrain, instance)

    def scale(self) -> None:
        """An operator wants another size."""
        wanted = self.chance.randint(1, self.world.plan.hosts)
        if self.world.provider is not None:
            self.world.note(f"the pool shall have {wanted} instances")
            self.world.operator.scale(wanted)

    def provider_away(self) -> None:
        seconds, share = self._seconds(6.0), self.chance.choice((0.3, 1.0))
        if self.world.provider is not None:
            self.world.note(f"the provider fails {share:.0%} of all calls for {seconds:.2f} s")
            self.world.provider.failing = share
            self._later(seconds, self._provider_back)

    def clear_cache(self) -> None:
        engine = self.chance.choice(self.world.engines)
        life = engine.host.life
        if life is not None and not engine.paused and life.engine.reset_prefix_cache():
            self.world.note(f"{engine.name} drops its cache")

    def restart_unseen(self) -> None:
        """An engine without a replay socket, of whose cache all is known since it was cleared, is another one a while later."""
        chance, forgetful = self.chance, [engine for engine in self.world.engines if not engine.host.replays]
        if not forgetful:
            return
        engine = chance.choice(forgetful)
        life = engine.host.life
        if life is not None and not engine.paused and life.engine.reset_prefix_cache():
            self.world.note(f"{engine.name} drops its cache")
            self._later(chance.random() * 4.0, self._kill, engine, 0.2 + chance.random())

    def damage_entries(self) -> None:
        share, seconds = self.chance.choice((0.1, 0.5)), self._seconds(6.0)
        self.world.note(f"the log server damages {share:.0%} of all cache events for {seconds:.2f} s")
        self.world.network.damage = share
        self._later(seconds, self._stop_damage)

    def archive_away(self) -> None:
        seconds = self._seconds(5.0)
        self.world.note(f"the recorder's database fails often for {seconds:.2f} s")
        self.world.recorder.archive.failing = self.chance.choice((0.3, 1.0))
        self._later(seconds, self._archive_back)

    # Engines that lie

    def lie_about_load(self) -> None:
        self._lie("load", **{self.chance.choice(("idle", "busy")): True})

    def lie_about_cache(self) -> None:
        self._lie("cache", events=self.chance.choice((0.2, 1.0)), cached_tokens=self.chance.random() < 0.5)

    def lie_about_length(self) -> None:
        self._lie("length", restart=True, max_model_len=1)

    def lie_about_name(self) -> None:
        named = {"model": "another-model"} if self.chance.random() < 0.5 else {"aliases": ("another-model",)}
        self._lie("name", restart=True, **named)

    def _lie(self, about: str, *, restart: bool = False, **lies: Any) -> None:
        """An engine says what is not so, until it is started anew. `restart`: it says so as it starts."""
        engine = self.chance.choice(self.world.engines)
        self.world.note(f"{engine.name} lies about its {about}: {lies}")
        for name, said in lies.items():
            setattr(engine.host.lies, name, said)
        if restart:
            self._kill(engine, 0.5)
        else:
            self._later(self._seconds(8.0), self._end_lies, engine)

    def _end_lies(self, engine: EngineProcess) -> None:
        """Somebody replaces an engine that lies by one that does not."""
        if engine.host.lies.any:
            engine.host.lies = Lies()
            self._kill(engine, 0.5)

    # Engines that fail what they are asked, and look well

    def engine_errors(self) -> None:
        self._misbehave("errors", self._bad_seconds)

    def engine_resets(self) -> None:
        self._misbehave("resets", self._bad_seconds)

    def engine_hangs(self) -> None:
        self._misbehave("hang", self._bad_seconds)

    def engine_slow(self) -> None:
        self._misbehave("slow", self._bad_seconds)

    @property
    def _bad_seconds(self) -> Seconds:
        return 3.0 + self._seconds(15.0)

    def _misbehave(self, misdeed: Misdeed, seconds: Seconds) -> None:
        engine = self.chance.choice(self.world.engines)
        self.world.note(f"{engine.name} misbehaves for {seconds:.2f} s: {misdeed}")
        engine.host.misbehave(misdeed)
        self._later(seconds, self._behave, engine)

    def _behave(self, engine: EngineProcess) -> None:
        if engine.host.misdeed:
            self.world.note(f"{engine.name} is well again")
            engine.host.misbehave("")

    # Strangers who write into the log

    def garbage(self) -> None:
        self._write_raw(
            (b"", b"\x00", b'{"type":"InstanceReported","at":', b'{"type":"Unheard","at":1.0}', b"[" * 40, b"null")
        )

    def poison(self) -> None:
        """What decoders and folds may stumble over."""
        host, chance = self.chance.choice(list(self.world.hosts.values())), self.chance
        known = next(
            (s.service.state.fleet.get(host.instance) for s in self.world.schedulers if s.life is not None), None
        )
        epoch, sequence = (known.epoch, known.sequence + 1) if known is not None else (1, 1)
        of_cache = f'"at":1.0,"instance":"{host.instance}","epoch":{epoch},"sequence":{sequence}'
        of_fleet = f'"at":1.0,"instance":"{host.instance}","epoch":{epoch}'
        report = '"serving":true,"waiting":0,"running":0,"kv_usage":%s,"sequence":1,"blocks":0,"digest":0'
        name = f"poison-{chance.randrange(10**6)}"
        arrived = f'"at":1.0,"request":"{name}","arrived_at":1.0,"ingress":"x","tenant":"t"'
        numbers = '"prompt_tokens":%s,"max_output_tokens":1,"slo_ttft":1.0,"slo_tpot":1.0'
        self._write_raw(
            (
                b'{"type":"InstanceReported","x":' + b"[" * 3000 + b"]" * 3000 + b"}",
                f'{{"type":"BlocksRemoved",{of_cache},"keys":"AAAAAAAAAA=="}}'.encode(),
                f'{{"type":"BlocksStored",{of_cache},"runs":[{{"keys":"AAAAAAAAAA=="}}]}}'.encode(),
                f'{{"type":"RequestArrived",{arrived},"keys":"AAAAAAAAAA==",{numbers % 9}}}'.encode(),
                f'{{"type":"RequestArrived",{arrived},"keys":"",{numbers % -5}}}'.encode(),
                f'{{"type":"InstanceReported",{of_fleet},{report % "1e999"}}}'.encode(),
                f'{{"type":"InstanceReported",{of_fleet},{report % "NaN"}}}'.encode(),
                f'{{"type":"InstanceReported",{of_fleet},{report % "0.1"},"x":"'.encode() + b'\xff\xfe"}',
                f'{{"type":"InstanceProbed","at":1e999,"instance":"{host.instance}","epoch":{epoch},"parity":true}}'.encode(),
            ),
        )

    def _write_raw(self, payloads: tuple[bytes, ...]) -> None:
        network, chance = self.world.network, self.chance
        if not network.broker.available:
            return
        payload = chance.choice(payloads)
        pool, host = network.pool, chance.choice(list(self.world.hosts.values()))
        subject = chance.choice(
            (cache_subject(pool, host.instance), fleet_subject(pool, host.instance), leader_subject(pool))
        )
        self.world.note(f"a stranger writes {payload[:60]!r} to {subject}")
        network.store_raw(subject, payload)

    # What ends it

    def _expire(self, kept: int) -> None:
        if not self.over:
            self.world.network.expire(kept)
            self._later(EXPIRY_SECONDS, self._expire, kept)

    def _storm(self) -> None:
        """Bad weather everywhere, all the time."""
        chance = self.chance
        weather = LinkConditions(delay=chance.choice((0.002, 0.02)), loss=chance.choice((0.0, 0.05)), doubling=0.05)
        self.world.note(f"storm everywhere: {weather}")
        for process in self.world.services:
            if process.life is not None:
                process.link.weather = weather

    def _kill(self, process: Process, down_seconds: Seconds) -> None:
        if process.life is None:
            return
        self._kill_after(process, self.chance.randrange(STEPS_BEFORE_KILL_MAX), down_seconds)

    def _kill_after(self, process: Process, steps: int, down_seconds: Seconds) -> None:
        if steps and not self.over:
            self.world.loop.call_soon(self._kill_after, process, steps - 1, down_seconds)
            return
        if process.life is None:
            return
        self.world.note(f"SIGKILL {process.name}, back in {down_seconds:.2f} s")
        process.kill()
        self._later(down_seconds, self._start, process)

    def _start(self, process: Process) -> None:
        if process.life is None and process.wanted:
            self.world.note(f"start {process.name}")
            process.start()

    def _resume(self, process: Process) -> None:
        process.resume()

    def _mend(self, process: Process) -> None:
        if process.life is not None and process.life.link is not None:
            process.life.link.weather = CALM if self.over else process.life.link.weather
            process.life.link.mend()

    def _clear_up(self, process: Process) -> None:
        if process.life is not None and process.life.link is not None:
            process.life.link.weather = CALM

    def _server_back(self) -> None:
        self.world.network.server_up()

    def _calm_events(self, engine: EngineProcess) -> None:
        engine.host.replay_trouble = 0.0
        if engine.host.life is not None:
            engine.host.life.publisher.dropping = 0.0

    def _mend_engine_way(self, instance: InstanceId) -> None:
        host = self.world.hosts[instance]
        if host.worker_cut:
            host.worker_cut = False
            host.reconnect()

    def undrain_all(self) -> None:
        """What an operator does who finds an instance draining that should not: a new life takes that over."""
        for scheduler in self.world.schedulers:
            for instance in scheduler.service.state.fleet.instances if scheduler.life is not None else ():
                if instance.draining and not instance.leaving:
                    self.world.operator.undrain(instance.id)

    def _stop_damage(self) -> None:
        self.world.network.damage = 0.0

    def _provider_back(self) -> None:
        if self.world.provider is not None:
            self.world.provider.failing = 0.0

    def _archive_back(self) -> None:
        self.world.recorder.archive.failing = 0.0

    def _later(self, seconds: Seconds, act: Callable[..., None], *arguments: object) -> None:
        self.world.loop.outside(seconds, act, *arguments)

    def _seconds(self, most: Seconds) -> Seconds:
        return min(most, 0.2 + self.chance.expovariate(3.0 / most))


FAULTS: dict[str, Fault] = {
    "kill": Fault(3.0, FaultInjector.kill),
    "kill scheduler": Fault(1.5, FaultInjector.kill_scheduler),
    "kill engine": Fault(2.0, FaultInjector.kill_engine),
    "restart": Fault(2.0, FaultInjector.restart),
    "rolling restart": Fault(0.7, FaultInjector.rolling_restart),
    "pause": Fault(2.0, FaultInjector.pause),
    "suspend": Fault(2.0, FaultInjector.suspend),
    "ambush": Fault(1.0, FaultInjector.ambush),
    "stale leader": Fault(2.0, FaultInjector.stale_leader),
    "partition": Fault(2.0, FaultInjector.partition),
    "weather": Fault(3.0, FaultInjector.bad_weather),
    "server away": Fault(1.0, FaultInjector.server_away),
    "clock": Fault(1.0, FaultInjector.clock_jump),
    "drop events": Fault(3.0, FaultInjector.drop_events),
    "worker cut from engine": Fault(1.0, FaultInjector.cut_worker_from_engine),
    "ingress cut from engine": Fault(1.0, FaultInjector.cut_ingress_from_engine),
    "drain": Fault(1.0, FaultInjector.drain),
    "scale": Fault(2.0, FaultInjector.scale),
    "provider away": Fault(0.5, FaultInjector.provider_away),
    "clear cache": Fault(0.5, FaultInjector.clear_cache),
    "restart unseen": Fault(0.7, FaultInjector.restart_unseen),
    "damage": Fault(1.0, FaultInjector.damage_entries),
    "archive": Fault(0.5, FaultInjector.archive_away),
    "kill ingress": Fault(1.5, FaultInjector.kill_ingress),
    "kill two": Fault(1.0, FaultInjector.kill_two),
    "pause engine": Fault(2.5, FaultInjector.pause_engine),
    "engine errors": Fault(2.0, FaultInjector.engine_errors),
    "engine resets": Fault(1.5, FaultInjector.engine_resets),
    "engine hangs": Fault(1.5, FaultInjector.engine_hangs),
    "engine slow": Fault(2.0, FaultInjector.engine_slow),
    "slow rebalancer": Fault(1.0, FaultInjector.slow_rebalancer),
    "lie about load": Fault(0.7, FaultInjector.lie_about_load),
    "lie about cache": Fault(0.7, FaultInjector.lie_about_cache),
    "lie about length": Fault(0.5, FaultInjector.lie_about_length),
    "lie about name": Fault(0.5, FaultInjector.lie_about_name),
    "garbage": Fault(0.7, FaultInjector.garbage),
    "poison": Fault(0.7, FaultInjector.poison),
}
"""By name."""
