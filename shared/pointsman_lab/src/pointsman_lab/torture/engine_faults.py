"""Faults of engines and of the connections to them: lost events, false reports, errors, hangs."""

from collections.abc import Callable
from typing import Any

from pointsman.primitives import EngineSeconds, InstanceId
from pointsman_lab.torture.engines import FailureMode, Lies
from pointsman_lab.torture.injector import Injector
from pointsman_lab.torture.services import EngineProcess


def drop_events(injector: Injector) -> None:
    forgetful = [engine for engine in injector.cluster.engines if not engine.host.replays]
    engine = injector.chance.choice([*injector.cluster.engines, *forgetful * 4])
    share, seconds = injector.chance.choice((0.1, 0.5, 1.0)), injector.seconds(6.0)
    injector.cluster.note(f"{engine.name} drops {share:.0%} of its KV events for {seconds:.2f} s")
    engine.host.replay_failures = injector.chance.choice((0.0, 0.3, 0.9))
    if engine.host.running is not None:
        engine.host.running.publisher.dropping = share
    injector.later(seconds, stop_dropping_events, engine)


def cut_worker_from_engine(injector: Injector) -> None:
    host = injector.chance.choice(list(injector.cluster.hosts.values()))
    seconds = injector.seconds(6.0)
    injector.cluster.note(f"the worker of {host.instance} cannot reach it for {seconds:.2f} s")
    host.worker_cut = True
    injector.later(seconds, reconnect_worker, injector, host.instance)


def cut_ingress_from_engine(injector: Injector) -> None:
    ingress, engine = (
        injector.chance.choice(injector.cluster.ingresses),
        injector.chance.choice(injector.cluster.engines),
    )
    seconds = injector.seconds(6.0)
    injector.cluster.note(f"{ingress.name} cannot reach {engine.name} for {seconds:.2f} s")
    ingress.engines_cut.add(engine.name)
    injector.later(seconds, ingress.engines_cut.discard, engine.name)


def clear_cache(injector: Injector) -> None:
    engine = injector.chance.choice(injector.cluster.engines)
    running = engine.host.running
    if running is not None and not engine.paused and running.engine.reset_prefix_cache():
        injector.cluster.note(f"{engine.name} drops its cache")


def restart_unseen(injector: Injector) -> None:
    """An engine without a replay socket, whose cache is fully known after a clear, is replaced a while later."""
    chance, forgetful = injector.chance, [engine for engine in injector.cluster.engines if not engine.host.replays]
    if not forgetful:
        return
    engine = chance.choice(forgetful)
    running = engine.host.running
    if running is not None and not engine.paused and running.engine.reset_prefix_cache():
        injector.cluster.note(f"{engine.name} drops its cache")
        injector.later(chance.random() * 4.0, injector.kill_process, engine, 0.2 + chance.random())


def lie_about_load(injector: Injector) -> None:
    _lie(injector, "load", **{injector.chance.choice(("idle", "busy")): True})


def lie_about_cache(injector: Injector) -> None:
    _lie(injector, "cache", events=injector.chance.choice((0.2, 1.0)), cached_tokens=injector.chance.random() < 0.5)


def lie_about_length(injector: Injector) -> None:
    _lie(injector, "length", restart=True, max_model_len=1)


def lie_about_name(injector: Injector) -> None:
    named = {"model": "another-model"} if injector.chance.random() < 0.5 else {"aliases": ("another-model",)}
    _lie(injector, "name", restart=True, **named)


def _lie(injector: Injector, about: str, *, restart: bool = False, **lies: Any) -> None:
    """An engine reports false values until restarted. `restart`: from its start on."""
    engine = injector.chance.choice(injector.cluster.engines)
    injector.cluster.note(f"{engine.name} lies about its {about}: {lies}")
    for name, value in lies.items():
        setattr(engine.host.lies, name, value)
    if restart:
        injector.kill_process(engine, 0.5)
    else:
        injector.later(injector.seconds(8.0), replace_lying_engine, injector, engine)


def replace_lying_engine(injector: Injector, engine: EngineProcess) -> None:
    if engine.host.lies.any:
        engine.host.lies = Lies()
        injector.kill_process(engine, 0.5)


def failing(failure_mode: FailureMode) -> Callable[[Injector], None]:
    return lambda injector: misbehave(injector, failure_mode, 3.0 + injector.seconds(15.0))


def misbehave(injector: Injector, failure_mode: FailureMode, seconds: EngineSeconds) -> None:
    engine = injector.chance.choice(injector.cluster.engines)
    injector.cluster.note(f"{engine.name} misbehaves for {seconds:.2f} s: {failure_mode}")
    engine.host.misbehave(failure_mode)
    injector.later(seconds, stop_misbehaving, injector, engine)


def stop_misbehaving(injector: Injector, engine: EngineProcess) -> None:
    if engine.host.failure_mode:
        injector.cluster.note(f"{engine.name} is well again")
        engine.host.misbehave("")


def stop_dropping_events(engine: EngineProcess) -> None:
    engine.host.replay_failures = 0.0
    if engine.host.running is not None:
        engine.host.running.publisher.dropping = 0.0


def reconnect_worker(injector: Injector, instance: InstanceId) -> None:
    host = injector.cluster.hosts[instance]
    if host.worker_cut:
        host.worker_cut = False
        host.reconnect()
