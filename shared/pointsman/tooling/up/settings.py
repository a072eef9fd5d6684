"""What `pointsman up` can be asked for."""

import re
from dataclasses import dataclass
from typing import NoReturn
from urllib.parse import parse_qs, urlsplit

import click

from pointsman.chassis.embedded_nats import SYNC_INTERVAL
from pointsman.chassis.settings import setting
from pointsman.contracts.subjects import valid_name
from pointsman.policies.admission import ADMISSION_POLICIES, DEFAULT_ADMISSION
from pointsman.policies.ordering import DEFAULT_ORDERING, ORDERING_POLICIES
from pointsman.policies.rebalancing import DEFAULT_REBALANCING, REBALANCING_POLICIES
from pointsman.policies.routing import DEFAULT_ROUTING, ROUTING_POLICIES
from pointsman.policies.scaling import SCALING_POLICIES
from pointsman.policies.scaling.slo_attainment import SloAttainment
from pointsman.state.engine_profiles import DEFAULT_PROFILE, PROFILES

SIMULATED = "sim"
ENGINES_MAX = 512
SCHEDULERS_MAX = 5
SYNC_INTERVALS = re.compile(r"always|\d+(ms|s|m)")


@dataclass(frozen=True, kw_only=True)
class UpSettings:
    """Settings of the command. What is None is left to the service that it concerns, and to its table in the file."""

    engines: int = setting(4, "How many simulated engines to start, each with a worker beside it.")
    scale: str | None = setting(
        None, "MIN..MAX: have the scaler start and stop simulated engines, at least and at most so many; not --engines."
    )
    scaling: str = setting(
        SloAttainment.name, "With --scale: the scaling policy.", choices=tuple(sorted(SCALING_POLICIES))
    )
    schedulers: int = setting(1, "How many schedulers to start. One leads, the others take over when it is gone.")
    policy: str | None = setting(
        None,
        f"Routing policy. Default: the scheduler's own, which is {DEFAULT_ROUTING}.",
        choices=tuple(sorted(ROUTING_POLICIES)),
    )
    port: int = setting(8080, "Port of the OpenAI-compatible HTTP service; 0 takes a free one.")
    host: str = setting("127.0.0.1", "Address that the HTTP service listens on; all else stays on the loopback.")
    data: str = setting(".pointsman", "Directory for the log's store, the SQL archive, the secret and log files.")
    model: str | None = setting(None, "Model name that clients ask for. Default: what the engines serve.")
    engine: str = setting(
        SIMULATED,
        "'sim', or URLs of engines that already run, separated by commas; where an engine publishes KV events: "
        "http://host:8000#kv=tcp://host:5557&replay=tcp://host:5558",
    )
    nats: str | None = setting(
        None, "Join this nats-server instead of starting one; the servers of a cluster separated by commas."
    )
    sync_interval: str = setting(
        SYNC_INTERVAL,
        "How often our nats-server forces the log to disk: 'always', before each write is confirmed, or a duration; "
        "only a power cut loses what is younger.",
    )
    pool: str = setting("default", "Name of the pool: lower-case letters, digits and dashes.")
    speed: float = setting(
        1.0, "Run simulated engines this much faster than real time; reported times stay engine time."
    )
    engine_model: str = setting(
        DEFAULT_PROFILE, "What an engine costs: model and hardware, by preset.", choices=tuple(PROFILES)
    )
    slo_ttft: float = setting(5.0, "Objective on the time to first token, engine seconds.")
    block_tokens: int = setting(64, "Tokens that one block key stands for; a multiple of the engines' block size.")
    kv_blocks: int | None = setting(None, "KV cache of each simulated engine, in its blocks. Default: the preset's.")
    admission: str | None = setting(
        None,
        f"Admission policy. Default: the scheduler's own, which is {DEFAULT_ADMISSION}.",
        choices=tuple(sorted(ADMISSION_POLICIES)),
    )
    order: str | None = setting(
        None,
        f"Order in which waiting requests are granted. Default: the scheduler's own, which is {DEFAULT_ORDERING}.",
        choices=tuple(sorted(ORDERING_POLICIES)),
    )
    rebalance: str | None = setting(
        None,
        f"Which waiting requests move. Default: the rebalancer's own, which is {DEFAULT_REBALANCING}.",
        choices=tuple(sorted(REBALANCING_POLICIES)),
    )
    secret: str | None = setting(
        None, "Secret of the deployment. Default: made once and kept in the data directory.", secret=True
    )
    restart: bool = setting(True, "Start a process again when it dies (at most 5 times a minute), saying so.")
    start_seconds_max: float = setting(60.0, "How long the fleet may take to become ready, in seconds.")


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """A running engine, and where it publishes and replays its KV events; empty where it does not."""

    url: str
    kv_endpoint: str = ""
    kv_replay_endpoint: str = ""


def checked(settings: UpSettings) -> list[EngineAddress]:
    """The engines that are named by URL, none where they are to be simulated. Raises click.BadParameter."""
    if not valid_name(settings.pool):
        _refuse("--pool", f"'{settings.pool}' is no name: use lower-case letters, digits and dashes, at most 63")
    if not 1 <= settings.engines <= ENGINES_MAX:
        _refuse("--engines", f"must be from 1 to {ENGINES_MAX}, not {settings.engines}")
    if not 1 <= settings.schedulers <= SCHEDULERS_MAX:
        _refuse("--schedulers", f"must be from 1 to {SCHEDULERS_MAX}, not {settings.schedulers}")
    for flag, value in (
        ("--speed", settings.speed),
        ("--slo-ttft", settings.slo_ttft),
        ("--block-tokens", settings.block_tokens),
    ):
        if not value > 0:
            _refuse(flag, f"must be positive, not {value}")
    if not SYNC_INTERVALS.fullmatch(settings.sync_interval):
        _refuse(
            "--sync-interval", f"'{settings.sync_interval}' is neither 'always' nor a duration like 500ms, 1s or 2m"
        )
    if settings.engine == SIMULATED:
        return []
    return [_engine_address(part.strip()) for part in settings.engine.split(",")]


def scale_bounds(settings: UpSettings) -> tuple[int, int] | None:
    """Least and most instances, where a scaler keeps them. Raises click.BadParameter."""
    if settings.scale is None:
        return None
    lowest, dots, highest = settings.scale.partition("..")
    if not (dots and lowest.isdecimal() and highest.isdecimal()):
        _refuse("--scale", f"'{settings.scale}' is no range; write for instance 4..8")
    if not int(lowest) <= int(highest) <= ENGINES_MAX or int(highest) == 0:
        _refuse("--scale", f"'{settings.scale}' must rise, and end between 1 and {ENGINES_MAX}")
    if settings.engine != SIMULATED:
        _refuse("--scale", "engines that run already cannot be scaled from here; see pointsman-scaler --provider")
    return int(lowest), int(highest)


def _engine_address(text: str) -> EngineAddress:
    parts = urlsplit(text)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        _refuse("--engine", f"'{text}' is neither 'sim' nor a URL like http://127.0.0.1:8000")
    sockets = parse_qs(parts.fragment)
    unknown = sorted(set(sockets) - {"kv", "replay"})
    if unknown:
        _refuse("--engine", f"'{text}': after # come kv=ENDPOINT and replay=ENDPOINT, not {', '.join(unknown)}")
    url = parts._replace(fragment="").geturl().rstrip("/")
    return EngineAddress(url, sockets.get("kv", [""])[-1], sockets.get("replay", [""])[-1])


def _refuse(flag: str, message: str) -> NoReturn:
    raise click.BadParameter(message, param_hint=flag)
