"""Engines from Docker containers with a label, `docker:LABEL[=VALUE]`; by default those that say their port in the label
`pointsman.io/port`.

- An engine is a container that runs: its name is the instance's; its id and start time are the identity, because a
  restarted container has an empty cache.
- It is reached by its name on a network that the worker shares, on the default bridge by its address.
- Ready is healthy, or running where the image has no health check. A paused container is not ready.

Events only make it ask sooner: the list is read every POLL_WALL_SECONDS anyway. While the daemon is away the last list
stays."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import closing, suppress
from typing import Any

import msgspec
import structlog
from typing_extensions import override

from pointsman.adapters.daemon_threads import in_daemon_thread
from pointsman.adapters.discovery.targets import PORT_KEY, TargetError, annotated_targets, kept_targets, listing
from pointsman.adapters.docker_api import Docker, DockerMissingError
from pointsman.ports import EngineDiscovery, EngineTarget
from pointsman.primitives import InstanceId, WallSeconds

log = structlog.get_logger()

POLL_WALL_SECONDS: WallSeconds = WallSeconds(5.0)
GATHER_WALL_SECONDS: WallSeconds = WallSeconds(0.2)
"""Between an event and the list that it causes, so that a flood of events is no flood of lists."""
CALL_WALL_SECONDS = 10
LABEL_LENGTH_MAX = 1024
RUNNING = ("running", "paused")
EVENTS = ["start", "die", "destroy", "rename", "pause", "unpause", "health_status"]
DEFAULT_BRIDGE = "bridge"
WITHOUT_NAMES = (DEFAULT_BRIDGE, "host", "none")


class _Listed(msgspec.Struct, rename="pascal"):
    id: str


class _Health(msgspec.Struct, rename="pascal"):
    status: str


class _State(msgspec.Struct, rename="pascal"):
    status: str
    started_at: str
    health: _Health | None = None


class _Config(msgspec.Struct, rename="pascal"):
    labels: dict[str, str] | None = None
    exposed_ports: dict[str, Any] | None = None


class _Network(msgspec.Struct):
    address: str = msgspec.field(default="", name="IPAddress")


class _NetworkSettings(msgspec.Struct, rename="pascal"):
    networks: dict[str, _Network] | None = None


class _Container(msgspec.Struct, rename="pascal"):
    id: str
    name: str
    state: _State
    config: _Config
    network_settings: _NetworkSettings


class DockerDiscovery(EngineDiscovery):
    def __init__(self, text: str, *, url: str = "", poll_seconds: WallSeconds = POLL_WALL_SECONDS) -> None:
        """`text`: [LABEL[=VALUE]]. `url`: of the daemon; empty: from the environment. Raises ValueError."""
        self.name = f"docker:{text}"
        if len(text) > LABEL_LENGTH_MAX or not text.isprintable() or text.startswith("="):
            raise ValueError(f"{self.name} is not docker:[LABEL=VALUE], such as docker:com.example.engine=vllm")
        try:
            self._daemon = Docker(url)
        except DockerMissingError as error:
            raise ValueError(str(error)) from error
        self._unusable: tuple[type[Exception], ...] = (
            *self._daemon.errors,
            msgspec.MsgspecError,
            ValueError,
            TypeError,
            AttributeError,  # the library indexes what it has not checked
            LookupError,
            RecursionError,
        )
        self._filters = {"label": [text or PORT_KEY]}
        self._poll_seconds = float(poll_seconds)
        self._client: Any = None
        self.problem = ""

    @override
    async def targets(self) -> AsyncGenerator[list[EngineTarget], None]:
        last: list[EngineTarget] | None = None
        changed = asyncio.Event()
        events = _Events(lambda: self._daemon.connected(timeout=CALL_WALL_SECONDS), self._filters, changed)
        try:
            while True:
                changed.clear()
                found = await self._ask(last or ())
                if found is not None and found != last:
                    last = found
                    yield found
                if found is None:
                    events.stop()  # of a daemon that vanished without a word the stream would be silent for ever
                else:
                    events.listen()
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._poll_seconds):
                        await changed.wait()
                    await asyncio.sleep(float(GATHER_WALL_SECONDS))
        finally:
            events.stop()
            self._disconnect()

    async def _ask(self, last: Sequence[EngineTarget]) -> list[EngineTarget] | None:
        """None: the last list stays."""
        try:
            inspected = await in_daemon_thread(self._inspected, "docker")
        except self._unusable as error:
            self._disconnect()
            self._fail(f"Docker does not answer: {error}")
            return None
        found, problem = engines_of(inspected, last)
        self._fail(problem)
        return found

    def _inspected(self) -> list[Any]:
        """Blocks. Raises `_unusable`."""
        if self._client is None:
            self._client = self._daemon.connected(timeout=CALL_WALL_SECONDS)
        found = []
        for listed in msgspec.convert(self._client.api.containers(filters=self._filters), list[_Listed]):
            with suppress(self._daemon.not_found):
                found.append(self._client.api.inspect_container(listed.id))
        return found

    def _disconnect(self) -> None:
        if self._client is not None:
            self._client.close()
        self._client = None

    def _fail(self, reason: str) -> None:
        problem = f"{self.name}: {reason[:300]}" if reason else ""
        if problem and not self.problem:
            log.warning("engines_unusable", source=self.name, reason=reason[:300])
        self.problem = problem


def engines_of(inspected: list[Any], last: Sequence[EngineTarget] = ()) -> tuple[list[EngineTarget], str]:
    """Targets by instance, and why something is not among them, or only as it was in `last`."""
    found: dict[InstanceId, EngineTarget] = {}
    problems: list[str] = []
    for attributes in inspected:
        try:
            container = msgspec.convert(attributes, _Container)
        except msgspec.ValidationError as error:
            problems.append(str(error))
            continue
        if container.state.status not in RUNNING:
            continue
        try:
            targets = _engine(container)
        except TargetError as error:
            problems.append(str(error))
            targets = kept_targets(last, identity=_identity(container), host="", ready=_is_ready(container.state))
        found |= {target.instance: target for target in targets}
    return listing(found, problems)


def _engine(container: _Container) -> list[EngineTarget]:
    """Raises TargetError."""
    name = container.name.lstrip("/")
    ports = [port.partition("/")[0] for port in container.config.exposed_ports or {} if port.endswith("/tcp")]
    return annotated_targets(
        container.config.labels or {},
        name=name,
        host=_host(name, container.network_settings.networks or {}),
        port=int(ports[0]) if len(ports) == 1 and ports[0].isdecimal() else None,
        identity=_identity(container),
        ready=_is_ready(container.state),
    )


def _identity(container: _Container) -> str:
    return f"{container.id}@{container.state.started_at}"


def _is_ready(state: _State) -> bool:
    health = state.health.status if state.health else "none"
    return state.status == "running" and health in ("healthy", "none")


def _host(name: str, networks: dict[str, _Network]) -> str:
    """Raises TargetError."""
    if any(network not in WITHOUT_NAMES for network in networks):
        return name
    address = networks.get(DEFAULT_BRIDGE, _Network()).address
    if not address:
        raise TargetError(f"{name} has no network of its own; name its engine in a file (--discover file:PATH)")
    return address


class _Events:
    """Sets `changed` at each event. A thread of its own, because it waits without end while nothing happens."""

    def __init__(self, connect: Callable[[], Any], filters: dict[str, list[str]], changed: asyncio.Event) -> None:
        self._connect = connect
        self._filters = {**filters, "type": ["container"], "event": EVENTS}
        self._changed = changed
        self._loop = asyncio.get_running_loop()
        self._thread: threading.Thread | None = None
        self._stream: Any = None

    def listen(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._read, name="docker-events", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Ends the thread where it waits for events; `listen` begins anew."""
        if self._stream is not None:
            with suppress(Exception):
                self._stream.close()

    def _read(self) -> None:
        with suppress(Exception), closing(self._connect()) as client:  # however it ends: the next list starts it anew
            self._stream = client.events(filters=self._filters)
            self._tell()  # what happened before the stream began
            for _ in self._stream:
                self._tell()

    def _tell(self) -> None:
        self._loop.call_soon_threadsafe(self._changed.set)
