"""vLLM's HTTP routes over the simulated engine, as an ASGI application."""

import hmac
from collections.abc import Awaitable, Callable
from functools import cached_property

import msgspec
import structlog

from pointsman.primitives import Tokens
from pointsman.runtime.health import Receive, Scope, Send, send_whole
from pointsman_engine_sim import answers, embeddings, messages, openai_bodies, responses, scores
from pointsman_engine_sim.engine import RequestAbortedError, prompt_hash
from pointsman_engine_sim.generation import JSON, Answer, Generator
from pointsman_engine_sim.kv_connector import TRANSFER_PATH
from pointsman_engine_sim.openai_bodies import AdapterBody, ApiError, ChatBody, DetokenizeBody, FetchBody, decoded

log = structlog.get_logger()

VERSION = "0.32.0+pointsman-sim"
BODY_BYTES_MAX = 64 * 2**20

Handler = Callable[[Scope, Receive, Send], Awaitable[None]]


class EngineApp(Generator):
    @cached_property
    def _routes(self) -> dict[str, dict[str, Handler]]:
        return {
            "/v1/completions": {"POST": self._completion},
            "/v1/chat/completions": {"POST": self._chat},
            "/v1/responses": {"POST": self._response},
            "/v1/messages": {"POST": self._anthropic(self._messages)},
            "/v1/messages/count_tokens": {"POST": self._anthropic(self._count_tokens)},
            "/v1/embeddings": {"POST": self._embeddings},
            **{path: {"POST": self._rerank} for path in ("/rerank", "/v1/rerank", "/v2/rerank")},
            **{path: {"POST": self._score} for path in ("/score", "/v1/score")},
            "/v1/models": {"GET": self._models},
            "/tokenize": {"POST": self._tokenize},
            "/detokenize": {"POST": self._detokenize},
            "/health": {"GET": self._health},
            "/ping": {"GET": self._health, "POST": self._health},
            "/version": {"GET": self._version},
            "/metrics": {"GET": self._metrics_page},
            "/reset_prefix_cache": {"POST": self._reset_prefix_cache},
            "/v1/load_lora_adapter": {"POST": self._load_adapter},
            "/v1/unload_lora_adapter": {"POST": self._unload_adapter},
            **({TRANSFER_PATH: {"POST": self._kv_transfer}} if self._transfer else {}),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        methods = self._routes.get(scope["path"])
        handler = None if methods is None else methods.get(scope["method"])
        if handler is None:
            status, detail = (404, "Not Found") if methods is None else (405, "Method Not Allowed")
            await send_whole(send, status, answers.encode({"detail": detail}), JSON)
            return
        if not self._authorised(scope):
            await send_whole(send, 401, b'{"error":"Unauthorized"}', JSON)
            return
        try:
            await handler(scope, receive, send)
        except ApiError as error:
            await send_whole(send, error.status, error.body, JSON)
        except RequestAbortedError:
            log.debug("client_gone", path=scope["path"])

    async def _completion(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = openai_bodies.parse_completion(await _read(receive))
        self._check_model(body.model)
        prompt = openai_bodies.prompt_of(body)
        tokens = await self._encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else prompt
        heading = self._heading(scope, "cmpl", body.model)
        generation = await self._submit(body, tokens, body.max_tokens, openai_bodies.COMPLETION_TOKENS_DEFAULT)
        frames, whole = answers.completion_frames(heading), answers.whole_completion
        answer = Answer(generation, len(tokens), frames, whole, heading, body.wants_stream, body.wants_stream_usage)
        await self._answer(receive, send, answer)

    async def _chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = openai_bodies.parse_chat(await _read(receive))
        self._check_model(body.model)
        tokens = await self._encode(self._rendered(body), add_special_tokens=False)
        heading = self._heading(scope, "chatcmpl", body.model)
        requested = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        generation = await self._submit(body, tokens, requested, openai_bodies.CHAT_TOKENS_DEFAULT)
        frames, whole = answers.chat_frames(heading), answers.whole_chat
        answer = Answer(generation, len(tokens), frames, whole, heading, body.wants_stream, body.wants_stream_usage)
        await self._answer(receive, send, answer)

    async def _response(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = responses.parse_response(await _read(receive))
        self._check_model(body.model)
        chat = ChatBody(
            messages=responses.messages_of(body),
            tools=responses.tools_of(body),
            chat_template_kwargs=body.chat_template_kwargs,
        )
        tokens = await self._encode(self._rendered(chat), add_special_tokens=True)
        heading = self._heading(scope, "resp", body.model)
        generation = await self._submit(body, tokens, body.max_output_tokens, openai_bodies.CHAT_TOKENS_DEFAULT)
        frames, whole = responses.ResponseFrames(heading), responses.whole_response
        stream = body.wants_stream
        answer = Answer(generation, len(tokens), frames, whole, heading, stream, stream, usage=responses.usage)
        await self._answer(receive, send, answer)

    def _anthropic(self, handler: Handler) -> Handler:
        async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                await handler(scope, receive, send)
            except ApiError as error:
                await send_whole(send, error.status, messages.error(error), JSON)

        return wrapped

    async def _messages(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = messages.parse_messages(await _read(receive))
        self._check_model(body.model)
        tokens = await self._encode(self._rendered(messages.chat_of(body)), add_special_tokens=False)
        heading = self._heading(scope, "chatcmpl", body.model)
        generation = await self._submit(body, tokens, body.max_tokens, openai_bodies.CHAT_TOKENS_DEFAULT)
        frames, whole, stream = messages.MessageFrames(heading), messages.whole_message, body.wants_stream
        answer = Answer(generation, len(tokens), frames, whole, heading, stream, stream, usage=messages.usage)
        await self._answer(receive, send, answer)

    async def _count_tokens(self, _scope: Scope, receive: Receive, send: Send) -> None:
        body = messages.parse_messages(await _read(receive))
        self._check_model(body.model)
        tokens = await self._encode(self._rendered(messages.chat_of(body)), add_special_tokens=False)
        await send_whole(send, 200, messages.counted(len(tokens)), JSON)

    async def _rerank(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = decoded(await _read(receive), scores.RerankBody)
        tokens = await self._read_pairs(receive, body, body.query)
        heading = self._heading(scope, "rerank", body.model)
        await send_whole(send, 200, scores.whole_rerank(heading, body, tokens), JSON)

    async def _score(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = decoded(await _read(receive), scores.ScoreBody)
        tokens = await self._read_pairs(receive, body, body.text_1)
        heading = self._heading(scope, "score", body.model)
        await send_whole(send, 200, scores.whole_scores(heading, body, tokens), JSON)

    async def _read_pairs(self, receive: Receive, body: scores.RerankBody | scores.ScoreBody, query: str) -> Tokens:
        self._check_model(body.model)
        total = 0
        for document in body.documents:
            tokens = await self._encode(f"{query}\n{document}", add_special_tokens=True)
            await self._prefill(receive, body.model, tokens, body.cache_salt)
            total += len(tokens)
        return total

    async def _embeddings(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An embedding costs as much as a prompt's first token."""
        body = embeddings.parse_embeddings(await _read(receive))
        self._check_model(body.model)
        vectors, total = [], 0
        for prompt in embeddings.prompts_of(body):
            tokens = await self._encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else prompt
            await self._prefill(receive, body.model, tokens, body.cache_salt)
            vectors.append(embeddings.vector(prompt_hash(tokens), body.dimensions))
            total += len(tokens)
        heading = self._heading(scope, "embd", body.model)
        await send_whole(send, 200, embeddings.whole_embeddings(heading, vectors, body.encoding_format, total), JSON)

    async def _models(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        served = self._served
        body = answers.model_list(
            served.name, created=self._started, max_model_len=served.max_model_len, adapters=self._adapters
        )
        await send_whole(send, 200, body, JSON)

    async def _tokenize(self, _scope: Scope, receive: Receive, send: Send) -> None:
        body = openai_bodies.parse_tokenize(await _read(receive))
        self._check_model(body.model)
        text = self._rendered(body) if body.prompt is None else body.prompt
        special = body.prompt is not None if body.add_special_tokens is None else body.add_special_tokens
        tokens = await self._encode(text, add_special_tokens=special)
        strings = [self._tokenizer.decode([token]) for token in tokens] if body.return_token_strs else None
        answer = {
            "count": len(tokens),
            "max_model_len": self._served.max_model_len,
            "tokens": tokens,
            "token_strs": strings,
        }
        await send_whole(send, 200, answers.encode(answer), JSON)

    async def _detokenize(self, _scope: Scope, receive: Receive, send: Send) -> None:
        body = decoded(await _read(receive), DetokenizeBody)
        self._check_model(body.model)
        openai_bodies.check_tokens(body.tokens, vocab_size=self._tokenizer.vocab_size)
        await send_whole(send, 200, answers.encode({"prompt": self._tokenizer.decode(body.tokens)}), JSON)

    async def _health(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        await send_whole(send, 200, b"", JSON)

    async def _version(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        await send_whole(send, 200, answers.encode({"version": VERSION}), JSON)

    async def _metrics_page(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        await send_whole(send, 200, self._metrics.exposition(), "text/plain; version=0.0.4; charset=utf-8")

    async def _reset_prefix_cache(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        """Always 200, as vLLM: with requests running nothing is dropped, only logged."""
        if not self._engine.reset_prefix_cache():
            log.warning("prefix_cache_not_reset", reason="requests are running")
        await send_whole(send, 200, b"", JSON)

    async def _kv_transfer(self, _scope: Scope, receive: Receive, send: Send) -> None:
        assert self._transfer is not None
        answer = self._transfer.give(decoded(await _read(receive), FetchBody))
        await send_whole(send, 404 if answer is None else 200, msgspec.json.encode(answer), JSON)

    async def _load_adapter(self, _scope: Scope, receive: Receive, send: Send) -> None:
        body = decoded(await _read(receive), AdapterBody)
        if not body.lora_path:
            raise ApiError(400, "Both 'lora_name' and 'lora_path' must be provided.", kind="InvalidUserInput")
        if body.lora_name in self._adapters:
            message = f"The lora adapter '{body.lora_name}' has already been loaded."
            raise ApiError(400, message, kind="InvalidUserInput")
        self._adapters[body.lora_name] = body.lora_path
        text = f"Success: LoRA adapter '{body.lora_name}' added successfully."
        await send_whole(send, 200, text.encode(), "text/plain; charset=utf-8")

    async def _unload_adapter(self, _scope: Scope, receive: Receive, send: Send) -> None:
        body = decoded(await _read(receive), AdapterBody)
        if self._adapters.pop(body.lora_name, None) is None:
            raise ApiError(404, f"The lora adapter '{body.lora_name}' cannot be found.", kind="NotFoundError")
        text = f"Success: LoRA adapter '{body.lora_name}' removed successfully."
        await send_whole(send, 200, text.encode(), "text/plain; charset=utf-8")

    def _authorised(self, scope: Scope) -> bool:
        if not self._served.api_key or not scope["path"].startswith("/v1"):
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(given, b"Bearer " + self._served.api_key.encode())


async def _read(receive: Receive) -> bytes:
    """Raises ApiError for a large body, RequestAbortedError for a disconnect."""
    parts = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RequestAbortedError
        part = message.get("body", b"")
        size += len(part)
        if size > BODY_BYTES_MAX:
            raise ApiError(413, f"the body has more than {BODY_BYTES_MAX} bytes", kind="Request Entity Too Large")
        parts.append(part)
        if not message.get("more_body"):
            return b"".join(parts)
