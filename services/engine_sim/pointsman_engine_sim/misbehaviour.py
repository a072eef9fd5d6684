"""Makes an engine fail on demand while health and metrics stay good: `POST /sim/misbehave` with `{"kind": "errors" |
"hang" | "slow" | "forget" | "", "factor": 10}`. Running streams continue. `forget` empties its prefix cache once, and no
KV event says so; 409 while requests run."""

from collections.abc import Callable
from typing import Annotated, Literal

import msgspec
import structlog

from pointsman.runtime.health import AsgiApp, Receive, Scope, Send, send_whole

log = structlog.get_logger()

MISBEHAVE_PATH = "/sim/misbehave"
WELL_POSTS = frozenset(
    {
        MISBEHAVE_PATH,
        "/tokenize",
        "/detokenize",
        "/v1/messages/count_tokens",
        "/ping",
        "/reset_prefix_cache",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
    }
)
"""POST requests without inference. All others fail, including KV fetches."""

Misbehaviour = Literal["", "errors", "hang", "slow", "forget"]
BODY_BYTES_MAX = 4096
JSON = "application/json"
ERROR_BODY = b'{"error":{"message":"CUDA error: an illegal memory access was encountered","type":"InternalServerError","param":null,"code":500}}'


class MisbehaveBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kind: Misbehaviour
    factor: Annotated[float, msgspec.Meta(ge=1.0, le=1000.0)] = 10.0


class MisbehavingApp:
    def __init__(self, app: AsgiApp, *, slow_down: Callable[[float], None], forget: Callable[[], bool]) -> None:
        """`forget`: whether it could."""
        self._app = app
        self._slow_down = slow_down
        self._forget = forget
        self._kind: Misbehaviour = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        posted = scope["type"] == "http" and scope["method"] == "POST"
        if posted and scope["path"] == MISBEHAVE_PATH:
            await self._on_misbehave(receive, send)
        elif posted and self._kind == "errors" and scope["path"] not in WELL_POSTS:
            await send_whole(send, 500, ERROR_BODY, JSON)
        elif posted and self._kind == "hang" and scope["path"] not in WELL_POSTS:
            await _until_disconnected(receive)
        else:
            await self._app(scope, receive, send)

    async def _on_misbehave(self, receive: Receive, send: Send) -> None:
        try:
            body = msgspec.json.decode(await _read(receive), type=MisbehaveBody)
        except msgspec.MsgspecError as error:
            await send_whole(send, 400, msgspec.json.encode({"error": {"message": str(error)}}), JSON)
            return
        if body.kind == "forget":
            await send_whole(send, 200 if self._forget() else 409, msgspec.json.encode(body), JSON)
            return
        self._kind = body.kind
        self._slow_down(body.factor if body.kind == "slow" else 1.0)
        log.warning("engine_misbehaves", kind=body.kind or "no more", factor=body.factor)
        await send_whole(send, 200, msgspec.json.encode(body), JSON)


async def _read(receive: Receive) -> bytes:
    body, more = b"", True
    while more and len(body) <= BODY_BYTES_MAX:
        message = await receive()
        body += message.get("body", b"")
        more = bool(message.get("more_body"))
    return body


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
