"""The ASGI application: a dictionary sends engine endpoints to `Gateway.serve`, FastAPI (slow) routes all others."""

from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from starlette.exceptions import HTTPException as StarletteHTTPException

from pointsman.runtime.health import AsgiApp, HealthBoard, Receive, Scope, Send, query_of
from pointsman_ingress.endpoints import BY_PATH
from pointsman_ingress.http.authentication import Authentication
from pointsman_ingress.http.errors import OPENAI_ERRORS, ApiError, post_only
from pointsman_ingress.placement.fleet_view import Model
from pointsman_ingress.placement.pools import Pool, Pools
from pointsman_ingress.service import Gateway

_MESSAGES = {
    404: ("not_found", "There is no such path; /docs lists those that there are."),
    405: ("method_not_allowed", "This path does not take that method; /docs says which."),
}


def ingress_app(*, gateway: Gateway, pools: Pools, authentication: Authentication, board: HealthBoard) -> AsgiApp:
    rest = _fastapi(pools, authentication, board)
    endpoints, serve = BY_PATH, gateway.serve

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = endpoints.get(scope["path"]) if scope["type"] == "http" else None
        if endpoint is None:
            await rest(scope, receive, send)
        elif scope["method"] == "POST":
            await serve(endpoint, scope, receive, send)
        else:
            await gateway.refuse(endpoint, scope, send, post_only())

    return app


def _fastapi(pools: Pools, authentication: Authentication, board: HealthBoard) -> FastAPI:
    app = FastAPI(
        title="Pointsman",
        description="An OpenAI-compatible gateway that sends each request to the engine that holds its prefix.",
        openapi_tags=[{"name": "OpenAI"}, {"name": "operations"}],
    )

    @app.get("/v1/models", tags=["OpenAI"])
    async def list_models(request: Request) -> dict[str, Any]:
        """The models that the client may use, of all pools; LoRA adapters have their base model as `parent`."""
        identity = await authentication.identity(dict(request.scope["headers"]))
        shown = [found for found in pools.offered() if identity is None or identity.may_use(found[1].name)]
        return {"object": "list", "data": [_card(pool, model) for pool, model in shown]}

    @app.get("/v1/models/{name:path}", tags=["OpenAI"])
    async def describe_model(name: str, request: Request) -> dict[str, Any]:
        identity = await authentication.identity(dict(request.scope["headers"]))
        if identity is None:
            return _card(*pools.find(name))
        identity.check_model(name)
        return _card(*pools.find(name, identity.may_use))

    @app.get("/livez", tags=["operations"])
    @app.get("/readyz", tags=["operations"])
    @app.get("/health", tags=["operations"])
    @app.get("/metrics", tags=["operations"])
    async def operations(request: Request) -> Response:
        """Whether the process runs, whether to send it traffic and what is missing, and its Prometheus metrics."""
        answer = board.answer(request.scope["path"], query_of(request.scope))
        assert answer is not None, "the board knows these paths"
        status, content_type, body = answer
        return Response(body, status, media_type=content_type)

    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(StarletteHTTPException, _http_error)
    _document_hot_routes(app)
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


def _http_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException | StarletteHTTPException)
    code, message = _MESSAGES.get(error.status_code, ("invalid_request", f"{error.detail}."))
    body = OPENAI_ERRORS.body(ApiError(error.status_code, code, message))
    return Response(body, error.status_code, error.headers, media_type="application/json")


def _document_hot_routes(app: FastAPI) -> None:
    described = app.openapi()
    for path, endpoint in BY_PATH.items():
        kind = "application/json" if endpoint.parse is not None else "multipart/form-data"
        described.setdefault("paths", {})[path] = {
            "post": {
                "tags": ["OpenAI"],
                "summary": f"{path} as the engine has it, streaming or not. Unknown fields are not passed on.",
                "requestBody": {"required": True, "content": {kind: {"schema": {"type": "object"}}}},
                "responses": {
                    "200": {"description": "The engine's answer."},
                    "4XX": {"description": "Refused, with an error object."},
                    "5XX": {"description": "No engine could answer, with an error object."},
                },
            }
        }
