"""The JSON API under `/api/`, and its OpenAPI description, which is made of the views. Reading needs no credential on
loopback; what changes something needs the page's CSRF token or the admin token as a bearer."""

from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Request, Response

from pointsman_cli.console.jobs.views import DoctorView, RequestPageView, WhatIfChange, WhatIfRun, WhatIfView
from pointsman_cli.console.page_views import NotThereError, PageViews, is_absent
from pointsman_cli.console.views import (
    ActionView,
    FleetView,
    HistoryView,
    LadderView,
    ProblemView,
    RequestsView,
    ShadowsView,
    StatusView,
    TenantsView,
    View,
)
from pointsman_cli.console.web.exchange import RefusedError, answered_json, body_of, quoted_path, route_of, visit_of
from pointsman_cli.console.web.security import READING_NEEDS_A_TOKEN, Guard, Refusal

Schema = dict[str, Any]
V = TypeVar("V", bound=View)


class Scale(View, frozen=True, kw_only=True):
    wanted: int


TEXT: Schema = {"type": "string", "maxLength": 256}
WHOLE: Schema = {"type": "integer", "minimum": 0}
QUERIES: dict[str, dict[str, tuple[Schema, str]]] = {
    "/api/fleet": {"at": (WHOLE, "The fleet as of a kept moment not after this log entry.")},
    "/api/requests": {
        "tenant": (TEXT, "Of this tenant."),
        "instance": (TEXT, "Placed on this instance last."),
        "stage": (TEXT, "In this stage."),
        "late": ({"type": "integer", "enum": [0, 1]}, "1: only late ones, and those that were not served."),
        "slowest": (
            {"type": "integer", "enum": [0, 1]},
            "1: longest wait first, for a first token or else an end, of all that are remembered.",
        ),
        "q": (TEXT, "Part of the id, or of the client's id."),
        "before": (WHOLE, "That arrived before this log entry."),
        "limit": (WHOLE, "At most so many, and at most 500; 50 if not given."),
    },
}
READS: dict[str, tuple[type[View], str]] = {
    "/api/status": (StatusView, "Which log is shown, and how far it was read."),
    "/api/fleet": (FleetView, "Instances, queues, hit rates, cache knowledge, goodput."),
    "/api/requests": (RequestsView, "Recent requests, newest first."),
    "/api/requests/{id}": (RequestPageView, "One request's timeline; ask again while its state is running."),
    "/api/doctor": (DoctorView, "Findings of the last examination of the log."),
    "/api/history": (HistoryView, "Scaling, rebalancing, and changes of instances."),
    "/api/tenants": (TenantsView, "Tenants and their figures."),
    "/api/hit-rate": (LadderView, "The hit-rate ladder."),
    "/api/shadow": (ShadowsView, "Shadow policies."),
    "/api/what-if": (WhatIfView, "What-if runs, newest first."),
    "/api/what-if/{id}": (WhatIfRun, "One what-if run."),
}
CHANGES: dict[str, tuple[type[View] | None, type[View], str, bool]] = {
    "/api/doctor": (None, DoctorView, "Examine the log again.", False),
    "/api/what-if": (WhatIfChange, WhatIfRun, "Start a run; one at a time.", False),
    "/api/what-if/{id}/cancel": (None, WhatIfRun, "Cancel a run.", False),
    "/api/instances/{id}/drain": (None, ActionView, "Drain an instance.", True),
    "/api/instances/{id}/undrain": (None, ActionView, "Take an instance back into service.", True),
    "/api/scale": (Scale, ActionView, "Set the wanted number of instances.", True),
}
"""Body, answer, summary, and whether it acts on the fleet."""


def api_router(console: PageViews, guard: Guard) -> APIRouter:
    router = APIRouter()

    async def read(request: Request) -> Response:
        if not visit_of(request, guard).reads:
            raise RefusedError(READING_NEEDS_A_TOKEN)
        path = quoted_path(request).removeprefix("/api")
        if path == "/status":
            return answered_json(console.status())
        _, view = console.view(path if path != "/fleet" else "/", dict(request.query_params))
        if is_absent(view):
            raise NotThereError(view.problem)
        return answered_json(view)

    async def document(_request: Request) -> Response:
        return Response(msgspec.json.encode(openapi_document()), media_type="application/json")

    async def examine(request: Request) -> Response:
        visit_of(request, guard, changes=True)
        console.jobs.examine()
        return answered_json(console.jobs.examination(), 202)

    async def start(request: Request) -> Response:
        visit_of(request, guard, changes=True)
        change = await _body(request, WhatIfChange)
        started = console.start_change(change)
        if isinstance(started, str):
            raise RefusedError(Refusal(409, "what_if", started))
        return answered_json(console.what_if_run(str(started)), 202)

    async def cancel(request: Request) -> Response:
        visit_of(request, guard, changes=True)
        console.cancel_what_if(request.path_params["id"])
        return answered_json(console.what_if_run(request.path_params["id"]))

    async def drain(request: Request) -> Response:
        visit_of(request, guard, changes=True, acts=True)
        undo = quoted_path(request).endswith("/undrain")
        return _acted(await console.actions.drain(request.path_params["id"], undo=undo))

    async def scale(request: Request) -> Response:
        visit_of(request, guard, changes=True, acts=True)
        return _acted(await console.actions.scale(str((await _body(request, Scale)).wanted)))

    for path in READS:
        router.add_api_route(route_of(path), read, methods=["GET"])
    router.add_api_route("/api/openapi.json", document, methods=["GET"])
    handlers: dict[str, Callable[[Request], Any]] = {
        "/api/doctor": examine,
        "/api/what-if": start,
        "/api/what-if/{id}/cancel": cancel,
        "/api/instances/{id}/drain": drain,
        "/api/instances/{id}/undrain": drain,
        "/api/scale": scale,
    }
    for path, handler in handlers.items():
        router.add_api_route(path, handler, methods=["POST"])
    return router


def _acted(result: ActionView) -> Response:
    return answered_json(result, 200 if result.done else 409)


async def _body(request: Request, kind: type[V]) -> V:
    """Raises RefusedError."""
    try:
        return msgspec.json.decode(await body_of(request), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RefusedError(Refusal(400, "invalid_body", str(error)[:200])) from error


@cache
def openapi_document() -> dict[str, Any]:
    kinds = {kind for kind, _ in READS.values()} | {answer for _, answer, _, _ in CHANGES.values()}
    kinds |= {body for body, _, _, _ in CHANGES.values() if body is not None} | {ProblemView}
    ordered = sorted(kinds, key=lambda kind: kind.__name__)
    schemas, components = msgspec.json.schema_components(ordered, ref_template="#/components/schemas/{name}")
    of = dict(zip(ordered, schemas, strict=True))
    paths: dict[str, Any] = {}
    for path, (kind, summary) in READS.items():
        paths.setdefault(path, {})["get"] = {
            "summary": summary,
            "parameters": [*_path_parameters(path), *_query_parameters(path)],
            "responses": _responses(of[kind], of[ProblemView], {"200"}),
        }
    for path, (body, answer, summary, acts) in CHANGES.items():
        operation: Schema = {
            "summary": summary,
            "parameters": _path_parameters(path),
            "security": [{"admin": []}] if acts else [{}, {"admin": []}],
            "responses": _responses(of[answer], of[ProblemView], {"200", "202", "409"}),
        }
        if body is not None:
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": of[body]}}}
        paths.setdefault(path, {})["post"] = operation
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Pointsman console",
            "version": version("pointsman"),
            "description": "What a log tells: fleet, requests, findings, history, tenants, hit rates. Times are Unix "
            "seconds, durations engine seconds. The names in it come from the log.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"admin": {"type": "http", "scheme": "bearer", "description": "The admin token."}},
        },
    }


def _path_parameters(path: str) -> list[Schema]:
    return [{"name": "id", "in": "path", "required": True, "schema": TEXT}] if "{id}" in path else []


def _query_parameters(path: str) -> list[Schema]:
    return [
        {"name": name, "in": "query", "required": False, "schema": schema, "description": text}
        for name, (schema, text) in QUERIES.get(path, {}).items()
    ]


def _responses(schema: Schema, problem: Schema, codes: set[str]) -> Schema:
    found = {
        code: {"description": "As described.", "content": {"application/json": {"schema": schema}}} for code in codes
    }
    return found | {"default": {"description": "Refused.", "content": {"application/json": {"schema": problem}}}}
