"""Engines from a TOML file, reread when it changes:

    [[engine]]
    url = "http://10.0.0.5:8000"
    name = "gpu-1"                              # default: host and port
    kv_endpoint = "tcp://{host}:5557"           # this and the rest: default is the worker's setting
    kv_replay_endpoint = "tcp://{host}:5558"
    data_parallel_size = 4
    role = "prefill"
    engine_model = "llama-8b-h100"
    advertised_url = "http://gpu-1.example:8000"
    identity = "serial 7"                       # another one: another engine
    ready = false                               # nothing is placed there; its cache stays known

A file that cannot be read, is not TOML or has one wrong engine changes nothing. Without engines it must say `engine = []`,
because a file that is being written is empty for a moment."""

import asyncio
import errno
import tomllib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import structlog
from typing_extensions import override

from pointsman.adapters.discovery.targets import TARGETS_MAX, TargetError, engine_targets
from pointsman.ports import EngineDiscovery, EngineTarget
from pointsman.primitives import WallSeconds

log = structlog.get_logger()

POLL_WALL_SECONDS: WallSeconds = WallSeconds(1.0)
FILE_BYTES_MAX = 1024 * 1024
TABLE = "engine"
TYPES: dict[str, type] = {
    "url": str,
    "name": str,
    "advertised_url": str,
    "kv_endpoint": str,
    "kv_replay_endpoint": str,
    "data_parallel_size": int,
    "role": str,
    "engine_model": str,
    "identity": str,
    "ready": bool,
}


class FileDiscovery(EngineDiscovery):
    def __init__(self, text: str, *, poll_seconds: WallSeconds = POLL_WALL_SECONDS) -> None:
        """`text`: the path. Raises ValueError."""
        if not text:
            raise ValueError("file: needs a path")
        self._path = Path(text)
        self._poll_seconds = float(poll_seconds)
        self.name = f"file:{text}"
        self.problem = ""

    @override
    async def targets(self) -> AsyncGenerator[list[EngineTarget], None]:
        read: bytes | None = None
        while True:
            try:
                content = await asyncio.to_thread(self._content)
                if content != read:
                    read = content
                    found = await asyncio.to_thread(parse_engines, content)
                    self.problem = ""
                    yield found
            except (OSError, TargetError) as error:
                self._fail(error)
                if isinstance(error, OSError):
                    read = None
            await asyncio.sleep(self._poll_seconds)

    def _content(self) -> bytes:
        """At most FILE_BYTES_MAX and one. Raises OSError."""
        if not self._path.is_file() and self._path.exists():  # a FIFO without a writer would block the thread for ever
            raise OSError(errno.EINVAL, "no regular file")
        with self._path.open("rb") as file:
            return file.read(FILE_BYTES_MAX + 1)

    def _fail(self, error: OSError | TargetError) -> None:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        problem = f"{self._path}: {reason}"
        if problem != self.problem:
            log.warning("engines_file_unusable", path=str(self._path), reason=reason)
        self.problem = problem


def parse_engines(content: bytes) -> list[EngineTarget]:
    """Raises TargetError."""
    if len(content) > FILE_BYTES_MAX:
        raise TargetError(f"more than {FILE_BYTES_MAX} bytes")
    try:
        tables = tomllib.loads(content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TargetError(f"not TOML: {error}") from error
    engines = tables.get(TABLE)
    if set(tables) - {TABLE} or not isinstance(engines, list):
        raise TargetError(f"it has [[{TABLE}]] tables and nothing else; one without engines says {TABLE} = []")
    targets: list[EngineTarget] = []
    for number, engine in enumerate(engines, 1):
        targets += _targets(engine, f"engine {number}")
        if len(targets) > TARGETS_MAX:
            raise TargetError(f"more than {TARGETS_MAX} engines")
    names = [target.instance for target in targets]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise TargetError(f"several engines are named {twice[0]}")
    return targets


def _targets(engine: Any, place: str) -> list[EngineTarget]:
    if not isinstance(engine, dict) or "url" not in engine:
        raise TargetError(f"{place}: no url")
    for key, value in engine.items():
        if key not in TYPES:
            raise TargetError(f"{place} has no key {key!r}; there are: {', '.join(TYPES)}")
        if type(value) is not TYPES[key]:
            raise TargetError(f"{place}: {key} = {value!r} is no {TYPES[key].__name__}")
    try:
        return engine_targets(**engine)
    except TargetError as error:
        raise TargetError(f"{place}: {error}") from error
