"""The ASGI application: two hot paths as plain ASGI, everything else on FastAPI under them.

FastAPI's routing alone costs as much as the whole of the rest of a forwarded request, so the paths that lead to
engines are looked up in a dictionary before it. They appear in its OpenAPI document all the same.
"""

from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from starlette.exceptions import HTTPException as StarletteHTTPException

from pointsman.chassis.health import AsgiApp, HealthBoard, Receive, Scope, Send, send_whole
from pointsman_ingress.fleet_view import FleetView
from pointsman_ingress.openai_errors import Refusal, error_body
from pointsman_ingress.service import ROUTES, Gateway
from pointsman_ingress.tenants import Keyring

_ONLY_POST = error_body(405, "method_not_allowed", "This path takes POST only.")
_CODES = {404: "not_found", 405: "method_not_allowed"}


def ingress_app(*, gateway: Gateway, fleet: FleetView, keyring: Keyring, board: HealthBoard) -> AsgiApp:
    """Everything that the ingress serves over HTTP."""
    under = _fastapi(fleet, keyring, board)
    routes, serve = ROUTES, gateway.serve

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        route = routes.get(scope["path"]) if scope["type"] == "http" else None
        if route is None:
            await under(scope, receive, send)
        elif scope["method"] == "POST":
            await serve(route, scope, receive, send)
        else:
            await send_whole(send, 405, _ONLY_POST, "application/json", [(b"allow", b"POST")])

    return app


def _fastapi(fleet: FleetView, keyring: Keyring, board: HealthBoard) -> FastAPI:
    app = FastAPI(
        title="Pointsman",
        description="An OpenAI-compatible gateway that sends each request to the engine that holds its prefix.",
        openapi_tags=[{"name": "OpenAI"}, {"name": "operations"}],
    )

    @app.get("/v1/models", tags=["OpenAI"])
    def list_models(request: Request) -> dict[str, Any]:
        """The models that can be asked for."""
        keyring.tenant(dict(request.scope["headers"]))
        length = fleet.model_len
        return {"object": "list", "data": [_model(name, int(at), length) for name, at in sorted(fleet.models.items())]}

    @app.get("/health", tags=["operations"])
    @app.get("/ready", tags=["operations"])
    @app.get("/metrics", tags=["operations"])
    def operations(request: Request) -> Response:
        """Whether the process runs, whether it can do its work and if not why, and its Prometheus metrics."""
        status, content_type, body = board.answer(request.url.path) or (404, "text/plain", b"")
        return Response(body, status, media_type=content_type)

    app.add_exception_handler(Refusal, _refused)
    app.add_exception_handler(StarletteHTTPException, _http_error)
    _document_hot_routes(app)
    return app


def _model(name: str, created: int, length: int) -> dict[str, Any]:
    model = {"id": name, "object": "model", "created": created, "owned_by": "pointsman"}
    return {**model, "max_model_len": length} if length else model


def _refused(_request: Request, refusal: Exception) -> Response:
    assert isinstance(refusal, Refusal)
    headers = {name.decode(): value.decode() for name, value in refusal.headers}
    return Response(refusal.body, refusal.status, headers, media_type="application/json")


def _http_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException | StarletteHTTPException)
    code = _CODES.get(error.status_code, "invalid_request")
    body = error_body(error.status_code, code, f"{error.detail}.")
    return Response(body, error.status_code, error.headers, media_type="application/json")


def _document_hot_routes(app: FastAPI) -> None:
    """Put the paths that FastAPI never sees into its OpenAPI document."""
    described = app.openapi()
    for path in ROUTES:
        described.setdefault("paths", {})[path] = {
            "post": {
                "tags": ["OpenAI"],
                "summary": f"OpenAI's {path}, streaming or not. Unknown fields reach the engine untouched.",
                "requestBody": {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}},
                "responses": {
                    "200": {"description": "The engine's answer."},
                    "4XX": {"description": "Refused, with an OpenAI error object."},
                    "5XX": {"description": "No engine could answer, with an OpenAI error object."},
                },
            }
        }
