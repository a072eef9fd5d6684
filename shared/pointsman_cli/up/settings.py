"""Settings of `pointsman up`, their checks, and the defaults of each kind of engine."""

import re
import shlex
import shutil
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from pointsman.bounds import COUNT, PORT, PORT_MAX, POSITIVE, Bounds
from pointsman.policies.routing import DEFAULT_ROUTING, ROUTING_POLICIES
from pointsman.policies.scaling.roles import parse_split
from pointsman.policies.setting_text import SettingTextError, parts_of
from pointsman.runtime.embedded_nats import SYNC_INTERVAL
from pointsman.runtime.engine_keys import EngineKeySettings
from pointsman.runtime.settings import NATS, SECRET, TEXT, PoolNameType, setting
from pointsman.state.engine_profiles import DEFAULT_PROFILE, PROFILES
from pointsman_cli.options import CONSOLE_PORT
from pointsman_cli.up.addresses import INSTANCES_MAX, EngineAddress, FurtherPool, engine_address, further_pool, refuse

SIMULATED = "sim"
VLLM = "vllm"
MODEL_PLACE = "{model}"
SCHEDULERS_MAX = 5
INGRESSES_MAX = 16
BUILTIN_TOKENIZER = "builtin"
TOKENIZER_FILE = "tokenizer.json"
CPU_PROFILE = "smollm2-135m-cpu"
SYNC_INTERVALS = re.compile(r"always|\d+(ms|s|m)")
SYNC_SETTING = "nats.sync_interval"
POOL_SERVICES = ("scheduler", "ingress", "rebalancer", "scaler", "recorder")
SETTABLE = (*POOL_SERVICES, "worker", "console")
SERVICE_OF_KIND = {
    "routing": "scheduler",
    "admission": "scheduler",
    "order": "scheduler",
    "pair": "scheduler",
    "outlier": "scheduler",
    "rebalance": "rebalancer",
    "scaling": "scaler",
}


@dataclass(frozen=True, kw_only=True)
class UpSettings(EngineKeySettings):
    """None: the service's default, or its table in the file."""

    instances: str = setting("4", "Engines to start, or MIN..MAX for a scaler.")
    split: str | None = setting(
        None,
        "P+D instead of --instances: P prefill engines and D decode engines, with KV transfer. With --instances MIN..MAX the "
        "scaler switches roles with the load, and starts more engines if MAX allows.",
    )
    schedulers: int = setting(
        1, "Schedulers to start: one leader, the others on standby.", bounds=Bounds(1, SCHEDULERS_MAX)
    )
    ingresses: int = setting(
        1, "Ingresses to start, on consecutive ports from --port.", bounds=Bounds(1, INGRESSES_MAX)
    )
    policy: str | None = setting(
        None, f"Routing policy. Default: {DEFAULT_ROUTING}.", choices=tuple(sorted(ROUTING_POLICIES))
    )
    set: tuple[str, ...] = setting(
        (),
        "SERVICE.NAME=VALUE: an option of one service (see pointsman-SERVICE --help), such as scheduler.admission=none; or "
        f"a policy setting, such as routing.displaced_max=2; or {SYNC_SETTING}=always. Repeatable.",
    )
    port: int = setting(8080, "Port of the OpenAI-compatible HTTP service; 0: any free port.", bounds=PORT)
    host: str = setting("127.0.0.1", "Address of the HTTP service; all other processes listen on loopback.", form=TEXT)
    console: bool = setting(True, "Start the console, a web page of the fleet (pointsman console).")
    console_port: int | None = setting(
        None,
        f"Port of the console. Default: {CONSOLE_PORT}, or a free one if that is taken or --port is 0.",
        bounds=PORT,
    )
    data: str = setting(".pointsman", "Directory of the log, the SQL archive, the secret and log files.", form=TEXT)
    model: str | None = setting(None, "Model name in requests. Default: the model of the engines.")
    engine: str = setting(
        SIMULATED,
        "'sim'; 'vllm': vLLM's CPU build with a small real model, built on first use; or comma-separated URLs of running "
        "engines with their KV event sockets, http://host:8000#kv=5557&replay=5558 (ports or endpoints), and "
        "optionally role=prefill, role=decode, rank=N.",
    )
    engine_command: str | None = setting(
        None, "Command line of an engine, with placeholders {port}, {kv_events}, {index}, ... (docs/engines.md)."
    )
    engine_args: str = setting("", "More arguments of each engine started here.")
    tokenizer: str | None = setting(
        None,
        "Directory with the model's tokenizer.json and chat template, or 'builtin'. Default: that of engines started "
        "here; else the engines tokenize, with one more round trip per request.",
    )
    also: tuple[str, ...] = setting(
        (),
        "MODEL=ENGINES: another model at the same address, in its own pool: a number of simulated engines, or URLs as in "
        "--engine, with block_tokens=N in the fragment if it differs. Repeatable.",
    )
    lora: tuple[str, ...] = setting((), "LoRA adapter of the simulated engines. Repeatable.")
    nats: str | None = setting(
        None, "Use this nats-server (or cluster, comma-separated URLs) instead of starting one.", form=NATS
    )
    nats_credentials: str | None = setting(
        None, "Directory written by 'pointsman credentials', with users of the nats-server of --nats."
    )
    nats_ca: str | None = setting(None, "File with the certificates that sign the nats-server's, for --nats.")
    nats_certificate: str | None = setting(None, "File with this fleet's certificate for the nats-server, for --nats.")
    nats_key: str | None = setting(None, "File with the certificate's private key.")
    pool: str = setting("default", "Name of the pool: lower-case letters, digits and dashes.", form=PoolNameType())
    speed: float = setting(
        1.0, "Speed-up of simulated engines over real time; reported times are engine time.", bounds=POSITIVE
    )
    engine_model: str | None = setting(
        None,
        f"Cost model of an engine: model and hardware. Default: {DEFAULT_PROFILE}; with --engine vllm {CPU_PROFILE}.",
        choices=tuple(PROFILES),
    )
    slo_ttft: float | None = setting(
        None, "TTFT SLO, engine seconds. Default: 5; with --engine vllm 30.", bounds=POSITIVE
    )
    block_tokens: int | None = setting(
        None,
        "Tokens per block key; a multiple of the engines' block size. Default: 64; with --engine vllm 32.",
        bounds=COUNT,
    )
    kv_blocks: int | None = setting(
        None,
        "KV cache of each engine started here, in blocks; not for --engine-command. Default: the engine's.",
        bounds=COUNT,
    )
    secret: str | None = setting(
        None, "Secret of the deployment. Default: generated once, in the data directory.", secret=True, form=SECRET
    )
    start_seconds_max: float | None = setting(
        None,
        "Wall seconds until the fleet must be ready. Default: 60; 900 if real engines are started.",
        bounds=POSITIVE,
    )

    @property
    def scaled(self) -> bool:
        return ".." in self.instances

    @property
    def bounds(self) -> tuple[int, int]:
        """Fewest and most instances. Raises click.BadParameter."""
        lowest, _, highest = self.instances.partition("..")
        highest = highest or lowest
        if not (lowest.isdecimal() and highest.isdecimal()):
            refuse("--instances", f"'{self.instances}' is neither a number nor a range like 4..8")
        if not int(lowest) <= int(highest) <= INSTANCES_MAX or int(highest) == 0:
            refuse("--instances", f"'{self.instances}' must end between 1 and {INSTANCES_MAX}, and not fall")
        return int(lowest), int(highest)

    @property
    def roles(self) -> tuple[int, int]:
        """Numbers of prefill and decode engines; (0, 0) without --split. Raises click.BadParameter."""
        if self.split is None:
            return 0, 0
        try:
            sizes = parse_split(self.split)
        except ValueError as error:
            refuse("--split", str(error))
        return sizes.prefill, sizes.decode

    @property
    def engines(self) -> int:
        return 0 if self.scaled else sum(self.roles) or self.bounds[0]

    @property
    def tls_files(self) -> dict[str, str]:
        named = {"nats_ca": self.nats_ca, "nats_certificate": self.nats_certificate, "nats_key": self.nats_key}
        return {name: str(Path(file).resolve()) if file else "" for name, file in named.items()}

    @property
    def requires_keys(self) -> bool:
        """Whether --set tells the ingress to ask for API keys."""
        switches = ("--require-keys", "--no-require-keys")
        told = [text for text in service_arguments(self.set).get("ingress", ()) if text in switches]
        return told[-1:] == ["--require-keys"]

    @property
    def sync_interval(self) -> str:
        return next(
            (text.partition("=")[2] for text in reversed(self.set) if text.startswith(SYNC_SETTING)), SYNC_INTERVAL
        )

    @property
    def kind(self) -> "EngineKind":
        if self.engine_command is not None:
            return COMMANDED
        return {SIMULATED: SIMULATED_ENGINES, VLLM: CPU_ENGINES}.get(self.engine, RUNNING)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    started: bool = True
    simulated: bool = False
    engine_model: str = DEFAULT_PROFILE
    slo_ttft: float = 5.0
    block_tokens: int = 64
    start_seconds_max: float = 900.0
    hold_seconds: float = 600.0
    """Wall seconds that requests wait for the first engine of a scaler."""


SIMULATED_ENGINES = EngineKind(simulated=True, start_seconds_max=60.0, hold_seconds=60.0)
CPU_ENGINES = EngineKind(engine_model=CPU_PROFILE, slo_ttft=30.0, block_tokens=32)
COMMANDED = EngineKind()
RUNNING = EngineKind(started=False, start_seconds_max=60.0)


def checked(settings: UpSettings) -> list[EngineAddress]:
    """Returns engines that already run. Raises click.BadParameter."""
    if settings.bounds[0] < 1 and not settings.scaled:
        refuse("--instances", "must be at least 1")
    highest = PORT_MAX - settings.ingresses + 1
    if settings.port > highest:
        refuse("--port", f"must be at most {highest} with {settings.ingresses} ingresses, not {settings.port}")
    if (
        settings.tokenizer not in (None, BUILTIN_TOKENIZER)
        and not (Path(settings.tokenizer) / TOKENIZER_FILE).is_file()
    ):
        refuse("--tokenizer", f"there is no {TOKENIZER_FILE} in '{settings.tokenizer}'; name the model's directory")
    if not SYNC_INTERVALS.fullmatch(settings.sync_interval):
        refuse("--set", f"'{settings.sync_interval}' is neither 'always' nor a duration like 500ms, 1s or 2m")
    service_arguments(settings.set)
    _check_command(settings)
    _check_layout(settings)
    if settings.nats_credentials and not settings.nats:
        refuse("--nats-credentials", "belongs to --nats; a nats-server started here gets its own users")
    if settings.kind.started:
        return []
    if settings.engine_args:
        refuse("--engine-args", "engines that already run take no more arguments")
    return [engine_address(part.strip()) for part in settings.engine.split(",")]


def service_arguments(texts: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Arguments for each service. Raises click.BadParameter; an unknown NAME is refused by the service itself."""
    found: dict[str, tuple[str, ...]] = defaultdict(tuple)
    for text in texts:
        try:
            kind, name, value = parts_of(text)
        except SettingTextError as error:
            refuse("--set", str(error))
        flag = name.replace("_", "-")
        if kind in SERVICE_OF_KIND:
            found[SERVICE_OF_KIND[kind]] += ("--set", text)
        elif (kind, flag) in (("ingress", "tls-certificate"), ("ingress", "tls-key")):
            refuse(
                "--set", "pointsman up serves without TLS; start pointsman-ingress yourself, or put a proxy before it"
            )
        elif kind in SETTABLE:
            switch = {"true": f"--{flag}", "false": f"--no-{flag}"}.get(value)
            found[kind] += (switch,) if switch else (f"--{flag}", value)
        elif not text.startswith(f"{SYNC_SETTING}="):
            refuse("--set", f"'{text}': SERVICE or KIND is one of {', '.join((*SETTABLE, *SERVICE_OF_KIND))}")
    return found


def further_pools(settings: UpSettings) -> list[FurtherPool]:
    """Raises click.BadParameter."""
    found = [further_pool(text) for text in settings.also]
    names = [settings.pool, *(further.pool for further in found)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        refuse(
            "--also", f"two models would share the pool '{twice[0]}'; give them names that differ in letters or digits"
        )
    return found


def words(flag: str, text: str) -> list[str]:
    """Splits a command line as a shell does. Raises click.BadParameter."""
    try:
        return shlex.split(text)
    except ValueError as error:
        refuse(flag, f"'{text}' is malformed: {error}")


def _check_layout(settings: UpSettings) -> None:
    if settings.split is not None:
        if sum(settings.roles) > INSTANCES_MAX:
            refuse("--split", f"at most {INSTANCES_MAX} together")
        lowest, highest = settings.bounds
        if settings.scaled and not max(2, lowest) <= sum(settings.roles) <= highest:
            refuse("--split", f"{sum(settings.roles)} engines are not within --instances {settings.instances}")
        if not settings.kind.started:
            refuse("--split", "running engines get their role in the URL: http://host:8000#role=prefill")
    if settings.scaled and not settings.kind.started:
        refuse("--instances", "running engines cannot be scaled from here; see pointsman-scaler --provider")


def _check_command(settings: UpSettings) -> None:
    for word in words("--engine-args", settings.engine_args):
        flag = word.partition("=")[0]
        if settings.engine_command is None and flag in ("--port", "--speed"):
            refuse("--engine-args", f"pointsman up gives each engine its {flag}; leave it out")
    text = settings.engine_command
    if text is None:
        return
    if settings.engine != SIMULATED:
        refuse("--engine-command", f"starts engines itself; leave --engine {settings.engine} out")
    program = next(iter(words("--engine-command", text)), "")
    if shutil.which(program) is None:
        refuse("--engine-command", f"there is no program '{program}' here; is it installed and in PATH?")
    if "{port}" not in text:
        refuse("--engine-command", "does not contain {port}, so the engine would not listen where it is expected")
    if MODEL_PLACE in text and settings.model is None:
        refuse("--engine-command", f"contains {MODEL_PLACE}; name it with --model")
    if settings.scaled and settings.model is None:
        refuse("--engine-command", "no engine runs yet to ask for its model; name it with --model")
