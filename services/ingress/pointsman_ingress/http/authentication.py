"""Finds out who sends a request: by an API key, by a token of an OIDC issuer, or by nothing where neither is required.
Whatever is wrong with a credential, the answer is the same. Without credentials pages of other sites are refused, unless the
operator names their origin: a browser would send their requests from inside."""

from collections.abc import Collection
from typing import TYPE_CHECKING

from pointsman.runtime.browser_requests import is_of_foreign_page
from pointsman_ingress.http.api_keys import ApiKeys
from pointsman_ingress.http.cross_origin import is_allowed
from pointsman_ingress.http.errors import foreign_page, invalid_credential
from pointsman_ingress.http.identity import Identity
from pointsman_ingress.http.request_headers import Headers

if TYPE_CHECKING:
    from pointsman_ingress.http.oidc import TokenVerifier


class Authentication:
    """Without keys and tokens every request is admitted and names its own tenant."""

    def __init__(
        self, keys: ApiKeys | None = None, tokens: "TokenVerifier | None" = None, *, origins: Collection[str] = ()
    ) -> None:
        """`origins`: of pages that are served."""
        self._keys = keys
        self._tokens = tokens
        self._origins = origins

    @property
    def required(self) -> bool:
        return self._keys is not None or self._tokens is not None

    async def identity(self, headers: Headers) -> Identity | None:
        """None where no credential is required. Raises ApiError (401; 503 while credentials cannot be checked; 403)."""
        if not self.required:
            self._refuse_foreign_page(headers)
            return None
        sent = _credential(headers)
        if sent and self._tokens is not None and sent.count(b".") == 2:
            return await self._tokens.identity(sent)
        if not sent or self._keys is None:
            raise invalid_credential()
        return self._keys.identity(sent)

    def _refuse_foreign_page(self, headers: Headers) -> None:
        """Raises ApiError."""
        site, origin, host = (
            headers.get(name, b"").decode("latin-1") for name in (b"sec-fetch-site", b"origin", b"host")
        )
        if is_of_foreign_page(site=site, origin=origin, host=host) and not is_allowed(origin, self._origins):
            raise foreign_page()


def _credential(headers: Headers) -> bytes:
    scheme, _, credential = headers.get(b"authorization", b"").partition(b" ")
    bearer = credential.strip() if scheme.lower() == b"bearer" else b""
    return bearer or headers.get(b"x-api-key", b"")
