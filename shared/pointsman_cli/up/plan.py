"""Values decided before the first process of a fleet starts; `processes` derives the processes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pointsman.adapters.providers.names import free_names
from pointsman.adapters.tcp_ports import LOOPBACK, in_url
from pointsman.contracts.permissions import BusRole, BusUser
from pointsman.primitives import PoolName
from pointsman.runtime.bus_users import Credentials
from pointsman.runtime.engine_command import engine_environment
from pointsman.runtime.settings import ENVIRONMENT_PREFIX
from pointsman_cli.up.addresses import EngineAddress, FurtherPool
from pointsman_cli.up.settings import BUILTIN_TOKENIZER, POOL_SERVICES, SIMULATED, UpSettings
from pointsman_cli.vllm_cpu.home import EngineHome

SIMULATED_MODEL = "pointsman-sim"
ENGINE_BLOCK_TOKENS = 64
"""Block size of engines started here; smaller if it does not divide `block_tokens`."""
PORTS_EACH_ENGINE = 4
OWN_SET = ENVIRONMENT_PREFIX + "SET"
FURTHER_SERVICES = ("scheduler", "rebalancer", "recorder")


def engine_name(number: int) -> str:
    return f"engine-{number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlan:
    """`script` is a console script of Pointsman or, if `foreign`, a program in PATH."""

    name: str
    role: str
    script: str
    url: str
    environment: Mapping[str, str]
    arguments: tuple[str, ...] = ()
    admin_url: str = ""
    ready_path: str = "/readyz"
    niceness: int = 0
    foreign: bool = False

    def environment_in(self, outer: Mapping[str, str]) -> dict[str, str]:
        """`outer`: of `up`, which its processes inherit but for its own `--set`: theirs takes other names."""
        inherited = engine_environment(outer) if self.role == "engine" else outer
        return {**{name: value for name, value in inherited.items() if name != OWN_SET}, **self.environment}

    @property
    def probe_url(self) -> str:
        return (self.admin_url or self.url) + self.ready_path


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    settings: UpSettings
    data: Path
    nats: str
    nats_port: int
    model: str
    secret: str
    secret_file: Path
    config: Path | None
    config_policy: str
    runtime: Path
    ports: tuple[int, ...]
    engines: tuple[EngineAddress, ...]
    home: EngineHome | None = None
    engine_threads: int = 1

    ingress_ports: tuple[int, ...] = ()
    console_port: int = 0
    """0: without a console."""
    further: tuple[FurtherPool, ...] = ()
    prefix: str = ""
    credentials: Credentials | None = None

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
        if self.settings.tokenizer is None and self.home is not None:
            return str(self.home.model)
        return self.settings.tokenizer or (BUILTIN_TOKENIZER if self.settings.kind.simulated else None)

    @property
    def console_token(self) -> Path:
        """File with the token of those who may act on the console's pages."""
        return self.data / "console-token"

    @property
    def instances(self) -> Path:
        return self.data / "instances"

    def of_further(self, further: FurtherPool) -> "FleetPlan":
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
        return [self, *(self.of_further(further) for further in self.further)]

    def real_engines(self) -> list[str]:
        """Engines of this pool that are not simulated, without those of a scaler."""
        if self.settings.kind.simulated and not self.engines:
            return []
        return self.engine_names()

    def engine_names(self) -> list[str]:
        count = len(self.engines) or self.settings.engines
        return [f"{self.prefix}{engine_name(number)}" for number in range(1, count + 1)]

    def worker_names(self) -> list[str]:
        """Instances of this pool that may join: also those of a scaler, which takes the next free name."""
        if not self.settings.scaled:
            return self.engine_names()
        started = 2 * self.settings.bounds[1]  # some leave while others join
        return [instance for instance, _ in zip(free_names(()), range(started), strict=False)]

    def workers(self) -> list[BusUser]:
        """Of all pools."""
        return [
            BusUser(BusRole.WORKER, name, PoolName(of_pool.settings.pool))
            for of_pool in self.pools
            for name in of_pool.worker_names()
        ]

    def credentials_of(self, role: str, instance: str = "") -> Path | None:
        if self.credentials is None:
            return None
        return self.credentials.file(BusUser(BusRole(role), instance, PoolName(self.settings.pool)))

    @property
    def ingress_url(self) -> str:
        return self.ingress_url_at(self.settings.port)

    def ingress_url_at(self, port: int) -> str:
        host = {"0.0.0.0": LOOPBACK, "::": "::1"}.get(self.settings.host, self.settings.host)
        return f"http://{in_url(host)}:{port}"


def ports_needed(settings: UpSettings, engines: int, further: Sequence[FurtherPool] = ()) -> int:
    first = (
        len(POOL_SERVICES)
        + settings.schedulers
        + settings.ingresses
        - 2
        + PORTS_EACH_ENGINE * max(settings.engines, engines)
    )
    return first + sum(len(FURTHER_SERVICES) + PORTS_EACH_ENGINE * pool.instances for pool in further)


def archive_file(data: Path, prefix: str = "") -> Path:
    return data / f"{prefix}archive.sqlite"
