"""Subjects, stream names, and the message ids that deduplicate retries."""

import re
from functools import lru_cache
from typing import Literal

from pointsman.contracts.access import ApiKeyChanged
from pointsman.contracts.cache import CacheEvent
from pointsman.contracts.decisions import (
    LeaderElected,
    RequestGranted,
    RequestHandedOver,
    RequestsRefused,
    ScaleApplied,
    ScaleDecided,
    WritesLost,
)
from pointsman.contracts.envelope import Event
from pointsman.contracts.fleet import FleetEvent, InstanceJoined, InstanceLeft, InstanceProbed
from pointsman.contracts.requests import PrefixCopyEnded, PrefixFetchEnded, RequestAttemptFailed, RequestEvent
from pointsman.contracts.tenants import TenantPoliciesSet
from pointsman.primitives import InstanceId, PoolName

SUBJECT_ROOT = "pm"
SchedulerCommand = Literal["route", "handover", "follow", "cancel", "migrate", "fleet", "overlap"]
AdminAction = Literal["drain", "scale", "keys", "tenants"]
ANY_ACTOR = "*"
LOCAL_ACTOR = "local"
SCALER_ACTOR = "scaler"
NAME_PATTERN = re.compile(r"^[a-z0-9][a-z0-9-]{0,62}\Z")
KINDS = ("kv.*", "fleet.*", "request.*", "scale", "leader", "lost", "access")
"""What follows the pool in subjects of the log."""
_LOG_SUBJECT = re.compile(
    rf"{SUBJECT_ROOT}\.[^.]+\.(?P<kind>{'|'.join(kind.partition('.')[0] for kind in KINDS)})"
    r"(?:\.(?P<name>[A-Za-z0-9_-]{1,64}))?"
)
_SMALL_COMMANDS = frozenset({"heartbeat", "fleet", "drain", "scale", "keys"})
_OF_AN_ATTEMPT = (RequestGranted, RequestHandedOver, RequestAttemptFailed, PrefixFetchEnded, PrefixCopyEnded)


def valid_name(name: str) -> bool:
    return NAME_PATTERN.match(name) is not None


def stream_name(pool: PoolName) -> str:
    return f"POINTSMAN_{pool}"


def bucket_name(pool: PoolName) -> str:
    """Of the pool's two buckets: leases at `$KV.<name>.<key>`, checkpoints under `$O.<name>`."""
    return f"pointsman-{pool}"


def lease_bucket(pool: PoolName) -> str:
    """Stream of the key-value bucket with the leases."""
    return f"KV_{bucket_name(pool)}"


def checkpoint_bucket(pool: PoolName) -> str:
    return f"OBJ_{bucket_name(pool)}"


def covers(pattern: str, subject: str) -> bool:
    """Whether every subject that matches `subject` (which may have wildcards) matches `pattern`."""
    wanted, found = pattern.split("."), subject.split(".")
    for position, token in enumerate(wanted):
        if token == ">":
            return len(found) > position
        if position >= len(found) or found[position] == ">" or token not in ("*", found[position]):
            return False
    return len(wanted) == len(found)


def log_subjects(pool: PoolName) -> list[str]:
    return [f"{SUBJECT_ROOT}.{pool}.{kind}" for kind in KINDS]


def cache_subject(pool: PoolName, instance: InstanceId | str) -> str:
    return f"{SUBJECT_ROOT}.{pool}.kv.{instance}"


def fleet_subject(pool: PoolName, instance: InstanceId | str) -> str:
    return f"{SUBJECT_ROOT}.{pool}.fleet.{instance}"


def command_subject(pool: PoolName, command: SchedulerCommand) -> str:
    return f"{SUBJECT_ROOT}.{pool}.cmd.{command}"


def admin_subject(pool: PoolName, action: AdminAction, actor: str) -> str:
    """Commands of operators name their sender, which NATS attests by its permissions. `actor`: a valid name, or
    ANY_ACTOR to serve all."""
    return f"{SUBJECT_ROOT}.{pool}.cmd.{action}.{actor}"


def actor_of(subject: str) -> str:
    """Sender of an admin command; empty if it is no valid name."""
    actor = subject.rpartition(".")[2]
    return actor if valid_name(actor) else ""


def any_actor(subject: str) -> str:
    return f"{subject.rpartition('.')[0]}.{ANY_ACTOR}"


def resync_subject(pool: PoolName, instance: InstanceId) -> str:
    return f"{SUBJECT_ROOT}.{pool}.cmd.resync.{instance}"


def heartbeat_subject(pool: PoolName, instance: InstanceId | str) -> str:
    return f"{SUBJECT_ROOT}.{pool}.cmd.heartbeat.{instance}"


def instance_of(subject: str) -> str:
    """Last token of a subject that names its sender, which NATS attests by its permissions."""
    return subject.rpartition(".")[2]


def leader_subject(pool: PoolName) -> str:
    return f"{SUBJECT_ROOT}.{pool}.leader"


def is_small(subject: str) -> bool:
    """Whether only small messages belong there, and workers, readers or operators may write them."""
    _, _, kind, action, *_ = *subject.split(".", 4), "", "", "", ""
    return kind == "fleet" or (kind == "cmd" and action in _SMALL_COMMANDS)


def is_of_cache(subject: str) -> bool:
    return _subject_parts(subject)[0] == "kv"


def subject_of(pool: PoolName, event: Event) -> str:
    kind, name = _kind_and_name(event)
    return f"{SUBJECT_ROOT}.{pool}.{kind}" if name is None else f"{SUBJECT_ROOT}.{pool}.{kind}.{name}"


def _kind_and_name(event: Event) -> tuple[str, str | None]:
    """What follows the pool in its subject, one of KINDS; None: the kind alone."""
    if isinstance(event, RequestEvent):
        return "request", event.request
    if isinstance(event, CacheEvent):
        return "kv", event.instance
    if isinstance(event, FleetEvent):
        return "fleet", event.instance
    if isinstance(event, ScaleDecided | ScaleApplied):
        return "scale", None
    if isinstance(event, LeaderElected):
        return "leader", None
    if isinstance(event, WritesLost | RequestsRefused):
        return "lost", None
    if isinstance(event, TenantPoliciesSet | ApiKeyChanged):
        return "access", None
    raise TypeError(f"{type(event).__name__} has no subject")


@lru_cache(maxsize=4096)
def _subject_parts(subject: str) -> tuple[str, str]:
    """Kind and id of a log subject; empty for any other subject."""
    found = _LOG_SUBJECT.fullmatch(subject)
    return (found["kind"], found["name"] or "") if found else ("", "")


def is_leader_subject(subject: str) -> bool:
    """Whether it is the subject of LeaderElected in some pool. (An instance or request may be named `leader`, too.)"""
    return _subject_parts(subject) == ("leader", "")


def is_subject_of(subject: str, event: Event) -> bool:
    kind, name = _kind_and_name(event)
    found_kind, found_name = _subject_parts(subject)
    return found_kind == kind and name in (None, found_name)


def message_id(event: Event) -> str | None:
    """Equal ids are one event. None where a repeat is harmless."""
    if isinstance(event, CacheEvent):
        return f"{event.instance}.{event.epoch}.{event.sequence}"
    if event.stamp is not None:
        return f"{event.stamp.term}.{event.stamp.number}"
    kind = type(event).__name__
    if isinstance(event, RequestEvent):
        return f"{kind}.{event.request}{_attempt(event)}"
    if isinstance(event, InstanceJoined | InstanceLeft):
        return f"{kind}.{event.instance}.{event.epoch}"
    if isinstance(event, InstanceProbed):  # a later probe of the same epoch may differ
        return f"{kind}.{event.instance}.{event.epoch}.{event.at}"
    if isinstance(event, ScaleDecided | ScaleApplied):
        return f"{kind}.{event.number}" if event.number else None
    if isinstance(event, LeaderElected):
        return f"{kind}.{event.term}.{event.scheduler}"
    return None


def _attempt(event: RequestEvent) -> str:
    """Empty for what happens once to a request."""
    if isinstance(event, _OF_AN_ATTEMPT):
        return f".{event.attempt}.{event.instance}"
    return ""
