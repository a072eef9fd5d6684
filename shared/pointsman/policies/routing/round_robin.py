"""Each instance in turn. Bias: counts requests, not work. Limit: a join shifts all turns."""

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from pointsman.contracts.decisions import Settings
from pointsman.policies.pool_view import PoolView
from pointsman.policies.routing.base import Choice, RoutingPolicy, candidates_of
from pointsman.state.trackers.base import Tracker
from pointsman.state.trackers.client_turns import ClientTurns


@dataclass(frozen=True)
class RoundRobin(RoutingPolicy):
    """`per_client`: each client's requests take turns of their own, so that every instance gets its share of each. A
    baseline of Cao et al. (2025), with `vtc`."""

    name: ClassVar[str] = "round_robin"
    rule: ClassVar[str] = "takes the engines in turn and looks at no queue"
    absent: ClassVar[Settings] = {"per_client": False}

    per_client: bool = False

    @override
    def trackers(self) -> tuple[Tracker, ...]:
        return (ClientTurns(),) if self.per_client else ()

    @override
    def choose(self, view: PoolView) -> Choice:
        candidates = candidates_of(view)
        turn = view.tracker(ClientTurns).placements(view.request.tenant) if self.per_client else view.placements
        return Choice(candidates[turn % len(candidates)], "its turn", candidates)
