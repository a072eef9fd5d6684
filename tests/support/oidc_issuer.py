"""An OIDC issuer over HTTP with keys of its own: discovery document, JWKS, and tokens signed as a test wants them."""

import json
import time
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import jwt
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt import InsecureKeyLengthWarning
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

AUDIENCE = "pointsman"
JWKS_PATH, MOVED_PATH = "/keys", "/moved"


class SigningKey:
    def __init__(self, kid: str, algorithm: str = "RS256", *, bits: int = 2048) -> None:
        self.kid = kid
        self.algorithm = algorithm
        made: Any
        if algorithm.startswith(("RS", "PS")):
            made, shown = rsa.generate_private_key(65537, bits), RSAAlgorithm
        elif algorithm == "EdDSA":
            made, shown = ed25519.Ed25519PrivateKey.generate(), OKPAlgorithm  # type: ignore[assignment]
        else:
            made, shown = ec.generate_private_key(ec.SECP256R1()), ECAlgorithm  # type: ignore[assignment]
        self.private = made
        self.public = made.public_key()
        self.jwk = {**json.loads(shown.to_jwk(self.public)), "kid": kid, "use": "sig"}

    def token(self, *, header: dict[str, Any] | None = None, **claims: Any) -> bytes:
        """With claims that are None left out."""
        now = int(time.time())
        all_claims = {"iss": "", "aud": AUDIENCE, "sub": "alice", "iat": now, "exp": now + 600} | claims
        told = {name: value for name, value in all_claims.items() if value is not None}
        with warnings.catch_warnings():  # a weak key is what a test may want
            warnings.simplefilter("ignore", InsecureKeyLengthWarning)
            return self._signed(told, header or {})

    def _signed(self, claims: dict[str, Any], header: dict[str, Any]) -> bytes:
        shown = {name: value for name, value in ({"kid": self.kid} | header).items() if value is not None}
        return jwt.encode(claims, self.private, self.algorithm, headers=shown).encode()


class Issuer:
    def __init__(self) -> None:
        self.url = ""
        self.keys: list[dict[str, Any]] = []
        self.moved: list[dict[str, Any]] = []
        """The keys where a redirect leads."""
        self.asked = 0
        """How often the keys were read."""
        self.discovery: dict[str, Any] = {}
        self.says: bytes | None = None
        """Instead of the keys."""
        self.status = 200

    async def _discovery(self, _request: web.Request) -> web.Response:
        return web.json_response({"issuer": self.url, "jwks_uri": self.url + JWKS_PATH} | self.discovery)

    async def _keys(self, _request: web.Request) -> web.Response:
        self.asked += 1
        body = self.says if self.says is not None else json.dumps({"keys": self.keys}).encode()
        headers = {"location": self.url + MOVED_PATH} if self.status == 302 else {}
        return web.Response(body=body, status=self.status, content_type="application/json", headers=headers)

    async def _moved(self, _request: web.Request) -> web.Response:
        return web.json_response({"keys": self.moved})


@asynccontextmanager
async def running_issuer(*keys: SigningKey) -> AsyncIterator[Issuer]:
    issuer = Issuer()
    issuer.keys = [key.jwk for key in keys]
    app = web.Application()
    app.router.add_get("/.well-known/openid-configuration", issuer._discovery)
    app.router.add_get(JWKS_PATH, issuer._keys)
    app.router.add_get(MOVED_PATH, issuer._moved)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    issuer.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield issuer
    finally:
        await runner.cleanup()
