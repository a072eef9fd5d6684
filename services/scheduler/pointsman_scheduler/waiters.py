"""Answers to ingresses; the only place that builds RouteGranted and RouteRejected."""

from dataclasses import dataclass
from functools import cache, partial

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.commands import (
    HandOverRequest,
    PrefixCopy,
    PrefixFetch,
    RouteGranted,
    RouteRejected,
    RouteRequest,
    SentRequest,
)
from pointsman.contracts.decisions import HandOverRefused, RequestGranted, RequestPlaced, RequestRejected
from pointsman.contracts.fleet import ANY_RANK
from pointsman.contracts.reasons import RejectReason, reject_answer
from pointsman.contracts.requests import RequestCancelled
from pointsman.contracts.tenants import RateLimits
from pointsman.policies.dispatch import Dispatcher
from pointsman.ports import Reply
from pointsman.primitives import EngineSeconds, RequestId, Tenant, Term
from pointsman.runtime import telemetry
from pointsman.state.fleet import Instance, Knowledge
from pointsman.state.workload import UNGRANTED, Request, Stage

RouteAnswer = RouteGranted | RouteRejected
Answers = list[tuple[Reply, RouteAnswer]]


@dataclass(slots=True)
class Waiter:
    attempt: int
    tenant: Tenant
    reply: Reply


class Waiters:
    """Pending `cmd.route` replies of one term."""

    def __init__(self, dispatcher: Dispatcher, pool: str) -> None:
        self._decisions = cache(partial(telemetry.DECISIONS.labels, pool))
        self._dispatcher = dispatcher
        self._waiters: dict[RequestId, Waiter] = {}

    def add(self, command: RouteRequest, reply: Reply) -> None:
        self._waiters[command.request] = Waiter(command.attempt, command.tenant, reply)

    def forget(self, request: RequestId) -> None:
        self._waiters.pop(request, None)

    def forget_absent(self) -> None:
        """Of requests that ended otherwise than by a decision, so that no answer follows."""
        requests = self._dispatcher.state.workload.requests
        for gone in [request for request in self._waiters if request not in requests]:
            del self._waiters[gone]

    def answers_to(self, event: LogEvent) -> Answers:
        match event:
            case RequestPlaced():
                self._decisions(event.policy, "placed").inc()
            case RequestGranted():
                request = self._dispatcher.state.workload.requests.get(event.request)
                return self._granted(request) if request else []
            case RequestRejected():
                self._decisions(event.policy, event.reason).inc()
                return self._rejected(event.request, event.reason, event.detail, event.retry_after)
            case RequestCancelled():
                self.forget(event.request)
            case _:
                pass
        return []

    def answers_again(self, command: RouteRequest) -> Answers:
        """Answers a repeated command as before; a pending request gets no answer."""
        workload = self._dispatcher.state.workload
        request = workload.requests.get(command.request)
        if request is not None:
            granted = request.stage not in UNGRANTED and request.attempt == command.attempt
            return self._granted(request) if granted else []
        known = workload.rejection_of(command.request, arrived_at=command.arrived_at, attempt=command.attempt)
        if known is not None:
            return self._rejected(command.request, known.reason, known.detail, known.retry_after)
        return self._rejected(command.request, RejectReason.ALREADY_ENDED, self._ended_detail(command.request), 0.0)

    def hand_over_answer(self, command: HandOverRequest, events: list[LogEvent]) -> RouteAnswer | None:
        request = self._dispatcher.state.workload.requests.get(command.request)
        if request is None or request.attempt != command.attempt or not request.prefilled_by:
            if self._dispatcher.state.workload.end_of(command.request) is not None:
                detail = self._ended_detail(command.request)
                return self._rejection(command.request, command.attempt, RejectReason.ALREADY_ENDED, detail)
            detail = f"nothing is known of a prefill at {command.instance}"
            return self._rejection(command.request, command.attempt, RejectReason.UNKNOWN_REQUEST, detail)
        if not request.awaits_decoder:
            return self._grant(request)
        refused = next((event for event in events if isinstance(event, HandOverRefused)), None)
        if refused is None:
            return None
        self._decisions(self._dispatcher.policies.routing.name, refused.reason).inc()
        return self._rejection(refused.request, refused.attempt, refused.reason, refused.detail, refused.retry_after)

    def redispatched(self, sent: SentRequest) -> RouteGranted | None:
        request = self._dispatcher.state.workload.requests.get(sent.request)
        if request is None or request.attempt != sent.attempt or request.rebound_from != sent.instance:
            return None
        return self._grant(request) if request.stage not in UNGRANTED else None

    def _granted(self, request: Request) -> Answers:
        waiter = self._waiters.pop(request.id, None)
        answer = self._grant(request)
        return [(waiter.reply, answer)] if waiter is not None and answer is not None else []

    def _rejected(self, request: RequestId, reason: str, detail: str, retry_after: EngineSeconds) -> Answers:
        waiter = self._waiters.pop(request, None)
        if waiter is None:
            return []
        term, limits = self._dispatcher.term, self._limits(waiter.tenant)
        answer = rejection(request, waiter.attempt, reason, detail, retry_after, term=term, limits=limits)
        return [(waiter.reply, answer)]

    def _limits(self, tenant: Tenant) -> RateLimits | None:
        state = self._dispatcher.state
        return state.tenants.rate_limits(tenant, state.now)

    def _ended_detail(self, request: RequestId) -> str:
        return f"the request has ended already ({self._dispatcher.state.workload.end_of(request)})"

    def _grant(self, request: Request) -> RouteGranted | None:
        state = self._dispatcher.state
        instance = state.fleet.get(request.instance)
        if instance is None:
            return None
        decoder = state.fleet.get(request.decode)
        seconds, tokens = request.engine_seconds, request.engine_tokens
        before = request.placed_at - request.arrived_at
        return RouteGranted(
            request=request.id,
            attempt=request.attempt,
            instance=instance.id,
            url=instance.url,
            hit_tokens=request.prompt_tokens - request.uncached_tokens,
            predicted_ttft=before + request.predicted_ttft,
            predicted_ttft_upper=before + request.predicted_ttft_upper,
            knowledge=_knowledge_for(request, instance),
            term=self._dispatcher.term,
            decode=request.decode,
            decode_url=decoder.url if decoder else "",
            prefilled_by=request.prefilled_by,
            dp_rank=instance.dp_rank,
            rebind=request.rebind,
            expected_seconds=state.latency.expected_seconds(instance.id, seconds, tokens),
            limits=self._limits(request.tenant),
            fetch=self._fetch(request) if request.fetching else None,
            copy=self._copy(request),
            best_effort=request.best_effort,
        )

    def _fetch(self, request: Request) -> PrefixFetch:
        """A source that has left meanwhile has no URL: its fetch fails."""
        source = self._dispatcher.state.fleet.get(request.fetch_from)
        return PrefixFetch(
            source=request.fetch_from,
            url=source.url if source is not None else "",
            prefix_tokens=request.prompt_tokens - request.uncached_tokens + 1,
            seconds=request.fetch_seconds,
            dp_rank=source.dp_rank if source is not None else ANY_RANK,
        )

    def _copy(self, request: Request) -> PrefixCopy | None:
        target = self._dispatcher.state.fleet.get(request.copy_to)
        if target is None or request.stage is not Stage.PREFILL:
            return None
        return PrefixCopy(
            target=target.id,
            url=target.url,
            prefix_tokens=request.copy_blocks * self._dispatcher.state.settings.block_tokens + 1,
            seconds=request.copy_seconds,
            dp_rank=target.dp_rank,
        )

    def _rejection(
        self, request: RequestId, attempt: int, reason: str, detail: str, retry_after: EngineSeconds = 0.0
    ) -> RouteRejected:
        return rejection(request, attempt, reason, detail, retry_after, term=self._dispatcher.term)


def rejection(
    request: RequestId,
    attempt: int,
    reason: str,
    detail: str,
    retry_after: EngineSeconds,
    *,
    term: Term,
    limits: RateLimits | None = None,
) -> RouteRejected:
    return RouteRejected(
        request=request,
        attempt=attempt,
        status=reject_answer(reason).status,
        reason=str(reason),
        detail=detail,
        retry_after=retry_after,
        limits=limits,
        term=term,
    )


def _knowledge_for(request: Request, instance: Instance) -> str:
    if instance.knowledge is Knowledge.EXACT and not request.exact:
        return Knowledge.DEGRADED
    return instance.knowledge
