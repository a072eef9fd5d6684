"""Copies of hot prefixes to further engines, ahead of the requests that will need them there: after the first token of a
request whose grant has `copy`, the target fetches its prefix from the request's engine (`PrefixFetcher`). In the
background; the client waits for none of it. Out: PrefixCopyEnded."""

from dataclasses import dataclass, field

import msgspec
import structlog

from pointsman.contracts.commands import PrefixCopy, PrefixFetch, RouteGranted
from pointsman.contracts.requests import PrefixCopyEnded
from pointsman.ports import Clock
from pointsman.primitives import RequestId
from pointsman.runtime.supervision import Supervisor
from pointsman_ingress import metrics
from pointsman_ingress.engine.prefix_fetch import FetchOutcome, PrefixFetcher, PrefixPrompt
from pointsman_ingress.http.request_headers import Headers
from pointsman_ingress.placement.pools import Pool

log = structlog.get_logger()

COPIES_MAX = 16
"""Under way; further ones are not made."""


@dataclass(eq=False)
class PrefixCopier:
    fetcher: PrefixFetcher
    supervisor: Supervisor
    _under_way: int = field(default=0, init=False)

    def start(
        self, pool: Pool, grant: RouteGranted, clock: Clock, prompt: PrefixPrompt | None, headers: Headers
    ) -> None:
        """Does nothing without `grant.copy`. `clock`: of the request."""
        if grant.copy is None:
            return
        if self._under_way >= COPIES_MAX:
            self._ended(pool, grant, clock, grant.copy, FetchOutcome(0, 0.0, 0.0, "this ingress makes too many copies"))
            return
        self._under_way += 1
        self.supervisor.start(self._make(pool, grant, clock, grant.copy, prompt, headers), name="prefix-copy")

    async def _make(
        self,
        pool: Pool,
        grant: RouteGranted,
        clock: Clock,
        copy: PrefixCopy,
        prompt: PrefixPrompt | None,
        headers: Headers,
    ) -> None:
        """For the fetcher a grant at the target, whose prefix the request's engine has."""
        target = msgspec.structs.replace(
            grant,
            request=RequestId(f"{grant.request}-copy"),
            instance=copy.target,
            url=copy.url,
            dp_rank=copy.dp_rank,
        )
        source = PrefixFetch(
            source=grant.instance,
            url=grant.url,
            prefix_tokens=copy.prefix_tokens,
            seconds=copy.seconds,
            dp_rank=grant.dp_rank,
        )
        try:
            outcome = await self.fetcher.run(target, source, prompt, headers)
        finally:
            self._under_way -= 1
        self._ended(pool, grant, clock, copy, outcome)

    def _ended(self, pool: Pool, grant: RouteGranted, clock: Clock, copy: PrefixCopy, outcome: FetchOutcome) -> None:
        metrics.prefix_copies(pool.name, copy.target, "failed" if outcome.failure else "made").inc()
        if outcome.failure:
            log.warning("prefix_copy_failed", source=grant.instance, target=copy.target, reason=outcome.failure)
        event = PrefixCopyEnded(
            at=clock.now(),
            request=grant.request,
            instance=copy.target,
            source=grant.instance,
            attempt=grant.attempt,
            tokens=outcome.tokens,
            seconds=outcome.seconds,
            failure=outcome.failure,
        )
        pool.events.append_soon(event)
