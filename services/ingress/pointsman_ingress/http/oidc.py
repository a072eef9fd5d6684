"""Tokens (JWT) of an OIDC issuer as credentials. Signature, issuer, audience and times are checked once per token; later
requests find it by its digest until it expires."""

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import jwt

from pointsman.contracts.access import scope_refusal, valid_tenant
from pointsman.ports import Clock, unix_now
from pointsman.primitives import Moment, Tenant
from pointsman_ingress.http.errors import credentials_unread, invalid_credential
from pointsman_ingress.http.identity import Identity
from pointsman_ingress.http.issuer_keys import IssuerKeys

LEEWAY_SECONDS = 30
VERIFIED_MAX = 10_000
TOKEN_BYTES_MAX = 16 * 1024
MODELS_CLAIM = "pointsman_models"
ENDPOINTS_CLAIM = "pointsman_endpoints"


class TokenVerifier:
    def __init__(self, keys: IssuerKeys, clock: Clock, *, issuer: str, audience: str, tenant_claim: str) -> None:
        self._keys = keys
        self._clock = clock
        self._issuer = issuer
        self._audience = audience
        self._tenant_claim = tenant_claim
        self._verified: OrderedDict[bytes, tuple[Identity, Moment]] = OrderedDict()
        keys.on_change(self._verified.clear)

    async def identity(self, token: bytes) -> Identity:
        """Raises ApiError (401; 503 before the issuer's keys are read)."""
        digest = hashlib.sha256(token).digest()
        known = self._verified.get(digest)
        if known is not None and known[1] > unix_now(self._clock):
            self._verified.move_to_end(digest)
            return known[0]
        if not self._keys.is_read:
            raise credentials_unread()
        claims, expires_at = await self._verify(token)
        identity = self._identity(claims)
        self._verified[digest] = identity, expires_at
        if len(self._verified) > VERIFIED_MAX:
            self._verified.popitem(last=False)
        return identity

    async def _verify(self, token: bytes) -> tuple[dict[str, Any], Moment]:
        """Its claims, and when it expires. Raises ApiError (401)."""
        if len(token) > TOKEN_BYTES_MAX:
            raise invalid_credential()
        try:
            header = jwt.get_unverified_header(token)
            kid = header.get("kid")
            if not isinstance(kid, str | None):
                raise invalid_credential()
            key = await self._keys.key(kid)
            if key is None:
                raise invalid_credential()
            claims = jwt.decode(
                token,
                key=key.key,
                algorithms=key.algorithms,
                audience=self._audience,
                issuer=self._issuer,
                leeway=LEEWAY_SECONDS,
                options={"require": ["exp", "iss", "aud"]},
            )
            return claims, float(claims["exp"])
        except (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError) as error:
            raise invalid_credential() from error

    def _identity(self, claims: Mapping[str, Any]) -> Identity:
        """Raises ApiError (401)."""
        tenant = claims.get(self._tenant_claim)
        if not isinstance(tenant, str) or not valid_tenant(tenant):
            raise invalid_credential()
        models, endpoints = _scope(claims, MODELS_CLAIM), _scope(claims, ENDPOINTS_CLAIM)
        if scope_refusal(models, endpoints):
            raise invalid_credential()
        return Identity(Tenant(tenant), tuple(models), tuple(endpoints))


def _scope(claims: Mapping[str, Any], name: str) -> list[str]:
    """Empty (all) only without the claim. Raises ApiError (401)."""
    found = claims.get(name)
    if found is None:
        return []
    if not isinstance(found, list) or not found or not all(isinstance(one, str) for one in found):
        raise invalid_credential()
    return found
