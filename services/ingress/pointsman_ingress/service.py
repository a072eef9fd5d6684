"""Serves one HTTP request: reads it, resolves it (`resolver`), delivers it (`delivery`). The end of a
logged request is the leader's before the grant and this module's after it."""

import asyncio
from dataclasses import dataclass

from pointsman.adapters.shared_timers import SharedTimer
from pointsman.contracts.reasons import CancelCause, FailReason
from pointsman.primitives import WallSeconds
from pointsman.runtime.containment import note_failure
from pointsman.runtime.health import Receive, Scope, Send
from pointsman_ingress.access_log import AccessLog
from pointsman_ingress.delivery import Delivery
from pointsman_ingress.endpoints import Endpoint
from pointsman_ingress.engine.prefix_fetch import PrefixFetcher
from pointsman_ingress.http import errors
from pointsman_ingress.http.call import BodyLoan, ClientGoneError, HttpExchange
from pointsman_ingress.http.errors import ApiError
from pointsman_ingress.http.request_deadline import RequestDeadline
from pointsman_ingress.lifecycle import RequestLifecycle
from pointsman_ingress.metrics import count_outcome
from pointsman_ingress.parts import IngressParts
from pointsman_ingress.passthrough import pass_through
from pointsman_ingress.prefix_copies import PrefixCopier
from pointsman_ingress.resolver import RequestResolver
from pointsman_ingress.spans import begin_request, end_request

LAST_WORDS_WALL_SECONDS: WallSeconds = WallSeconds(3.0)  # for the error of an interrupted request


@dataclass(eq=False)
class Gateway:
    parts: IngressParts
    resolver: RequestResolver
    access_log: AccessLog | None

    def __post_init__(self) -> None:
        parts = self.parts
        self._time = SharedTimer(parts.settings.request_timeout_seconds)
        self._last_words = SharedTimer(float(LAST_WORDS_WALL_SECONDS))
        self._copier = PrefixCopier(PrefixFetcher(parts.engines, parts.clock, parts.work), parts.supervisor)

    async def serve(self, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
        """A cancelled task ends the request with an error; a second cancellation is raised."""
        call = self._call(endpoint, scope, send)
        parts = self.parts
        if parts.tracer is not None:
            begin_request(parts.tracer, call)
        lifecycle: RequestLifecycle | None = None
        loan: BodyLoan | None = None
        try:
            with RequestDeadline(parts.supervisor, self._time) as deadline:
                try:
                    await self._identify(call, endpoint)
                    endpoint.check_content_type(call.headers)
                    loan = BodyLoan(parts.bodies, call.owner)
                    body = await call.read_body(receive, loan, bytes_max=parts.settings.body_bytes_max)
                    deadline.watch(scope, receive)
                    if not endpoint.placed:
                        await pass_through(call, endpoint, body, self.resolver, loan)
                        return
                    context = await self.resolver.resolve(call, endpoint, body, loan)
                    del body  # engines get the context's
                    lifecycle = RequestLifecycle(context, call.clock, call.span)
                    await Delivery(parts, context, call, lifecycle, self._copier, loan).run()
                except ApiError as error:
                    await call.fail(error)
                except ClientGoneError:
                    call.facts.reason = CancelCause.CLIENT_GONE
                except asyncio.CancelledError:
                    call.facts.reason = cause = deadline.uncancel() or CancelCause.INGRESS_STOPPED
                    if loan is not None:
                        loan.end()
                    await self._end_interrupted(call, lifecycle, cause)
                except RecursionError:  # the client's nesting
                    _fail(lifecycle, FailReason.MALFORMED_BODY, 400)
                    await call.fail(errors.nested_too_deeply())
                except Exception as error:  # noqa: BLE001 - a client may cause many: counted, logged at a bounded rate
                    note_failure("request", error, request=call.id)
                    _fail(lifecycle, FailReason.INTERNAL_ERROR, 500)
                    await call.fail(errors.internal_error(), events=_events(lifecycle))
        finally:
            if loan is not None:
                loan.end()
            self._note_end(call, lifecycle)

    async def refuse(self, endpoint: Endpoint, scope: Scope, send: Send, error: ApiError) -> None:
        call = self._call(endpoint, scope, send)
        try:
            await call.fail(error)
        finally:
            self._note_end(call, None)

    def _note_end(self, call: HttpExchange, lifecycle: RequestLifecycle | None) -> None:
        facts = call.facts
        facts.reason = facts.reason or call.error_code or (lifecycle.reason if lifecycle else "") or ""
        count_outcome(call)
        if self.parts.tracer is not None:
            end_request(call, lifecycle)
        if self.access_log is not None:
            self.access_log.write(call, lifecycle)

    def _call(self, endpoint: Endpoint, scope: Scope, send: Send) -> HttpExchange:
        return HttpExchange(endpoint.path, endpoint.errors, scope, send, ids=self.parts.ids, clock=self.parts.clock)

    async def _identify(self, call: HttpExchange, endpoint: Endpoint) -> None:
        """Raises ApiError."""
        call.facts.identity = identity = await self.parts.authentication.identity(call.headers)
        if identity is not None:
            call.facts.tenant = identity.tenant
            identity.check_endpoint(endpoint.path)

    async def _end_interrupted(
        self, call: HttpExchange, lifecycle: RequestLifecycle | None, cause: CancelCause
    ) -> None:
        if lifecycle is not None and not lifecycle.ended:
            waits = lifecycle.grant is None and cause is not CancelCause.INGRESS_STOPPED
            if waits and await lifecycle.pool.scheduler.cancel(lifecycle.request, cause):
                lifecycle.ended_by_leader()
            elif cause is CancelCause.TIMEOUT:
                lifecycle.failed(FailReason.TIMEOUT, 408)
            else:
                lifecycle.cancelled(cause)
        if cause is not CancelCause.CLIENT_GONE:
            error = errors.request_timeout() if cause is CancelCause.TIMEOUT else errors.ingress_stopped()
            await self._fail_in_time(call, error, _events(lifecycle))

    async def _fail_in_time(self, call: HttpExchange, error: ApiError, events: int) -> None:
        """A client that reads slowly, or nothing, gets its connection cut instead."""
        try:
            with self._last_words.limit():
                await call.fail(error, events=events)
        except TimeoutError:
            call.cut()


def _events(lifecycle: RequestLifecycle | None) -> int:
    """Of the stream that the client gets."""
    return 0 if lifecycle is None or lifecycle.stream is None else lifecycle.stream.whole_events


def _fail(lifecycle: RequestLifecycle | None, reason: FailReason, status: int) -> None:
    if lifecycle is not None and not lifecycle.ended:
        lifecycle.failed(reason, status)
