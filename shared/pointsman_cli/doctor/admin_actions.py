"""Admin actions: who drained, scaled, changed keys or limits. NATS attests the names (`by`), if it has users."""

from collections import Counter
from collections.abc import Iterator

from typing_extensions import override

from pointsman.contracts.access import ApiKeyChanged
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import ScaleDecided
from pointsman.contracts.fleet import InstanceDraining, InstanceUndrained
from pointsman.contracts.tenants import TenantPoliciesSet
from pointsman.primitives import EngineSeconds
from pointsman.state.state import PoolSettings, State
from pointsman_cli.doctor.examination import Examiner
from pointsman_cli.doctor.findings import Finding
from pointsman_cli.formatting import plural
from pointsman_cli.policy_changes import changes
from pointsman_cli.terminal import wall_time

SHOWN_MAX = 30
ACTORS_MAX = 1_000
NOBODY = "somebody without a name"
UNATTENDED = ("", "scaler")


class AdminActions(Examiner):
    area = "admin"

    def __init__(self, settings: PoolSettings) -> None:
        super().__init__(settings)
        self._actors: Counter[str] = Counter()
        self._newest: list[str] = []

    @override
    def before(self, event: LogEvent, state: State) -> None:
        if isinstance(event, TenantPoliciesSet):
            self._note(event.at, event.by, f"set policies: {changes(state.tenants.policies, event.policies)}")

    @override
    def after(self, event: LogEvent, state: State) -> None:
        match event:
            case InstanceDraining() if event.by not in UNATTENDED:
                self._note(event.at, event.by, f"drained {event.instance}")
            case InstanceUndrained() if event.by not in UNATTENDED:
                self._note(event.at, event.by, f"took {event.instance} back into service")
            case ScaleDecided() if event.by not in UNATTENDED:
                self._note(event.at, event.by, f"set {event.wanted} instances")
            case ApiKeyChanged():
                self._note(event.at, event.by, f"{event.action}: key {event.key} of {event.tenant or 'no tenant'}")
            case _:
                pass

    @override
    def findings(self, state: State) -> Iterator[Finding]:
        if self._actors:
            by = ", ".join(f"{name} ({count:,})" for name, count in self._actors.most_common(SHOWN_MAX))
            evidence = self._newest[-SHOWN_MAX:]
            yield self.note(f"{plural(self._actors.total(), 'admin action')} by {by}", evidence)

    def _note(self, at: EngineSeconds, by: str, what: str) -> None:
        actor = by or NOBODY
        if actor in self._actors or len(self._actors) < ACTORS_MAX:
            self._actors[actor] += 1
        self._newest.append(f"{wall_time(at, self.settings.speed):%Y-%m-%d %H:%M:%S} {actor} {what}")
        del self._newest[:-SHOWN_MAX]
