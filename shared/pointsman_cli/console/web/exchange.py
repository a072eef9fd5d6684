"""One HTTP exchange: whose it is, its bounded body, and its answer. Used by pages and API alike."""

import asyncio
from dataclasses import dataclass
from urllib.parse import parse_qsl

import msgspec
from fastapi import Request, Response
from starlette.datastructures import Headers, MutableHeaders

from pointsman.runtime.health import AsgiApp, Receive, Scope, Send
from pointsman_cli.console.views import ProblemView, Session, View
from pointsman_cli.console.web.security import (
    BODY_BYTES_MAX,
    CSRF_FIELD,
    CSRF_HEADER,
    HEADERS,
    READING_NEEDS_A_TOKEN,
    Guard,
    Refusal,
    new_session_id,
)

FIELDS_MAX = 64
BODY_WALL_SECONDS = 10.0
JSON = "application/json"
FORM = "application/x-www-form-urlencoded"


class RefusedError(Exception):
    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.error)
        self.refusal = refusal


@dataclass(frozen=True, slots=True)
class Visit:
    """`id`: of its session; `is_new`: the browser does not have it yet."""

    id: str
    is_new: bool
    session: Session

    @property
    def reads(self) -> bool:
        """Whether it may look at all."""
        return self.session.reads


def visit_of(
    request: Request, guard: Guard, *, changes: bool = False, acts: bool = False, form: dict[str, str] | None = None
) -> Visit:
    """Raises RefusedError if it may not change, or not act on the fleet, but would."""
    headers = request.headers
    known = guard.session_id(headers)
    session_id = known or new_session_id()
    session = guard.session(session_id, headers)
    if changes:
        shown = (form or {}).get(CSRF_FIELD) or headers.get(CSRF_HEADER, "")
        refusal = guard.may_change(known, headers, shown)
        if refusal is None and not session.reads and request.url.path != "/sign-in":
            refusal = READING_NEEDS_A_TOKEN
        if refusal is None and acts and not session.acts:
            refusal = Refusal(403, "not_signed_in", "This needs the admin token: sign in first.")
        if refusal is not None:
            raise RefusedError(refusal)
    return Visit(session_id, not known, session)


def check_visitor(request: Request, guard: Guard, *, acts: bool = False) -> None:
    """Before its form is read: what it may not do whatever its form holds. Raises RefusedError."""
    visit_of(request, guard, changes=True, acts=acts, form={CSRF_FIELD: guard.csrf(guard.session_id(request.headers))})


async def body_of(request: Request) -> bytes:
    """Raises RefusedError for one that is too long, or does not arrive in time."""
    try:
        async with asyncio.timeout(BODY_WALL_SECONDS):
            return await _bounded_body(request)
    except TimeoutError as error:
        raise RefusedError(Refusal(408, "too_slow", "The body did not arrive in time.")) from error


async def _bounded_body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > BODY_BYTES_MAX:
            raise RefusedError(Refusal(413, "too_long", f"At most {BODY_BYTES_MAX:,} bytes."))
    return bytes(body)


async def form_of(request: Request) -> dict[str, str]:
    """Repeated fields are joined by lines. Raises RefusedError."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != FORM:
        raise RefusedError(Refusal(415, "no_form"))
    try:
        pairs = parse_qsl((await body_of(request)).decode(), keep_blank_values=True, max_num_fields=FIELDS_MAX)
    except ValueError as error:
        raise RefusedError(Refusal(400, "no_form")) from error
    form: dict[str, str] = {}
    for name, value in pairs:
        form[name] = f"{form[name]}\n{value}" if name in form else value
    return form


def answered_json(view: View, status: int = 200) -> Response:
    return Response(msgspec.json.encode(view), status, media_type=JSON, headers={"cache-control": "no-store"})


def guarded(app: AsgiApp, guard: Guard) -> AsgiApp:
    """Refuses foreign hosts and who guesses tokens, and adds the security headers to every answer."""

    async def within(scope: Scope, receive: Receive, send: Send) -> None:
        async def secured(message: dict[str, object]) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        refusal = guard.refusal(scope["path"], Headers(scope=scope), address_of(scope))
        if refusal is None:
            await app(scope, receive, secured)  # type: ignore[arg-type]
            return
        view = ProblemView(status=refusal.status, error=refusal.error, detail=refusal.detail)
        await answered_json(view, refusal.status)(scope, receive, secured)  # type: ignore[arg-type]

    return within


def address_of(scope: Scope) -> str:
    """Of the peer; empty if it has none."""
    client = scope.get("client")
    return str(client[0]) if client else ""


def quoted_path(request: Request) -> str:
    """As it was sent. In `request.url.path` only some characters are quoted."""
    return bytes(request.scope["raw_path"]).decode("ascii")


def route_of(path: str) -> str:
    """A request's id may hold any character, a slash, too."""
    return path.replace("/requests/{id}", "/requests/{id:path}")
