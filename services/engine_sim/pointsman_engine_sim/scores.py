"""`/rerank` and `/score` in vLLM's format. A document's score is the share of the query's words in it."""

from typing import Any

import msgspec

from pointsman.primitives import Tokens
from pointsman_engine_sim.answers import Heading, encode


class RerankBody(msgspec.Struct, frozen=True, kw_only=True):
    query: str
    documents: list[str]
    model: str | None = None
    cache_salt: str | None = None
    top_n: int = 0


class ScoreBody(msgspec.Struct, frozen=True, kw_only=True):
    text_1: str
    text_2: str | list[str]
    model: str | None = None
    cache_salt: str | None = None

    @property
    def documents(self) -> list[str]:
        return [self.text_2] if isinstance(self.text_2, str) else self.text_2


def scores(query: str, documents: list[str]) -> list[float]:
    words = set(query.lower().split())
    return [len(words & set(document.lower().split())) / max(1, len(words)) for document in documents]


def whole_rerank(heading: Heading, body: RerankBody, tokens: Tokens) -> bytes:
    ranked = sorted(enumerate(scores(body.query, body.documents)), key=lambda pair: -pair[1])
    results = [
        {"index": index, "document": {"text": body.documents[index]}, "relevance_score": score}
        for index, score in ranked[: body.top_n or None]
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return encode({"id": heading.id, "model": heading.model, "usage": usage, "results": results})


def whole_scores(heading: Heading, body: ScoreBody, tokens: Tokens) -> bytes:
    data: list[dict[str, Any]] = [
        {"index": index, "object": "score", "score": score}
        for index, score in enumerate(scores(body.text_1, body.documents))
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
    answer = {"id": heading.id, "object": "list", "created": heading.created, "model": heading.model}
    return encode({**answer, "data": data, "usage": usage})
