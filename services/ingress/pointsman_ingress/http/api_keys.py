"""API keys: reads a file with lines `NAME SHA256-HEX`, maps a request's key to its tenant. Empty lines and `#` comments
are skipped; a name may have several keys. To add one:

    printf %s "$KEY" | sha256sum | sed 's/^/alice /; s/ *-$//' >> keys

The file is checked every two seconds; the previous keys stay valid if it becomes unreadable.
"""

import hashlib
import hmac
import re
from pathlib import Path

import structlog

from pointsman.ports import Clock
from pointsman.primitives import Tenant, WallSeconds
from pointsman_ingress.http.errors import invalid_key
from pointsman_ingress.http.request_headers import Headers

log = structlog.get_logger()

RELOAD_WALL_SECONDS: WallSeconds = WallSeconds(2.0)
_LINE = re.compile(r"^(?P<name>[A-Za-z0-9_.@-]{1,128})\s+(?P<digest>[0-9a-f]{64})$")


class KeysFileError(ValueError):
    """The message contains the line's number, not its content."""


class Keyring:
    def __init__(self, path: Path | None, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._keys: list[tuple[bytes, Tenant]] = []
        self._version: tuple[int, int] = (0, 0)
        if path is not None:
            self._read(path)

    @property
    def required(self) -> bool:
        return self._path is not None

    def tenant(self, headers: Headers) -> Tenant | None:
        """None without a keys file. Raises ApiError (401)."""
        if self._path is None:
            return None
        key = _sent_key(headers)
        sent = hashlib.sha256(key).digest() if key is not None else b""
        found = None
        for digest, name in self._keys:  # all of them: constant time
            if hmac.compare_digest(digest, sent):
                found = name
        if found is None:
            raise invalid_key()
        return found

    async def follow(self) -> None:
        """Reload the file when it changes; runs without end."""
        path = self._path
        while path is not None:
            await self._clock.sleep_wall(RELOAD_WALL_SECONDS)
            try:
                if self._read(path):
                    log.info("api_keys_read", keys=len(self._keys))
            except KeysFileError as error:
                log.warning("api_keys_unreadable", reason=str(error))

    def _read(self, path: Path) -> bool:
        """Returns whether the file has changed."""
        try:
            status = path.stat()
            version = status.st_mtime_ns, status.st_size
            if version == self._version:
                return False
            self._version = version
            lines = path.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            msg = f"cannot read the keys file {path}: {error}"
            raise KeysFileError(msg) from error
        numbered = [(number, line.strip()) for number, line in enumerate(lines, 1)]
        self._keys = [_key(line, path, number) for number, line in numbered if line and not line.startswith("#")]
        return True


def _sent_key(headers: Headers) -> bytes | None:
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key")


def _key(line: str, path: Path, number: int) -> tuple[bytes, Tenant]:
    match = _LINE.match(line)
    if match is None:
        msg = f"{path}, line {number}: not of the form `NAME SHA256-HEX`"
        raise KeysFileError(msg)
    return bytes.fromhex(match["digest"]), Tenant(match["name"])
