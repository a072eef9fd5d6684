"""Requests that may still be taken out of their engine, until it answers.

Only requests whose grant says `rebind` are watched. The leader's answer to `cmd.follow` (`heartbeat`) says which of them are
to go elsewhere. Whoever waits for such a request's engine is interrupted there: the connection is closed, which is how the
engine learns to stop. From the first bytes of the answer on the request stays, whatever is said: the log then tells by its
PrefillFinished, or its end, where it was served.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import structlog

from pointsman.contracts.commands import RouteGranted
from pointsman.primitives import RequestId
from pointsman.runtime.telemetry import REQUESTS_REDISPATCHED

log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class Watch:
    """One request at an engine that has not answered. `onward`: where it is to go instead."""

    grant: RouteGranted
    wait: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))
    onward: RouteGranted | None = None


class Rebinding:
    """The requests of one pool that may be re-bound."""

    def __init__(self) -> None:
        self._watched: dict[RequestId, Watch] = {}

    @asynccontextmanager
    async def watch(self, grant: RouteGranted) -> AsyncIterator[Watch]:
        """Interrupts what is done inside when the request is to go elsewhere: then `onward` says where."""
        watch = Watch(grant)
        self._watched[grant.request] = watch
        try:
            async with watch.wait:
                yield watch
        except TimeoutError:
            if watch.onward is None:
                raise
            REQUESTS_REDISPATCHED.inc()
            log.info(
                "request_redispatched", request=grant.request, source=grant.instance, instance=watch.onward.instance
            )
        finally:
            self._watched.pop(grant.request, None)

    def answered(self, grant: RouteGranted) -> None:
        """Its engine has begun to answer: it stays, even where the leader has said otherwise in this very moment."""
        watch = self._watched.pop(grant.request, None)
        if watch is not None:
            watch.onward = None
            watch.wait.reschedule(None)

    def move(self, onward: RouteGranted) -> None:
        """The leader says that this request goes there; a no-op where it stays or has gone already."""
        watch = self._watched.get(onward.request)
        if watch is None or watch.onward is not None:
            return
        if watch.grant.attempt == onward.attempt and watch.grant.instance != onward.instance:
            watch.onward = onward
            watch.wait.reschedule(0.0)
