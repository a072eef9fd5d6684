"""A running fleet: whether a scheduler answers, and by its answer whether the log takes writes now, whether any instance is
there, and whether checkpoints are taken."""

from collections.abc import Iterator

from typing_extensions import override

from pointsman.contracts.commands import FleetDescribed
from pointsman.state.state import PoolSettings, State
from pointsman_cli.command_client import STALLED_ADVICE, stalled_log
from pointsman_cli.doctor.examination import Examiner
from pointsman_cli.doctor.findings import Finding


class LiveFleet(Examiner):
    area = "log"

    def __init__(self, settings: PoolSettings, fleet: FleetDescribed | None, unanswered: str) -> None:
        super().__init__(settings)
        self._fleet = fleet
        self._unanswered = unanswered

    @override
    def findings(self, state: State) -> Iterator[Finding]:
        if self._fleet is None:
            yield self.ongoing(
                "no scheduler answers",
                [self._unanswered],
                "Ingresses place requests on the least loaded engine meanwhile, without limits and SLOs. Start a scheduler; "
                "the /readyz of one that runs says why it does not lead.",
            )
            return
        if stalled := stalled_log(self._fleet):
            yield self.ongoing(stalled, ["what follows is only what was written before"], STALLED_ADVICE)
        if not self._fleet.instances and state.scaling.wanted != 0:
            yield self.ongoing(
                "no instance is in the fleet",
                [],
                "Start engines and their workers (pointsman up, pointsman-worker); requests wait up to --hold-seconds and "
                "then get 503.",
            )
        if overdue := self._fleet.checkpoints_overdue:
            yield self.warning(
                "no checkpoints are taken",
                [overdue],
                "Requests do not notice, but a scheduler that starts knows nothing of what the log no longer has: quotas, "
                "drains, learned speeds. The scheduler's log says why: checkpointer_ended (-9: it lacked memory), "
                "checkpoint_not_saved, nats_forbidden.",
            )
