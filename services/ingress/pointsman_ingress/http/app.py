"""The ASGI application: the paths that lead to engines as plain ASGI, everything else on FastAPI under them.

FastAPI's routing alone costs as much as the whole of the rest of a forwarded request, so the paths that lead to
engines are looked up in a dictionary before it. They appear in its OpenAPI document all the same.
"""

from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from starlette.exceptions import HTTPException as StarletteHTTPException

from pointsman.runtime.health import AsgiApp, HealthBoard, Receive, Scope, Send, query_of
from pointsman_ingress.http.endpoints import BY_PATH
from pointsman_ingress.http.openai_errors import Refusal, error_body, only_post
from pointsman_ingress.http.tenants import Keyring
from pointsman_ingress.placement.fleet_view import Model
from pointsman_ingress.placement.pools import Pool, Pools
from pointsman_ingress.service import Gateway

_SAID = {
    404: ("not_found", "There is no such path; /docs lists those that there are."),
    405: ("method_not_allowed", "This path does not take that method; /docs says which."),
}


def ingress_app(*, gateway: Gateway, pools: Pools, keyring: Keyring, board: HealthBoard) -> AsgiApp:
    """Everything that the ingress serves over HTTP."""
    under = _fastapi(pools, keyring, board)
    endpoints, serve = BY_PATH, gateway.serve

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = endpoints.get(scope["path"]) if scope["type"] == "http" else None
        if endpoint is None:
            await under(scope, receive, send)
        elif scope["method"] == "POST":
            await serve(endpoint, scope, receive, send)
        else:
            await gateway.refuse(endpoint, scope, send, only_post())

    return app


def _fastapi(pools: Pools, keyring: Keyring, board: HealthBoard) -> FastAPI:
    app = FastAPI(
        title="Pointsman",
        description="An OpenAI-compatible gateway that sends each request to the engine that holds its prefix.",
        openapi_tags=[{"name": "OpenAI"}, {"name": "operations"}],
    )

    @app.get("/v1/models", tags=["OpenAI"])
    def list_models(request: Request) -> dict[str, Any]:
        """The models that can be asked for, of all pools; LoRA adapters have their base model as `parent`."""
        keyring.tenant(dict(request.scope["headers"]))
        return {"object": "list", "data": [_card(pool, model) for pool, model in pools.offered()]}

    @app.get("/v1/models/{name:path}", tags=["OpenAI"])
    def describe_model(name: str, request: Request) -> dict[str, Any]:
        """One of them."""
        keyring.tenant(dict(request.scope["headers"]))
        return _card(*pools.find(name))

    @app.get("/livez", tags=["operations"])
    @app.get("/readyz", tags=["operations"])
    @app.get("/health", tags=["operations"])
    @app.get("/metrics", tags=["operations"])
    async def operations(request: Request) -> Response:
        """Whether the process runs, whether to send it traffic and what it lacks, and its Prometheus metrics."""
        status, content_type, body = board.answer(request.scope["path"], query_of(request.scope)) or (
            404,
            "text/plain",
            b"",
        )
        return Response(body, status, media_type=content_type)

    app.add_exception_handler(Refusal, _refused)
    app.add_exception_handler(StarletteHTTPException, _http_error)
    _document_hot_routes(app)
    return app


def _card(pool: Pool, model: Model) -> dict[str, Any]:
    """As vLLM describes a model, but for paths on the engine, which are nobody's business."""
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


def _refused(_request: Request, refusal: Exception) -> Response:
    assert isinstance(refusal, Refusal)
    headers = {name.decode(): value.decode() for name, value in refusal.headers}
    return Response(refusal.body, refusal.status, headers, media_type="application/json")


def _http_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException | StarletteHTTPException)
    code, message = _SAID.get(error.status_code, ("invalid_request", f"{error.detail}."))
    body = error_body(error.status_code, code, message)
    return Response(body, error.status_code, error.headers, media_type="application/json")


def _document_hot_routes(app: FastAPI) -> None:
    """Put the paths that FastAPI never sees into its OpenAPI document."""
    described = app.openapi()
    for path, endpoint in BY_PATH.items():
        kind = "application/json" if endpoint.parse is not None else "multipart/form-data"
        described.setdefault("paths", {})[path] = {
            "post": {
                "tags": ["OpenAI"],
                "summary": f"{path} as the engine has it, streaming or not. Unknown fields reach it untouched.",
                "requestBody": {"required": True, "content": {kind: {"schema": {"type": "object"}}}},
                "responses": {
                    "200": {"description": "The engine's answer."},
                    "4XX": {"description": "Refused, with an error object."},
                    "5XX": {"description": "No engine could answer, with an error object."},
                },
            }
        }
