"""A fleet in containers, from a clean copy of this tree: up, down, and the state of each container."""

import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import docker
from docker.errors import DockerException
from testcontainers.compose import DockerCompose

from pointsman.adapters.tcp_ports import free_ports
from pointsman.primitives import InstanceId
from pointsman.runtime.settings import FleetSettings
from pointsman_cli.discovery import FleetFile
from tests.support.compose import ROOT

IMAGE = "pointsman:containers"
POOL, MODEL, BLOCK_TOKENS = "default", "pointsman-sim", 64
OVERRIDE = str(Path(__file__).with_name("override.yml"))
FILES = ("docker-compose.yml", OVERRIDE)
START_ATTEMPTS_MAX = 3
ADDRESS_SECONDS_MAX = 0.3
"""How long the address of a container is believed."""


class NoDockerError(Exception):
    """No Docker engine answers."""


@dataclass(frozen=True, slots=True)
class Container:
    """`addresses` by network, without the project's name."""

    name: str
    service: str
    state: str
    image: str
    labels: Mapping[str, str]
    addresses: Mapping[str, str]

    @property
    def is_engine(self) -> bool:
        return "engine" in self.service

    @property
    def instance(self) -> InstanceId:
        """Name of the instance behind it, as the worker makes it of what DNS answers."""
        return InstanceId(f"{self.addresses.get('engines', '').replace('.', '-')}-8080")


@dataclass(slots=True)
class ContainerFleet:
    """`directory`: the clean copy. `variables`: of the compose file."""

    directory: Path
    project: str
    variables: dict[str, str]
    profiles: tuple[str, ...] = ()
    files: tuple[str, ...] = FILES
    build: bool = False
    engine: Any = field(default_factory=lambda: docker_engine())
    _seen: dict[str, Container] = field(default_factory=dict)
    _seen_at: float = 0.0

    @property
    def compose(self) -> DockerCompose:
        return DockerCompose(
            str(self.directory),
            list(self.files),
            profiles=list(self.profiles) or None,
            build=self.build,
            env_file=str(self._written_variables()),
            wait=True,
        )

    def start(self) -> None:
        """`docker compose up --wait`; again where a busy machine made a container miss its health checks."""
        for attempt in range(START_ATTEMPTS_MAX):
            try:
                self.compose.start()
            except subprocess.CalledProcessError:
                if attempt + 1 == START_ATTEMPTS_MAX:
                    raise
            else:
                return

    def command(self, *arguments: str, timeout: float = 300.0) -> str:
        """Output of a docker compose command. Raises AssertionError with what it printed."""
        done = subprocess.run(
            [*self.compose.compose_command_property, *arguments],
            cwd=self.directory,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, f"docker compose {' '.join(arguments)}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
        return done.stdout

    def pointsman(self, *arguments: str) -> str:
        """Output of a command for people, as the operator of the compose file."""
        return self.command("run", "--rm", "--no-deps", "-T", "pointsman", *arguments)

    def in_pointsman(self, script: str) -> str:
        return self.command("run", "--rm", "--no-deps", "-T", "--entrypoint", "sh", "pointsman", "-c", script).strip()

    def containers(self) -> dict[str, Container]:
        """All containers of the project by name, running or not."""
        if time.monotonic() > self._seen_at + ADDRESS_SECONDS_MAX:
            found = self.engine.api.containers(
                all=True, filters={"label": f"com.docker.compose.project={self.project}"}
            )
            self._seen = {one.name: one for one in map(self._container, found) if one is not None}
            self._seen_at = time.monotonic()
        return self._seen

    def named(self, service: str, number: int = 1) -> Container:
        return self.containers()[f"{self.project}-{service}-{number}"]

    def of_service(self, service: str) -> list[Container]:
        return [container for container in self.containers().values() if container.service == service]

    def address(self, service: str, *networks: str) -> str:
        """Address in the first of these networks that it is in, or in any. Raises OSError if it is in none or not running."""
        container = self.containers().get(f"{self.project}-{service}-1")
        if container is None or container.state != "running":
            raise OSError(f"{service} does not run")
        for network in networks or container.addresses:
            if address := container.addresses.get(network):
                return address
        raise OSError(f"{service} is in none of {networks}")

    @property
    def url(self) -> str:
        """Where clients are served."""
        return f"http://127.0.0.1:{self.variables['POINTSMAN_PORT']}"

    @property
    def nats(self) -> str:
        return f"nats://127.0.0.1:{self.variables['POINTSMAN_NATS_PORT']}"

    def settings(self) -> FleetSettings:
        """Of a link from here as the operator of the compose file."""
        name, seed = self.in_pointsman(
            'basename "$POINTSMAN_NATS_CREDENTIALS"; cat "$POINTSMAN_NATS_CREDENTIALS"'
        ).split()
        file = self.directory.with_name(f"{self.project}-operator") / name
        file.parent.mkdir(mode=0o700, exist_ok=True)
        file.write_text(seed)
        return FleetSettings(
            nats=self.nats,
            nats_credentials=str(file),
            pool=POOL,
            block_tokens=BLOCK_TOKENS,
            secret=self.in_pointsman('cat "$POINTSMAN_SECRET_FILE"'),
        )

    @property
    def file(self) -> FleetFile:
        """As clients of a fleet of processes take it."""
        return FleetFile(
            nats="",
            ingress="http://ingress:8080",
            pool=POOL,
            model=MODEL,
            policy="",
            speed=1.0,
            slo_ttft=5.0,
            block_tokens=BLOCK_TOKENS,
            secret_file="",
            data="",
            pid=0,
            started_at=0.0,
        )

    def _written_variables(self) -> Path:
        file = self.directory / "variables.env"
        file.write_text("".join(f"{name}={value}\n" for name, value in self.variables.items()))
        return file

    def _container(self, found: dict[str, Any]) -> Container | None:
        if found["Labels"].get("com.docker.compose.oneoff") == "True":
            return None
        networks = found["NetworkSettings"]["Networks"]
        return Container(
            name=found["Names"][0].removeprefix("/"),
            service=found["Labels"]["com.docker.compose.service"],
            state=found["State"],
            image=found["Image"],
            labels=found["Labels"],
            addresses={
                name.removeprefix(f"{self.project}_"): network["IPAddress"]
                for name, network in networks.items()
                if network["IPAddress"]
            },
        )


def docker_engine() -> Any:
    """Raises NoDockerError."""
    try:
        engine = docker.from_env()
        engine.ping()
    except DockerException as error:
        raise NoDockerError(f"no Docker engine answers here, and make test-containers needs one: {error}") from error
    return engine


@contextmanager
def running_fleet(
    directory: Path, project: str, *profiles: str, files: tuple[str, ...] = FILES, build: bool = False
) -> Iterator[ContainerFleet]:
    """Started with `docker compose up --wait`, and removed with its volumes in the end."""
    port, nats_port, console_port = free_ports(
        3
    )  # fixed ones: Docker gives a container that is started again another free port
    own = {
        "COMPOSE_PROJECT_NAME": project,
        "POINTSMAN_IMAGE": IMAGE,
        "POINTSMAN_PORT": str(port),
        "POINTSMAN_NATS_PORT": str(nats_port),
        "POINTSMAN_CONSOLE_PORT": str(console_port),
    }
    fleet = ContainerFleet(directory, project, own, profiles, files, build)
    try:
        fleet.start()
        yield fleet
    finally:
        fleet.command("--profile", "*", "down", "--volumes", "--remove-orphans", "--timeout", "2")


def relabelled(image: str, name: str) -> None:
    """Another image with the same content."""
    recipe = f"FROM {image}\nLABEL org.opencontainers.image.revision=next\n"
    subprocess.run(["docker", "build", "-q", "-t", name, "-"], input=recipe, text=True, check=True, timeout=60)


def clean_copy(directory: Path) -> Path:
    """What a clone of this tree has: tracked files, and new ones that are not ignored."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        source, target = ROOT / name, directory / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
            target.chmod(source.stat().st_mode & 0o777)
    return directory
