"""How a process proves itself to a nats-server: an nkey seed or a .creds file, and a TLS certificate. A user with
password or a token are in the URL."""

import re
import ssl
from collections import UserString
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import nkeys

CREDS_MARK = "BEGIN NATS USER JWT"
_CREDS = re.compile(r"BEGIN NATS USER JWT-*\n\S+\n.*BEGIN USER NKEY SEED-*\n(?P<seed>\S+)\n", re.DOTALL)
"""As nats-py reads it: each of the two in the line after its mark, and ended."""


class IdentityError(Exception):
    """A file is missing or not what it should be; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Names of files; empty: none."""

    credentials: str = ""
    ca: str = ""
    certificate: str = ""
    key: str = ""

    @property
    def needs_tls(self) -> bool:
        return bool(self.ca or self.certificate or self.key)

    def connect_options(self) -> dict[str, Any]:
        """For nats-py. Reads the files. Raises IdentityError."""
        options = self._credentials()
        if self.needs_tls:
            options["tls"] = self.tls_context()
        return options

    def tls_context(self) -> ssl.SSLContext:
        """Raises IdentityError."""
        if self.key and not self.certificate:
            raise IdentityError(f"the key {self.key} proves nothing without its certificate (--nats-certificate)")
        files = [file for file in (self.ca, self.certificate, self.key) if file]
        try:
            for file in files:  # ssl's own errors name none
                Path(file).read_bytes()
            context = ssl.create_default_context(cafile=self.ca or None)
            if self.certificate:
                context.load_cert_chain(self.certificate, self.key or None)
        except (OSError, ValueError) as error:  # an ssl.SSLError is an OSError
            raise IdentityError(
                f"TLS files for the nats-server cannot be used: {error} ({', '.join(files)})"
            ) from error
        return context

    def _credentials(self) -> dict[str, Any]:
        if not self.credentials:
            return {}
        try:
            text = Path(self.credentials).read_text()
            seed = _seed_of_creds(text) if CREDS_MARK in text else text.strip()
            nkeys.from_seed(bytearray(seed.encode())).wipe()
        except (OSError, ValueError, nkeys.NkeysError) as error:
            raise IdentityError(
                f"the credentials {self.credentials} cannot be used: {error or 'not an nkey seed'}"
            ) from error
        if CREDS_MARK in text:
            return {"user_credentials": UserString(text)}  # by name, nats-py would read it, half-written or not, again
        return {"nkeys_seed_str": seed}


def _seed_of_creds(text: str) -> str:
    """Raises ValueError."""
    found = _CREDS.search(text)
    if found is None:
        raise ValueError("a .creds file has a JWT and a seed, each in the line after its mark")
    return found["seed"]


def is_refusal(error: Exception) -> bool:
    """Whether other files may help."""
    return isinstance(error, ssl.SSLError) or "authori" in str(error).lower()


def refusal(error: Exception, identity: Identity) -> str:
    """Why a connection attempt failed, in words for an operator."""
    if isinstance(error, TimeoutError):
        return "the nats-server does not answer"
    text = (str(error) or type(error).__name__) + _expiry(identity)
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the nats-server's certificate is not accepted: {error.verify_message or text}"
    if isinstance(error, ssl.SSLError):
        return f"the TLS handshake with the nats-server failed (does it accept our certificate?): {text}"
    if "authori" in text.lower():
        used = identity.credentials or "none; see POINTSMAN_NATS_CREDENTIALS"
        return f"the nats-server refuses our credentials ({used}): {text}"
    cut = isinstance(error, ConnectionError | EOFError) and not isinstance(error, ConnectionRefusedError)
    if cut and identity.needs_tls:  # its alert may be lost with the connection
        question = "does it accept our certificate?" if identity.certificate else "is a client certificate required?"
        return f"the nats-server ended the connection ({question}): {text}"
    return f"{type(error).__name__}: {text}"


def _expiry(identity: Identity) -> str:
    """A server only says that the certificate is bad."""
    if not identity.certificate:
        return ""
    from cryptography import x509  # 0.1 s of each start, and rarely needed

    try:
        ends = x509.load_pem_x509_certificate(Path(identity.certificate).read_bytes()).not_valid_after_utc
    except (OSError, ValueError):
        return ""
    return f"; ours expired on {ends:%Y-%m-%d}" if ends < datetime.now(UTC) else ""
