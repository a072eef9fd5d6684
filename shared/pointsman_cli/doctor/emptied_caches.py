"""Caches that lost blocks without an event: an engine finds cached less than the log says it holds. Two answers are
enough; one may be a race. The index is compared when the answer ends, without what was removed since the placement."""

from collections.abc import Iterator
from dataclasses import dataclass

from typing_extensions import override

from pointsman.contracts.requests import RequestFinished, cached_of_keys
from pointsman.primitives import EngineSeconds, InstanceId, RequestId, Tokens
from pointsman.state.state import PoolSettings, State
from pointsman.state.workload import Request
from pointsman_cli.doctor.examination import Examiner
from pointsman_cli.doctor.findings import Finding
from pointsman_cli.doctor.request_ends import Ended
from pointsman_cli.explain.causes import Cause
from pointsman_cli.formatting import plural
from pointsman_cli.terminal import wall_span

ANSWERS_MIN = 2
NOTHING_LEFT_SHARE = 0.1


@dataclass(slots=True)
class _Loss:
    first_at: EngineSeconds
    last_at: EngineSeconds
    example: RequestId
    answers: int = 0
    promised: Tokens = 0
    delivered: Tokens = 0


class EmptiedCaches(Examiner):
    area = "caches"

    def __init__(self, settings: PoolSettings) -> None:
        super().__init__(settings)
        self._losses: dict[InstanceId, _Loss] = {}

    @override
    def ended(self, end: Ended, state: State) -> None:
        event, request = end.event, end.request
        if not isinstance(event, RequestFinished) or request is None or not _is_comparable(request, event, state):
            return
        claimed = _claimed(request, event, state)
        if claimed - event.cached_tokens <= self.settings.block_tokens:
            return
        loss = self._losses.setdefault(event.instance, _Loss(request.granted_at, event.at, event.request))
        loss.last_at = event.at
        loss.answers += 1
        loss.promised += claimed
        loss.delivered += event.cached_tokens

    @override
    def findings(self, state: State) -> Iterator[Finding]:
        for name, loss in sorted(self._losses.items()):
            if loss.answers < ANSWERS_MIN:
                continue
            emptied = loss.delivered < NOTHING_LEFT_SHARE * loss.promised
            how = "was emptied" if emptied else "lost blocks"
            yield self.warning(
                f"the cache of {name} {how} behind its back: in {plural(loss.answers, 'answer')} it found {loss.delivered:,} of "
                f"{loss.promised:,} tokens that its events say it holds",
                [f"{wall_span(loss.first_at, loss.last_at, self.settings.speed)}, for example request {loss.example}"],
                "Its requests are slow because they compute again what should be cached; the engine is not slow. Something resets "
                "its cache (/reset_prefix_cache, a sleep, weights loaded anew), or its removals are lost: look into the "
                "engine's log, and give its events a replay endpoint. Restarting its worker makes what it holds unknown, and so right.",
                cause=Cause.STALE_INDEX,
            )


def _is_comparable(request: Request, event: RequestFinished, state: State) -> bool:
    instance = state.fleet.get(event.instance)
    return (
        instance is not None
        and instance.epoch == request.epoch
        and instance.relied_on
        and not instance.doubt
        and event.instance == request.instance
        and request.exact
        and not request.rebound_from
        and not request.prefilled_by
        and cached_of_keys(event, request.answers) >= 0
    )


def _claimed(request: Request, event: RequestFinished, state: State) -> Tokens:
    """Tokens that the index had of its prompt when it was placed, and has still."""
    name, keys = event.instance, request.keys
    depth = min(request.held_blocks, state.index.depth(name, keys))
    delivered = min(event.cached_tokens // state.settings.block_tokens, len(keys))
    if delivered < depth and state.contradictions.explained(name, keys[delivered], request.placed_as_of):
        return 0
    return state.latency.cached_tokens(state.fleet[name], depth, request.prompt_tokens)
