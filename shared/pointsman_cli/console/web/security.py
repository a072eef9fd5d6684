"""Who may do what, and what no foreign page may make a browser do. In: heads and addresses of requests. Out: a refusal, or
the session.

The console listens on loopback without a password, so any page that a browser shows could reach it. Against that: a Host
that is a foreign name is refused (DNS rebinding), a request that changes something needs its own origin and a token of the
session (cross-site posts), and no page may be framed or run a script from elsewhere. An address that shows wrong tokens,
in the form or as a bearer, is refused for a while, so that nobody guesses."""

import hmac
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from http.cookies import CookieError, SimpleCookie

from pointsman.runtime.browser_requests import FOREIGN_SITES, is_host, is_same_origin
from pointsman.runtime.http_protocol import network_of
from pointsman_cli.console.views import Session

COOKIE = "pointsman_console"
CSRF_FIELD = "csrf"
CSRF_HEADER = "x-csrf-token"
TOKEN_BYTES = 32
SESSIONS_MAX = 100
SESSION_WALL_SECONDS = 12 * 3600.0
FAILURES_MAX = 10
"""Of one address, within FAILURES_WALL_SECONDS; then its tokens are not looked at."""
FAILURES_OF_ALL_MAX = 1_000
"""A hundred addresses, before others are refused, too."""
FAILURES_WALL_SECONDS = 60.0
BODY_BYTES_MAX = 64 * 1024
OPEN_PATHS = frozenset({"/livez", "/readyz", "/health", "/metrics"})
"""As on every other process; scraped and probed by whatever name."""

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "font-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",  # with no-referrer a form's Origin would be null
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


@dataclass(frozen=True, slots=True)
class Refusal:
    status: int
    error: str
    detail: str = ""


READING_NEEDS_A_TOKEN = Refusal(
    401, "sign_in_needed", "Programs send `Authorization: Bearer TOKEN`; who sits at a browser signs in."
)
TOO_MANY_FAILURES = Refusal(429, "too_many_failures", "Too many wrong tokens; try again in a minute.")


class WrongTokens:
    """Of the last FAILURES_WALL_SECONDS, by address. Bounded: beyond FAILURES_OF_ALL_MAX none is looked at."""

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall
        self._shown: deque[tuple[float, str]] = deque(maxlen=FAILURES_OF_ALL_MAX)

    def are_too_many(self, address: str) -> bool:
        self._forget()
        own = network_of(address)
        return len(self._shown) >= FAILURES_OF_ALL_MAX or sum(of == own for _, of in self._shown) >= FAILURES_MAX

    def note(self, address: str) -> None:
        self._shown.append((self._wall(), network_of(address)))

    def _forget(self) -> None:
        while self._shown and self._shown[0][0] <= self._wall() - FAILURES_WALL_SECONDS:
            self._shown.popleft()


@dataclass(slots=True)
class Guard:
    """`hosts`: names under which the console is reached, beside IP addresses and localhost. `admin_token`, `reader_token`:
    empty if there is none; without a reader's everybody reads. `wall`: a monotonic clock."""

    wall: Callable[[], float]
    hosts: frozenset[str] = frozenset()
    admin_token: str = ""
    reader_token: str = ""
    _key: bytes = field(default_factory=lambda: secrets.token_bytes(TOKEN_BYTES))
    _sessions: OrderedDict[str, tuple[float, bool]] = field(default_factory=OrderedDict)
    """When it ends, and whether it acts."""
    _wrong_tokens: WrongTokens = field(init=False)

    def __post_init__(self) -> None:
        self._wrong_tokens = WrongTokens(self.wall)

    @property
    def has_tokens(self) -> bool:
        return bool(self.admin_token or self.reader_token)

    def refusal(self, path: str, headers: Mapping[str, str], address: str) -> Refusal | None:
        """Once for each request, before anything else."""
        return self.misdirected(path, headers) or self._guessing(path, headers, address)

    def misdirected(self, path: str, headers: Mapping[str, str]) -> Refusal | None:
        if path in OPEN_PATHS:
            return None
        if not is_host(headers.get("host", ""), names=self.hosts):
            return Refusal(421, "misdirected_request", "This console is not known by that host name; see --allow-host.")
        if headers.get("sec-fetch-site") in FOREIGN_SITES and headers.get("sec-fetch-mode") != "navigate":
            return Refusal(403, "cross_site", "A page of another site may link to this one, and load nothing of it.")
        return None

    def _guessing(self, path: str, headers: Mapping[str, str], address: str) -> Refusal | None:
        """Of a request with a bearer token; a wrong one is counted."""
        if path in OPEN_PATHS or not (self.has_tokens and _bearer(headers)):
            return None
        if self._wrong_tokens.are_too_many(address):
            return TOO_MANY_FAILURES
        acts, reads = self._bearer_is(self.admin_token, headers), self._bearer_is(self.reader_token, headers)
        if not acts and not reads:
            self._wrong_tokens.note(address)
        return None

    def session_id(self, headers: Mapping[str, str]) -> str:
        """As the cookie says; a new one without."""
        cookies: SimpleCookie = SimpleCookie()
        try:
            cookies.load(headers.get("cookie", ""))
        except CookieError:
            return ""
        found = cookies.get(COOKIE)
        return found.value if found is not None and len(found.value) == len(new_session_id()) else ""

    def session(self, session_id: str, headers: Mapping[str, str]) -> Session:
        acts = self._bearer_is(self.admin_token, headers) or self._known(session_id) is True
        return Session(reads=self.may_read(session_id, headers), acts=acts, csrf=self.csrf(session_id))

    def may_read(self, session_id: str, headers: Mapping[str, str]) -> bool:
        if not self.reader_token or self._known(session_id) is not None:
            return True
        return self._bearer_is(self.reader_token, headers) or self._bearer_is(self.admin_token, headers)

    def may_change(self, session_id: str, headers: Mapping[str, str], csrf: str) -> Refusal | None:
        """Whether a request that changes something was made by our own page, or by a program that shows a token."""
        site, origin = headers.get("sec-fetch-site", ""), headers.get("origin", "")
        if site not in ("", "same-origin", "none") or (origin and not is_same_origin(origin, headers.get("host", ""))):
            return Refusal(403, "cross_site", "The request comes from another site.")
        if self._bearer_is(self.admin_token, headers):
            return None
        if session_id and hmac.compare_digest(csrf.encode(), self.csrf(session_id).encode()):
            return None
        return self._unproven(session_id, headers)

    def _unproven(self, session_id: str, headers: Mapping[str, str]) -> Refusal:
        """In words for a program or for who sits at a browser."""
        if _bearer(headers) and not self.admin_token:
            return Refusal(
                403, "no_admin_token", "This console has no admin token (--admin-token-file): it only reads."
            )
        if self._bearer_is(self.reader_token, headers):
            return Refusal(
                403, "readers_token", "The token of the Authorization header only reads; send the admin token."
            )
        if _bearer(headers):
            return Refusal(401, "wrong_token", "The token of the Authorization header is not the admin token.")
        if not session_id:
            return Refusal(
                401, "sign_in_needed", "Programs send `Authorization: Bearer ADMIN_TOKEN`; browsers need cookies."
            )
        return Refusal(403, "csrf", "The page is too old, or cookies are off; load it again.")

    def sign_in(self, token: str, address: str) -> str | Refusal:
        """The id of a new session."""
        if self._wrong_tokens.are_too_many(address):
            return TOO_MANY_FAILURES
        acts, reads = _equal(token, self.admin_token), _equal(token, self.reader_token)
        if not acts and not reads:
            self._wrong_tokens.note(address)
            return Refusal(403, "wrong_token", "That is not the token.")
        made = new_session_id()
        self._sessions[made] = (self.wall() + SESSION_WALL_SECONDS, acts)
        if len(self._sessions) > SESSIONS_MAX:
            self._sessions.popitem(last=False)
        return made

    def sign_out(self, session_id: str) -> None:
        self._sessions.pop(session_id, None)

    def csrf(self, session_id: str) -> str:
        return hmac.new(self._key, session_id.encode(), sha256).hexdigest() if session_id else ""

    def _known(self, session_id: str) -> bool | None:
        """Whether the session acts; None if nobody signed in."""
        found = self._sessions.get(session_id)
        if found is None or found[0] < self.wall():
            self._sessions.pop(session_id, None)
            return None
        return found[1]

    def _bearer_is(self, token: str, headers: Mapping[str, str]) -> bool:
        return _equal(_bearer(headers), token)


def set_cookie(session_id: str) -> str:
    return f"{COOKIE}={session_id}; Path=/; HttpOnly; SameSite=Strict"


def _bearer(headers: Mapping[str, str]) -> str:
    scheme, _, shown = headers.get("authorization", "").partition(" ")
    return shown.strip() if scheme.lower() == "bearer" else ""


def new_session_id() -> str:
    return secrets.token_hex(TOKEN_BYTES)


def _equal(shown: str, token: str) -> bool:
    return bool(token) and hmac.compare_digest(shown.encode(), token.encode())
