"""What `pointsman up` can be asked for, and what follows from the kind of engine where nobody asked."""

import re
import shlex
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn, cast, get_args
from urllib.parse import parse_qs, urlsplit

import click

from pointsman.contracts.fleet import Role
from pointsman.contracts.subjects import valid_name
from pointsman.policies.admission import ADMISSION_POLICIES, DEFAULT_ADMISSION
from pointsman.policies.ordering import DEFAULT_ORDERING, ORDERING_POLICIES
from pointsman.policies.rebalancing import DEFAULT_REBALANCING, REBALANCING_POLICIES
from pointsman.policies.routing import DEFAULT_ROUTING, ROUTING_POLICIES
from pointsman.policies.scaling import SCALING_POLICIES
from pointsman.policies.scaling.slo_attainment import SloAttainment
from pointsman.runtime.embedded_nats import SYNC_INTERVAL
from pointsman.runtime.settings import COUNT, PORT_MAX, setting
from pointsman.state.engine_profiles import DEFAULT_PROFILE, PROFILES

SIMULATED = "sim"
VLLM = "vllm"
MODEL_PLACE = "{model}"
ENGINES_MAX = 512
SCHEDULERS_MAX = 5
INGRESSES_MAX = 16
BUILTIN_TOKENIZER = "builtin"
TOKENIZER_FILE = "tokenizer.json"
POOL_NAME_MAX = 40
"""Longest name of a pool that is made from a model's: instances are named after it."""

CPU_PROFILE = "smollm2-135m-cpu"
SYNC_INTERVALS = re.compile(r"always|\d+(ms|s|m)")


@dataclass(frozen=True, kw_only=True)
class UpSettings:
    """Settings of the command. What is None is left to the service that it concerns, and to its table in the file."""

    engines: int = setting(4, "How many engines to start, each with a worker beside it.")
    scale: str | None = setting(
        None, "MIN..MAX: have the scaler start and stop engines, at least and at most so many; not --engines."
    )
    prefill: int = setting(
        0,
        "How many engines only compute prompts and hand their KV caches to those of --decode. Then these two say how many "
        "engines there are, and --engines does not.",
    )
    decode: int = setting(0, "How many engines only give answers, from KV caches that they fetch. See --prefill.")
    scaling: str = setting(
        SloAttainment.name, "With --scale: the scaling policy.", choices=tuple(sorted(SCALING_POLICIES))
    )
    schedulers: int = setting(1, "How many schedulers to start. One leads, the others take over when it is gone.")
    ingresses: int = setting(
        1,
        "How many ingresses to start: the first on --port, the others on the ports after it, for a load balancer in front "
        "(docs/operations.md).",
    )
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
        "'sim'; 'vllm': vLLM's CPU build with a small real model, made on the first use; or URLs of engines that already "
        "run, separated by commas; where an engine publishes KV events: http://host:8000#kv=5557&replay=5558, or whole "
        "endpoints: #kv=tcp://host:5557&replay=tcp://host:5558; there also role=prefill or role=decode, and rank=N of data-parallel ranks.",
    )
    engine_command: str | None = setting(
        None,
        "Start engines with this command line instead; {port}, {kv_events}, {index}, {model} and more are filled in: "
        "docs/engines.md names them and has examples.",
    )
    engine_args: str = setting("", "More arguments for each engine that is started, as one would type them.")
    vllm_dir: str | None = setting(
        None, "With --engine vllm: where its environment lies, or is made. Default: below the user's cache directory."
    )
    tokenizer: str | None = setting(
        None,
        "Directory with the model's tokenizer.json and chat template, or 'builtin'. Default: that of the engines started here; of others "
        "the ingress's own setting, and without one the engines are asked, which costs a round trip.",
    )
    also: tuple[str, ...] = setting(
        (),
        "MODEL=ENGINES: one more model behind the same address, with a pool of its own: how many simulated engines, or "
        "URLs as for --engine. May be given several times.",
    )
    also_block_tokens: tuple[str, ...] = setting(
        (),
        "MODEL=TOKENS: what a block key stands for in that model's pool of --also, where its engines need another number "
        "than --block-tokens. May be given several times.",
    )
    lora: tuple[str, ...] = setting(
        (),
        "Name of a LoRA adapter that the simulated engines serve beside their model (not those of --also). May be "
        "given several times.",
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
    engine_model: str | None = setting(
        None,
        f"What an engine costs: model and hardware, by preset. Default: {DEFAULT_PROFILE}; with --engine vllm {CPU_PROFILE}.",
        choices=tuple(PROFILES),
    )
    slo_ttft: float | None = setting(
        None, "Objective on the time to first token, engine seconds. Default: 5; with --engine vllm 30."
    )
    block_tokens: int | None = setting(
        None,
        "Tokens that one block key stands for; a multiple of the engines' block size. Default: 64; with --engine vllm 32.",
    )
    kv_blocks: int | None = setting(
        None,
        "KV cache of each engine that is started here, in its blocks; not by --engine-command. Default: the engine's own.",
    )
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
    processes: int | None = setting(None, "Processes of an ingress, which share its port. Default: one.", bounds=COUNT)
    rebind: bool | None = setting(
        None,
        "Also take overdue requests out of an engine before their first token, to start again elsewhere. Default: no.",
    )
    secret: str | None = setting(
        None, "Secret of the deployment. Default: made once and kept in the data directory.", secret=True
    )
    restart: bool = setting(True, "Start a process again when it dies, saying so.")
    start_seconds_max: float | None = setting(
        None,
        "How long the fleet may take to become ready, in seconds. Default: 60; where real engines are started 900.",
    )

    @property
    def split(self) -> bool:
        """Whether engines are started that prefill, and others that decode."""
        return bool(self.prefill or self.decode)

    @property
    def kind(self) -> "EngineKind":
        """What kind of engines these are."""
        if self.engine_command is not None:
            return COMMANDED
        return {SIMULATED: SIMULATED_ENGINES, VLLM: CPU_ENGINES}.get(self.engine, RUNNING)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """What a kind of engine has as its own, where nobody asked for something else."""

    note: str
    """What it is, for people."""
    started: bool = True
    """Whether `up` or the scaler starts it."""
    simulated: bool = False
    engine_model: str = DEFAULT_PROFILE
    slo_ttft: float = 5.0
    block_tokens: int = 64
    start_seconds_max: float = 900.0
    hold_seconds: float = 600.0
    """How long requests wait for a first engine, where a scaler starts one; wall time."""


SIMULATED_ENGINES = EngineKind(note="simulated engine", simulated=True, start_seconds_max=60.0, hold_seconds=60.0)
CPU_ENGINES = EngineKind(
    note="vLLM on the CPU, a small real model", engine_model=CPU_PROFILE, slo_ttft=30.0, block_tokens=32
)
COMMANDED = EngineKind(note="engine, by --engine-command")
RUNNING = EngineKind(note="engine", started=False, start_seconds_max=60.0)


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """A running engine, and where it publishes and replays its KV events; empty where it does not."""

    url: str
    kv_endpoint: str = ""
    kv_replay_endpoint: str = ""
    role: Role = "both"
    dp_rank: int | None = None
    """Which of the engine's data-parallel ranks, where it has several; the endpoints are those of the first."""


def checked(settings: UpSettings) -> list[EngineAddress]:
    """The engines that are named by URL, none where they are to be simulated. Raises click.BadParameter."""
    if not valid_name(settings.pool):
        _refuse("--pool", f"'{settings.pool}' is no name: use lower-case letters, digits and dashes, at most 63")
    if not 1 <= settings.engines <= ENGINES_MAX:
        _refuse("--engines", f"must be from 1 to {ENGINES_MAX}, not {settings.engines}")
    if not 1 <= settings.schedulers <= SCHEDULERS_MAX:
        _refuse("--schedulers", f"must be from 1 to {SCHEDULERS_MAX}, not {settings.schedulers}")
    if not 1 <= settings.ingresses <= INGRESSES_MAX:
        _refuse("--ingresses", f"must be from 1 to {INGRESSES_MAX}, not {settings.ingresses}")
    for flag, value in (
        ("--speed", settings.speed),
        ("--slo-ttft", settings.slo_ttft),
        ("--block-tokens", settings.block_tokens),
        ("--kv-blocks", settings.kv_blocks),
        ("--start-seconds-max", settings.start_seconds_max),
    ):
        if value is not None and not value > 0:
            _refuse(flag, f"must be positive, not {value}")
    highest = PORT_MAX - settings.ingresses + 1
    if not 0 <= settings.port <= highest:
        _refuse("--port", f"must be from 0 to {highest}, not {settings.port}")
    if not _has_tokenizer(settings.tokenizer or BUILTIN_TOKENIZER):
        _refuse("--tokenizer", f"there is no {TOKENIZER_FILE} in '{settings.tokenizer}'; name the model's directory")
    if not SYNC_INTERVALS.fullmatch(settings.sync_interval):
        _refuse(
            "--sync-interval", f"'{settings.sync_interval}' is neither 'always' nor a duration like 500ms, 1s or 2m"
        )
    _check_command(settings)
    _check_split(settings)
    if settings.kind.started:
        return []
    if settings.engine_args:
        _refuse("--engine-args", "engines that run already take no more arguments")
    return [_engine_address(part.strip()) for part in settings.engine.split(",")]


def _has_tokenizer(place: str) -> bool:
    return place == BUILTIN_TOKENIZER or (Path(place) / TOKENIZER_FILE).is_file()


def _check_split(settings: UpSettings) -> None:
    if not settings.split:
        return
    if min(settings.prefill, settings.decode) < 1 or settings.prefill + settings.decode > ENGINES_MAX:
        _refuse("--prefill", f"--prefill and --decode must both be at least 1, and {ENGINES_MAX} together at most")
    if settings.scale is not None:
        _refuse("--prefill", "a scaler starts engines that do all of a request; leave --scale away")
    if not settings.kind.started:
        _refuse("--prefill", "engines that run already are told apart by their URLs: http://host:8000#role=prefill")


def words(flag: str, text: str) -> list[str]:
    """A command line, taken apart as a shell would. Raises click.BadParameter."""
    try:
        return shlex.split(text)
    except ValueError as error:
        _refuse(flag, f"'{text}' is not understood: {error}")


def _check_command(settings: UpSettings) -> None:
    words("--engine-args", settings.engine_args)
    if settings.engine_command is None:
        return
    if settings.engine != SIMULATED:
        _refuse("--engine-command", f"starts engines itself; leave --engine {settings.engine} away")
    command = words("--engine-command", settings.engine_command)
    if not command or shutil.which(command[0]) is None:
        _refuse(
            "--engine-command",
            f"there is no program '{command[0] if command else ''}' here; is it installed and in PATH?",
        )
    text = settings.engine_command
    if "{port}" not in text:
        _refuse("--engine-command", "does not say {port}, so the engine would not listen where it is expected")
    if MODEL_PLACE in text and settings.model is None:
        _refuse("--engine-command", f"says {MODEL_PLACE}; name it with --model")
    if settings.scale is not None and settings.model is None:
        _refuse(
            "--engine-command", "with --scale no engine runs yet that could say what it serves; name it with --model"
        )


@dataclass(frozen=True, slots=True)
class FurtherPool:
    """One more model and its pool: so many simulated engines, or `addresses` of running ones. `block_tokens` None: those of
    the first pool."""

    pool: str
    model: str
    engines: int
    addresses: tuple[EngineAddress, ...] = ()
    block_tokens: int | None = None


def further_pools(settings: UpSettings) -> list[FurtherPool]:
    """What --also asks for. Raises click.BadParameter."""
    found = [_further_pool(told) for told in settings.also]
    names = [settings.pool, *(further.pool for further in found)]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        _refuse(
            "--also", f"two models would share the pool '{twice[0]}'; give them names that differ in more than signs"
        )
    told = dict(_block_tokens_of(text) for text in settings.also_block_tokens)
    if unknown := sorted(set(told) - {further.model for further in found}):
        _refuse(
            "--also-block-tokens", f"--also names no model '{unknown[0]}'; that of the first pool is --block-tokens"
        )
    return [replace(further, block_tokens=told.get(further.model)) for further in found]


def _block_tokens_of(text: str) -> tuple[str, int]:
    model, _, tokens = text.rpartition("=")
    if not (model and tokens.isdecimal() and int(tokens)):
        _refuse("--also-block-tokens", f"'{text}' is not MODEL=TOKENS; write for instance coder=128")
    return model, int(tokens)


def _further_pool(told: str) -> FurtherPool:
    model, equals, engines = told.partition("=")
    pool = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")[:POOL_NAME_MAX].rstrip("-")
    if not (equals and engines and valid_name(pool)):
        _refuse("--also", f"'{told}' is not MODEL=ENGINES; write for instance coder=2")
    if not engines.isdecimal():
        addresses = tuple(_engine_address(part.strip()) for part in engines.split(","))
        return FurtherPool(pool, model, len(addresses), addresses)
    if not 1 <= int(engines) <= ENGINES_MAX:
        _refuse("--also", f"'{told}': the number of engines must be from 1 to {ENGINES_MAX}")
    return FurtherPool(pool, model, int(engines))


def scale_bounds(settings: UpSettings) -> tuple[int, int] | None:
    """Least and most instances, where a scaler keeps them. Raises click.BadParameter."""
    if settings.scale is None:
        return None
    lowest, dots, highest = settings.scale.partition("..")
    if not (dots and lowest.isdecimal() and highest.isdecimal()):
        _refuse("--scale", f"'{settings.scale}' is no range; write for instance 4..8")
    if not int(lowest) <= int(highest) <= ENGINES_MAX or int(highest) == 0:
        _refuse("--scale", f"'{settings.scale}' must rise, and end between 1 and {ENGINES_MAX}")
    if not settings.kind.started:
        _refuse("--scale", "engines that run already cannot be scaled from here; see pointsman-scaler --provider")
    return int(lowest), int(highest)


def _engine_address(text: str) -> EngineAddress:
    parts = urlsplit(text)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        _refuse("--engine", f"'{text}' is neither 'sim', nor 'vllm', nor a URL like http://127.0.0.1:8000")
    sockets = parse_qs(parts.fragment)
    unknown = sorted(set(sockets) - {"kv", "replay", "role", "rank"})
    if unknown:
        _refuse(
            "--engine",
            f"'{text}': after # come kv=ENDPOINT, replay=ENDPOINT, role=ROLE and rank=N, not {', '.join(unknown)}",
        )
    role = sockets.get("role", ["both"])[-1]
    if role not in get_args(Role):
        _refuse("--engine", f"'{text}': a role is one of {', '.join(get_args(Role))}")
    url = parts._replace(fragment="").geturl().rstrip("/")
    kv, replay = (_endpoint(sockets.get(name, [""])[-1], parts.hostname, text) for name in ("kv", "replay"))
    rank = sockets.get("rank", [""])[-1]
    if rank and not rank.isdecimal():
        _refuse("--engine", f"'{text}': a data-parallel rank is a number from 0")
    return EngineAddress(url, kv, replay, cast("Role", role), int(rank) if rank else None)


def _endpoint(named: str, host: str, text: str) -> str:
    """A ZMQ endpoint; a mere port is one of the engine's own host."""
    if named.isdecimal():
        return f"tcp://{f'[{host}]' if ':' in host else host}:{named}"
    if named and not named.startswith(("tcp://", "ipc://")):
        _refuse(
            "--engine", f"'{text}': '{named}' is neither a port nor an endpoint like tcp://host:5557 or ipc:///path"
        )
    return named


def _refuse(flag: str, message: str) -> NoReturn:
    raise click.BadParameter(message, param_hint=flag)
