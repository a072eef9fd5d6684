"""What is decided before the first process of a fleet starts. Plain values; `processes` makes the processes of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pointsman.adapters.tcp_ports import LOOPBACK
from pointsman_cli.up.addresses import EngineAddress, FurtherPool
from pointsman_cli.up.settings import BUILTIN_TOKENIZER, SIMULATED, UpSettings
from pointsman_cli.vllm_cpu.home import EngineHome

SIMULATED_MODEL = "pointsman-sim"
ENGINE_BLOCK_TOKENS = 64
"""Block size of engines started here, or its largest divisor that divides `block_tokens`."""

PORTS_EACH_ENGINE = 4
"""Its own, its worker's, and two for its KV events over TCP."""

SERVICES = ("scheduler", "ingress", "rebalancer", "scaler", "recorder")
FURTHER_SERVICES = ("scheduler", "rebalancer", "recorder")
"""Services of each pool but the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlan:
    """One process. `ready_path` answers 200 once it is ready. `script` is a console script of Pointsman or, if `foreign`, a
    program from PATH."""

    name: str
    role: str
    script: str
    url: str
    environment: Mapping[str, str]
    arguments: tuple[str, ...] = ()
    ready_path: str = "/readyz"
    niceness: int = 0
    foreign: bool = False

    @property
    def probe_url(self) -> str:
        return self.url + self.ready_path


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    settings: UpSettings
    data: Path
    nats: str
    nats_port: int
    """Port of our own nats-server, if there is one."""

    model: str
    secret: str
    secret_file: Path
    config: Path | None
    config_policy: str
    """The scheduler's policy by the file, else the default."""
    runtime: Path
    """A short private directory for Unix sockets."""

    ports: tuple[int, ...]
    """Free ports, `ports_needed` of them."""

    engines: tuple[EngineAddress, ...]
    """Engines that already run."""

    home: EngineHome | None = None
    """vLLM's CPU build, if that is started, each engine with `engine_threads`."""

    engine_threads: int = 1

    ingress_ports: tuple[int, ...] = ()
    """One for each ingress; empty: the port of the settings."""

    further: tuple[FurtherPool, ...] = ()
    """Pools behind the same ingress."""

    prefix: str = ""
    """Of the names of this pool's processes."""

    @property
    def block_tokens(self) -> int:
        return self.settings.block_tokens or self.settings.kind.block_tokens

    @property
    def slo_ttft(self) -> float:
        return self.settings.slo_ttft or self.settings.kind.slo_ttft

    @property
    def engine_model(self) -> str:
        return self.settings.engine_model or self.settings.kind.engine_model

    @property
    def start_seconds_max(self) -> float:
        return self.settings.start_seconds_max or self.settings.kind.start_seconds_max

    @property
    def tokenizer(self) -> str | None:
        """None leaves it to the ingress's own setting."""
        if self.settings.tokenizer is None and self.home is not None:
            return str(self.home.model)
        return self.settings.tokenizer or (BUILTIN_TOKENIZER if self.settings.kind.simulated else None)

    @property
    def instances(self) -> Path:
        """Directory of the scaler's process provider."""
        return self.data / "instances"

    def of_further(self, further: FurtherPool) -> "FleetPlan":
        """The plan of a further pool."""
        settings = replace(
            self.settings,
            pool=further.pool,
            instances=str(further.instances),
            schedulers=1,
            split=None,
            lora=(),
            block_tokens=further.block_tokens or self.block_tokens,
            engine=SIMULATED,
            engine_command=None,
            engine_args="",
        )
        return replace(
            self,
            settings=settings,
            model=further.model,
            engines=further.addresses,
            home=None,
            further=(),
            prefix=f"{further.pool}-",
        )

    @property
    def pools(self) -> "list[FleetPlan]":
        """The plans of all pools, this one first."""
        return [self, *(self.of_further(further) for further in self.further)]

    def real_engines(self) -> list[str]:
        """Names of this pool's engines that are not simulated, without those that a scaler starts."""
        if self.settings.kind.simulated and not self.engines:
            return []
        return self.engine_names()

    def engine_names(self) -> list[str]:
        return [
            f"{self.prefix}engine-{number}" for number in range(1, (len(self.engines) or self.settings.engines) + 1)
        ]

    @property
    def ingress_url(self) -> str:
        """Of the first ingress."""
        return self.ingress_url_at(self.settings.port)

    def ingress_url_at(self, port: int) -> str:
        host = {"0.0.0.0": LOOPBACK, "::": "[::1]"}.get(self.settings.host, self.settings.host)
        return f"http://{host}:{port}"


def ports_needed(settings: UpSettings, engines: int, further: Sequence[FurtherPool] = ()) -> int:
    first = (
        len(SERVICES)
        + settings.schedulers
        + settings.ingresses
        - 2
        + PORTS_EACH_ENGINE * max(settings.engines, engines)
    )
    return first + sum(len(FURTHER_SERVICES) + PORTS_EACH_ENGINE * pool.instances for pool in further)


def archive_file(data: Path, prefix: str = "") -> Path:
    """The recorder's SQLite file; `prefix` is that of a further pool."""
    return data / f"{prefix}archive.sqlite"
