"""The API as an ASGI application: a dictionary sends engine endpoints to `Gateway.serve`, FastAPI (slow) routes the
models and `/health`. Probes, metrics and the API's description are on the admin port."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from starlette.exceptions import HTTPException as StarletteHTTPException

from pointsman.runtime.health import AsgiApp, Receive, Scope, Send
from pointsman_ingress.endpoints import BY_PATH
from pointsman_ingress.http.authentication import Authentication
from pointsman_ingress.http.call import with_id_headers
from pointsman_ingress.http.errors import OPENAI_ERRORS, ApiError, errors_at, post_only
from pointsman_ingress.placement.fleet_view import Model
from pointsman_ingress.placement.pools import Pool, Pools
from pointsman_ingress.service import Gateway

MODEL_PATH = b"/v1/models/"
_MESSAGES = {
    404: ("not_found", "There is no such path."),
    405: ("method_not_allowed", "This path does not take that method."),
}


@dataclass(frozen=True, slots=True)
class IngressApps:
    """`admin`: by path, on the admin port."""

    api: AsgiApp
    admin: Mapping[str, AsgiApp]


def ingress_app(gateway: Gateway) -> AsgiApp:
    rest = _fastapi(gateway.resolver.pools, gateway.parts.authentication)
    endpoints, serve = {path.encode(): endpoint for path, endpoint in BY_PATH.items()}, gateway.serve

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        """Paths count as they were sent: a proxy's rules see no other spelling. Only a model's name may be encoded."""
        path: bytes = scope.get("raw_path", b"")
        endpoint = endpoints.get(path)
        if endpoint is None:
            if b"%" in path and not path.startswith(MODEL_PATH):
                scope["path"] = path.decode("latin-1")
            names = errors_at(path).id_headers
            await rest(scope, receive, with_id_headers(send, scope, gateway.parts.ids.fresh(), *names))
        elif scope["method"] == "POST":
            await serve(endpoint, scope, receive, send)
        else:
            await gateway.refuse(endpoint, scope, send, post_only())

    return app


def _fastapi(pools: Pools, authentication: Authentication) -> FastAPI:
    app = FastAPI(
        openapi_url=None,
        redirect_slashes=False,
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},  # ours are the spans
    )

    @app.get("/health")
    async def health() -> Response:
        """As vLLM answers, for tools made for it. It tells strangers nothing; readiness is on the admin port."""
        return Response()

    @app.get("/v1/models")
    async def list_models(request: Request) -> dict[str, Any]:
        """The models that the client may use, of all pools; LoRA adapters have their base model as `parent`."""
        identity = await authentication.identity(dict(request.scope["headers"]))
        shown = [found for found in pools.offered() if identity is None or identity.may_use(found[1].name)]
        return {"object": "list", "data": [_card(pool, model) for pool, model in shown]}

    @app.get("/v1/models/{name:path}")
    async def describe_model(name: str, request: Request) -> dict[str, Any]:
        identity = await authentication.identity(dict(request.scope["headers"]))
        return _card(*pools.find(name, identity))

    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(StarletteHTTPException, _http_error)
    return app


def _card(pool: Pool, model: Model) -> dict[str, Any]:
    card = {
        "id": model.name,
        "object": "model",
        "created": int(model.since),
        "owned_by": "pointsman",
        "root": model.adapter or model.base,
        "parent": model.base if model.adapter else None,
    }
    length = pool.fleet.context_of(model)
    return {**card, "max_model_len": length} if length else card


def _api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    headers = {name.decode(): value.decode() for name, value in error.headers}
    return Response(OPENAI_ERRORS.body(error), error.status, headers, media_type="application/json")


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException | StarletteHTTPException)
    code, message = _MESSAGES.get(error.status_code, ("invalid_request", f"{error.detail}."))
    body = errors_at(request.scope.get("raw_path", b"")).body(ApiError(error.status_code, code, message))
    return Response(body, error.status_code, error.headers, media_type="application/json")
