"""Questions that any engine of a pool answers alike and that cost it no model: `/tokenize`, `/detokenize`.

Nothing is scheduled and nothing logged. The reachable instance with the least to do is asked, and when it fails the
next, as often as a request may be sent again.
"""

import structlog

from pointsman.chassis.telemetry import ENGINE_RETRIES
from pointsman.primitives import InstanceId
from pointsman.state.fleet import Instance
from pointsman_ingress.call import Call
from pointsman_ingress.fleet_view import Model
from pointsman_ingress.openai_errors import engine_failed, no_engines, not_served
from pointsman_ingress.pools import Pool
from pointsman_ingress.proxy import EngineClient, EngineFailedError, lacks_endpoint

log = structlog.get_logger()


class Passage:
    """Takes a question to an engine and the answer back."""

    def __init__(self, engines: EngineClient, *, retries: int) -> None:
        self._engines = engines
        self._retries = retries

    async def deliver(self, call: Call, pool: Pool, model: Model) -> None:
        """Raises Refusal where no engine answers."""
        tried: list[InstanceId] = []
        reason = ""
        while len(tried) <= self._retries:
            instance = pool.under_way.least_busy(model, excluded=tried)
            if instance is None:
                break
            try:
                await self._ask(call, instance)
            except EngineFailedError as error:
                log.warning("engine_failed", instance=instance.id, request=call.id, reason=str(error))
                tried.append(instance.id)
                reason = error.told
                ENGINE_RETRIES.inc()
            else:
                return
        raise engine_failed(reason) if tried else no_engines()

    async def _ask(self, call: Call, instance: Instance) -> None:
        """Raises EngineFailedError, and Refusal where the engine has no such path; then the client has seen nothing."""
        path = call.endpoint.path
        async with await self._engines.send(instance.url, path, call.body, call.headers, call.id) as answer:
            body = await answer.whole()
        if lacks_endpoint(answer.status, body):
            raise not_served(path)
        await call.answer(answer.status, body, answer.content_type, instance.id)
