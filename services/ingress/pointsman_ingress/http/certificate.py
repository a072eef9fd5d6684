"""The certificate that the API's port shows, read again when its files change: it is renewed while the process runs. Out: an
SSLContext, and `tls` on the board while the files cannot be used or the certificate ends soon."""

import asyncio
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click
import structlog
from cryptography import x509

from pointsman.ports import Clock
from pointsman.primitives import WallSeconds
from pointsman.runtime.health import HealthBoard

log = structlog.get_logger()

PART = "tls"
LOOK_WALL_SECONDS: WallSeconds = WallSeconds(10.0)
SOON = timedelta(days=7)
"""What renews certificates does so weeks before."""


class ServerCertificate:
    def __init__(self, certificate: str, key: str) -> None:
        """PEM files. Raises click.ClickException if they cannot be used."""
        self._certificate, self._key = certificate, key
        self._loaded: list[bytes] = []
        self._ends = datetime.now(UTC)
        self.context = _context()
        try:
            self._take(self._read())
        except (OSError, ValueError) as error:
            raise click.ClickException(self._unusable(error)) from error

    async def keep_fresh(self, clock: Clock, board: HealthBoard) -> None:
        """Without end. A pair that does not fit, such as half of a new one, changes nothing."""
        while True:
            try:
                self._take(await asyncio.to_thread(self._read))
            except (OSError, ValueError) as error:
                board.degraded(PART, f"{self._unusable(error)}; the last one is shown")
            else:
                left = self._ends - datetime.now(UTC)
                if left < SOON:
                    board.degraded(PART, f"the certificate {self._certificate} ends on {self._ends:%Y-%m-%d %H:%M} UTC")
                else:
                    board.restored(PART)
            await clock.sleep_wall(LOOK_WALL_SECONDS)

    def _read(self) -> list[bytes]:
        """Raises OSError."""
        return [Path(file).read_bytes() for file in (self._certificate, self._key)]

    def _take(self, found: list[bytes]) -> None:
        """Raises OSError (of which ssl.SSLError is one) and ValueError."""
        if found == self._loaded:
            return
        try:
            ends = x509.load_pem_x509_certificate(found[0]).not_valid_after_utc
        except x509.InvalidVersion as error:
            raise ValueError(str(error)) from error
        for context in (_context(), self.context):  # a failed load leaves a context with half of the pair
            context.load_cert_chain(self._certificate, self._key, password=_no_password)
        self._loaded, self._ends = found, ends
        log.info("certificate_loaded", certificate=self._certificate, ends=f"{ends:%Y-%m-%d}")

    def _unusable(self, error: Exception) -> str:
        return f"the certificate {self._certificate} with the key {self._key} cannot be used: {error}"


def _context() -> ssl.SSLContext:
    """TLS 1.2 or newer, HTTP/1.1."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    return context


def _no_password() -> str:
    """OpenSSL would ask the terminal."""
    raise ValueError("the key has a password")
