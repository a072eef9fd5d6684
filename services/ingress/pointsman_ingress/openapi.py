"""The API as an OpenAPI document, for tools and tests. Describes what the ingress itself checks; engines check more."""

from typing import Any

import msgspec

from pointsman.contracts.overlap import OverlapAnswered
from pointsman_ingress import overlap
from pointsman_ingress.endpoints import BY_PATH, Endpoint

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": ["integer", "null"], "minimum": 1, "maximum": 2**31}
FLAG: Schema = {"type": ["boolean", "null"]}
TOKEN_IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}, "minItems": 1}
TEXT_OR_TEXTS: Schema = {"anyOf": [TEXT, {"type": "array", "items": TEXT, "minItems": 1}]}
TOOLS: Schema = {"type": ["array", "null"], "items": {"type": "object"}}
MESSAGES: Schema = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {
            "role": {"enum": ["system", "user", "assistant"]},
            "content": {
                "anyOf": [
                    TEXT,
                    {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "required": ["type", "text"],
                            "properties": {"type": {"const": "text"}, "text": TEXT},
                        },
                    },
                ]
            },
        },
    },
}

GENERATING: Schema = {
    "stream": FLAG,
    "max_tokens": COUNT,
    "user": {"type": ["string", "null"]},
    "cache_salt": {"type": ["string", "null"], "maxLength": 1024},
    "temperature": {"type": ["number", "null"], "minimum": 0, "maximum": 2},
    "top_p": {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1},
    "seed": {"type": ["integer", "null"], "minimum": 0, "maximum": 2**31},
    "stop": {"anyOf": [{"type": "null"}, *TEXT_OR_TEXTS["anyOf"]]},
}

FIELDS: dict[str, tuple[list[str], Schema]] = {
    "/v1/chat/completions": (
        ["messages"],
        {"messages": MESSAGES, "tools": TOOLS, "max_completion_tokens": COUNT, **GENERATING},
    ),
    "/v1/completions": (
        ["prompt"],
        {
            "prompt": {"anyOf": [*TEXT_OR_TEXTS["anyOf"], TOKEN_IDS, {"type": "array", "items": TOKEN_IDS, "minItems": 1}]},
            **GENERATING,
            "max_tokens": {**COUNT, "minimum": 0, "description": "0 only with `echo`."},
            "echo": FLAG,
        },
    ),
    "/v1/responses": (
        ["input"],
        {"input": {"anyOf": [{**TEXT, "minLength": 1}, MESSAGES]}, "max_output_tokens": COUNT, **GENERATING},
    ),
    "/v1/messages": (["messages", "max_tokens"], {"messages": MESSAGES, "system": TEXT, **GENERATING, "max_tokens": COUNT}),
    "/v1/messages/count_tokens": (["messages"], {"messages": MESSAGES, "system": TEXT}),
    "/v1/embeddings": (["input"], {"input": {"anyOf": [{**TEXT, "minLength": 1}, *TEXT_OR_TEXTS["anyOf"][1:], TOKEN_IDS]}}),
    "/pooling": (["input"], {"input": TEXT_OR_TEXTS}),
    "/classify": (["input"], {"input": TEXT_OR_TEXTS}),
    **{path: (["query", "documents"], {"query": TEXT, "documents": TEXT_OR_TEXTS["anyOf"][1]}) for path in ("/rerank", "/v1/rerank", "/v2/rerank")},
    **{path: (["text_1", "text_2"], {"text_1": TEXT, "text_2": TEXT_OR_TEXTS}) for path in ("/score", "/v1/score")},
    "/tokenize": (["prompt"], {"prompt": TEXT, "add_special_tokens": FLAG}),
    "/detokenize": (["tokens"], {"tokens": TOKEN_IDS}),
}  # fmt: skip
FORM: tuple[list[str], Schema] = (["file"], {"file": {**TEXT, "format": "binary"}, "stream": {"type": "boolean"}})

MODEL_CARD: Schema = {
    "type": "object",
    "required": ["id", "object", "created", "owned_by"],
    "properties": {
        "id": TEXT,
        "object": {"const": "model"},
        "created": {"type": "integer"},
        "owned_by": TEXT,
        "parent": {"type": ["string", "null"]},
        "max_model_len": {"type": "integer"},
    },
}
ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {"message": TEXT, "type": TEXT, "param": {"type": ["string", "null"]}},
        }
    },
}


def openapi_document() -> bytes:
    paths: dict[str, Any] = {path: {"post": _operation(endpoint)} for path, endpoint in BY_PATH.items()}
    listed = {"type": "object", "required": ["data"], "properties": {"data": {"type": "array", "items": MODEL_CARD}}}
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    paths["/health"] = {"get": {"summary": "An empty 200.", "responses": {"200": {"description": "It runs."}}}}
    paths["/v1/models"] = {"get": {"summary": "The models of all pools.", "responses": _responses(listed)}}
    paths["/v1/models/{name}"] = {
        "get": {"summary": "One model.", "parameters": [name], "responses": _responses(MODEL_CARD)}
    }
    paths[overlap.PATH], schemas = _overlap()
    document = {
        "openapi": "3.1.0",
        "info": {
            "title": "Pointsman",
            "version": "1",
            "description": "OpenAI's API and Anthropic's Messages API, in front of many engines. A field that is not "
            "listed here reaches the engine if it is one of vLLM's.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"x-api-key": []}],
    }
    return msgspec.json.encode(document)


def _operation(endpoint: Endpoint) -> Schema:
    form = endpoint.parse is None
    required, fields = FORM if form else FIELDS[endpoint.path]
    body = {"type": "object", "required": required, "properties": {"model": TEXT, **fields}}
    return {
        "summary": f"{endpoint.path}, as vLLM has it.",
        "requestBody": {
            "required": True,
            "content": {"multipart/form-data" if form else "application/json": {"schema": body}},
        },
        "responses": _responses({"type": ["object", "array"]}, streams="stream" in fields),
    }


def _overlap() -> tuple[Schema, Schema]:
    """The path, and the schemas that it names."""
    (body, answer), schemas = msgspec.json.schema_components(
        [overlap.OverlapBody, OverlapAnswered], ref_template="#/components/schemas/{name}"
    )
    post = {
        "summary": "How much of each prompt every instance holds in its KV cache.",
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": _responses(answer),
    }
    return {"servers": [{"url": "/", "description": "The admin port."}], "post": post}, schemas


def _responses(answer: Schema, *, streams: bool = False) -> Schema:
    content: Schema = {"application/json": {"schema": answer}}
    if streams:
        content["text/event-stream"] = {"schema": TEXT}
    refused = {"description": "Refused, with an error object.", "content": {"application/json": {"schema": ERROR}}}
    failed = {"description": "No engine answered, with an error object.", "content": refused["content"]}
    return {"200": {"description": "The answer.", "content": content}, "4XX": refused, "5XX": failed}
