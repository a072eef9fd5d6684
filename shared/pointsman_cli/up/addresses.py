"""Running engines, as `--engine` and `--also` name them: URLs with sockets, role and rank in the fragment."""

import re
from dataclasses import dataclass
from typing import NoReturn, cast, get_args
from urllib.parse import SplitResult, parse_qs, urlsplit

import click

from pointsman.adapters.tcp_ports import in_url
from pointsman.contracts.fleet import Role
from pointsman.contracts.subjects import valid_name

INSTANCES_MAX = 512
POOL_NAME_MAX = 40
FRAGMENT = ("kv", "replay", "role", "rank", "block_tokens")


@dataclass(frozen=True, slots=True)
class EngineAddress:
    url: str
    kv_endpoint: str = ""
    kv_replay_endpoint: str = ""
    role: Role = "both"
    dp_rank: int | None = None


@dataclass(frozen=True, slots=True)
class FurtherPool:
    """Another model in a pool of its own, on `instances` simulated engines or at `addresses`."""

    pool: str
    model: str
    instances: int
    addresses: tuple[EngineAddress, ...] = ()
    block_tokens: int | None = None


def refuse(flag: str, message: str) -> NoReturn:
    raise click.BadParameter(message, param_hint=flag)


def further_pool(text: str) -> FurtherPool:
    """Parses MODEL=ENGINES. Raises click.BadParameter."""
    model, equals, engines = text.partition("=")
    pool = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")[:POOL_NAME_MAX].rstrip("-")
    if not (equals and engines and valid_name(pool)):
        refuse("--also", f"'{text}' is not MODEL=ENGINES; write for instance coder=2")
    sizes = {size for part in engines.split(",") for size in _fragment(part, text).get("block_tokens", [])}
    if len(sizes) > 1 or not all(size.isdecimal() and int(size) for size in sizes):
        refuse("--also", f"'{text}': block_tokens is one positive number for the whole pool")
    block_tokens = int(sizes.pop()) if sizes else None
    count = engines.partition("#")[0]
    if not count.isdecimal():
        addresses = tuple(engine_address(part.strip()) for part in engines.split(","))
        return FurtherPool(pool, model, len(addresses), addresses, block_tokens)
    if not 1 <= int(count) <= INSTANCES_MAX:
        refuse("--also", f"'{text}': the number of engines must be from 1 to {INSTANCES_MAX}")
    return FurtherPool(pool, model, int(count), block_tokens=block_tokens)


def engine_address(text: str) -> EngineAddress:
    """Raises click.BadParameter."""
    parts = _parts(text)
    if parts is None or parts.scheme not in {"http", "https"} or not parts.hostname:
        refuse("--engine", f"'{text}' is neither 'sim', nor 'vllm', nor a URL like http://127.0.0.1:8000")
    values = {name: found[-1] for name, found in _fragment(text, text).items()}
    role = values.get("role", "both")
    if role not in get_args(Role):
        refuse("--engine", f"'{text}': a role is one of {', '.join(get_args(Role))}")
    rank = values.get("rank", "")
    if rank and not rank.isdecimal():
        refuse("--engine", f"'{text}': a data-parallel rank is a number from 0")
    kv, replay = (_endpoint(values.get(name, ""), parts.hostname, text) for name in ("kv", "replay"))
    url = parts._replace(fragment="").geturl().rstrip("/")
    return EngineAddress(url, kv, replay, cast("Role", role), int(rank) if rank else None)


def _parts(url: str) -> SplitResult | None:
    """None: its host or port can be none."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises ValueError
    except ValueError:
        return None
    return parts


def _fragment(part: str, text: str) -> dict[str, list[str]]:
    values = parse_qs(part.partition("#")[2])
    if unknown := sorted(set(values) - set(FRAGMENT)):
        refuse("--engine", f"'{text}': after # come {', '.join(FRAGMENT)}, each NAME=VALUE, not {', '.join(unknown)}")
    return values


def _endpoint(named: str, host: str, text: str) -> str:
    if named.isdecimal():
        return f"tcp://{in_url(host)}:{named}"
    if named and not named.startswith(("tcp://", "ipc://")):
        refuse("--engine", f"'{text}': '{named}' is neither a port nor an endpoint like tcp://host:5557 or ipc:///path")
    return named
