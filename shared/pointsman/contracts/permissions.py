"""Users of the bus: which subjects each role may publish and subscribe to. Pure; `runtime.bus_users` writes it down for
nats-server.

nats-server checks no reply subject: it publishes acknowledgements and stored messages wherever a client asks (measured).
Hence three accounts. Only FLEET has the log. WORKERS and PEOPLE call it as services of FLEET, and every reply to them
stays in their own account."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import get_args

from pointsman.contracts.subjects import (
    ANY_ACTOR,
    SCALER_ACTOR,
    SUBJECT_ROOT,
    AdminAction,
    SchedulerCommand,
    admin_subject,
    bucket_name,
    cache_subject,
    checkpoint_bucket,
    command_subject,
    fleet_subject,
    heartbeat_subject,
    lease_bucket,
    resync_subject,
    stream_name,
)
from pointsman.primitives import InstanceId, PoolName

ADMIN_ACTIONS: tuple[AdminAction, ...] = ("drain", "scale", "keys", "tenants")
LEADER_ACTIONS: tuple[AdminAction, ...] = ("drain", "keys", "tenants")
SCALER_ACTIONS: tuple[AdminAction, ...] = ("drain", "scale")
ACCESS_BUCKET = "POINTSMAN_ACCESS"
ACCESS_STREAM = f"KV_{ACCESS_BUCKET}"
LEADER_KEY = "leader"
SCALER_KEY = "scaler"
INBOX = "_INBOX"
MAPPED_REPLY = "_R_"
"""First token of the replies to another account."""
JETSTREAM_API = "$JS.API."
SERVICE_API = "POINTSMAN.API."
"""JetStream API of FLEET, as the other accounts see it: there the server itself answers `$JS.API`."""
EVERYTHING = ">"
"""In the account of the user."""
ANY_POOL = PoolName("*")
ANY_INSTANCE = InstanceId("*")
POOL_WIDE = "_"
"""In the inbox of a worker of any instance: no instance has this name, so it hears no other worker's."""


class BusRole(StrEnum):
    SCHEDULER = "scheduler"
    INGRESS = "ingress"
    REBALANCER = "rebalancer"
    SCALER = "scaler"
    RECORDER = "recorder"
    WORKER = "worker"
    READER = "reader"
    CONSOLE = "console"
    OPERATOR = "operator"
    ROUTER = "router"
    ADMIN = "admin"


class Account(StrEnum):
    FLEET = "FLEET"
    WORKERS = "WORKERS"
    PEOPLE = "PEOPLE"


@dataclass(frozen=True, slots=True)
class BusUser:
    """`name`: instance of a worker, ANY_INSTANCE of one that follows many; name of an operator, router or admin. `pool`: of
    a worker or router; the others serve all pools."""

    role: BusRole
    name: str = ""
    pool: PoolName | None = None

    @property
    def inbox(self) -> str:
        name = POOL_WIDE if self.name == ANY_INSTANCE else self.name
        return ".".join(part for part in (INBOX, self.role, self.pool or "", name) if part)

    @property
    def account(self) -> Account:
        match self.role:
            case BusRole.WORKER:
                return Account.WORKERS
            case BusRole.READER | BusRole.CONSOLE | BusRole.OPERATOR | BusRole.ROUTER:
                return Account.PEOPLE
            case _:
                return Account.FLEET


@dataclass(frozen=True, slots=True)
class Permissions:
    """Everything else is refused. `responses`: may also answer a message, once."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    responses: bool = False


@dataclass(frozen=True, slots=True)
class Service:
    """Offered by `by` to `to`, there as `local`. `streamed`: answered by several messages."""

    by: Account
    to: Account
    subject: str
    local: str
    streamed: bool = False


def permissions_of(user: BusUser, pools: Sequence[PoolName]) -> Permissions:
    """`pools`: of the deployment."""
    if user.role is BusRole.ADMIN:
        return Permissions((EVERYTHING,), (EVERYTHING,))
    own_pools = list(pools) if user.pool is None else [user.pool]
    publish = [subject for pool in own_pools for subject in _publish(user, pool)]
    subscribe = [f"{user.inbox}.>", *(subject for pool in own_pools for subject in _subscribe(user, pool))]
    if user.role in (BusRole.SCHEDULER, BusRole.SCALER):
        publish.append(f"{MAPPED_REPLY}.>")
    if user.role is BusRole.SCHEDULER:
        publish += [f"{INBOX}.{role}.>" for role in (BusRole.INGRESS, BusRole.REBALANCER, BusRole.SCALER)]
        publish += [f"$KV.{ACCESS_BUCKET}.>", *_api("STREAM.CREATE", ACCESS_STREAM)]
    if user.role is BusRole.SCALER:
        publish.append(f"{INBOX}.{BusRole.SCALER}.>")
    if user.role in (BusRole.SCHEDULER, BusRole.INGRESS):
        publish += _api("STREAM.MSG.GET", ACCESS_STREAM)
    if user.role is BusRole.OPERATOR:
        publish.append(f"{SERVICE_API}STREAM.MSG.GET.{ACCESS_STREAM}")
    return Permissions(tuple(publish), tuple(subscribe), responses=user.role is BusRole.WORKER)


def services() -> list[Service]:
    fleet, workers, people = Account.FLEET, Account.WORKERS, Account.PEOPLE
    offered = [
        Service(fleet, workers, subject, subject)
        for subject in (
            cache_subject(ANY_POOL, ANY_INSTANCE),
            fleet_subject(ANY_POOL, ANY_INSTANCE),
            heartbeat_subject(ANY_POOL, ANY_INSTANCE),
        )
    ]
    resync = resync_subject(ANY_POOL, ANY_INSTANCE)
    offered.append(Service(workers, fleet, resync, resync))
    commands = [command_subject(ANY_POOL, "fleet"), command_subject(ANY_POOL, "overlap")]
    commands += (admin_subject(ANY_POOL, action, ANY_ACTOR) for action in ADMIN_ACTIONS)
    offered += [Service(fleet, people, subject, subject) for subject in commands]
    for account, call, streamed in (
        (workers, "STREAM.INFO", False),
        (people, "STREAM.INFO", False),
        (people, "STREAM.MSG.GET", False),
        (people, "DIRECT.GET", True),
    ):
        subject, local = (f"{prefix}{call}.*" for prefix in (JETSTREAM_API, SERVICE_API))
        offered.append(Service(fleet, account, subject, local, streamed))
    return offered


def _publish(user: BusUser, pool: PoolName) -> Iterator[str]:
    log = stream_name(pool)
    match user.role:
        case BusRole.SCHEDULER:
            yield from _events(pool, "fleet.*", "request.*", "leader", "lost", "access")
            yield resync_subject(pool, ANY_INSTANCE)
            yield f"$KV.{bucket_name(pool)}.{LEADER_KEY}"
            yield f"$O.{bucket_name(pool)}.>"
            yield from _reading(pool)
            yield from _api("STREAM.CREATE", log, lease_bucket(pool), checkpoint_bucket(pool))
            yield from _api("STREAM.UPDATE", log)
            yield from _api("STREAM.MSG.GET", log, lease_bucket(pool), checkpoint_bucket(pool))
            yield from _api("STREAM.PURGE", checkpoint_bucket(pool))
        case BusRole.INGRESS:
            yield from _events(pool, "fleet.*", "request.*", "lost")
            asked: tuple[SchedulerCommand, ...] = ("route", "handover", "follow", "cancel", "fleet", "overlap")
            yield from (command_subject(pool, command) for command in asked)
            yield from _reading(pool)
        case BusRole.REBALANCER:
            yield command_subject(pool, "migrate")
            yield from _reading(pool)
            yield from _api("STREAM.MSG.GET", checkpoint_bucket(pool))
        case BusRole.SCALER:
            yield from _events(pool, "scale", "lost")
            yield from (admin_subject(pool, action, SCALER_ACTOR) for action in SCALER_ACTIONS)
            yield f"$KV.{bucket_name(pool)}.{SCALER_KEY}"
            yield from _reading(pool)
            yield from _api("STREAM.MSG.GET", lease_bucket(pool), checkpoint_bucket(pool))
        case BusRole.RECORDER:
            yield from _reading(pool)
        case BusRole.WORKER:
            yield cache_subject(pool, user.name)
            yield fleet_subject(pool, user.name)
            yield heartbeat_subject(pool, user.name)
            yield f"{SERVICE_API}STREAM.INFO.{log}"
        case BusRole.ROUTER:
            yield command_subject(pool, "overlap")
        case BusRole.READER | BusRole.CONSOLE | BusRole.OPERATOR:
            if user.role is not BusRole.CONSOLE:  # which could not ask a leader anything if it wanted to
                yield command_subject(pool, "fleet")
            for call in ("STREAM.INFO", "DIRECT.GET"):
                yield f"{SERVICE_API}{call}.{log}"
            yield f"{SERVICE_API}STREAM.MSG.GET.{checkpoint_bucket(pool)}"
            if user.role is BusRole.OPERATOR:
                yield from (admin_subject(pool, action, user.name) for action in ADMIN_ACTIONS)
        case BusRole.ADMIN:
            pass  # has everything, of whatever pool


def _subscribe(user: BusUser, pool: PoolName) -> Iterator[str]:
    if user.role is BusRole.SCHEDULER:
        yield from (command_subject(pool, command) for command in get_args(SchedulerCommand))
        yield from (admin_subject(pool, action, ANY_ACTOR) for action in LEADER_ACTIONS)
        yield heartbeat_subject(pool, ANY_INSTANCE)
    elif user.role is BusRole.SCALER:
        yield admin_subject(pool, "scale", ANY_ACTOR)
    elif user.role is BusRole.WORKER:
        yield resync_subject(pool, InstanceId(user.name))


def _events(pool: PoolName, *kinds: str) -> Iterator[str]:
    return (f"{SUBJECT_ROOT}.{pool}.{kind}" for kind in kinds)


def _reading(pool: PoolName) -> Iterator[str]:
    """By a consumer that the server forgets by itself."""
    log = stream_name(pool)
    yield f"{JETSTREAM_API}STREAM.INFO.{log}"
    yield f"{JETSTREAM_API}CONSUMER.CREATE.{log}.*"
    yield f"{JETSTREAM_API}CONSUMER.MSG.NEXT.{log}.*"


def _api(call: str, *streams: str) -> Iterator[str]:
    return (f"{JETSTREAM_API}{call}.{stream}" for stream in streams)
