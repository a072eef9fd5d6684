"""The leader's calls, each one turn. All return decisions that are applied already and are to be published in order."""

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.commands import HandOverRequest, RouteRequest
from pointsman.contracts.fleet import LivenessTimeouts
from pointsman.contracts.reasons import CancelCause
from pointsman.policies.dispatch import fleet_care, granting, migrations, placement, splitting
from pointsman.policies.dispatch.turn import DecisionContext, Turn
from pointsman.policies.rebalancing.base import MigrationPlan
from pointsman.primitives import InstanceId, RequestId, Seconds


class Dispatcher(DecisionContext):
    """Decides for one term of leadership. The function behind each method documents it."""

    def route(self, command: RouteRequest, now: Seconds) -> list[LogEvent]:
        turn = Turn(self, now)
        placement.route(turn, command)
        return turn.events

    def place_held(self, now: Seconds) -> list[LogEvent]:
        turn = Turn(self, now)
        placement.place_held(turn)
        return turn.events

    def hand_over(self, command: HandOverRequest, now: Seconds) -> list[LogEvent]:
        turn = Turn(self, now)
        splitting.hand_over(turn, command)
        return turn.events

    def cancel(self, request: RequestId, cause: CancelCause, now: Seconds, *, reason: str = "") -> list[LogEvent]:
        """`reason`: a sentence in place of the cause's own."""
        turn = Turn(self, now)
        granting.cancel_pending(turn, request, cause, reason)
        return turn.events

    def abandon(self, request: RequestId, cause: CancelCause, now: Seconds, *, reason: str = "") -> list[LogEvent]:
        turn = Turn(self, now)
        granting.cancel_any(turn, request, cause, reason)
        return turn.events

    def grant_waiting(self, instance: InstanceId, now: Seconds) -> list[LogEvent]:
        """Called when something left the instance's window."""
        turn = Turn(self, now)
        granting.grant_next(turn, instance)
        return turn.events

    def migrate(self, plan: MigrationPlan, now: Seconds) -> list[LogEvent]:
        turn = Turn(self, now)
        migrations.migrate(turn, plan)
        return turn.events

    def relocate_pending(self, now: Seconds) -> list[LogEvent]:
        turn = Turn(self, now)
        migrations.relocate_pending(turn)
        return turn.events

    def drain(self, instance: InstanceId, reason: str, now: Seconds, *, leaving: bool) -> list[LogEvent]:
        turn = Turn(self, now)
        fleet_care.drain(turn, instance, reason, leaving=leaving)
        return turn.events

    def undrain(self, instance: InstanceId, now: Seconds) -> list[LogEvent]:
        turn = Turn(self, now)
        fleet_care.undrain(turn, instance)
        return turn.events

    def check_liveness(self, timeouts: LivenessTimeouts, now: Seconds) -> list[LogEvent]:
        turn = Turn(self, now)
        fleet_care.check_liveness(turn, timeouts)
        return turn.events

    def eject_outliers(self, now: Seconds) -> list[LogEvent]:
        turn = Turn(self, now)
        fleet_care.eject_outliers(turn)
        return turn.events
