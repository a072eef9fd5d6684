"""Placements of each client, for turns of its own. The client placed longest ago is dropped first."""

from collections import OrderedDict

from typing_extensions import override

from pointsman.primitives import EngineSeconds, Tenant
from pointsman.state.trackers.base import Tracker
from pointsman.state.workload import Request

CLIENTS_MAX = 10_000


class ClientTurns(Tracker):
    def __init__(self) -> None:
        self._placements: OrderedDict[Tenant, int] = OrderedDict()

    def placements(self, client: Tenant) -> int:
        return self._placements.get(client, 0)

    @override
    def placed(self, request: Request, at: EngineSeconds) -> None:
        self._placements[request.tenant] = self.placements(request.tenant) + 1
        self._placements.move_to_end(request.tenant)
        if len(self._placements) > CLIENTS_MAX:
            self._placements.popitem(last=False)
