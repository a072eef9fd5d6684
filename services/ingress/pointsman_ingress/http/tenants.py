"""Who may ask: API keys, kept as SHA-256 and compared in constant time.

The file has one key a line, `NAME SHA256-HEX`; the name is the tenant. Empty lines and lines that start with `#` are
skipped; several keys may have one name. To add a key:

    printf %s "$KEY" | sha256sum | sed 's/^/alice /; s/ *-$//' >> keys

The file is looked at every two seconds, so a key that is taken out stops working within that time. A file that
turns unreadable changes nothing but the log: the keys that were read last go on counting.
"""

import hashlib
import hmac
import re
from pathlib import Path

import structlog

from pointsman.ports import Clock
from pointsman.primitives import Seconds, Tenant
from pointsman_ingress.http.openai_errors import invalid_key
from pointsman_ingress.http.request_headers import Headers

log = structlog.get_logger()

RELOAD_WALL_SECONDS: Seconds = 2.0
_LINE = re.compile(r"^(?P<name>[A-Za-z0-9_.@-]{1,128})\s+(?P<digest>[0-9a-f]{64})$")


class KeysFileError(ValueError):
    """The keys file cannot be used; the message says which line, never what is in it."""


class Keyring:
    """The keys that let clients in. Without a file everybody is let in, without a name."""

    def __init__(self, path: Path | None, clock: Clock) -> None:
        """Raises KeysFileError when there is a file and it cannot be read."""
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
        """Whose key the client showed; None where no keys are configured. Raises Refusal (401)."""
        if self._path is None:
            return None
        key = _shown_key(headers)
        shown = hashlib.sha256(key).digest() if key is not None else b""
        found = None
        for digest, name in self._keys:
            # Every key is compared, so the time taken tells nothing about which one came close.
            if hmac.compare_digest(digest, shown):
                found = name
        if found is None:
            raise invalid_key()
        return found

    async def follow(self) -> None:
        """Read the file again whenever it changes, for ever."""
        path = self._path
        while path is not None:
            await self._clock.sleep_wall(RELOAD_WALL_SECONDS)
            try:
                if self._stamp(path) != self._version:
                    self._read(path)
                    log.info("api_keys_read", keys=len(self._keys))
            except KeysFileError as error:
                log.warning("api_keys_unreadable", reason=str(error))

    def _read(self, path: Path) -> None:
        self._version = self._stamp(path)
        try:
            lines = path.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            msg = f"cannot read the keys file {path}: {error}"
            raise KeysFileError(msg) from error
        self._keys = [_key(line.strip(), path, number) for number, line in enumerate(lines, 1) if _counts(line)]

    @staticmethod
    def _stamp(path: Path) -> tuple[int, int]:
        try:
            status = path.stat()
        except OSError as error:
            msg = f"cannot read the keys file {path}: {error.strerror}"
            raise KeysFileError(msg) from error
        return status.st_mtime_ns, status.st_size


def _shown_key(headers: Headers) -> bytes | None:
    """As OpenAI's clients show it; Anthropic's have a header of their own for it."""
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key")


def _counts(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _key(line: str, path: Path, number: int) -> tuple[bytes, Tenant]:
    match = _LINE.match(line)
    if match is None:
        msg = f"{path}, line {number}: not of the form `NAME SHA256-HEX`"
        raise KeysFileError(msg)
    return bytes.fromhex(match["digest"]), Tenant(match["name"])
