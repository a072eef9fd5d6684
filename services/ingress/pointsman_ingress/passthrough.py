"""Stateless endpoints (`/tokenize`, `/detokenize`): any instance can answer, nothing is scheduled and nothing logged.

The least busy reachable instance is asked, and another when it fails, within the same bounds as other requests. They cost
no prefill, so the shortest deadline for the first byte applies.
"""

from functools import partial

import structlog

from pointsman.primitives import InstanceId, Seconds
from pointsman.runtime.telemetry import ENGINE_RETRIES
from pointsman.state.fleet import Instance
from pointsman_ingress.context import RequestFacts
from pointsman_ingress.engine.client import EngineAnswer, EngineClient, EngineFailedError, EngineRequest, lacks_endpoint
from pointsman_ingress.engine.first_byte import FirstByteDeadline, FirstByteTimeout
from pointsman_ingress.http.call import Call
from pointsman_ingress.http.errors import endpoint_not_found, engine_failed, no_engines, retry_budget_spent
from pointsman_ingress.placement.fleet_view import Model
from pointsman_ingress.placement.pools import Pool

log = structlog.get_logger()


class Passthrough:
    def __init__(self, engines: EngineClient, *, retries: int, first_byte: FirstByteTimeout) -> None:
        self._engines = engines
        self._retries = retries
        self._wall_seconds = first_byte.wall_seconds(0.0, speed=1.0)

    async def deliver(self, call: Call, body: bytes, pool: Pool, model: Model, facts: RequestFacts) -> None:
        """Raises ApiError if no engine answers."""
        tried: list[InstanceId] = []
        reason = ""

        def may_leave(present: InstanceId, _seconds: Seconds) -> bool:
            excluded = [*tried, present]
            return len(excluded) <= self._retries and pool.in_flight.least_busy(model, excluded=excluded) is not None

        with pool.retry_budget.open() as ticket:
            while (instance := pool.in_flight.least_busy(model, excluded=tried)) is not None:
                try:
                    async with FirstByteDeadline(self._wall_seconds, partial(may_leave, instance.id)):
                        answer, first = await self._open(call, body, instance)
                    await self._pass_on(call, answer, first, instance, facts)
                except EngineFailedError as error:
                    log.warning("engine_failed", instance=instance.id, request=call.id, reason=str(error))
                    pool.in_flight.failed(instance.id)
                    tried.append(instance.id)
                    reason = error.public_reason
                    if len(tried) > self._retries:
                        raise engine_failed(reason) from error
                    if not ticket.claim():
                        raise retry_budget_spent(reason) from error
                    facts.retries += 1
                    ENGINE_RETRIES.inc()
                else:
                    return
        raise engine_failed(reason) if tried else no_engines()

    async def _open(self, call: Call, body: bytes, instance: Instance) -> tuple[EngineAnswer, bytes]:
        """Raises EngineFailedError."""
        return await self._engines.open(EngineRequest(instance.url, call.path, body, call.headers, call.id))

    async def _pass_on(
        self, call: Call, answer: EngineAnswer, first: bytes, instance: Instance, facts: RequestFacts
    ) -> None:
        """Raises EngineFailedError, and ApiError if the engine has no such path; the client has seen nothing then."""
        async with answer:
            body = await answer.whole(first)
        if lacks_endpoint(answer.status, body):
            raise endpoint_not_found(call.path)
        facts.instance = instance.id
        headers = ((b"x-pointsman-instance", instance.id.encode()),)
        await call.answer(answer.status, body, answer.content_type, headers)
