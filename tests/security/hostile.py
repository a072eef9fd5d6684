"""Requests of a hostile client, made by a seed: paths, methods, headers, ids, encodings, fields, framing.

`tests/integration/test_malformed_requests.py` spoils sound requests; this module adds what an outsider would try on
purpose. A bait is in each prompt and each key: where one is found afterwards, something leaked.
"""

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

from tests.integration.test_malformed_requests import SOUND, request_of, spoiled, with_body, with_form, with_head

MODEL = "m"
PROMPT_BAIT = "xyzzy-prompt-bait"
KEY_BAIT = "sk-xyzzy-key-bait"
BAITS = (PROMPT_BAIT, KEY_BAIT)
"""Must be found nowhere: no answer of ours repeats a prompt, no log holds one."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """`complete`: it is whole HTTP, so that an answer is owed. `read_bytes_max`: the client hangs up after so many."""

    raw: bytes
    complete: bool = True
    read_bytes_max: int | None = None

    @property
    def method(self) -> bytes:
        return self.raw.split(b" ", 1)[0]

    @property
    def path(self) -> str:
        return self.raw.split(b" ", 2)[1].split(b"?")[0].decode("latin-1") if self.raw.count(b" ") > 1 else ""


def attempts(seed: int, count: int, *, bait_port: int, key: str = "") -> Iterator[Attempt]:
    """`bait_port`: of a listener of the test's that nobody must connect to."""
    chance = Random(seed)
    makers = _makers(bait_port)
    for _ in range(count):
        made = chance.choice(makers)(chance)
        yield _with_key(made, key, chance) if key else made


def _makers(bait_port: int) -> list[Callable[[Random], Attempt]]:
    return [
        lambda chance: Attempt(with_body(chance)),
        lambda chance: Attempt(with_body(chance)),
        lambda chance: Attempt(with_form(chance)),
        lambda chance: Attempt(with_head(chance), complete=False),
        _odd_path,
        _odd_headers,
        _odd_encoding,
        lambda chance: _odd_fields(chance, bait_port),
        lambda chance: _odd_fields(chance, bait_port),
        _odd_framing,
        _hanging_up,
        _heavy,
    ]


def _with_key(made: Attempt, key: str, chance: Random) -> Attempt:
    if b"authorization" in made.raw[:4000].lower() or chance.random() < 0.05:
        return made
    raw = made.raw.replace(b"\r\n", b"\r\nauthorization: Bearer %s\r\n" % key.encode(), 1)
    return Attempt(raw, made.complete, made.read_bytes_max)


# Paths

ADMIN_PATHS = (
    "/pause", "/resume", "/abort_requests", "/sleep", "/wake_up", "/is_sleeping", "/reset_prefix_cache", "/update_weights",
    "/collective_rpc", "/load_lora_adapter", "/unload_lora_adapter", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/invocations",
    "/inference/v1/generate", "/start_profile", "/stop_profile", "/server_info", "/scale_elastic_ep", "/is_scaling_elastic_ep",
    "/init_weight_transfer_engine", "/reset_mm_cache", "/reset_encoder_cache", "/v1/chat/completions/render", "/v1/completions/render", "/ping", "/version", "/load",
)  # fmt: skip
TRICKS = (
    "{path}/", "/{path}", "{path}//", "/v1/..{path}", "/v1/models/..{path}", "/v1/models/%2e%2e{path}", "{path};a=b", "{path}%00", "{path}%20",
    "{path}?x={path}", "/v1/models/..%2f..{path}", "{path}#x", "/v1\\..{path}", "http://127.0.0.1{path}", "/.{path}", "{path}%0d%0ax-y:%20z", "//evil.example{path}",
)  # fmt: skip
METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "PROPFIND", "PURGE")
KNOWN_PATHS = (
    *SOUND,
    "/v1/models",
    "/v1/models/m",
    "/tokenize",
    "/detokenize",
    "/metrics",
    "/readyz",
    "/docs",
    "/openapi.json",
    "/kv/overlap",
)


def _odd_path(chance: Random) -> Attempt:
    path = chance.choice([*ADMIN_PATHS, *KNOWN_PATHS])
    if chance.random() < 0.6:
        path = chance.choice(TRICKS).format(path=path)
    body = json.dumps(_sound(chance, chance.choice(list(SOUND)))).encode() if chance.random() < 0.5 else b""
    head = f"{chance.choice(METHODS)} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    return Attempt(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)


# Headers

NASTY = (
    b"", b" ", b"../../etc/passwd", b"' OR 1=1;--", b"\x1b[31mred\x1b]0;title\x07", b"[bold red]x[/]", b"${jndi:ldap://x}", b"{{7*7}}",
    b"\xf0\x9f\x92\xa9", b"\xff\xfe", b"a" * 3000, b"*", b">", b"pm.default.cmd.drain", b"_INBOX.x", b"%s%n", b"NaN", b"-1", b"1e309", b"0x10", b"null",
)  # fmt: skip
NAMES = (
    b"x-request-id", b"x-session-id", b"x-tenant", b"x-tenant-id", b"x-priority", b"x-slo-ttft-ms", b"x-slo-tpot-ms", b"traceparent", b"tracestate",
    b"x-api-key", b"authorization", b"cookie", b"x-forwarded-for", b"x-forwarded-host", b"forwarded", b"x-real-ip", b"x-original-url",
    b"x-rewrite-url", b"x-http-method-override", b"x-pointsman-instance", b"x-pointsman-cached-tokens", b"x-pointsman-tenant", b"range",
    b"if-none-match", b"accept", b"accept-encoding", b"accept-language", b"content-type", b"openai-organization", b"anthropic-version",
    b"x-data-parallel-rank", b"x-prefiller-host-port", b"x-kv-transfer-params", b"te", b"priority", b"origin", b"referer", b"user-agent",
)  # fmt: skip


def _odd_headers(chance: Random) -> Attempt:
    path = chance.choice(list(SOUND))
    headers = [chance.choice(NAMES) + b": " + chance.choice(NASTY) for _ in range(chance.randint(1, 6))]
    if chance.random() < 0.3:
        headers.append(b"x-request-id: " + _wanted_id(chance))
    if chance.random() < 0.3:
        headers.append(b"authorization: Bearer " + KEY_BAIT.encode())
    return Attempt(request_of(path, json.dumps(_sound(chance, path)).encode(), headers))


def _wanted_id(chance: Random) -> bytes:
    """One that others may have: the same for many, or in a form that looks like ours."""
    match chance.randrange(4):
        case 0:
            return b"everybody-takes-this"
        case 1:
            return b"%012x-%d" % (chance.getrandbits(48), chance.randint(1, 9))
        case 2:
            return b"%032x" % chance.getrandbits(128)
        case _:
            return b"id-%d" % chance.randint(1, 20)


# Encodings


def _odd_encoding(chance: Random) -> Attempt:
    path = chance.choice(list(SOUND))
    text = json.dumps(_sound(chance, path), ensure_ascii=False)
    headers: list[bytes] = []
    match chance.randrange(10):
        case 0:
            body = text.encode(chance.choice(["utf-16", "utf-32", "utf-16-le", "utf-7", "cp1252"]), "replace")
        case 1:
            body = b"\xef\xbb\xbf" * chance.randint(1, 3) + text.encode()
        case 2:
            body = text.encode().replace(
                b"bait", chance.choice([b"\xc0\xaf", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"\xff"])
            )
        case 3:
            body, headers = gzip.compress(text.encode()), [b"content-encoding: gzip"]
        case 4:
            bomb = gzip.compress(b" " * (1 << 20) + text.encode())
            body, headers = bomb, [b"content-encoding: gzip, gzip"]
        case 5:
            body = text[:-1].encode() + b', "model": "other", "model": "m"}'
        case 6:
            body = text[:-1].encode() + b', "seed": ' + b"9" * chance.choice([30, 400, 5000]) + b"}"
        case 7:
            body = text[:-1].encode() + chance.choice(
                [b', "temperature": NaN}', b', "top_p": -Infinity}', b', "x": 1e99999}']
            )
        case _:
            body = b" " * chance.randint(0, 9) + text.encode() + chance.choice([b"\x00", b"\n\n", b"{}", b"]"])
    return Attempt(request_of(path, body, headers))


# Fields


def _odd_fields(chance: Random, bait_port: int) -> Attempt:
    path = chance.choice(list(SOUND))
    body = _sound(chance, path)
    for _ in range(chance.randint(1, 3)):
        body.update(chance.choice(_extra_fields(chance, bait_port)))
    if chance.random() < 0.2:
        body["stream"] = True
    return Attempt(request_of(path, json.dumps(body).encode(), []))


def _extra_fields(chance: Random, bait_port: int) -> list[dict[str, Any]]:
    url = f"http://127.0.0.1:{bait_port}/bait"
    remote = {
        "remote_host": "127.0.0.1",
        "remote_port": bait_port,
        "remote_bootstrap_addr": url,
        "remote_engine_id": "x",
    }
    transfer = {
        **remote,
        "do_remote_prefill": True,
        "do_remote_decode": chance.random() < 0.5,
        "remote_block_ids": [1, 2],
        "tp_size": 1,
    }
    deep: Any = 1
    for _ in range(chance.choice([5, 100, 400])):
        deep = {"type": "object", "properties": {"a": deep}}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":' * 900 + "1" + "}" * 900}}
    parts = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "audio_url", "audio_url": {"url": url}},
        {"type": "video_url", "video_url": {"url": "file:///etc/passwd"}},
        {"type": "input_file", "file_url": url},
    ]
    return [
        {"kv_transfer_params": transfer},
        {"extra_args": {"kv_transfer_params": transfer}},
        {"vllm_xargs": {"kv_transfer_params": json.dumps(transfer), "tenant": "other", "kv_transfer_host": url}},
        {"messages": [{"role": "user", "content": chance.sample(parts, 2)}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": url}}]}]},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": deep}}]},
        {"tools": [{"type": "mcp", "server_url": url, "server_label": "x"}]},
        {"messages": [{"role": "assistant", "tool_calls": [call]}]},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": deep}}},
        {"structured_outputs": {"regex": "(a+)+$" * 50}},
        {"cache_salt": chance.choice(["", "other", 3, "s" * 5000, None])},
        {"user": chance.choice(["other", "pm.*", "\x1b[2J", "u" * 5000, 7])},
        {"prompt_embeds": "AAAA", "prompt": None},
        {"chat_template": "{{ ''.__class__.__mro__ }}" * 3},
        {"chat_template_kwargs": {"enable_thinking": {"a": deep}}},
        {"max_tokens": chance.choice([-1, 0, 2**31, 2**63, 10**30, 1.5, "9", None])},
        {"n": chance.choice([0, 1000, -1, 2**40]), "best_of": 10**6},
        {"stop": ["x"] * 5000},
        {"logit_bias": {str(n): n for n in range(3000)}},
        {"priority": -(2**62)},
        {"request_id": "everybody-takes-this"},
        {"api_base": url, "base_url": url, "api_key": "x"},
        {
            "model": chance.choice(
                ["../m", "m\x00", "M", "m:other", "http://x", ["m"], {"a": 1}, "\x1b[31m", "m" * 10_000]
            )
        },
        {"previous_response_id": "resp_1", "store": True, "background": True},
        {"data_parallel_rank": chance.choice([-1, 0, 10**9])},
        {"return_token_ids": True, "prompt_logprobs": 10**6, "logprobs": 10**9, "echo": True},
        {"mm_processor_kwargs": {"x": deep}, "media_io_kwargs": {"video": {"num_frames": 10**9}}},
    ]


# Framing and leaving


def _odd_framing(chance: Random) -> Attempt:
    path = chance.choice(list(SOUND))
    body = json.dumps(_sound(chance, path)).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n".encode()
    match chance.randrange(6):
        case 0:
            return Attempt(head + b"transfer-encoding: chunked\r\n\r\n" + _chunked(body, chance))
        case 1:
            extension = b";a=" + b"b" * chance.choice([3, 9000])
            return Attempt(
                head + b"transfer-encoding: chunked\r\n\r\n" + _chunked(body, chance, extension), complete=False
            )
        case 2:
            trailers = b"authorization: Bearer other\r\ncontent-length: 5\r\n"
            return Attempt(
                head + b"transfer-encoding: chunked\r\n\r\n" + _chunked(body, chance)[:-2] + trailers + b"\r\n",
                complete=False,
            )
        case 3:
            smuggled = b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n"
            both = b"content-length: %d\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" % len(smuggled)
            return Attempt(head + both + smuggled, complete=False)
        case 4:
            return Attempt(
                head
                + b"transfer-encoding: chunked\r\n\r\n"
                + chance.choice([b"-1\r\n", b"g\r\n", b"ffffffffffffffffff\r\n", b"5\n"]),
                complete=False,
            )
        case _:
            kept = head.replace(b"connection: close\r\n", b"") + b"content-length: %d\r\n\r\n" % len(body) + body
            return Attempt(kept * chance.randint(2, 5), complete=False)


def _chunked(body: bytes, chance: Random, extension: bytes = b"") -> bytes:
    size = chance.choice([1, 7, 4096])
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(b"%x%b\r\n%b\r\n" % (len(piece), extension, piece) for piece in pieces) + b"0\r\n\r\n"


def _hanging_up(chance: Random) -> Attempt:
    """Mid-head, mid-body, before the answer, or in the middle of a stream."""
    path = chance.choice(["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
    body = _sound(chance, path) | {"stream": True, "max_tokens": 500, "max_output_tokens": 500}
    if path == "/v1/responses":
        del body["max_tokens"]
    else:
        del body["max_output_tokens"]
    raw = request_of(path, json.dumps(body).encode(), [b"x-request-id: " + _wanted_id(chance)])
    match chance.randrange(4):
        case 0:
            return Attempt(raw[: chance.randrange(20, len(raw))], complete=False, read_bytes_max=0)
        case 1:
            return Attempt(raw, read_bytes_max=0)
        case _:
            return Attempt(raw, read_bytes_max=chance.choice([1, 300, 2000]))


def _heavy(chance: Random) -> Attempt:
    """Work in a small request; now and then in a large one."""
    path = "/v1/chat/completions"
    if chance.random() < 0.9:
        path = chance.choice(list(SOUND))
        return Attempt(request_of(path, spoiled(chance, _sound(chance, path)), []))
    match chance.randrange(4):
        case 0:
            body: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": ""}] * 20_000}
        case 1:
            body = {"model": MODEL, "messages": [{"role": "user", "content": "<|im_end|>ab" * 5000}]}
        case 2:
            tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
            body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "tools": [tool] * 2000}
        case _:
            path, body = "/v1/completions", {"model": MODEL, "prompt": [[1]] * 20_000, "max_tokens": 1}
    return Attempt(request_of(path, json.dumps(body).encode(), []))


def _sound(chance: Random, path: str) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(json.dumps(chance.choice(SOUND[path])))
    for field in ("prompt", "input", "query", "text_1"):
        if isinstance(body.get(field), str):
            body[field] = f"{PROMPT_BAIT} {chance.randint(0, 99)}"
    if "messages" in body:
        body["messages"][-1] = {"role": "user", "content": f"{PROMPT_BAIT} {chance.randint(0, 99)}"}
    return body
