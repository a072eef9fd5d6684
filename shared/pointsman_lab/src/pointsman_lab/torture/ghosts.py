"""After an ingress is killed, its requests must leave the leader's state within seconds."""

from pointsman.contracts.requests import RequestArrived
from pointsman.primitives import RequestId, Seconds
from pointsman.state.workload import Stage
from pointsman_lab.torture.cluster import Cluster

GONE_SECONDS: Seconds = 6.0
LOOK_SECONDS: Seconds = 0.25
UNGRANTED = (Stage.ARRIVED, Stage.PENDING)


class GhostWatch:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def watch(self, ingress: str) -> None:
        """`ingress`: the link name of that process."""
        self._cluster.loop.outside(LOOK_SECONDS, self._look, ingress, 0.0, "")

    def _look(self, ingress: str, well_for: Seconds, leader: str) -> None:
        """`well_for`: seconds since the kill during which the same leader was reachable."""
        cluster = self._cluster
        leading = [
            s for s in cluster.schedulers if s.run is not None and s.service.leading and s.link.open and not s.paused
        ]
        name = f"{leading[0].link.name} in term {leading[0].service.state.term}" if len(leading) == 1 else ""
        runs = (p.run.link for p in cluster.ingresses if p.run is not None and p.run.link is not None)
        ends = any(link.name == ingress for link in runs)  # in order, and serves meanwhile
        if not name or name != leader or ends:
            well_for = 0.0
        if well_for < GONE_SECONDS:
            cluster.loop.outside(LOOK_SECONDS, self._look, ingress, well_for + LOOK_SECONDS, name)
            return
        of_it: set[RequestId] = {
            s.event.request
            for s in cluster.network.history
            if isinstance(s.event, RequestArrived) and s.event.ingress == ingress
        }
        left = [
            request.id
            for request in leading[0].service.state.workload.requests.values()
            if request.id in of_it and request.stage not in UNGRANTED
        ]
        if left:
            cluster.violation(
                f"{well_for:g} s after {ingress} was killed {len(left)} of its requests are at engines: {left[:5]}"
            )
