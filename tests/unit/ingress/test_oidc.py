"""Tokens of an OIDC issuer: which are accepted, and how the issuer's keys are followed."""

import asyncio
import base64
import contextlib
import hmac
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from pointsman.adapters.tcp_ports import free_ports
from pointsman.primitives import WallSeconds
from pointsman.runtime.health import HealthBoard
from pointsman_ingress.http import issuer_keys
from pointsman_ingress.http.authentication import Authentication
from pointsman_ingress.http.errors import ApiError, invalid_credential
from pointsman_ingress.http.identity import Identity
from pointsman_ingress.http.issuer_keys import ISSUER_PART, IssuerKeys
from pointsman_ingress.http.oidc import TokenVerifier
from pointsman_ingress.settings import is_trustworthy
from pointsman_lab.background import background
from tests.support.oidc_issuer import AUDIENCE, JWKS_PATH, Issuer, SigningKey, running_issuer
from tests.support.settable_clock import SettableClock
from tests.support.waiting import eventually

RSA, EC, ED = SigningKey("rsa"), SigningKey("ec", "ES256"), SigningKey("ed", "EdDSA")
STRANGER, WEAK = SigningKey("rsa"), SigningKey("weak", bits=1024)


@dataclass
class Verification:
    issuer: Issuer
    keys: IssuerKeys
    verifier: TokenVerifier
    clock: SettableClock
    board: HealthBoard

    def token(self, key: SigningKey = RSA, **claims: Any) -> bytes:
        return key.token(**({"iss": self.issuer.url} | claims))

    async def refused(self, token: bytes) -> ApiError:
        with pytest.raises(ApiError) as refusal:
            await self.verifier.identity(token)
        return refusal.value


@asynccontextmanager
async def opened(
    issuer: Issuer, *, is_read: bool = True, jwks_url: str = "", claim: str = "sub"
) -> AsyncIterator[Verification]:
    clock, board = SettableClock(), HealthBoard()
    keys = IssuerKeys(issuer.url, jwks_url, clock, board, serves_without=False)
    verifier = TokenVerifier(keys, clock, issuer=issuer.url, audience=AUDIENCE, tenant_claim=claim)
    async with background(keys.follow()):
        if is_read:
            await eventually(lambda: keys.is_read)
        yield Verification(issuer, keys, verifier, clock, board)


@pytest.fixture
async def verification() -> AsyncIterator[Verification]:
    async with running_issuer(RSA, EC, ED, WEAK) as issuer, opened(issuer) as verification:
        yield verification


async def test_an_issuer_on_the_internet_is_read_through_the_proxy_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[bytes] = []
    monkeypatch.setattr(issuer_keys, "RETRY_WALL_SECONDS", WallSeconds(0.01))

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readline())
        writer.write(b"HTTP/1.1 502 no way out\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as proxy:
        port = proxy.sockets[0].getsockname()[1]
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("NO_PROXY", "intranet.invalid")
        outside, inside = Issuer(), Issuer()
        outside.url, inside.url = "https://login.invalid/realms/main", "https://login.intranet.invalid"
        async with opened(inside, is_read=False) as unread, opened(outside, is_read=False) as refused:
            await eventually(lambda: "502" in refused.board.missing_parts[ISSUER_PART])
            await eventually(lambda: "not read yet" not in unread.board.missing_parts[ISSUER_PART])

    assert set(asked) == {b"CONNECT login.invalid:443 HTTP/1.1\r\n"}


async def test_an_issuer_of_this_machine_is_read_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else whoever runs the proxy has keys of the issuer."""
    (closed,) = free_ports(1)
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{closed}")

    async with running_issuer(RSA) as issuer, opened(issuer) as verification:
        assert await verification.verifier.identity(verification.token()) == Identity(token_tenant("alice"))


@pytest.mark.parametrize("key", [RSA, EC, ED], ids=lambda key: key.algorithm)
async def test_a_token_of_the_issuer_names_its_tenant(verification: Verification, key: SigningKey) -> None:
    token = verification.token(key, aud=["other", AUDIENCE])
    authentication = Authentication(tokens=verification.verifier)

    assert await authentication.identity({b"authorization": b"Bearer " + token}) == Identity(token_tenant("alice"))
    assert await authentication.identity({b"x-api-key": token}) == Identity(token_tenant("alice"))


def token_tenant(name: str) -> Any:
    return name


def rsa_public_pem() -> bytes:
    return bytes(RSA.public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))


def b64(content: Any) -> bytes:
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    return base64.urlsafe_b64encode(raw).rstrip(b"=")


def hand_made(header: dict[str, Any], sign: Callable[[bytes], bytes], **claims: Any) -> bytes:
    signed = b64(header) + b"." + b64({"aud": AUDIENCE, "sub": "alice", "exp": int(time.time()) + 600} | claims)
    return signed + b"." + b64(sign(signed))


FORGERIES: dict[str, Callable[[Verification], bytes]] = {
    "other issuer": lambda w: w.token(iss=w.issuer.url + "/"),
    "no issuer": lambda w: w.token(iss=None),
    "other audience": lambda w: w.token(aud="pointsman2"),
    "no audience": lambda w: w.token(aud=None),
    "expired": lambda w: w.token(exp=int(time.time()) - 60),
    "no expiry": lambda w: w.token(exp=None),
    "endless": lambda w: w.token(exp=1e400),
    "beyond all numbers": lambda w: w.token(exp=10**400),
    "not yet valid": lambda w: w.token(nbf=int(time.time()) + 120),
    "other key under a known id": lambda w: STRANGER.token(iss=w.issuer.url),
    "unknown key id": lambda w: w.token(header={"kid": "other"}),
    "key id that is no text": lambda w: hand_made({"alg": "RS256", "kid": ["rsa"]}, lambda _: b"x", iss=w.issuer.url),
    "no key id among several": lambda w: w.token(header={"kid": None}),
    "weak key": lambda w: WEAK.token(iss=w.issuer.url),
    "a key's other kind": lambda w: w.token(EC, header={"kid": "rsa"}),
    "critical extension": lambda w: w.token(header={"crit": ["exp"]}),
    "alg none": lambda w: hand_made({"alg": "none", "kid": "rsa"}, lambda _: b"", iss=w.issuer.url),
    "alg None": lambda w: hand_made({"alg": "None", "kid": "rsa"}, lambda _: b"", iss=w.issuer.url),
    "HS256 with the public key": lambda w: hand_made(
        {"alg": "HS256", "kid": "rsa"}, lambda m: hmac.digest(rsa_public_pem(), m, "sha256"), iss=w.issuer.url
    ),
    "key in the header": lambda w: STRANGER.token(iss=w.issuer.url, header={"jwk": STRANGER.jwk, "kid": "x"}),
    "tampered": lambda w: tampered(w.token()),
    "no tenant": lambda w: w.token(sub=None),
    "empty tenant": lambda w: w.token(sub=""),
    "tenant with escapes": lambda w: w.token(sub="\x1b[31malice"),
    "too large": lambda w: w.token(more="x" * 20_000),
    "deep header": lambda w: b64(b"[" * 9_000) + b".e30.AA",
    "deep claims": lambda w: b64({"alg": "RS256", "kid": "rsa"}) + b"." + b64(b"[" * 9_000) + b".AA",
    "not base64": lambda w: b"\xff.\xfe.\xfd",
    "nothing": lambda w: b"..",
    "scope that is no list": lambda w: w.token(pointsman_models="llama"),
    "scope that is empty": lambda w: w.token(pointsman_models=[]),
    "endpoint that is none": lambda w: w.token(pointsman_endpoints=["/metrics"]),
}


def tampered(token: bytes) -> bytes:
    header, claims, signature = token.split(b".")
    forged = json.loads(base64.urlsafe_b64decode(claims + b"==")) | {"sub": "mallory"}
    return b".".join((header, b64(forged), signature))


@pytest.mark.parametrize("forge", FORGERIES.values(), ids=FORGERIES)
async def test_all_other_tokens_are_refused_alike(
    verification: Verification, forge: Callable[[Verification], bytes]
) -> None:
    refusal, known = await verification.refused(forge(verification)), invalid_credential()

    assert (refusal.status, refusal.message, refusal.headers) == (401, known.message, known.headers)


async def test_scopes_of_a_token_are_those_of_a_key(verification: Verification) -> None:
    token = verification.token(pointsman_models=["llama-*"], pointsman_endpoints=["/v1/embeddings"])
    identity = await verification.verifier.identity(token)

    assert (identity.models, identity.endpoints) == (("llama-*",), ("/v1/embeddings",))


async def test_the_tenant_is_in_the_claim_that_the_operator_names() -> None:
    async with running_issuer(RSA) as issuer, opened(issuer, claim="organisation") as verification:
        assert (await verification.verifier.identity(verification.token(organisation="acme"))).tenant == "acme"
        assert (await verification.refused(verification.token())).status == 401


async def test_a_token_is_verified_once_and_no_longer_than_it_is_valid(
    verification: Verification, monkeypatch: pytest.MonkeyPatch
) -> None:
    verified: list[bytes] = []
    decode = jwt.decode

    def counted(token: bytes, **options: Any) -> Any:
        verified.append(token)
        return decode(token, **options)

    monkeypatch.setattr(jwt, "decode", counted)
    token, ended = verification.token(), verification.token(exp=int(time.time()) - 10)  # within the leeway
    for _ in range(3):
        await verification.verifier.identity(token)
    assert len(verified) == 1
    for _ in range(3):
        await verification.verifier.identity(ended)
    assert len(verified) == 4


async def test_a_new_key_of_the_issuer_is_found_when_a_token_names_it(verification: Verification) -> None:
    old, new = verification.token(), SigningKey("new")
    await verification.verifier.identity(old)
    verification.issuer.keys = [new.jwk]
    verification.clock.waited += WallSeconds(20.0)

    assert (await verification.verifier.identity(verification.token(new))).tenant == "alice"
    assert (await verification.refused(old)).status == 401  # also if it was verified before


async def test_tokens_with_made_up_key_ids_cause_no_fetches(verification: Verification) -> None:
    verification.clock.waited += WallSeconds(20.0)
    asked = verification.issuer.asked
    for round_ in range(3):
        forged = [verification.token(header={"kid": f"{round_}-{n}"}) for n in range(5)]
        assert {(await verification.refused(token)).status for token in forged} == {401}
        refusals = await asyncio.gather(
            *(verification.refused(verification.token(header={"kid": f"x{n}"})) for n in range(20))
        )
        assert {refusal.status for refusal in refusals} == {401}

    assert verification.issuer.asked == asked + 1
    assert (await verification.verifier.identity(verification.token())).tenant == "alice"


@pytest.mark.parametrize(
    ("says", "status"),
    [
        (None, 500),
        (None, 302),
        (b"no json", 200),
        (b"[]", 200),
        (b'{"keys": []}', 200),
        (b'{"keys": [{"kty": "oct", "k": "c2VjcmV0", "kid": "rsa"}, 7, {"kty": "RSA", "n": 3, "e": []}]}', 200),
        (b'{"keys": ' + b"[" * 100_000, 200),
        (json.dumps({"keys": [STRANGER.jwk], "more": "x" * 300_000}).encode(), 200),
    ],
)
async def test_an_issuer_that_answers_nonsense_leaves_the_last_good_keys(
    verification: Verification, says: bytes | None, status: int
) -> None:
    verification.issuer.says, verification.issuer.status, verification.issuer.moved = says, status, [STRANGER.jwk]
    verification.clock.waited += WallSeconds(20.0)
    await verification.refused(verification.token(header={"kid": "other"}))

    assert ISSUER_PART in verification.board.degraded_parts
    assert (await verification.verifier.identity(verification.token())).tenant == "alice"


async def test_before_the_issuers_keys_are_read_tokens_get_503_and_the_process_is_not_ready() -> None:
    async with running_issuer(RSA) as issuer:
        issuer.status = 500
        async with opened(issuer, is_read=False) as verification:
            await eventually(lambda: issuer.asked > 0)
            assert (await verification.refused(verification.token())).status == 503
            assert not verification.board.ready
            issuer.status = 200
            verification.keys._wanted.set()

            await eventually(lambda: verification.board.ready)
            assert (await verification.verifier.identity(verification.token())).tenant == "alice"


async def test_an_issuer_whose_heads_never_end_is_left_at_once() -> None:
    """It was read for all of its five seconds, in which the event loop did little else."""

    async def interim(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while True:
                writer.write(b"HTTP/1.1 103 Early Hints\r\n\r\n" * 1000)
                await writer.drain()

    async with await asyncio.start_server(interim, "127.0.0.1", 0) as server:
        issuer = Issuer()
        issuer.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with opened(issuer, is_read=False) as verification:
            await eventually(lambda: "1xx" in verification.board.missing_parts[ISSUER_PART])


async def test_an_issuer_that_never_answers_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1000):
            pass
        writer.close()

    monkeypatch.setattr(issuer_keys, "FETCH_SECONDS_MAX", 0.1)
    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    issuer = Issuer()
    issuer.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with opened(issuer, is_read=False) as verification:
        await eventually(lambda: "Timeout" in verification.board.missing_parts[ISSUER_PART])
        assert (await verification.refused(verification.token())).status == 503
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize(
    "wrong", [{"issuer": "http://127.0.0.1:1"}, {"jwks_uri": "http://keys.example.com/"}, {"jwks_uri": 7}]
)
async def test_a_discovery_document_of_another_issuer_or_without_safe_keys_is_refused(wrong: dict[str, Any]) -> None:
    async with running_issuer(RSA) as issuer:
        issuer.discovery = wrong
        async with opened(issuer, is_read=False) as verification:
            await eventually(lambda: "discovery" in verification.board.missing_parts[ISSUER_PART])
            assert issuer.asked == 0


async def test_the_only_key_of_an_issuer_needs_no_id() -> None:
    async with running_issuer(RSA) as issuer, opened(issuer) as verification:
        assert (await verification.verifier.identity(verification.token(header={"kid": None}))).tenant == "alice"


async def test_a_named_url_of_keys_needs_no_discovery() -> None:
    async with running_issuer(RSA) as issuer:
        issuer.discovery = {"issuer": "nobody"}
        async with opened(issuer, jwks_url=issuer.url + JWKS_PATH) as verification:
            assert (await verification.verifier.identity(verification.token())).tenant == "alice"


@pytest.mark.parametrize(
    ("url", "may"),
    [
        ("https://login.example.com/x", True),
        ("http://127.0.0.1:8080/x", True),
        ("http://localhost/x", True),
        ("http://[::1]:80", True),
        ("http://login.example.com", False),
        ("http://127.0.0.1.example.com", False),
        ("http://10.0.0.1", False),
        ("file:///etc/passwd", False),
        ("https://", False),
        ("http://[", False),
        ("", False),
    ],
)
def test_keys_are_read_over_https_or_from_this_machine(url: str, may: bool) -> None:
    assert is_trustworthy(url) == may


async def test_a_private_key_in_the_issuers_document_is_not_used() -> None:
    leaked = SigningKey("leaked")
    from jwt.algorithms import RSAAlgorithm

    shown = json.loads(RSAAlgorithm.to_jwk(leaked.private)) | {"kid": "leaked"}
    async with running_issuer(RSA) as issuer:
        issuer.keys.append(shown)
        async with opened(issuer) as verification:
            assert (await verification.refused(verification.token(leaked))).status == 401
