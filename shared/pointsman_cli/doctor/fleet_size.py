"""The size of the pool: fewer engines ready than the scaler wants, at the end of the log. Not of a manual policy before
somebody asked for a size: with a static provider that is what was there, and nobody's wish."""

from collections.abc import Iterator

from typing_extensions import override

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import ScaleDecided
from pointsman.contracts.fleet import FleetEvent
from pointsman.policies.scaling.decider import in_service
from pointsman.policies.scaling.manual import Manual
from pointsman.policies.scaling.roles import drained_by_operators
from pointsman.primitives import EngineSeconds
from pointsman.state.fleet import Status
from pointsman.state.state import PoolSettings, State
from pointsman_cli.doctor.examination import Examiner
from pointsman_cli.doctor.findings import Finding
from pointsman_cli.options import as_given

SHORT_WALL_SECONDS_MIN = 60.0
"""An engine may take so long to start."""


class FleetSize(Examiner):
    area = "fleet"

    def __init__(self, settings: PoolSettings) -> None:
        super().__init__(settings)
        self._short_since: EngineSeconds | None = None

    @override
    def begin(self, state: State, *, blind: bool) -> None:
        self._look(state)

    @override
    def after(self, event: LogEvent, state: State) -> None:
        if isinstance(event, FleetEvent | ScaleDecided):
            self._look(state)

    def _look(self, state: State) -> None:
        if len(in_service(state)) >= _wanted(state):
            self._short_since = None
        elif self._short_since is None:
            self._short_since = self.time.now

    @override
    def findings(self, state: State) -> Iterator[Finding]:
        if self._short_since is None:
            return
        seconds, wanted, ready = self.wall(self.time.now - self._short_since), _wanted(state), len(in_service(state))
        if seconds < SHORT_WALL_SECONDS_MIN:
            return
        yield self.warning(
            f"fewer engines ready than wanted for {seconds:.0f} s: {ready} of {wanted}",
            list(_reasons(state, wanted)),
            f"`pointsman scale{as_given()}` shows what the scaler is in trouble with; its log has `instance_ended` for each engine "
            "that ended by itself.",
        )


def _wanted(state: State) -> int:
    decided = state.scaling.decided
    if decided is None or (decided.policy == Manual.name and not decided.by):
        return 0
    return decided.wanted


def _reasons(state: State, wanted: int) -> Iterator[str]:
    """Drained by operators: replaced, so that they are not missing."""
    drained = {instance.id for instance in drained_by_operators(state.fleet)}
    there = [instance for instance in state.fleet.instances if instance.id not in drained]
    if len(there) < wanted:
        yield f"{wanted - len(there)} not in the fleet: not started, ended, or without a worker that joined"
    for instance in there:
        if instance.status is not Status.READY:
            yield f"{instance.id}: {instance.status}"
        elif not instance.answered:
            yield f"{instance.id}: has not answered yet"
    if state.scaling.decided is not None:
        yield f"{wanted} were decided because: {state.scaling.decided.reason}"
