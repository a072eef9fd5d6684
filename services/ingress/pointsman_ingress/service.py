"""The life of one request, from the client's bytes to the single end in the log.

1. *Understand*: key, body, fields, model, tokens, length. Whatever is wrong is refused here and leaves no trace.
2. *Place*: `cmd.route`; the answer is a grant with an engine's URL, or a rejection (the leader has logged it).
3. *Forward*: the body as it came; the answer as it comes. The first bytes end the prefill, the last the request.
4. *Again*: an engine that fails before the client has seen anything costs the client nothing: back to 2, without it.

A client that hangs up, or a request that takes too long, interrupts wherever the story stands (`patience`). Who
writes the end then depends on where that was: the leader while the request waits, the ingress after a grant.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import msgspec
import structlog

from pointsman.contracts.commands import RouteGranted, RouteRejected, RouteRequest
from pointsman.contracts.reasons import CancelCause, RejectReason
from pointsman.ports import Clock
from pointsman.primitives import Seconds, Tokens
from pointsman.runtime.health import Receive, Scope, Send
from pointsman.runtime.supervision import Supervisor
from pointsman.runtime.telemetry import ENGINE_RETRIES
from pointsman.state.fleet import Knowledge
from pointsman_ingress.engine.disaggregation import NOT_PREFILLED, Prefilled, SplitBody, read_prefill
from pointsman_ingress.engine.passthrough import Passthrough
from pointsman_ingress.engine.proxy import (
    TOLD_FAILURE,
    EngineAnswer,
    EngineClient,
    EngineFailedError,
    lacks_endpoint,
    usage_in,
)
from pointsman_ingress.engine.stream_usage import UsageRemover, asking_for_usage
from pointsman_ingress.engine.tenant_forwarding import naming_client
from pointsman_ingress.http.access_log import AccessLog
from pointsman_ingress.http.bodies import Bodies
from pointsman_ingress.http.call import Call, ClientGoneError, RequestIds
from pointsman_ingress.http.endpoints import Endpoint
from pointsman_ingress.http.openai_errors import (
    RETRY_BUDGET_SPENT,
    Refusal,
    bad_request,
    engine_broke_off,
    engine_failed,
    given_up,
    no_place,
    not_served,
    rejected,
    retry_refused,
    stopped,
    too_deep,
    too_long,
)
from pointsman_ingress.http.request_headers import ANONYMOUS, Objectives, cleaned, objectives, session_of, tenant_of
from pointsman_ingress.http.tenants import Keyring
from pointsman_ingress.lifecycle import RequestLifecycle
from pointsman_ingress.placement.fleet_view import Model
from pointsman_ingress.placement.pools import Pool, Pools
from pointsman_ingress.placement.retry_budget import RetryTicket
from pointsman_ingress.placement.routing import NoPlaceError, Router
from pointsman_ingress.prompt.keys import Keys
from pointsman_ingress.prompt.openai_requests import ParsedRequest, Tokenised
from pointsman_ingress.prompt.tokenization import TokenizeContext
from pointsman_ingress.request_deadline import RequestDeadline
from pointsman_ingress.timeouts import FOREVER, FirstByteBounds, FirstByteDeadline

log = structlog.get_logger()

OUTPUT_TOKENS_MAX: Tokens = 2**31
"""What a client may ask for where nobody knows the model's context."""

CONTEXT_TOKENS_MAX: Tokens = 2**32
"""And what prompt and answer come to then."""

UNREACHED_WALL_SECONDS: Seconds = 1.0
"""After so long a worker has told that its engine is gone."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What a request may take. Wall seconds."""

    body_bytes: int
    request_wall_seconds: Seconds
    hold_wall_seconds: Seconds
    retries: int
    first_byte: FirstByteBounds


@dataclass(frozen=True, kw_only=True)
class BodyRewrites:
    """What is added to a client's body on its way to an engine."""

    stream_usage: bool
    """Where the client does not, the usage of its stream is asked for."""
    client_name: bool
    """The engine is told whose request it is."""


class Gateway:
    """Serves the paths that lead to engines."""

    def __init__(
        self,
        *,
        name: str,
        bounds: Bounds,
        objectives: Objectives,
        additions: BodyRewrites,
        keyring: Keyring,
        pools: Pools,
        engines: EngineClient,
        clock: Clock,
        supervisor: Supervisor,
        ids: RequestIds,
        access_log: AccessLog | None = None,
    ) -> None:
        """`name`: this ingress in the log. `objectives`: of clients that name none."""
        self._name = name
        self._bounds = bounds
        self._objectives = objectives
        self._additions = additions
        self._keyring = keyring
        self._pools = pools
        self._engines = engines
        self._clock = clock
        self._supervisor = supervisor
        self._ids = ids
        self._access_log = access_log
        self._bodies = Bodies()
        self._passage = Passthrough(engines, retries=bounds.retries, first_byte=bounds.first_byte)

    async def serve(self, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. A cancellation of its task ends it, too, with an error to the client; a second one is raised."""
        call = Call(endpoint, scope, send, ids=self._ids, clock=self._clock)
        life: RequestLifecycle | None = None
        with (
            self._logged(call, lambda: life),
            RequestDeadline(self._supervisor, wall_seconds=self._bounds.request_wall_seconds) as patience,
        ):
            try:
                asked = await self._read(call, receive, patience)
                if not endpoint.placed:
                    await self._passage.deliver(call, *await self._find(call, asked))
                    return
                pool, command = await self._understand(call, asked)
                life = self._begin(pool, call, command)
                await self._deliver(call, life, command)
            except Refusal as refusal:
                await call.refuse(refusal)
            except ClientGoneError:
                call.reason = CancelCause.CLIENT_GONE
            except asyncio.CancelledError:
                if patience.recovered():
                    await self._interrupted(call, life, patience.interruption)
                else:
                    await self._cut(call, life)
            except RecursionError:  # nothing else here is nested as deeply as a client likes
                await self._nested_too_deeply(call, life)
            except Exception as error:  # noqa: BLE001 - the outermost frame of a request, which must still get its end
                await self._stumbled(call, life, error)

    async def refuse(self, endpoint: Endpoint, scope: Scope, send: Send, refusal: Refusal) -> None:
        """Answer a request that is none for this path, whatever is in it."""
        call = Call(endpoint, scope, send, ids=self._ids, clock=self._clock)
        with self._logged(call, lambda: None):
            await call.refuse(refusal)

    @contextmanager
    def _logged(self, call: Call, life: Callable[[], RequestLifecycle | None]) -> Iterator[None]:
        try:
            yield
        finally:
            if self._access_log is not None:
                self._access_log.tell(call, life())

    # Understand

    async def _read(self, call: Call, receive: Receive, patience: RequestDeadline) -> ParsedRequest:
        """What the client asks for. Raises Refusal, ClientGoneError."""
        call.key_name = call.tenant = self._keyring.tenant(call.headers)
        bounds = self._bounds
        await call.read_body(receive, self._bodies, bytes_max=bounds.body_bytes)
        patience.watch(receive)
        return call.endpoint.read(call.body, call.headers)

    async def _find(self, call: Call, asked: ParsedRequest) -> tuple[Pool, Model]:
        """Raises Refusal."""
        call.model, call.wants_stream = cleaned(asked.model) or None, asked.stream
        call.tenant = call.key_name or tenant_of(call.headers, asked.user)
        pool, model = await self._pools.await_model(asked.model)
        call.model, call.pool = model.name, pool.name
        return pool, model

    async def _understand(self, call: Call, asked: ParsedRequest) -> tuple[Pool, RouteRequest]:
        """Whose request it is, and how that pool's scheduler must know it. Raises Refusal."""
        wished = objectives(call.headers, self._objectives)
        pool, model = await self._find(call, asked)
        model_len = pool.fleet.context_of(model)
        _check_length(asked, model_len, _certain_tokens(asked))
        tokens = await pool.tokenising.tokens(asked, TokenizeContext(call.headers, call.id, model))
        call.prefix, call.prompt_tokens = tokens.said, tokens.count
        call.comparable = asked.answers == 1 and len(tokens.prompts) == 1
        call.asks_usage = asked.usage_may_be_asked and self._additions.stream_usage
        if tokens.exact:
            _check_length(asked, model_len, max(map(len, tokens.prompts)))
        output_tokens = _output_tokens(asked, model_len, tokens.count)
        call.output_bounded = asked.output_tokens is not None or output_tokens > 0
        command = RouteRequest(
            request=call.id,
            ingress=self._name,
            arrived_at=call.arrived_at,
            tenant=call.tenant or ANONYMOUS,
            keys=_packed_keys(pool.keys, model, asked, tokens.keyed),
            prompt_tokens=tokens.count,
            max_output_tokens=output_tokens,
            slo_ttft=wished.ttft,
            slo_tpot=wished.tpot,
            session=session_of(call.headers, asked.user),
            exact=tokens.exact,
            streaming=asked.stream,
            adapter=model.adapter,
            alias=model.alias,
            context_tokens=_context_tokens(asked, model_len, max(map(len, tokens.prompts), default=0)),
            followed=True,
        )
        if self._additions.client_name and call.endpoint.parse is not None:
            call.body = naming_client(call.body, command.tenant)
        return pool, command

    def _begin(self, pool: Pool, call: Call, command: RouteRequest) -> RequestLifecycle:
        return RequestLifecycle(
            command.request,
            pool=pool,
            arrived_at=command.arrived_at,
            slo_ttft=command.slo_ttft,
            clock=self._clock,
            comparable=call.comparable,
        )

    # Place, forward, and again

    async def _deliver(self, call: Call, life: RequestLifecycle, command: RouteRequest) -> None:
        """Raises Refusal where the client gets no answer from an engine."""
        with life.pool.retry_budget.open() as ticket:
            while True:
                command, grant = await self._place(life, command)
                life.may_go_elsewhere = partial(self._may_go_elsewhere, life, command, ticket)
                try:
                    await self._forward(call, life, grant, command, ticket)
                except EngineFailedError as error:
                    command = self._next_attempt(life, command, ticket, error)
                else:
                    return

    def _next_attempt(
        self, life: RequestLifecycle, command: RouteRequest, ticket: RetryTicket, error: EngineFailedError
    ) -> RouteRequest:
        """What to ask the scheduler now that the engine has failed it. Raises Refusal where it may not be tried again."""
        failed = life.instance
        log.warning("engine_failed", instance=failed, request=life.request, reason=str(error))
        if error.failure is not None:
            life.attempt_failed(error.failure, status=error.status, detail=str(error))
        if command.attempt > self._bounds.retries and (life.reached or not self._may_wait(command)):
            life.failed("engine_failed", 502)
            raise engine_failed(error.told) from error
        if life.reached and not ticket.claim():
            life.failed(RETRY_BUDGET_SPENT, 503)
            raise retry_refused(error.told) from error
        ENGINE_RETRIES.inc()
        life.waits_again()
        excluded = [*command.excluded, failed]
        return msgspec.structs.replace(command, request=life.request, attempt=command.attempt + 1, excluded=excluded)

    def _may_go_elsewhere(self, life: RequestLifecycle, command: RouteRequest, ticket: RetryTicket) -> bool:
        tried = [*command.excluded, life.instance]
        other = life.pool.under_way.least_busy(command, excluded=tried)
        if other is None or command.attempt > self._bounds.retries:
            return False
        led = life.grant is not None and life.grant.term > 0
        if led and all(other.id != ready.id for ready in life.pool.fleet.ready):
            return False  # a leader does not place where it is doubtful that anybody answers
        return ticket.claim()

    async def _place(self, life: RequestLifecycle, command: RouteRequest) -> tuple[RouteRequest, RouteGranted]:
        """Its place, and the command that it was given for. Raises Refusal where there is none; the request's end is written then."""
        answer = await self._routed(life, command)
        while _nobody_is_left(answer) and command.excluded and not life.reached and self._may_wait(command):
            # All engines are gone, and their workers may not have said so yet: from then on it is held like any other.
            await self._clock.sleep_wall(UNREACHED_WALL_SECONDS)
            if answer is not None:  # the leader has ended it
                life.request = self._ids.fresh()
            command = msgspec.structs.replace(command, request=life.request, attempt=command.attempt + 1, excluded=[])
            answer = await self._routed(life, command)
        if answer is None:
            life.failed("no_place", 503)
            raise no_place()
        if isinstance(answer, RouteRejected):
            raise self._refused(life, answer)
        life.granted(answer)
        return command, answer

    def _may_wait(self, command: RouteRequest) -> bool:
        return self._clock.now() - command.arrived_at < self._bounds.hold_wall_seconds * self._clock.speed

    async def _routed(self, life: RequestLifecycle, command: RouteRequest) -> RouteGranted | RouteRejected | None:
        router = life.pool.router
        answer = await _route(router, command)
        if isinstance(answer, RouteRejected) and answer.reason == RejectReason.ALREADY_ENDED:
            # The client's id was used before, in another ingress or another life of this one; or the leader has given this
            # request up meanwhile, as one that its engine has no more.
            life.request = self._ids.fresh()
            answer = await _route(router, msgspec.structs.replace(command, request=life.request))
        return answer

    def _refused(self, life: RequestLifecycle, answer: RouteRejected) -> Refusal:
        """What the client is told of a request that the leader has ended."""
        life.ended_by_leader()
        return self._refusal(answer)

    def _refusal(self, answer: RouteRejected) -> Refusal:
        wall = answer.retry_after / self._clock.speed
        return rejected(answer.status, answer.reason, answer.detail, retry_after_wall=wall)

    async def _forward(
        self, call: Call, life: RequestLifecycle, grant: RouteGranted, command: RouteRequest, ticket: RetryTicket
    ) -> None:
        """Raises EngineFailedError while the client has seen nothing; afterwards the stream ends with an error."""
        body = asking_for_usage(call.body) if call.asks_usage else call.body
        if grant.decode:
            handed_over = await self._prefill_elsewhere(call, life, grant, body)
            if handed_over is None:
                return
            grant, body = handed_over
        while grant.rebind:
            async with life.pool.rebinding.watch(grant) as watch:
                await self._exchange(call, life, grant, body, command, ticket)
            if watch.onward is None:
                return
            grant = watch.onward
            life.rebound(grant)
        await self._exchange(call, life, grant, body, command, ticket)

    async def _exchange(
        self,
        call: Call,
        life: RequestLifecycle,
        grant: RouteGranted,
        body: bytes,
        command: RouteRequest,
        ticket: RetryTicket,
    ) -> None:
        """One engine's answer, as it comes. Raises as `_forward`."""
        pool = life.pool
        output = self._output_seconds(call, command)
        with pool.under_way.at_engine(grant):
            answer, first = await self._opened(call, life, grant, body, output=output)
            async with answer:
                if grant.rebind:
                    pool.rebinding.answered(grant)
                knowledge = _knowledge(grant, exact=command.exact)
                if answer.status >= 400:
                    await self._pass_refusal_on(call, life, answer, first)
                    return
                ticket.settle()
                pool.under_way.answered(grant.instance)
                if answer.streams:
                    await self._stream(call, life, grant, answer, first, knowledge)
                else:
                    await self._hand_over(call, life, grant, answer, first, knowledge)

    def _output_seconds(self, call: Call, command: RouteRequest) -> Seconds:
        """Engine seconds that the answer may take after its first token before anything of it is sent. A client that asks for
        a shorter TPOT than usual does not make engines fail that cannot give it."""
        if command.streaming:
            return 0.0
        if not call.output_bounded:
            return FOREVER
        return command.max_output_tokens * max(command.slo_tpot, self._objectives.tpot)

    async def _opened(
        self, call: Call, life: RequestLifecycle, grant: RouteGranted, body: bytes, *, output: Seconds = 0.0
    ) -> tuple[EngineAnswer, bytes]:
        """The answer and its first bytes, which come in time or when nobody else could take the request. `output`: engine
        seconds that the answer may take before anything of it is sent. Raises EngineFailedError."""
        expected = grant.expected_seconds or grant.predicted_ttft
        wall_seconds = self._bounds.first_byte.wall_seconds(expected, output=output, speed=self._clock.speed)
        deadline = FirstByteDeadline(wall_seconds, partial(_leave_slow_engine, life))
        with life.pool.under_way.unanswered(grant.request, deadline.expire):
            async with deadline:
                return await self._engines.open(
                    grant.url,
                    call.endpoint.path,
                    body,
                    call.headers,
                    life.request,
                    dp_rank=grant.dp_rank,
                    shape=call.endpoint.shape,
                    content_type=call.endpoint.content_type(call.headers),
                )

    async def _prefill_elsewhere(
        self, call: Call, life: RequestLifecycle, grant: RouteGranted, body: bytes
    ) -> tuple[RouteGranted, bytes] | None:
        """Have the prompt computed where it was placed, and ask where the request goes on: that grant, and the body to be
        sent there. None where the engine refused the request, which the client has been told. Raises EngineFailedError,
        and Refusal where nobody who decodes can take it any more."""
        split, prefilled = SplitBody(body, path_splits=call.endpoint.splits), NOT_PREFILLED
        if split.possible:
            answered = await self._prefill(call, life, grant, split)
            if answered is None:
                return None
            prefilled = answered
        onward = await life.pool.router.hand_over(grant, life.sent_seconds if split.possible else 0.0)
        if isinstance(onward, RouteRejected):
            if onward.reason == RejectReason.ALREADY_ENDED:
                raise self._refused(life, onward)
            life.failed(onward.reason, onward.status)
            raise self._refusal(onward)
        life.handed_over(onward, prefilled.cached_tokens)
        return onward, split.decode(prefilled)

    async def _prefill(
        self, call: Call, life: RequestLifecycle, grant: RouteGranted, split: SplitBody
    ) -> Prefilled | None:
        """None where the engine refused the request. Raises EngineFailedError."""
        with life.pool.under_way.at_engine(grant):
            answer, first = await self._opened(call, life, grant, split.prefill())
            async with answer:
                if answer.status < 400:
                    prefilled = read_prefill(await answer.whole(first))
                    life.pool.under_way.answered(grant.instance)
                    return prefilled
                await self._pass_refusal_on(call, life, answer, first)
                return None

    async def _stream(
        self,
        call: Call,
        life: RequestLifecycle,
        grant: RouteGranted,
        answer: EngineAnswer,
        first: bytes,
        knowledge: str,
    ) -> None:
        await call.start(answer.content_type, grant, knowledge=knowledge, length=None)
        remover = UsageRemover() if call.asks_usage else None
        await call.write(remover.shown(first) if remover else first)
        life.first_token()
        try:
            while chunk := await answer.chunk():
                if shown := remover.shown(chunk) if remover else chunk:
                    await call.write(shown)
        except EngineFailedError as error:
            log.warning("engine_broke_off", instance=grant.instance, request=life.request, reason=str(error))
            if error.failure is not None:
                life.attempt_failed(error.failure, detail=str(error))
            life.failed("engine_broke_off", 502)
            await call.refuse(engine_broke_off(error.told), mid_event=answer.mid_event)
            return
        if answer.tells_failure:
            # The client reads it in the engine's words.
            log.warning("engine_broke_off", instance=grant.instance, request=life.request, reason=TOLD_FAILURE)
            life.attempt_failed("stream_reset", detail=TOLD_FAILURE)
            life.failed("engine_broke_off", 502)
            call.reason = "engine_broke_off"
            await call.finish(remover.rest() if remover else b"")
            return
        await call.finish(remover.rest() if remover else b"")
        usage = life.told_of(answer.streamed_usage())
        life.finished(usage, output_tokens=usage.completion_tokens if usage.completion_tokens >= 0 else answer.events)

    async def _hand_over(
        self,
        call: Call,
        life: RequestLifecycle,
        grant: RouteGranted,
        answer: EngineAnswer,
        first: bytes,
        knowledge: str,
    ) -> None:
        """An answer that is not streamed: nothing is shown before it is whole."""
        body = await answer.whole(first)
        usage = life.told_of(usage_in(body))
        await call.start(answer.content_type, grant, knowledge=knowledge, length=len(body))
        await call.finish(body)
        if 0 <= usage.completion_tokens <= 1:
            # Only then does the prefill end with the answer; else it ended some time before.
            life.first_token()
        life.finished(usage, output_tokens=0)

    async def _pass_refusal_on(
        self, call: Call, life: RequestLifecycle, answer: EngineAnswer, first: bytes = b""
    ) -> None:
        """The engine's own 4xx: the client's business, unless it says that the engine is not fit to serve anybody. Raises
        EngineFailedError then, if there is another."""
        body = await answer.whole(first)
        lacks = lacks_endpoint(answer.status, body)
        if not lacks and self._engines.is_unfit(answer.status, call.headers) and life.may_go_elsewhere():
            msg = f"it refused with status {answer.status}"
            raise EngineFailedError(msg)
        life.failed("engine_refused", answer.status)
        if lacks:
            raise not_served(call.endpoint.path)
        await call.pass_on(answer.status, body, answer.content_type)

    # Interruptions

    async def _interrupted(self, call: Call, life: RequestLifecycle | None, interruption: CancelCause | None) -> None:
        call.reason = interruption or ""
        overdue = interruption is CancelCause.TIMEOUT
        if life is not None and not life.over:
            await self._end_interrupted(life, overdue=overdue)
        if overdue:
            await call.refuse(given_up(), mid_event=True)

    async def _end_interrupted(self, life: RequestLifecycle, *, overdue: bool) -> None:
        cause = CancelCause.TIMEOUT if overdue else CancelCause.CLIENT_GONE
        if life.grant is None and await life.pool.router.withdraw(life.request, cause):
            life.ended_by_leader()
        elif overdue:
            life.failed(cause.value, 408)
        else:
            life.cancelled(cause)

    async def _stumbled(self, call: Call, life: RequestLifecycle | None, error: Exception) -> None:
        """A defect of ours. The client and the log are told so."""
        log.error("request_internal_error", request=call.id, exc_info=error)
        if life is not None and not life.over:
            life.failed("internal_error", 500)
        await call.refuse(Refusal(500, "internal_error", "The gateway made a mistake; it has been logged."))

    async def _nested_too_deeply(self, call: Call, life: RequestLifecycle | None) -> None:
        """A body that decodes, and whose parts cannot be followed to their end."""
        if life is not None and not life.over:
            life.failed("malformed_body", 400)
        await call.refuse(too_deep())

    async def _cut(self, call: Call, life: RequestLifecycle | None) -> None:
        """This process is being stopped, and the time to finish is over (`HttpServer`)."""
        call.reason = CancelCause.INGRESS_STOPPED
        if life is not None and not life.over:
            life.cancelled(CancelCause.INGRESS_STOPPED)
        await call.refuse(stopped(CancelCause.INGRESS_STOPPED), mid_event=True)


def _leave_slow_engine(life: RequestLifecycle, wall_seconds: Seconds) -> bool:
    """No first byte in time: whether to try another engine. Where that is not possible the request goes on waiting, for it
    would lose its place for nothing; the log is told all the same."""
    life.attempt_failed("first_byte_timeout", detail=f"no first byte within {wall_seconds:.3g} s")
    return life.may_go_elsewhere()


def _nobody_is_left(answer: RouteGranted | RouteRejected | None) -> bool:
    return answer is None or (isinstance(answer, RouteRejected) and answer.reason == RejectReason.NO_INSTANCE)


async def _route(router: Router, command: RouteRequest) -> RouteGranted | RouteRejected | None:
    try:
        return await router.route(command)
    except NoPlaceError as error:
        log.warning("no_place", request=command.request, reason=str(error))
        return None


def _packed_keys(keys: Keys, model: Model, asked: ParsedRequest, tokens: Sequence[int]) -> bytes:
    """Raises Refusal for impossible token ids."""
    try:
        return keys.packed(model.base, tokens, lora=model.adapter, cache_salt=asked.cache_salt)
    except ValueError as error:
        msg = f"{error}."
        raise bad_request(msg, param="prompt") from error


def _check_length(asked: ParsedRequest, model_len: Tokens, prompt_tokens: Tokens) -> None:
    """Refuse what cannot fit the model; `model_len` 0 means that nobody knows."""
    if model_len == 0 or asked.truncates:
        return
    output_tokens = _demanded_tokens(asked)
    if prompt_tokens + output_tokens > model_len:
        raise too_long(prompt_tokens, output_tokens, model_len, param=asked.prompt_field)


def _demanded_tokens(asked: ParsedRequest) -> Tokens:
    """Output that must fit the context beside the prompt."""
    return 1 if asked.output_tokens is None or not asked.output_demanded else asked.output_tokens


def _context_tokens(asked: ParsedRequest, model_len: Tokens, prompt_tokens: Tokens) -> Tokens:
    """The context that an instance must have. A prompt that was guessed, or will be truncated, may look longer than it is:
    the longest context that there is has room for it."""
    needed = prompt_tokens + _demanded_tokens(asked)
    return min(needed, model_len or CONTEXT_TOKENS_MAX)


def _certain_tokens(asked: ParsedRequest) -> Tokens:
    """Tokens of the longest prompt that are known without tokenising."""
    prompt = asked.prompt
    return max(map(len, prompt.prompts)) if isinstance(prompt, Tokenised) else 0


def _output_tokens(asked: ParsedRequest, model_len: Tokens, prompt_tokens: Tokens) -> Tokens:
    """The most that can come out; 0 where neither the client nor the model sets a bound."""
    room = max(0, model_len - prompt_tokens)
    if asked.output_tokens is None:
        return room
    return min(asked.output_tokens, room or OUTPUT_TOKENS_MAX)


def _knowledge(grant: RouteGranted, *, exact: bool) -> str:
    """How well the cache was known for this request: no better than its own tokens are."""
    if not exact and grant.knowledge == Knowledge.EXACT:
        return Knowledge.DEGRADED
    return grant.knowledge
