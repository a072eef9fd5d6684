"""The attempts of one request. In: answers of the scheduler, failures of engines. Out: the next grant, or what the client is
told. A request whose engine fails before the client received anything is placed again, without that engine; and without the
one that prefilled it, if another can: either may be why no KV cache came."""

from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec
import structlog

from pointsman.contracts.commands import RouteGranted, RouteRejected, RouteRequest
from pointsman.contracts.reasons import TENANT_LIMITS, FailReason, RejectReason
from pointsman.contracts.tenants import RateLimits
from pointsman.ports import CommandTooLargeError
from pointsman.primitives import InstanceId, WallSeconds, engine_seconds
from pointsman.runtime.telemetry import REQUEST_RETRIES
from pointsman_ingress.context import RequestContext
from pointsman_ingress.engine.answer import EngineFailedError
from pointsman_ingress.http import errors
from pointsman_ingress.http.call import HttpExchange
from pointsman_ingress.http.errors import ApiError, Header
from pointsman_ingress.lifecycle import RequestLifecycle
from pointsman_ingress.parts import IngressParts
from pointsman_ingress.placement.retry_budget import RetryTicket
from pointsman_ingress.spans import describe_answer, route_span

log = structlog.get_logger()

UNREACHABLE_WALL_SECONDS: WallSeconds = WallSeconds(1.0)  # time for workers to report an unreachable engine
RENAMES_MAX = 8  # of one attempt


@dataclass(eq=False)
class Attempts:
    parts: IngressParts
    context: RequestContext
    call: HttpExchange
    lifecycle: RequestLifecycle
    ticket: RetryTicket

    def __post_init__(self) -> None:
        self._command = self.context.command
        self._pool = self.context.pool
        self._limits: RateLimits | None = None  # as last told by the leader

    async def next_grant(self) -> RouteGranted:
        """Raises ApiError without one."""
        answer, lifecycle = await self._route(), self.lifecycle
        while _no_instance(answer) and self._command.excluded and not lifecycle.reached_engine and self._may_hold():
            # No engine accepts connections, and the workers may not have reported it yet.
            await self.call.clock.sleep_wall(UNREACHABLE_WALL_SECONDS)
            if answer is not None:  # its end is in the log
                self._rename()
            self._command = msgspec.structs.replace(self._command, attempt=self._command.attempt + 1, excluded=[])
            answer = await self._route()
        if answer is None:
            lifecycle.failed(FailReason.NO_PLACE, 503)
            raise errors.no_place()
        if isinstance(answer, RouteRejected):
            lifecycle.ended_by_leader()
            raise self.rejected(answer)
        lifecycle.granted(answer)
        self._limits = answer.limits or self._limits
        return answer

    def failed(self, error: EngineFailedError) -> None:
        """Raises ApiError if the request may not be retried."""
        lifecycle, command = self.lifecycle, self._command
        failed = lifecycle.instance
        log.warning("engine_failed", instance=failed, request=lifecycle.request, reason=str(error))
        if error.failure is not None:
            lifecycle.attempt_failed(error.failure, status=error.status, detail=str(error))
        refused, retries_max = error.failure == "connect_failure", self.parts.settings.retries_max
        spent = lifecycle.retries_counted >= retries_max
        if refused:
            spent = command.attempt > retries_max and not self._may_hold()
        if spent:
            lifecycle.failed(FailReason.ENGINE_FAILED, 502)
            raise errors.engine_failed(error.public_reason) from error
        if lifecycle.reached_engine and not self.ticket.claim():
            lifecycle.failed(FailReason.RETRY_BUDGET_SPENT, 503)
            raise errors.retry_budget_spent(error.public_reason) from error
        REQUEST_RETRIES.labels(self._pool.name).inc()
        excluded = [*command.excluded, failed]
        prefilled_by = lifecycle.transfer_from
        if prefilled_by and error.failure is not None and not refused and self._others_prefill(prefilled_by, excluded):
            excluded.insert(-1, prefilled_by)
        lifecycle.requeued(refused=refused)
        self._command = msgspec.structs.replace(command, attempt=command.attempt + 1, excluded=excluded)

    def _others_prefill(self, prefilled_by: InstanceId, excluded: list[InstanceId]) -> bool:
        tried = (*excluded, prefilled_by)
        others = (i for i in self._pool.fleet.ready if i.id not in tried and not i.half_open)
        return any(i.can_serve(self._command) for i in others)

    def may_retry_elsewhere(self) -> bool:
        command, grant = self._command, self.lifecycle.grant
        tried = [*command.excluded, self.lifecycle.instance]
        other = self._pool.in_flight.least_busy(command, excluded=tried)
        if other is None or self.lifecycle.retries_counted >= self.parts.settings.retries_max:
            return False
        if grant is not None and grant.term > 0 and all(other.id != ready.id for ready in self._pool.fleet.ready):
            return False  # a leader grants ready instances only
        return self.ticket.claim()

    def rejected(self, answer: RouteRejected) -> ApiError:
        self._limits = answer.limits or self._limits
        if self.context.private and answer.reason not in TENANT_LIMITS:  # other details name instances, queues
            answer = msgspec.structs.replace(answer, detail="there is no room for this request now")
        return errors.rejected(answer, speed=self.call.clock.speed, limit_headers=self.limit_headers())

    def limit_headers(self) -> list[Header]:
        if self._limits is None:
            return []
        return self.context.endpoint.limit_headers(self._limits, self.call.clock.speed, datetime.now(UTC))

    async def _route(self) -> RouteGranted | RouteRejected | None:
        answer = await self._ask(self._command)
        for _ in range(RENAMES_MAX):
            if not (isinstance(answer, RouteRejected) and answer.reason == RejectReason.ALREADY_ENDED):
                break
            # The leader ended the request because its engine lost it, or this process stood still.
            self._rename()
            answer = await self._ask(self._command)
        return answer

    async def _ask(self, command: RouteRequest) -> RouteGranted | RouteRejected | None:
        with route_span(self.call, command) as span:
            if span.recording:
                command = msgspec.structs.replace(command, traceparent=span.headers["traceparent"])
            try:
                answer = await self._pool.scheduler.route(command, self.call.clock, owner=self.call.owner)
            except CommandTooLargeError as error:
                self.lifecycle.failed(FailReason.REQUEST_TOO_LARGE, 413)
                raise errors.request_too_large() from error
            describe_answer(span, answer)
            return answer

    def _rename(self) -> None:
        self.lifecycle.request = self.call.id = fresh = self.parts.ids.fresh()
        self._command = msgspec.structs.replace(self._command, request=fresh, instead_of=self._command.request)

    def _may_hold(self) -> bool:
        clock = self.call.clock
        return clock.now() - self._command.arrived_at < engine_seconds(self.parts.settings.hold_seconds, clock.speed)


def _no_instance(answer: RouteGranted | RouteRejected | None) -> bool:
    return answer is None or (isinstance(answer, RouteRejected) and answer.reason == RejectReason.NO_INSTANCE)
