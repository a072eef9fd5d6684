"""From what a source says of an engine to valid targets: the one place where such text is checked. `engine_targets` takes
what an administrator wrote in full, `annotated_targets` the annotations of a pod or labels of a container."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import get_args
from urllib.parse import urlsplit

from pointsman.bounds import PORT_MAX
from pointsman.contracts.fleet import ANY_RANK, Role
from pointsman.contracts.subjects import valid_name
from pointsman.ports import EngineTarget
from pointsman.primitives import InstanceId
from pointsman.state.engine_profiles import PROFILES

PREFIX = "pointsman.io/"
PORT_KEY = PREFIX + "port"
KV_PORT_KEY = PREFIX + "kv-port"
KV_REPLAY_PORT_KEY = PREFIX + "kv-replay-port"
DATA_PARALLEL_SIZE_KEY = PREFIX + "data-parallel-size"
ROLE_KEY = PREFIX + "role"
ENGINE_MODEL_KEY = PREFIX + "engine-model"

TARGETS_MAX = 1024
"""Of one source; the rest is not followed."""
RANKS_MAX = 1024
NAME_LENGTH_MAX = 63
HASH_LENGTH = 8
TEXT_SHOWN_MAX = 200
DEFAULT_PORTS = {"http": 80, "https": 443}
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252})|[0-9A-Fa-f:.]{2,45}")
_ENDPOINT = re.compile(
    r"tcp://(?P<host>\*|[A-Za-z0-9_.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):(?P<port>[0-9]{1,5})|ipc://\S{1,100}"
)


class TargetError(ValueError):
    """A source names an engine that cannot be followed. The message says which and why."""


def engine_targets(
    *,
    url: str,
    name: str = "",
    advertised_url: str = "",
    kv_endpoint: str = "",
    kv_replay_endpoint: str = "",
    data_parallel_size: int | None = None,
    role: str = "",
    engine_model: str = "",
    identity: str = "",
    ready: bool = True,
) -> list[EngineTarget]:
    """One target, or one per rank; endpoints are rank 0's and may contain {host}. `name` is made valid, by default
    host and port. `data_parallel_size` None: the worker's setting, 1: no ranks. Raises TargetError."""
    host, port = host_and_port(url)
    named = name or f"{host}-{port}"
    advertised = with_host(advertised_url, host)
    if advertised:
        host_and_port(advertised)
    target = EngineTarget(
        instance=instance_name(named),
        url=url,
        advertised_url=advertised,
        kv_endpoint=checked_endpoint(with_host(kv_endpoint, host), named),
        kv_replay_endpoint=checked_endpoint(with_host(kv_replay_endpoint, host), named),
        role=_checked_choice(role, get_args(Role), named, "role"),
        engine_model=_checked_choice(engine_model, tuple(PROFILES), named, "engine model"),
        identity=identity[:TEXT_SHOWN_MAX],
        ready=ready,
    )
    return [target] if data_parallel_size is None else by_rank(target, data_parallel_size)


def annotated_targets(
    annotations: Mapping[str, str],
    *,
    name: str,
    host: str,
    port: int | None = None,
    identity: str = "",
    ready: bool = True,
) -> list[EngineTarget]:
    """Targets of a pod or container at `host`. `port`: what the source says beside its annotations. Raises
    TargetError."""
    own_port = _port(annotations, PORT_KEY, name) or port
    if own_port is None:
        raise TargetError(f"{_shown(name)}: no port; say it in {PORT_KEY}")
    kv_port, replay_port = (_port(annotations, key, name) for key in (KV_PORT_KEY, KV_REPLAY_PORT_KEY))
    ranks = annotations.get(DATA_PARALLEL_SIZE_KEY)
    return engine_targets(
        url=engine_url(host, own_port),
        name=name,
        kv_endpoint=f"tcp://{{host}}:{kv_port}" if kv_port else "",
        kv_replay_endpoint=f"tcp://{{host}}:{replay_port}" if replay_port else "",
        data_parallel_size=None if ranks is None else _number(ranks, RANKS_MAX, f"{name}: {DATA_PARALLEL_SIZE_KEY}"),
        role=annotations.get(ROLE_KEY, ""),
        engine_model=annotations.get(ENGINE_MODEL_KEY, ""),
        identity=identity,
        ready=ready,
    )


def by_rank(target: EngineTarget, data_parallel_size: int) -> list[EngineTarget]:
    """A target per data-parallel rank, whose endpoints take the ports after rank 0's. Raises TargetError."""
    if not 1 <= data_parallel_size <= RANKS_MAX:
        raise TargetError(f"{target.instance}: {data_parallel_size} data-parallel ranks; 1 to {RANKS_MAX}")
    if data_parallel_size == 1:
        return [replace(target, dp_rank=ANY_RANK)]
    try:
        return [
            replace(
                target,
                instance=rank_name(target.instance, rank),
                dp_rank=rank,
                kv_endpoint=checked_endpoint(rank_endpoint(target.kv_endpoint, rank), target.instance),
                kv_replay_endpoint=checked_endpoint(rank_endpoint(target.kv_replay_endpoint, rank), target.instance),
            )
            for rank in range(data_parallel_size)
        ]
    except ValueError as error:
        raise TargetError(f"{target.instance}: {error}") from error


def rank_endpoint(endpoint: str, dp_rank: int) -> str:
    """Each rank takes the next port after rank 0's. Raises ValueError without a port."""
    if not endpoint or dp_rank == 0:
        return endpoint
    address, _, port = endpoint.rpartition(":")
    if not endpoint.startswith("tcp://") or not port.isdecimal():
        raise ValueError(
            f"{endpoint!r} has no port, so rank {dp_rank} has no endpoint: engines with ranks publish on tcp://"
        )
    return f"{address}:{int(port) + dp_rank}"


def listing(found: Mapping[InstanceId, EngineTarget], problems: Sequence[str] = ()) -> tuple[list[EngineTarget], str]:
    """Targets by name, at most TARGETS_MAX, and why something is not among them."""
    excess = [f"{len(found)} engines; the first {TARGETS_MAX} are followed"] if len(found) > TARGETS_MAX else []
    return [found[name] for name in sorted(found)][:TARGETS_MAX], first_of([*problems, *excess])


def kept_targets(last: Sequence[EngineTarget], *, identity: str, host: str, ready: bool) -> list[EngineTarget]:
    """Of an engine that is still there, but whose description cannot be used any more: as it was known last. By its identity,
    or its host if the source knows none."""
    return [
        replace(target, ready=ready)
        for target in last
        if target.identity == identity[:TEXT_SHOWN_MAX] and (identity or host_and_port(target.url)[0] == host.lower())
    ]


def first_of(problems: Sequence[str]) -> str:
    """And how many more there are; empty if there is none."""
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{problems[0]}{more}" if problems else ""


def instance_name(text: str, suffix: str = "") -> InstanceId:
    """A valid name; what is cut off is replaced by a hash. Raises TargetError if nothing is left."""
    made = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if len(made) + len(suffix) > NAME_LENGTH_MAX:
        digest = blake2b(text.encode(errors="replace"), digest_size=HASH_LENGTH // 2).hexdigest()
        made = f"{made[: NAME_LENGTH_MAX - len(suffix) - HASH_LENGTH - 1].rstrip('-')}-{digest}"
    if not valid_name(made + suffix):
        raise TargetError(f"{_shown(text)} cannot be made a name of an instance")
    return InstanceId(made + suffix)


def rank_name(instance: InstanceId, rank: int) -> InstanceId:
    return instance_name(instance, f"-rank-{rank}")


def engine_url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def host_and_port(url: str) -> tuple[str, int]:
    """Raises TargetError."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or DEFAULT_PORTS.get(parts.scheme, 0)
    except ValueError as error:
        raise TargetError(f"{_shown(url)} is no URL: {error}") from error
    plain = not (parts.query or parts.fragment or parts.username or parts.password) and url.isprintable()
    if parts.scheme not in DEFAULT_PORTS or not _HOST.fullmatch(host) or not plain or " " in url:
        raise TargetError(f"{_shown(url)} is no URL like http://10.0.0.5:8000")
    return host, port


def with_host(template: str, host: str) -> str:
    return template.replace("{host}", f"[{host}]" if ":" in host else host)


def checked_endpoint(endpoint: str, name: str) -> str:
    """Raises TargetError."""
    match = _ENDPOINT.fullmatch(endpoint)
    if endpoint and (match is None or int(match["port"] or 1) not in range(1, PORT_MAX + 1)):
        raise TargetError(f"{_shown(name)}: {_shown(endpoint)} is no ZMQ endpoint like tcp://10.0.0.5:5557")
    return endpoint


def _checked_choice(text: str, choices: tuple[str, ...], name: str, what: str) -> str:
    if text and text not in choices:
        raise TargetError(f"{_shown(name)}: the {what} {_shown(text)} is none of {', '.join(choices)}")
    return text


def _port(annotations: Mapping[str, str], key: str, name: str) -> int | None:
    text = annotations.get(key)
    return None if text is None else _number(text, PORT_MAX, f"{name}: {key}")


def _number(text: str, highest: int, what: str) -> int:
    number = int(text) if text.isascii() and text.isdecimal() and len(text) <= len(str(highest)) else 0
    if not 1 <= number <= highest:
        raise TargetError(f"{_shown(what)} = {_shown(text)}: 1 to {highest}")
    return number


def _shown(text: str) -> str:
    return repr(text[:TEXT_SHOWN_MAX])[1:-1]
