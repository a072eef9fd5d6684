"""Methods of the leader. Each returns decisions that are applied already and are to be published in order."""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Concatenate, Literal, ParamSpec

from pointsman.contracts.access import ApiKeyChanged, KeyAction
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.commands import HandOverRequest, RouteRequest, SentRequest
from pointsman.contracts.fleet import LivenessTimeouts, Role
from pointsman.contracts.reasons import CancelCause
from pointsman.contracts.tenants import TenantPolicies
from pointsman.policies.dispatch import (
    fleet_care,
    granting,
    migrations,
    placement,
    splitting,
    tenant_limits,
)
from pointsman.policies.dispatch.turn import DecisionContext, Turn
from pointsman.policies.rebalancing.base import MigrationPlan
from pointsman.primitives import EngineSeconds, InstanceId, Name, RequestId, Tenant

P = ParamSpec("P")
NOTHING_HEARD: Mapping[InstanceId, EngineSeconds] = MappingProxyType({})


class Dispatcher(DecisionContext):
    def route(self, command: RouteRequest, now: EngineSeconds) -> list[LogEvent]:
        return self._run(now, placement.route, command)

    def place_held(self, now: EngineSeconds) -> list[LogEvent]:
        return self._run(now, placement.place_held)

    def hand_over(self, command: HandOverRequest, now: EngineSeconds) -> list[LogEvent]:
        return self._run(now, splitting.hand_over, command)

    def cancel_ungranted(
        self, request: RequestId, cause: CancelCause, now: EngineSeconds, *, reason: str = ""
    ) -> list[LogEvent]:
        """Nothing if it was granted: its ingress ends it."""
        return self._run(now, granting.cancel_ungranted, request, cause, reason)

    def cancel_any(
        self, request: RequestId, cause: CancelCause, now: EngineSeconds, *, reason: str = ""
    ) -> list[LogEvent]:
        """Also a granted one, which its ingress or engine has lost."""
        return self._run(now, granting.cancel_any, request, cause, reason)

    def note_first_token(self, sent: SentRequest, now: EngineSeconds) -> list[LogEvent]:
        """Of a stream, as its ingress tells while the log is late."""
        return self._run(now, granting.note_first_token, sent)

    def grant_waiting(self, instance: InstanceId, now: EngineSeconds) -> list[LogEvent]:
        return self._run(now, granting.grant_waiting, instance)

    def grant_everywhere(self, now: EngineSeconds) -> list[LogEvent]:
        return self._run(now, granting.grant_everywhere)

    def grant_next(self, instance: InstanceId, now: EngineSeconds) -> list[LogEvent]:
        """For replay: only at this instance, whatever turn granted it."""
        return self._run(now, granting.grant_next, instance)

    def migrate(self, plan: MigrationPlan, now: EngineSeconds) -> list[LogEvent]:
        return self._run(now, migrations.migrate, plan)

    def relocate_pending(self, now: EngineSeconds) -> list[LogEvent]:
        return self._run(now, migrations.relocate_pending)

    def drain(
        self,
        instance: InstanceId,
        reason: str,
        now: EngineSeconds,
        *,
        leaving: bool = False,
        by: str = "",
        becomes: Role | Literal[""] = "",
    ) -> list[LogEvent]:
        return self._run(now, fleet_care.drain, instance, reason, leaving=leaving, by=by, becomes=becomes)

    def change_roles(self, now: EngineSeconds) -> list[LogEvent]:
        return self._run(now, fleet_care.change_roles)

    def repeat_roles_and_drains(self, instances: Iterable[InstanceId], now: EngineSeconds) -> list[LogEvent]:
        return self._run(now, fleet_care.repeat_roles_and_drains, instances)

    def undrain(self, instance: InstanceId, now: EngineSeconds, *, by: str = "") -> list[LogEvent]:
        return self._run(now, fleet_care.undrain, instance, by=by)

    def record_key(self, key: str, tenant: Tenant, action: KeyAction, now: EngineSeconds, *, by: str) -> list[LogEvent]:
        """A change of an API key. The keys themselves are no part of State."""
        turn = Turn(self, now)
        turn.decide(ApiKeyChanged(at=now, stamp=turn.stamp, key=key, tenant=tenant, action=action, by=by))
        return turn.events

    def set_tenant_policies(self, policies: TenantPolicies, now: EngineSeconds, *, by: Name) -> list[LogEvent]:
        return self._run(now, tenant_limits.set_policies, policies, by)

    def refuse(self, instance: InstanceId, reason: str, now: EngineSeconds) -> list[LogEvent]:
        return self._run(now, fleet_care.refuse, instance, reason)

    def check_liveness(
        self, timeouts: LivenessTimeouts, now: EngineSeconds, heard: Mapping[InstanceId, EngineSeconds] = NOTHING_HEARD
    ) -> list[LogEvent]:
        return self._run(now, fleet_care.check_liveness, timeouts, heard)

    def eject_outliers(self, now: EngineSeconds) -> list[LogEvent]:
        return self._run(now, fleet_care.eject_outliers)

    def _run(
        self, now: EngineSeconds, step: Callable[Concatenate[Turn, P], None], *args: P.args, **kwargs: P.kwargs
    ) -> list[LogEvent]:
        turn = Turn(self, now)
        step(turn, *args, **kwargs)
        return turn.events
