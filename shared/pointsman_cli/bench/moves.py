"""Rebalancing of one run, from the fleet's log: moved requests and their hit rates."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from pointsman.contracts.decisions import MigrationRefused, RequestMigrated, RequestPlaced
from pointsman.contracts.requests import RequestArrived, RequestFinished
from pointsman.ports import LogEntry
from pointsman.primitives import RequestId, Tokens


class Moves(msgspec.Struct, kw_only=True):
    moved: int
    moves: int
    refused: dict[str, int]
    hit_rate_placed: float | None
    hit_rate_moved: float | None
    hit_rate_found: float | None


@dataclass(slots=True)
class _Request:
    prompt: Tokens
    placed: Tokens = 0
    moved: Tokens = 0
    moves: int = 0
    found: Tokens | None = None


def moves_in(entries: Iterable[LogEntry]) -> Moves:
    requests: dict[RequestId, _Request] = {}
    refused: Counter[str] = Counter()
    for entry in entries:
        event = entry.event
        if isinstance(event, RequestArrived):
            requests.setdefault(event.request, _Request(event.prompt_tokens))
        elif isinstance(event, MigrationRefused):
            refused[event.reason] += 1
        elif isinstance(event, RequestPlaced | RequestMigrated | RequestFinished):
            known = requests.get(event.request)
            if known is not None:
                _follow(known, event)
    moved = [request for request in requests.values() if request.moves]
    answered = [request for request in moved if request.found is not None]
    return Moves(
        moved=len(moved),
        moves=sum(request.moves for request in moved),
        refused=dict(refused.most_common()),
        hit_rate_placed=_share(sum(r.placed for r in moved), moved),
        hit_rate_moved=_share(sum(r.moved for r in moved), moved),
        hit_rate_found=_share(sum(r.found or 0 for r in answered), answered),
    )


def _follow(request: _Request, event: RequestPlaced | RequestMigrated | RequestFinished) -> None:
    match event:
        case RequestPlaced():
            if not request.moves:
                request.placed = request.prompt - event.uncached_tokens
        case RequestMigrated():
            request.moved = request.prompt - event.uncached_tokens
            request.moves += bool(event.plan)
        case RequestFinished():
            request.found = event.cached_tokens if event.cached_tokens >= 0 else None


def _share(tokens: Tokens, requests: list[_Request]) -> float | None:
    prompt = sum(request.prompt for request in requests)
    return tokens / prompt if prompt else None
