"""`POST /kv/overlap` on the admin port: makes the block keys of prompts as for requests, and asks a scheduler who holds
them. For other routers: it places and logs nothing. Where credentials are required, a key must name this path among its
endpoints, and sees the prefixes of its own tenant."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from msgspec import Meta

from pointsman.contracts.codec import short_reason
from pointsman.contracts.overlap import (
    OVERLAP_PROMPTS_MAX,
    OverlapAnswered,
    OverlapPrompt,
    OverlapRefused,
    OverlapRequest,
    TokenId,
)
from pointsman.contracts.subjects import command_subject
from pointsman.ports import Commands, CommandTimeoutError, CommandTooLargeError, NoResponderError
from pointsman.primitives import PackedKeys, PoolName, WallSeconds
from pointsman.runtime.containment import note_failure
from pointsman.runtime.health import Receive, Scope, Send
from pointsman_ingress.endpoints import is_json
from pointsman_ingress.http import errors
from pointsman_ingress.http.call import JSON, BodyLoan, ClientGoneError, HttpExchange
from pointsman_ingress.http.errors import OPENAI_ERRORS, ApiError
from pointsman_ingress.http.json_form import LIGHT_BYTES_MAX
from pointsman_ingress.parts import IngressParts
from pointsman_ingress.placement.fleet_view import Model
from pointsman_ingress.placement.pools import Pool, Pools
from pointsman_ingress.token_ids import token_ids

PATH = "/kv/overlap"
BODY_BYTES_MAX = 8 * 1024 * 1024
TOKENS_MAX = 1_048_576
AT_ONCE_MAX = 16
TIMEOUT_WALL_SECONDS: WallSeconds = WallSeconds(1.0)
TRIES = 2
"""The first may have gone to a scheduler that just ended."""


TOKEN_IDS_SCHEMA = msgspec.json.schema(Annotated[list[TokenId], Meta(max_length=TOKENS_MAX)])


class PromptBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    # Read by slices.
    token_ids: Annotated[msgspec.Raw, Meta(extra_json_schema=TOKEN_IDS_SCHEMA)] = msgspec.field(
        default_factory=lambda: msgspec.Raw(b"[]")
    )
    block_keys: PackedKeys = b""


class OverlapBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    prompts: Annotated[list[PromptBody], Meta(min_length=1, max_length=OVERLAP_PROMPTS_MAX)]
    model: str = ""
    cache_salt: Annotated[str, Meta(max_length=1024)] = ""


_bodies = msgspec.json.Decoder(OverlapBody)
_encode = msgspec.json.Encoder().encode


@dataclass(eq=False)
class OverlapEndpoint:
    parts: IngressParts
    pools: Pools
    commands: Mapping[PoolName, Commands]
    _at_once: int = field(default=0, init=False)

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = HttpExchange(PATH, OPENAI_ERRORS, scope, send, ids=self.parts.ids, clock=self.parts.clock)
        loan = BodyLoan(self.parts.bodies, PATH)
        self._at_once += 1
        try:
            answer = await self._answer(call, receive, loan)
            await call.answer(200, _encode(answer), JSON)
        except ApiError as error:
            await call.fail(error)
        except ClientGoneError:
            pass
        except Exception as error:  # noqa: BLE001 - a client may cause many: counted, logged at a bounded rate
            note_failure("overlap", error, request=call.id)
            await call.fail(errors.internal_error())
        finally:
            self._at_once -= 1
            loan.end()

    async def _answer(self, call: HttpExchange, receive: Receive, loan: BodyLoan) -> OverlapAnswered:
        """Raises ApiError, ClientGoneError."""
        if call.method != "POST":
            raise errors.post_only()
        if not is_json(call.headers):
            raise errors.not_json()
        identity = await self.parts.authentication.identity(call.headers)
        if identity is not None and PATH not in identity.endpoints:
            raise errors.endpoint_out_of_scope(PATH)
        if self._at_once > AT_ONCE_MAX:
            raise errors.too_many_lookups()
        body = await call.read_body(receive, loan, bytes_max=BODY_BYTES_MAX)
        light = len(body) <= LIGHT_BYTES_MAX
        asked = await self.parts.work.run_unless(light, PATH, _parsed, body)
        pool, model = self.pools.find(asked.model, identity)
        salt, salts = asked.cache_salt, self.parts.salts
        if salts is not None and identity is not None:
            salt = salts.salt(salts.group(identity.tenant), asked.cache_salt)
        request = await self.parts.work.run_unless(light, PATH, _request, asked, pool, model, salt)
        return await self._ask(pool, request)

    async def _ask(self, pool: Pool, request: OverlapRequest) -> OverlapAnswered:
        """Raises ApiError."""
        for _ in range(TRIES):
            try:
                answer = await self.commands[pool.name].request(
                    command_subject(pool.name, "overlap"), request, timeout=TIMEOUT_WALL_SECONDS
                )
            except CommandTooLargeError as error:
                raise errors.request_too_large() from error
            except (NoResponderError, CommandTimeoutError):
                continue
            if isinstance(answer, OverlapRefused):
                raise errors.overlap_refused(answer)
            if isinstance(answer, OverlapAnswered):
                return answer
        raise errors.no_scheduler()


def _parsed(body: bytes) -> OverlapBody:
    """Raises ApiError."""
    try:
        asked = _bodies.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        msg = f"The body is not as docs/overlap.md has it: {short_reason(error)}."
        raise errors.bad_request(msg, code="malformed_body") from error
    return asked


def _request(asked: OverlapBody, pool: Pool, model: Model, salt: str) -> OverlapRequest:
    """Raises ApiError."""
    try:
        tokens = _tokens(asked)
        keys = [
            _keys(ids, prompt.block_keys, pool, model, salt) for ids, prompt in zip(tokens, asked.prompts, strict=True)
        ]
        return OverlapRequest(prompts=[OverlapPrompt(block_keys=packed) for packed in keys])
    except ValueError as error:
        raise errors.bad_request(f"The prompts cannot be looked up: {short_reason(error)}.", param="prompts") from error


def _tokens(asked: OverlapBody) -> list[Sequence[int]]:
    """Of each prompt. Raises ValueError."""
    tokens: list[Sequence[int]] = [token_ids(bytes(prompt.token_ids)) for prompt in asked.prompts]
    if (count := sum(map(len, tokens))) > TOKENS_MAX:
        raise ValueError(f"{count} token ids are more than {TOKENS_MAX}")
    return tokens


def _keys(tokens: Sequence[int], block_keys: bytes, pool: Pool, model: Model, salt: str) -> bytes:
    """Raises ValueError."""
    if tokens and block_keys:
        raise ValueError("a prompt is given by `token_ids` or by `block_keys`, not by both")
    if not tokens:
        return block_keys
    return pool.block_keys.packed(model.base, tokens, lora=model.adapter, cache_salt=salt)
