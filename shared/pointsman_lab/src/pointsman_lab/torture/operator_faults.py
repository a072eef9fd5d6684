"""Faults by operators, other systems and unknown writers."""

from random import Random

from pointsman.contracts.fleet import Role
from pointsman.contracts.subjects import cache_subject, fleet_subject, leader_subject
from pointsman_lab.torture.injector import Injector

SWITCHED_SHARE = 0.7
BACK_SHARE = 0.3


ROLES: tuple[Role, ...] = ("prefill", "decode")


def drain(injector: Injector) -> None:
    instance = injector.chance.choice(list(injector.cluster.hosts))
    seconds = injector.seconds(8.0)
    if injector.cluster.plan.split and _own_chance(injector).random() < SWITCHED_SHARE:
        switch(injector)
        return
    injector.cluster.note(f"{instance} drains for {seconds:.2f} s")
    injector.cluster.operator.drain(instance)
    injector.later(seconds, injector.cluster.operator.undrain, instance)


def switch(injector: Injector) -> None:
    """Mostly to a role that it did not begin with."""
    own = _own_chance(injector)
    instance = own.choice(list(injector.cluster.hosts))
    others = [role for role in ROLES if role != injector.cluster.hosts[instance].role]
    role = own.choice(ROLES if own.random() < BACK_SHARE else others)
    injector.cluster.note(f"{instance} is to become {role}")
    injector.cluster.operator.switch(instance, role)


def scale(injector: Injector) -> None:
    """Of a split pool without a provider: its roles."""
    wanted = injector.chance.randint(1, injector.cluster.plan.hosts)
    if injector.cluster.provider is not None:
        injector.cluster.note(f"the pool is to have {wanted} instances")
        injector.cluster.operator.scale(wanted)
    elif injector.cluster.plan.split:
        switch(injector)


def _own_chance(injector: Injector) -> Random:
    """Draws nothing of the run's own chance."""
    return Random(f"role {injector.cluster.plan.seed} {injector.chance.getstate()[1][-1]}")


def provider_away(injector: Injector) -> None:
    seconds, share = injector.seconds(6.0), injector.chance.choice((0.3, 1.0))
    provider = injector.cluster.provider
    if provider is not None:
        injector.cluster.note(f"the provider fails {share:.0%} of all calls for {seconds:.2f} s")
        provider.failing = share
        injector.later(seconds, setattr, provider, "failing", 0.0)


def archive_outage(injector: Injector) -> None:
    seconds = injector.seconds(5.0)
    injector.cluster.note(f"the recorder's database fails often for {seconds:.2f} s")
    archive = injector.cluster.recorder.archive
    archive.failing = injector.chance.choice((0.3, 1.0))
    injector.later(seconds, setattr, archive, "failing", 0.0)


def garbage(injector: Injector) -> None:
    _write_raw(
        injector,
        (b"", b"\x00", b'{"type":"InstanceReported","at":', b'{"type":"Unheard","at":1.0}', b"[" * 40, b"null"),
    )


def poison(injector: Injector) -> None:
    host, chance = injector.chance.choice(list(injector.cluster.hosts.values())), injector.chance
    known = next(
        (s.service.state.fleet.get(host.instance) for s in injector.cluster.schedulers if s.run is not None), None
    )
    epoch, sequence = (known.epoch, known.sequence + 1) if known is not None else (1, 1)
    of_cache = f'"at":1.0,"instance":"{host.instance}","epoch":{epoch},"sequence":{sequence}'
    of_fleet = f'"at":1.0,"instance":"{host.instance}","epoch":{epoch}'
    report = '"serving":true,"waiting":0,"running":0,"kv_usage":%s,"sequence":1,"blocks":0,"digest":0'
    name = f"poison-{chance.randrange(10**6)}"
    arrived = f'"at":1.0,"request":"{name}","arrived_at":1.0,"ingress":"x","tenant":"t"'
    numbers = '"prompt_tokens":%s,"max_output_tokens":1,"slo_ttft":1.0,"slo_tpot":1.0'
    _write_raw(
        injector,
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


def _write_raw(injector: Injector, payloads: tuple[bytes, ...]) -> None:
    network, chance = injector.cluster.network, injector.chance
    if not network.broker.available:
        return
    payload = chance.choice(payloads)
    pool, host = network.pool, chance.choice(list(injector.cluster.hosts.values()))
    subject = chance.choice(
        (cache_subject(pool, host.instance), fleet_subject(pool, host.instance), leader_subject(pool))
    )
    injector.cluster.note(f"a stranger writes {payload[:60]!r} to {subject}")
    network.store_raw(subject, payload)


def undrain_all(injector: Injector) -> None:
    for scheduler in injector.cluster.schedulers:
        for instance in scheduler.service.state.fleet.instances if scheduler.run is not None else ():
            if instance.draining and not instance.leaving and not instance.becomes:
                injector.cluster.operator.undrain(instance.id)
