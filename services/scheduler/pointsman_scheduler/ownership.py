"""Tracks which requests still have an ingress: it names them about once a second (`cmd.follow`). Wall time."""

from collections.abc import Iterable

from pointsman.contracts.commands import FollowRequests
from pointsman.primitives import RequestId, WallSeconds
from pointsman.state.workload import Request


class Ownership:
    def __init__(self) -> None:
        self._named_at: dict[RequestId, WallSeconds] = {}

    def named(self, request: RequestId, now: WallSeconds) -> None:
        self._named_at[request] = now

    def followed(self, command: FollowRequests, now: WallSeconds) -> None:
        for sent in command.requests:
            self._named_at[sent.request] = now
        for request in command.waiting:
            self._named_at[request] = now

    def orphans(
        self, requests: Iterable[Request], now: WallSeconds, *, since: WallSeconds, silence_max: WallSeconds
    ) -> list[Request]:
        """Those of `requests` that nobody has named for `silence_max`, counted from `since` at the earliest. `requests`: all
        that there are; what is known of others is forgotten."""
        known: dict[RequestId, WallSeconds] = {}
        silent = []
        for request in requests:
            named_at = self._named_at.get(request.id)
            if named_at is not None:
                known[request.id] = named_at
            if now - max(named_at or since, since) > silence_max:
                silent.append(request)
        self._named_at = known
        return silent
