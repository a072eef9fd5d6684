"""`pointsman-lab credentials`: microseconds to check an API key among many, and a token, in the ingress's own code. Medians
over rounds."""

import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any

import click
import jwt
import msgspec
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm
from rich.console import Console

from pointsman.adapters.clocks import ScaledClock
from pointsman.contracts.access import ApiKey, key_hash, name_of_key
from pointsman.ports import StoredValue, ValuesRead
from pointsman.primitives import Tenant
from pointsman.runtime.health import HealthBoard
from pointsman.runtime.structured_logs import configure_logging
from pointsman_cli.options import CONTEXT, COUNT, out_option
from pointsman_cli.output_file import write_json
from pointsman_cli.terminal import table
from pointsman_ingress.http.api_keys import ApiKeys
from pointsman_ingress.http.authentication import Authentication
from pointsman_ingress.http.errors import ApiError
from pointsman_ingress.http.issuer_keys import IssuerKeys
from pointsman_ingress.http.oidc import TokenVerifier

SECRET, ISSUER, AUDIENCE = "a secret", "https://issuer.example", "pointsman"
ROUNDS = 15
CHECKS_PER_ROUND = 1000
SEED = 1

Check = Callable[[bytes], Awaitable[object]]


@click.command("credentials", context_settings=CONTEXT)
@click.option("--keys", type=COUNT, default=10_000, show_default=True, help="API keys that are stored.")
@out_option
def credentials_command(keys: int, out: Path | None) -> None:
    """Time the checks of clients' credentials.

    \b
      pointsman-lab credentials                         among 10,000 keys
      pointsman-lab credentials --keys 100000 --out credentials.json
    """
    configure_logging("error", "text")
    figures = asyncio.run(_measured(keys))
    made = table("check", ">us", title=f"Credentials, microseconds (median over rounds), {keys:,} keys")
    for name, value in figures["us"].items():
        made.add_row(name, f"{value:.2f}")
    console = Console()
    console.print(made)
    console.print(f"all keys are taken over in {figures['take_all_ms']:.0f} ms")
    if out:
        write_json(out, figures)


async def _measured(count: int) -> dict[str, Any]:
    chance, board = Random(SEED), HealthBoard()
    sent = [f"pm-{number}-{chance.getrandbits(240):060x}".encode() for number in range(count)]
    keys = ApiKeys(SECRET, ScaledClock(), board)
    values = [_stored(number, key) for number, key in enumerate(sent)]
    began = time.perf_counter()
    keys.take(ValuesRead(values, whole=True))
    taken = time.perf_counter() - began

    verifier, tokens = _issuer()
    by_key, by_token = Authentication(keys), Authentication(keys, verifier)
    unknown = [key[:-1] + b"x" for key in sent]
    us = {
        "known key": await _time(_bearer(by_key), chance.choices(sent, k=CHECKS_PER_ROUND)),
        "unknown key": await _time(_bearer(by_key), chance.choices(unknown, k=CHECKS_PER_ROUND)),
        "no credentials required": await _time(_bearer(Authentication()), chance.choices(sent, k=CHECKS_PER_ROUND)),
    }
    for algorithm, made in tokens.items():
        us[f"token, first time, {algorithm}"] = await _time(_bearer(by_token), made)
    us["token, again"] = await _time(_bearer(by_token), [tokens["RS256"][-1]] * CHECKS_PER_ROUND)
    return {"keys": count, "us": us, "take_all_ms": round(taken * 1e3, 1)}


def _bearer(authentication: Authentication) -> Check:
    return lambda sent: authentication.identity({b"authorization": b"Bearer " + sent})


async def _time(check: Check, sent: list[bytes]) -> float:
    """Each token is sent in one round only, so that it is verified."""
    per_round = max(1, len(sent) // ROUNDS)
    means = []
    for start in range(0, per_round * ROUNDS, per_round):
        chosen = sent[start : start + per_round]
        began = time.perf_counter()
        for credential in chosen:
            try:
                await check(credential)
            except ApiError:
                continue
        means.append((time.perf_counter() - began) / len(chosen) * 1e6)
    return round(statistics.median(means), 2)


def _stored(number: int, key: bytes) -> StoredValue:
    made = ApiKey(
        id=f"k{number}", digest=key_hash(SECRET)(key), tenant=Tenant(f"tenant-{number % 100}"), created_at=1.0
    )
    return StoredValue(name_of_key(made.id), msgspec.json.encode(made), number + 1)


def _issuer() -> tuple[TokenVerifier, dict[str, list[bytes]]]:
    """A verifier and tokens by algorithm, all different."""
    private: dict[str, tuple[Any, Any]] = {
        "RS256": (rsa.generate_private_key(65537, 2048), RSAAlgorithm),
        "ES256": (ec.generate_private_key(ec.SECP256R1()), ECAlgorithm),
        "EdDSA": (ed25519.Ed25519PrivateKey.generate(), OKPAlgorithm),
    }
    shown = [
        json.loads(kind.to_jwk(key.public_key())) | {"kid": algorithm} for algorithm, (key, kind) in private.items()
    ]
    issuer_keys = IssuerKeys(ISSUER, "", ScaledClock(), HealthBoard(), serves_without=True)
    issuer_keys.take({"keys": shown})
    verifier = TokenVerifier(issuer_keys, ScaledClock(), issuer=ISSUER, audience=AUDIENCE, tenant_claim="sub")
    claims = {"iss": ISSUER, "aud": AUDIENCE, "exp": int(time.time()) + 3600}
    tokens = {
        algorithm: [
            jwt.encode(claims | {"sub": f"t{number}"}, key, algorithm, headers={"kid": algorithm}).encode()
            for number in range(20 * ROUNDS)
        ]
        for algorithm, (key, _) in private.items()
    }
    return verifier, tokens
