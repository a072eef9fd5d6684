"""Stateless endpoints (`/tokenize`, `/detokenize`): any instance can answer; not scheduled, not logged."""

from functools import partial

import structlog

from pointsman.primitives import InstanceId, Seconds
from pointsman.runtime.telemetry import REQUEST_RETRIES
from pointsman_ingress.endpoints import Endpoint
from pointsman_ingress.engine.answer import ANSWER_BYTES_MAX, AnswerTooLargeError, EngineFailedError
from pointsman_ingress.engine.client import KEY_REFUSED, EngineRequest
from pointsman_ingress.engine.first_byte import FirstByteDeadline, first_byte_wall_seconds
from pointsman_ingress.engine.refusals import lacks_endpoint, refusal_status, refused_by_engine
from pointsman_ingress.http import errors
from pointsman_ingress.http.call import BodyLoan, HttpExchange
from pointsman_ingress.prompt.body_fields import DROPPED_HEADER
from pointsman_ingress.resolver import RequestResolver
from pointsman_ingress.spans import engine_span

log = structlog.get_logger()


async def pass_through(
    call: HttpExchange, endpoint: Endpoint, body: bytes, resolver: RequestResolver, loan: BodyLoan
) -> None:
    """`loan`: for the answer. Raises ApiError, also if no engine answers."""
    accepted = await resolver.accept(call, endpoint, body)
    pool, model = await resolver.find_model(call, accepted.request)
    engines, settings, private = resolver.parts.engines, resolver.parts.settings, resolver.private
    tried: list[InstanceId] = []
    reason = ""

    def may_retry_elsewhere(current: InstanceId, _seconds: Seconds) -> bool:
        excluded = [*tried, current]
        return len(excluded) <= settings.retries_max and pool.in_flight.least_busy(model, excluded=excluded) is not None

    with pool.retry_budget.open() as ticket:
        while (instance := pool.in_flight.least_busy(model, excluded=tried)) is not None:
            span = engine_span(call, instance.id, instance.url, model=model.name, resent=len(tried))
            request = EngineRequest(
                instance.id, instance.url, call.path, accepted.content, call.headers, call.id, span=span
            )
            bytes_max = min(ANSWER_BYTES_MAX, loan.left)
            try:
                with span:
                    with FirstByteDeadline(
                        first_byte_wall_seconds(settings), partial(may_retry_elsewhere, instance.id), engines.seconds
                    ):
                        answer, first = await engines.open(request)
                    async with answer:
                        whole = await answer.whole(first, bytes_max=bytes_max, take=loan.add)
            except AnswerTooLargeError as error:
                raise errors.answer_too_large(bytes_max) from error
            except EngineFailedError as error:
                log.warning("engine_failed", instance=instance.id, request=call.id, reason=str(error))
                pool.in_flight.failed(instance.id)
                tried.append(instance.id)
                reason = error.public_reason
                if len(tried) > settings.retries_max:
                    raise errors.engine_failed(reason) from error
                if not ticket.claim():
                    raise errors.retry_budget_spent(reason) from error
                call.facts.retries += 1
                REQUEST_RETRIES.labels(pool.name).inc()
                continue
            if lacks_endpoint(answer.status, whole):
                raise errors.endpoint_not_found(call.path)
            call.facts.instance = instance.id
            if engines.refused_own_key(answer.status, instance.id):
                log.error("engine_key_refused", instance=instance.id, status=answer.status, reason=KEY_REFUSED)
                raise errors.engine_key_refused()
            status = refusal_status(answer.status)
            if private and status >= 400:
                raise refused_by_engine(status, whole, answer.retry_headers)
            headers = answer.retry_headers
            if not private:
                headers.append((b"x-pointsman-instance", instance.id.encode()))
            if accepted.dropped:
                headers.append((DROPPED_HEADER, accepted.dropped.encode()))
            await call.answer(status, whole, answer.content_type, headers)
            return
    raise errors.engine_failed(reason) if tried else errors.no_engines()
