"""The size that the pool is to have, whether it has it, and what people have to do for it. In: the folded log, the
provider's instances. Where nobody acts on a size, the present one is wanted."""

from dataclasses import dataclass

from pointsman.policies.scaling.decider import Decider
from pointsman.policies.scaling.manual import Manual
from pointsman.policies.scaling.roles import NOT_SIZED, RoleSizes, role_switches, staying
from pointsman.runtime.log_follower import LogFollower
from pointsman.state.state import State
from pointsman_scaler.desired_page import DesiredPage
from pointsman_scaler.step_runner import StepRunner
from pointsman_scaler.trouble import Trouble


@dataclass(frozen=True, slots=True)
class WantedSize:
    follower: LogFollower
    decider: Decider
    runner: StepRunner
    page: DesiredPage
    deciding: Trouble

    @property
    def state(self) -> State:
        return self.follower.state

    @property
    def total(self) -> int | None:
        """As decided, or as many as there are."""
        return len(staying(self.state.fleet)) if self._is_any_wanted else self.state.scaling.wanted

    @property
    def reason(self) -> str:
        if self._is_any_wanted:
            return "nobody asked for a size: all that are not drained"
        decided = self.state.scaling.decided
        return decided.reason if decided else ""

    @property
    def roles(self) -> RoleSizes:
        decided = self.state.scaling.decided
        return RoleSizes(decided.prefill, decided.decode) if decided and decided.wanted else NOT_SIZED

    @property
    def is_applied(self) -> bool:
        """Whether the pool has this size now, as of the last look; before the first one, whether it has had it. The log
        says only that it has had it: instances may have ended since."""
        total, status = self.total, self.runner.status
        if status is None or total is None:
            return self.state.scaling.is_applied
        switches = status.switching or role_switches(self.state, self.roles, status.overdue)
        return status.settled(total) and not switches

    @property
    def trouble(self) -> str:
        return self.runner.error or self.deciding.error

    def by_hand(self, wanted: int) -> str:
        """What people have to do for this size, or ""."""
        present = len(staying(self.state.fleet))
        if present == wanted or not self._nobody_acts:
            return ""
        verb, count = ("start", wanted - present) if wanted > present else ("stop", present - wanted)
        return (
            f"the provider '{self.runner.provider.name}' starts and stops no engines, and no autoscaler reads GET /desired: "
            f"{present} are there; {verb} {count} by hand"
        )

    @property
    def _is_any_wanted(self) -> bool:
        """Nobody asked for a size and nobody acts on one."""
        decided = self.state.scaling.decided
        unasked = decided is not None and self.decider.policy.name == Manual.name and not decided.by
        return unasked and self._nobody_acts

    @property
    def _nobody_acts(self) -> bool:
        return not self.runner.provider.manages and not self.page.is_read
