"""Public keys of an OIDC issuer: its JWKS document, fetched in the background and bounded in size and time. The last good
keys stay while the issuer does not answer. An unknown key id makes one fetch, at most every FETCH_PAUSE_WALL_SECONDS."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import msgspec
import structlog
from jwt import PyJWTError
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

from pointsman.adapters.engine_connector import EngineConnector
from pointsman.adapters.http_bodies import bounded_body
from pointsman.adapters.name_resolver import NameResolver
from pointsman.adapters.waiting import wait_at_most
from pointsman.contracts.codec import short_reason
from pointsman.ports import Clock
from pointsman.primitives import WallSeconds
from pointsman.runtime.health import HealthBoard
from pointsman_ingress.settings import is_trustworthy

log = structlog.get_logger()

ISSUER_PART = "oidc_issuer"
REFRESH_WALL_SECONDS: WallSeconds = WallSeconds(300.0)
RETRY_WALL_SECONDS: WallSeconds = WallSeconds(5.0)
FETCH_PAUSE_WALL_SECONDS: WallSeconds = WallSeconds(10.0)
FETCH_SECONDS_MAX = 5.0
ROTATION_WALL_SECONDS_MAX: WallSeconds = WallSeconds(2.0)
"""How long a request with an unknown key id waits for the fetch."""
DOCUMENT_BYTES_MAX = 256 * 1024
KEYS_MAX = 100
RSA_BITS_MIN = 2048

_ALGORITHMS: dict[str, tuple[str, ...]] = {
    "RSA": ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    "P-256": ("ES256",),
    "P-384": ("ES384",),
    "P-521": ("ES512",),
    "Ed25519": ("EdDSA",),
}
"""Asymmetric ones only: with `none` or HS* everybody could sign."""


class IssuerUnreachableError(Exception):
    """The message has the reason, without secrets."""


@dataclass(frozen=True, slots=True)
class IssuerKey:
    key: Any
    algorithms: tuple[str, ...]


class IssuerKeys:
    def __init__(self, issuer: str, jwks_url: str, clock: Clock, board: HealthBoard, *, serves_without: bool) -> None:
        """Without `jwks_url` the issuer's discovery document names it. `serves_without`: other credentials are
        accepted, so the process is ready without the issuer."""
        self._issuer = issuer
        self._jwks_url = jwks_url
        self._clock = clock
        self._board = board
        self._lacks = board.degraded if serves_without else board.missing
        self._keys: dict[str, IssuerKey] = {}
        self._wanted = asyncio.Event()
        self._fetched = asyncio.Event()
        self._began = -FETCH_PAUSE_WALL_SECONDS
        self._fetching = False
        self._listeners: list[Callable[[], None]] = []
        self._lacks(ISSUER_PART, "its keys are not read yet")

    @property
    def is_read(self) -> bool:
        return bool(self._keys)

    def on_change(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    async def key(self, kid: str | None) -> IssuerKey | None:
        """Waits for a fetch if the id is unknown and a fetch is due or under way."""
        if kid is None:
            return next(iter(self._keys.values())) if len(self._keys) == 1 else None
        known = self._keys.get(kid)
        if known is not None:
            return known
        due = self._clock.wall() - self._began >= FETCH_PAUSE_WALL_SECONDS
        if due or self._fetching:
            fetched = self._fetched
            if not self._fetching:
                self._wanted.set()
            await wait_at_most(fetched, ROTATION_WALL_SECONDS_MAX)
        return self._keys.get(kid)

    def take(self, document: Mapping[str, Any]) -> None:
        """Replace the keys by those of a JWKS document. Raises IssuerUnreachableError if it has none."""
        found = _issuer_keys(document)
        if not found:
            raise IssuerUnreachableError("its JWKS document has no key that can be used")
        if found != self._keys:
            self._keys = found
            log.info("oidc_keys_read", keys=len(found))
            for listener in self._listeners:
                listener()

    async def follow(self) -> None:
        """Runs without end."""
        timeout = aiohttp.ClientTimeout(total=FETCH_SECONDS_MAX)
        connector = EngineConnector(resolver=NameResolver())
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as session:
            while True:
                pause = REFRESH_WALL_SECONDS if await self._refresh(session) else RETRY_WALL_SECONDS
                await wait_at_most(self._wanted, pause)
                self._wanted.clear()

    async def _refresh(self, session: aiohttp.ClientSession) -> bool:
        self._began, self._fetching = self._clock.wall(), True
        try:
            self.take(await _document(session, self._jwks_url or await self._discovered(session)))
        except IssuerUnreachableError as error:
            reason = short_reason(error)
            self._lacks(ISSUER_PART, reason) if not self._keys else self._board.degraded(ISSUER_PART, reason)
            log.warning("oidc_keys_unread", reason=reason, known=len(self._keys))
            return False
        finally:
            fetched, self._fetched, self._fetching = self._fetched, asyncio.Event(), False
            fetched.set()
        self._board.restored(ISSUER_PART)
        return True

    async def _discovered(self, session: aiohttp.ClientSession) -> str:
        """Raises IssuerUnreachableError."""
        document = await _document(session, self._issuer.rstrip("/") + "/.well-known/openid-configuration")
        url = document.get("jwks_uri")
        if document.get("issuer") != self._issuer or not isinstance(url, str) or not is_trustworthy(url):
            raise IssuerUnreachableError("its discovery document names another issuer, or no https URL of keys")
        return url


def _proxy_of(url: str) -> str | None:
    """HTTPS_PROXY of the environment, but for the hosts of NO_PROXY. What is read by http is this machine's own, which no proxy
    may answer for."""
    parts = urlsplit(url)
    return getproxies().get("https") if parts.scheme == "https" and not proxy_bypass(parts.netloc) else None


async def _document(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """Raises IssuerUnreachableError."""
    try:
        headers = {"accept": "application/json", "accept-encoding": "identity"}
        async with session.get(url, allow_redirects=False, headers=headers, proxy=_proxy_of(url)) as answer:
            if answer.status != 200:
                raise IssuerUnreachableError(f"{url} answers {answer.status}")
            body = await bounded_body(answer, DOCUMENT_BYTES_MAX)
        if body is None:
            raise IssuerUnreachableError(f"{url} is larger than {DOCUMENT_BYTES_MAX} bytes")
        document = msgspec.json.decode(body)
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError, RecursionError) as error:
        raise IssuerUnreachableError(f"{url}: {type(error).__name__} {error}") from error
    if not isinstance(document, dict):
        raise IssuerUnreachableError(f"{url} is no JSON object")
    return document


def _issuer_keys(document: Mapping[str, Any]) -> dict[str, IssuerKey]:
    entries = document.get("keys")
    found = {}
    for entry in entries[:KEYS_MAX] if isinstance(entries, list) else ():
        key = _issuer_key(entry) if isinstance(entry, dict) else None
        if key is not None:
            found[str(entry.get("kid", ""))] = key
    return found


def _issuer_key(entry: dict[str, Any]) -> IssuerKey | None:
    """None for keys that are not for signatures, symmetric, private, weak or malformed."""
    kind = entry.get("kty")
    algorithms = _ALGORITHMS.get("RSA" if kind == "RSA" else str(entry.get("crv")), ())
    if "alg" in entry:
        algorithms = tuple(name for name in algorithms if name == entry["alg"])
    if entry.get("use", "sig") != "sig" or "d" in entry or not algorithms:
        return None
    made: dict[str, Callable[[dict[str, Any]], Any]] = {
        "RSA": RSAAlgorithm.from_jwk,
        "EC": ECAlgorithm.from_jwk,
        "OKP": OKPAlgorithm.from_jwk,
    }
    try:
        key = made[str(kind)](entry)
    except (PyJWTError, ValueError, TypeError, KeyError):
        return None
    return None if kind == "RSA" and key.key_size < RSA_BITS_MIN else IssuerKey(key, algorithms)
