"""The console's HTTP surface: pages and forms for people, `/api` for programs, `/live` for pages that change, probes and
metrics. Every request passes the guard first, and every answer carries its headers."""

from collections.abc import AsyncIterator, Callable
from hashlib import sha256
from importlib.resources import files
from typing import NamedTuple
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from fastapi import APIRouter, FastAPI, Request, Response
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.responses import StreamingResponse

from pointsman.runtime.health import AsgiApp, HealthBoard, Receive, Scope, Send
from pointsman_cli.console.page_views import BadQueryError, NotThereError, PageViews, is_absent
from pointsman_cli.console.pages.live import Parts
from pointsman_cli.console.pages.rendering import Pages
from pointsman_cli.console.views import ActionView, ProblemView, Session
from pointsman_cli.console.web.api import api_router, openapi_document
from pointsman_cli.console.web.exchange import (
    RefusedError,
    Visit,
    address_of,
    answered_json,
    check_visitor,
    form_of,
    guarded,
    quoted_path,
    route_of,
    visit_of,
)
from pointsman_cli.console.web.security import READING_NEEDS_A_TOKEN, Guard, Refusal, set_cookie
from pointsman_cli.console.web.viewers import TooManyViewersError, Viewers

HTML = "text/html; charset=utf-8"
SEE_OTHER = 303
NOT_MODIFIED = 304
NO_TOKEN = "This console was started without --admin-token-file: it only reads."
PAGES = (
    "/",
    "/requests",
    "/requests/{id}",
    "/doctor",
    "/history",
    "/tenants",
    "/hit-rate",
    "/shadow",
    "/what-if",
    "/what-if/{id}",
)
PAGE_LENGTH_MAX = 2_048
STATIC = "static"
MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".woff2": "font/woff2",
    ".ico": "image/x-icon",
}


class Site:
    def __init__(
        self, console: PageViews, guard: Guard, board: HealthBoard, viewers: Callable[[Callable[[str], Parts]], Viewers]
    ) -> None:
        self._console = console
        self._guard = guard
        self._board = board
        self._pages = Pages()
        self.viewers = viewers(self._parts)
        self._static = _static_files()

    def app(self) -> AsgiApp:
        app = FastAPI(
            openapi_url=None,
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,
            telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
        )
        app.include_router(api_router(self._console, self._guard))
        router = APIRouter(include_in_schema=False)
        for path in PAGES:
            router.add_api_route(route_of(path), self._page, methods=["GET"])
        router.add_api_route("/api", self._api_page, methods=["GET"])
        router.add_api_route("/sign-in", self._sign_in_page, methods=["GET"])
        router.add_api_route("/live", self._live, methods=["GET"])
        router.add_api_route("/static/{path:path}", self._static_file, methods=["GET"])
        for path, handler in (
            ("/actions/drain", self._drain),
            ("/actions/undrain", self._undrain),
            ("/actions/scale", self._scale),
            ("/doctor", self._examine),
            ("/what-if", self._start_what_if),
            ("/what-if/{id}/cancel", self._cancel_what_if),
            ("/sign-in", self._sign_in),
            ("/sign-out", self._sign_out),
        ):
            router.add_api_route(path, handler, methods=["POST"])
        app.include_router(router)
        for error in (RefusedError, NotThereError, BadQueryError, StarletteHTTPException):
            app.add_exception_handler(error, self._problem)
        return guarded(self._with_probes(app), self._guard)

    def _with_probes(self, app: AsgiApp) -> AsgiApp:
        async def probed(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["path"] == "/metrics":
                self._console.source.note_metrics()
            answer = await self._board.answer(scope["path"], scope.get("query_string", b"").decode("latin-1"))
            if answer is None:
                await app(scope, receive, send)
            else:
                status, content_type, body = answer
                await Response(body, status, media_type=content_type)(scope, receive, send)

        return probed

    def _parts(self, page: str) -> Parts:
        address = urlsplit(page)
        query = dict(parse_qsl(address.query))
        try:
            name, view = self._console.view(address.path, query)
        except (NotThereError, BadQueryError):
            return Parts({}, {})
        return self._pages.parts(name, view, status=self._console.status(), query=query)

    def _rendered(
        self, name: str, view: object, visit: Visit, *, status: int = 200, query: dict[str, str] | None = None
    ) -> Response:
        page = self._pages.render(
            name, view, status=self._console.status(), session=visit.session, query=dict(query or {})
        )
        answer = Response(page, status, media_type=HTML, headers={"cache-control": "no-store"})
        if visit.is_new:
            answer.headers["set-cookie"] = set_cookie(visit.id)
        return answer

    async def _page(self, request: Request) -> Response:
        visit = visit_of(request, self._guard)
        if not visit.reads:
            return _see("/sign-in")
        query = dict(request.query_params)
        name, view = self._console.view(quoted_path(request), query)
        return self._rendered(name, view, visit, query=query, status=404 if is_absent(view) else 200)

    async def _api_page(self, request: Request) -> Response:
        return self._rendered("api", openapi_document(), visit_of(request, self._guard))

    async def _sign_in_page(self, request: Request) -> Response:
        return self._signing_in(visit_of(request, self._guard), "" if self._guard.has_tokens else NO_TOKEN)

    async def _sign_in(self, request: Request) -> Response:
        visit, form = await self._changing(request)
        made = self._guard.sign_in(form.get("token", ""), address_of(request.scope))
        if isinstance(made, Refusal):
            return self._signing_in(visit, made.detail, status=made.status)
        answer = _see("/")
        answer.headers["set-cookie"] = set_cookie(made)
        return answer

    def _signing_in(self, visit: Visit, detail: str, *, status: int = 200) -> Response:
        view = ProblemView(status=status, error="sign_in", detail=detail)
        return self._rendered("sign_in", view, visit, status=status)

    async def _sign_out(self, request: Request) -> Response:
        visit, _ = await self._changing(request)
        self._guard.sign_out(visit.id)
        return _see("/")

    async def _drain(self, request: Request) -> Response:
        _, form = await self._changing(request, acts=True)
        return self._done(await self._console.actions.drain(form.get("instance", "")))

    async def _undrain(self, request: Request) -> Response:
        _, form = await self._changing(request, acts=True)
        return self._done(await self._console.actions.drain(form.get("instance", ""), undo=True))

    async def _scale(self, request: Request) -> Response:
        _, form = await self._changing(request, acts=True)
        return self._done(await self._console.actions.scale(form.get("wanted", "")), "/history")

    async def _examine(self, request: Request) -> Response:
        await self._changing(request)
        self._console.jobs.examine()
        return _see("/doctor")

    async def _start_what_if(self, request: Request) -> Response:
        visit, form = await self._changing(request)
        started = self._console.start_what_if(form)
        if isinstance(started, str):
            return self._rendered(
                "problem", ProblemView(status=400, error="what_if", detail=started), visit, status=400
            )
        return _see(f"/what-if/{started}")

    async def _cancel_what_if(self, request: Request) -> Response:
        await self._changing(request)
        self._console.cancel_what_if(request.path_params["id"])
        return _see(f"/what-if/{quote(request.path_params['id'], safe='')}")

    async def _changing(self, request: Request, *, acts: bool = False) -> tuple[Visit, dict[str, str]]:
        """Raises RefusedError."""
        check_visitor(request, self._guard, acts=acts)
        form = await form_of(request)
        return visit_of(request, self._guard, changes=True, acts=acts, form=form), form

    def _done(self, result: ActionView, where: str = "/") -> Response:
        return _see(f"{where}?{urlencode({'done' if result.done else 'refused': result.detail})}")

    async def _live(self, request: Request) -> Response:
        if not visit_of(request, self._guard).reads:
            raise RefusedError(READING_NEEDS_A_TOKEN)
        page = request.query_params.get("page", "/")
        if len(page) > PAGE_LENGTH_MAX or not page.startswith("/"):
            raise RefusedError(Refusal(400, "no_page"))
        try:
            page = _canonical(page)
        except ValueError as error:
            raise RefusedError(Refusal(400, "no_page")) from error
        try:
            self.viewers.check_room(page)
        except TooManyViewersError as error:
            raise RefusedError(
                Refusal(503, "too_many_viewers", "Too many pages are open; this one does not change by itself.")
            ) from error
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(
            _unless_full(self.viewers.stream(page)), media_type="text/event-stream", headers=headers
        )

    async def _static_file(self, request: Request) -> Response:
        found = self._static.get(request.path_params["path"])
        if found is None:
            raise StarletteHTTPException(404)
        headers = {
            "cache-control": "no-cache",
            "etag": found.tag,
        }  # asked for again, sent again only by another version
        if request.headers.get("if-none-match") == found.tag:
            return Response(status_code=NOT_MODIFIED, headers=headers)
        return Response(found.content, media_type=found.media_type, headers=headers)

    async def _problem(self, request: Request, error: Exception) -> Response:
        match error:
            case RefusedError():
                refusal = error.refusal
            case BadQueryError():
                refusal = Refusal(400, "invalid_query", str(error))
            case StarletteHTTPException():
                refusal = Refusal(error.status_code, "http_error", str(error.detail))
            case _:
                refusal = Refusal(404, "not_found", str(error))
        view = ProblemView(status=refusal.status, error=refusal.error, detail=refusal.detail)
        if request.url.path.startswith("/api/") or request.url.path == "/live":
            return answered_json(view, refusal.status)
        reads = visit_of(request, self._guard).reads
        return self._rendered("problem", view, Visit("", False, Session(reads=reads)), status=refusal.status)


async def _unless_full(frames: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    try:
        async for frame in frames:
            yield frame
    except TooManyViewersError:
        return


def _see(where: str) -> Response:
    return Response(status_code=SEE_OTHER, headers={"location": where, "cache-control": "no-store"})


def _canonical(page: str) -> str:
    """Viewers of the same page share its rendering, whatever the order of its parameters. Raises ValueError."""
    address = urlsplit(page)
    query = urlencode(sorted((name, value) for name, value in parse_qsl(address.query)))
    return f"{address.path}?{query}" if query else address.path


class _StaticFile(NamedTuple):
    media_type: str
    content: bytes
    tag: str


def _static_files() -> dict[str, _StaticFile]:
    """By path below `static`. Read once: nothing that a request names becomes a path."""
    found: dict[str, _StaticFile] = {}
    waiting = [("", files("pointsman_cli.console.pages").joinpath(STATIC))]
    while waiting:
        prefix, directory = waiting.pop()
        if not directory.is_dir():
            continue
        for entry in directory.iterdir():
            name = f"{prefix}{entry.name}"
            if entry.is_dir():
                waiting.append((f"{name}/", entry))
            elif (suffix := name[name.rfind(".") :]) in MEDIA_TYPES:
                content = entry.read_bytes()
                found[name] = _StaticFile(MEDIA_TYPES[suffix], content, f'"{sha256(content).hexdigest()[:16]}"')
    return found
