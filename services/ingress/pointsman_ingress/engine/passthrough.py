"""Questions that any engine of a pool answers alike and that cost it no model: `/tokenize`, `/detokenize`.

Nothing is scheduled and the log does not hear of it. The reachable instance with the least to do is asked, and when it fails the
next, as often as a request may be sent again and the pool's retry budget allows. It costs an engine no prefill, so the least
that the bounds allow is its deadline for the first byte.
"""

from collections.abc import Callable
from functools import partial

import structlog

from pointsman.primitives import InstanceId, Seconds
from pointsman.runtime.telemetry import ENGINE_RETRIES
from pointsman.state.fleet import Instance
from pointsman_ingress.engine.proxy import EngineClient, EngineFailedError, lacks_endpoint
from pointsman_ingress.http.call import Call
from pointsman_ingress.http.openai_errors import engine_failed, no_engines, not_served, retry_refused
from pointsman_ingress.placement.fleet_view import Model
from pointsman_ingress.placement.pools import Pool
from pointsman_ingress.timeouts import FirstByteBounds, FirstByteDeadline

log = structlog.get_logger()


class Passthrough:
    """Takes a question to an engine and the answer back."""

    def __init__(self, engines: EngineClient, *, retries: int, first_byte: FirstByteBounds) -> None:
        self._engines = engines
        self._retries = retries
        self._wall_seconds = first_byte.wall_seconds(0.0, speed=1.0)

    async def deliver(self, call: Call, pool: Pool, model: Model) -> None:
        """Raises Refusal where no engine answers."""
        tried: list[InstanceId] = []
        told = ""
        with pool.retry_budget.open() as ticket:
            while (instance := pool.under_way.least_busy(model, excluded=tried)) is not None:
                try:
                    await self._ask(call, instance, partial(self._may_leave, pool, model, [*tried, instance.id]))
                except EngineFailedError as error:
                    log.warning("engine_failed", instance=instance.id, request=call.id, reason=str(error))
                    pool.under_way.failed(instance.id)
                    tried.append(instance.id)
                    if len(tried) > self._retries:
                        raise engine_failed(error.told) from error
                    if not ticket.claim():
                        raise retry_refused(error.told) from error
                    told = error.told
                    call.retries += 1
                    ENGINE_RETRIES.inc()
                else:
                    return
        raise engine_failed(told) if tried else no_engines()

    def _may_leave(self, pool: Pool, model: Model, tried: list[InstanceId], _seconds: Seconds) -> bool:
        return len(tried) <= self._retries and pool.under_way.least_busy(model, excluded=tried) is not None

    async def _ask(self, call: Call, instance: Instance, may_leave: Callable[[Seconds], bool]) -> None:
        """`may_leave`: whether to leave an engine that is slow. Raises EngineFailedError, and Refusal where the engine has no such path; then the client has
        seen nothing."""
        path = call.endpoint.path
        async with FirstByteDeadline(self._wall_seconds, may_leave):
            answer, first = await self._engines.open(instance.url, path, call.body, call.headers, call.id)
        async with answer:
            body = await answer.whole(first)
        if lacks_endpoint(answer.status, body):
            raise not_served(path)
        await call.answer(answer.status, body, answer.content_type, instance.id)
