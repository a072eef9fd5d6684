"""What rebalancing did in one run, from the fleet's log: moved requests, and their hits as placed, as moved and as found."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from pointsman.contracts.decisions import MigrationRefused, RequestMigrated, RequestPlaced
from pointsman.contracts.requests import RequestArrived, RequestFinished
from pointsman.ports import LogEntry
from pointsman.primitives import RequestId, Tokens


class Moves(msgspec.Struct, kw_only=True):
    """Rebalancing in one run. Hit rates are of the requests that moved; null where none did."""

    moved: int
    """Requests that moved at least once."""
    moves: int
    refused: dict[str, int]
    """Moves that were planned and not made, by reason."""
    hit_rate_placed: float | None
    """Predicted where they were placed first."""
    hit_rate_moved: float | None
    """Predicted where they were moved to last."""
    hit_rate_found: float | None
    """What the engines found, of those that were answered."""


@dataclass(slots=True)
class _Request:
    prompt: Tokens
    placed: Tokens = 0
    """Cached tokens predicted where it was placed first."""
    moved: Tokens = 0
    moves: int = 0
    found: Tokens | None = None


def moves_in(entries: Iterable[LogEntry]) -> Moves:
    """The rebalancing that a whole log tells of."""
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
