"""Delivers a `RequestContext`: forwards the body to the engine that it is granted and passes the answer to the client.
Split requests go to a prefill engine first. `Attempts` places it, and again if its engine fails."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ParamSpec, TypeVar

import structlog

from pointsman.contracts.commands import PrefixFetch, RouteGranted, RouteRejected
from pointsman.contracts.reasons import FailReason
from pointsman.primitives import EngineSeconds, Seconds
from pointsman.runtime.tracing import NO_SPAN, Span
from pointsman_ingress.attempts import Attempts
from pointsman_ingress.context import RequestContext
from pointsman_ingress.engine.answer import (
    ANSWER_BYTES_MAX,
    METADATA,
    STREAM_FAILURE,
    AnswerTooLargeError,
    EngineAnswer,
    EngineFailedError,
)
from pointsman_ingress.engine.client import KEY_REFUSED, EngineRequest
from pointsman_ingress.engine.disaggregation import NO_PREFILL, SplitBody, read_prefill
from pointsman_ingress.engine.first_byte import FOREVER, FirstByteDeadline, first_byte_wall_seconds
from pointsman_ingress.engine.refusals import lacks_endpoint, refusal_status, refused_by_engine
from pointsman_ingress.engine.streams import StreamError
from pointsman_ingress.engine.usage import EventFilter, Usage, usage_at_end, usage_in
from pointsman_ingress.http import errors
from pointsman_ingress.http.call import JSON, BodyLoan, HttpExchange
from pointsman_ingress.http.errors import ApiError, Header
from pointsman_ingress.http.json_form import LIGHT_BYTES_MAX
from pointsman_ingress.lifecycle import RequestLifecycle
from pointsman_ingress.parts import IngressParts
from pointsman_ingress.placement.in_flight import InFlightRequest
from pointsman_ingress.prefix_copies import PrefixCopier
from pointsman_ingress.spans import describe_grant, engine_span

log = structlog.get_logger()

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(eq=False)
class Delivery:
    parts: IngressParts
    context: RequestContext
    call: HttpExchange
    lifecycle: RequestLifecycle
    copier: PrefixCopier
    loan: BodyLoan
    """Of the body; answers that are held whole are added."""

    def __post_init__(self) -> None:
        self._pool = self.context.pool
        self._span: Span = NO_SPAN  # of the current attempt

    async def run(self) -> None:
        """Raises ApiError if no engine answers."""
        with self.context.metrics.in_flight.track_inprogress(), self._pool.retry_budget.open() as ticket:
            self._attempts = attempts = Attempts(self.parts, self.context, self.call, self.lifecycle, ticket)
            while True:
                grant = await attempts.next_grant()
                try:
                    await self._forward(grant)
                except EngineFailedError as error:
                    attempts.failed(error)
                else:
                    return

    async def _forward(self, grant: RouteGranted) -> None:
        """Raises EngineFailedError if the client has received nothing; later failures become an error event."""
        body = self.context.body
        next_grant: RouteGranted | None = grant
        if grant.fetch is not None:
            await self._fetch(grant, grant.fetch)
        with self.loan.scope():
            if grant.decode:
                self._take(len(body))  # for what each of the two engines gets
                split = await self._between_engines(grant, SplitBody, body, splittable=self.context.endpoint.splittable)
                next_grant, body = await self._prefill(grant, split)
            while next_grant is not None:
                next_grant = await self._exchange(next_grant, body)

    def _take(self, size: int) -> None:
        """Raises ApiError."""
        try:
            self.loan.add(size)
        except ApiError as error:
            self.lifecycle.failed(FailReason.TOO_MANY_BODIES, error.status)
            raise

    async def _fetch(self, grant: RouteGranted, fetch: PrefixFetch) -> None:
        """Without success the request computes its prompt."""
        async with self._pool.in_flight.at_engine(grant, self.call.clock):
            with self._engine_span(grant) as span:
                outcome = await self.copier.fetcher.run(grant, fetch, self.context.prefix, self.call.headers, span)
        self.lifecycle.fetched(fetch, outcome)

    async def _prefill(self, grant: RouteGranted, split: SplitBody) -> tuple[RouteGranted | None, bytes]:
        """None: the prefill engine's refusal was passed on. Raises EngineFailedError, and ApiError without a decode
        engine."""
        lifecycle, prefill = self.lifecycle, NO_PREFILL
        if split.possible:
            async with self._pool.in_flight.at_engine(grant, self.call.clock) as at_engine:
                with self._engine_span(grant), self.loan.scope():
                    answer, first = await self._open(at_engine, await self._on_body(split.for_prefill))
                    async with answer:
                        if answer.status >= 400:
                            await self._pass_refusal(answer, first)
                            return None, b""
                        whole = await self._whole(answer, first)
                        prefill = await self._on_answer(whole, read_prefill)
                self._pool.in_flight.answered(grant.instance)
        seconds = self.call.clock.now() - lifecycle.sent_at if split.possible else 0.0
        next_grant = await self._pool.scheduler.hand_over(grant, self.call.clock, seconds)
        if isinstance(next_grant, RouteRejected):
            lifecycle.failed(next_grant.reason, next_grant.status)
            raise self._attempts.rejected(next_grant)
        lifecycle.handed_over(next_grant, prefill)
        return next_grant, await self._between_engines(next_grant, split.for_decode, prefill)

    async def _between_engines(
        self, grant: RouteGranted, work: Callable[P, T], *arguments: P.args, **named: P.kwargs
    ) -> T:
        """Work on the body of a request that is granted and at no engine: heartbeats must name it all the same."""
        with self._pool.in_flight.waiting_for_place(grant.request):
            return await self._on_body(work, *arguments, **named)

    async def _on_body(self, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        light = len(self.context.body) <= LIGHT_BYTES_MAX
        return await self.parts.work.run_unless(light, self.call.owner, work, *arguments, **named)

    async def _exchange(self, grant: RouteGranted, body: bytes) -> RouteGranted | None:
        """Returns the next grant if the leader redispatched the request before the answer."""
        in_flight = self._pool.in_flight
        async with in_flight.at_engine(grant, self.call.clock, redispatchable=grant.rebind) as at_engine:
            with self._engine_span(grant), self.loan.scope():
                answer, first = await self._open(at_engine, body, output=self._output_seconds())
                async with answer:
                    at_engine.answered()
                    if answer.status >= 400:
                        await self._pass_refusal(answer, first)
                        return None
                    if answer.tail.error is not None:
                        await self._refuse(answer.tail.error.status, answer.tail.error.data, JSON)
                        return None
                    self._attempts.ticket.settle()
                    in_flight.answered(grant.instance)
                    if answer.streams:
                        await self._stream(grant, answer, first)
                    else:
                        await self._pass_whole(grant, answer, first)
        next_grant = at_engine.redispatched_to
        if next_grant is not None:
            self.lifecycle.granted(next_grant)
        return next_grant

    async def _open(
        self, at_engine: InFlightRequest, body: bytes, *, output: EngineSeconds = 0.0
    ) -> tuple[EngineAnswer, bytes]:
        """`output`: engine seconds of generation before the first bytes. Raises EngineFailedError."""
        grant, context = at_engine.grant, self.context
        expected = grant.expected_seconds or grant.predicted_ttft
        wall_seconds = first_byte_wall_seconds(
            self.parts.settings, expected, output=output, speed=self.call.clock.speed
        )
        deadline = FirstByteDeadline(
            wall_seconds,
            self._give_up_engine,
            self.parts.engines.seconds,
            least=self.parts.settings.first_byte_seconds_min,
        )
        request = EngineRequest(
            grant.instance,
            grant.url,
            context.endpoint.path,
            body,
            self.call.headers,
            self.lifecycle.request,
            grant.dp_rank,
            context.endpoint.shape,
            context.endpoint.content_type(self.call.headers),
            self._span,
            partial(self._pool.fleet.is_working, grant.instance),
        )
        at_engine.on_lost = deadline.expire
        try:
            with deadline:
                return await self.parts.engines.open(request)
        finally:
            at_engine.on_lost = None

    def _engine_span(self, grant: RouteGranted) -> Span:
        model, resent = self.context.model, self.lifecycle.retries
        self._span = engine_span(self.call, grant.instance, grant.url, model=model, resent=resent)
        describe_grant(self._span, grant)
        return self._span

    def _output_seconds(self) -> EngineSeconds:
        """Engine seconds from the first token to the first byte, at the default TPOT SLO or a longer one of the
        request. A stream that begins late may hide all but its last tokens."""
        command = self.context.command
        if command.streaming and not self.context.begins_late:
            return 0.0
        if not self.context.output_bounded:
            return FOREVER
        return command.max_output_tokens * max(command.slo_tpot, self.parts.settings.slo_tpot_seconds)

    def _give_up_engine(self, wall_seconds: Seconds) -> bool:
        self.lifecycle.attempt_failed("first_byte_timeout", detail=f"no first byte within {wall_seconds:.3g} s")
        return self._attempts.may_retry_elsewhere()

    async def _stream(self, grant: RouteGranted, answer: EngineAnswer, first: bytes) -> None:
        call, lifecycle, tail = self.call, self.lifecycle, answer.tail
        await call.start(answer.content_type, self._head(grant), length=None)
        lifecycle.stream = tail
        shown = EventFilter(removes_usage=self.context.removes_usage)
        await call.write(shown.feed(first))
        lifecycle.first_token()
        self._copy(grant)
        try:
            while chunk := await answer.chunk():
                if tail.error is not None and self.context.private:
                    break  # it may hold addresses
                if passed := shown.feed(chunk):
                    await call.write(passed)
                lifecycle.next_part()
        except EngineFailedError as error:
            if tail.error is None:
                self._stream_failed(error)
                await call.fail(errors.engine_broke_off(error.public_reason), events=tail.whole_events)
                return
        if tail.error is not None:
            await self._end_in_error(tail.error, shown.rest(), events=tail.whole_events)
            return
        await call.finish(shown.rest())
        if not lifecycle.ended:
            counted = tail.usage.completion_tokens
            lifecycle.finished(tail.usage, output_tokens=counted if counted >= 0 else tail.events)

    async def _end_in_error(self, error: StreamError, held: bytes, *, events: int) -> None:
        """Who may see the engine's own event has it already, unless it is `held` without its end."""
        if error.blames_engine:
            failure = EngineFailedError(STREAM_FAILURE, failure="stream_reset")
            self._stream_failed(failure)
            shown = errors.engine_broke_off(failure.public_reason)
        else:
            self.lifecycle.failed(FailReason.ENGINE_REFUSED, error.status)
            shown = refused_by_engine(error.status, error.data)
        if self.context.private or held:
            await self.call.fail(shown, events=events)
        else:
            await self.call.finish()

    def _stream_failed(self, error: EngineFailedError) -> None:
        lifecycle = self.lifecycle
        log.warning("engine_broke_off", instance=lifecycle.instance, request=lifecycle.request, reason=str(error))
        self._span.fail(error.failure or FailReason.ENGINE_BROKE_OFF.value)
        if error.failure is not None:
            lifecycle.attempt_failed(error.failure, detail=str(error))
        lifecycle.failed(FailReason.ENGINE_BROKE_OFF, 502)

    async def _pass_whole(self, grant: RouteGranted, answer: EngineAnswer, first: bytes) -> None:
        body = await self._whole(answer, first)
        metadata = answer.metadata.encode() if self.context.endpoint.gives_tensors else b""
        usage = await self._usage(body, metadata)
        head = self._head(grant) + ([(METADATA.encode(), metadata)] if metadata else [])
        await self.call.start(answer.content_type, head, length=len(body))
        await self.call.write(body)
        if 0 <= usage.completion_tokens <= 1:  # otherwise the prefill ended before the answer
            self.lifecycle.first_token()
        self.lifecycle.finished(usage, output_tokens=0)
        self._copy(grant)
        await self.call.finish()  # once the client has read most of it: until then it is held

    async def _usage(self, body: bytes, metadata: bytes) -> Usage:
        if metadata:
            return usage_in(metadata)
        at_end = usage_at_end(body) if len(body) > LIGHT_BYTES_MAX else None
        return at_end if at_end is not None else await self._on_answer(body, usage_in)

    async def _whole(self, answer: EngineAnswer, first: bytes) -> bytes:
        """Raises EngineFailedError, and ApiError if it is more than may be held."""
        bytes_max = min(ANSWER_BYTES_MAX, self.loan.left)
        try:
            return await answer.whole(first, bytes_max=bytes_max, take=self._take)
        except AnswerTooLargeError as error:
            self.lifecycle.failed(FailReason.ANSWER_TOO_LARGE, 502)
            raise errors.answer_too_large(bytes_max) from error

    async def _on_answer(self, answer: bytes, work: Callable[[bytes], T]) -> T:
        return await self.parts.work.run_unless(len(answer) <= LIGHT_BYTES_MAX, self.call.owner, work, answer)

    def _head(self, grant: RouteGranted) -> list[Header]:
        return self.context.answer_headers(grant) + self._attempts.limit_headers()

    def _copy(self, grant: RouteGranted) -> None:
        self.copier.start(self._pool, grant, self.call.clock, self.context.prefix, self.call.headers)

    async def _pass_refusal(self, answer: EngineAnswer, first: bytes) -> None:
        """Raises EngineFailedError if another engine can take the request."""
        body = await self._whole(answer, first)
        await self._refuse(answer.status, body, answer.content_type, answer.retry_headers)

    async def _refuse(self, engine_status: int, body: bytes, content_type: str, headers: Sequence[Header] = ()) -> None:
        lacks, status = lacks_endpoint(engine_status, body), refusal_status(engine_status)
        instance = self.lifecycle.instance
        own_key = self.parts.engines.refused_own_key(status, instance)
        unfit = not lacks and self.parts.engines.is_unfit(status, instance, self.call.headers)
        if unfit and self._attempts.may_retry_elsewhere():
            public = f"it refused with status {status}"
            raise EngineFailedError(KEY_REFUSED if own_key else public, public_reason=public)
        if own_key:
            log.error("engine_key_refused", instance=instance, status=status, reason=KEY_REFUSED)
            self.lifecycle.failed(FailReason.ENGINE_FAILED, 502)
            raise errors.engine_key_refused()
        self.lifecycle.failed(FailReason.ENGINE_REFUSED, status)
        if lacks:
            raise errors.endpoint_not_found(self.context.endpoint.path)
        if self.context.private:
            raise refused_by_engine(status, body, headers)
        await self.call.answer(status, body, content_type, [*headers, *self._attempts.limit_headers()])
