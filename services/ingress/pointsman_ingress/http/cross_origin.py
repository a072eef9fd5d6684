"""Pages of other origins, as the operator names them: a browser shows them what the ingress answers (CORS), and asks first.
In: the API's application, origins. Out: the application that serves these pages too."""

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from typing_extensions import override

from pointsman.runtime.health import AsgiApp
from pointsman_ingress.settings import ANY_ORIGIN

PREFLIGHT_SECONDS = 7200  # for which a browser need not ask again


def served_to(app: AsgiApp, origins: Collection[str]) -> AsgiApp:
    """The application itself without origins, so that it costs nothing."""
    return _CrossOrigin(app, origins) if origins else app


def is_allowed(origin: str, origins: Collection[str]) -> bool:
    """`origin`: empty if no page sent the request."""
    return bool(origin) and (origin in origins or ANY_ORIGIN in origins)


class _CrossOrigin(CORSMiddleware):
    def __init__(self, app: AsgiApp, origins: Collection[str]) -> None:
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            allow_private_network=True,
            expose_headers=("*",),
            max_age=PREFLIGHT_SECONDS,
        )

    @override
    def preflight_response(self, request_headers: Headers) -> Response:
        """Without a body where it is granted."""
        answer = super().preflight_response(request_headers)
        if answer.status_code != 200:
            return answer
        kept = {name: value for name, value in answer.headers.items() if not name.startswith("content-")}
        return Response(status_code=204, headers=kept)
