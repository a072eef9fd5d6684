"""Events and metrics of one request. The leader logs its end before a grant, this module after it."""

from math import ceil

import msgspec
import structlog

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.commands import PrefixFetch, RouteGranted
from pointsman.contracts.reasons import CancelCause
from pointsman.contracts.requests import (
    AttemptFailure,
    PrefillFinished,
    PrefixFetchEnded,
    RequestAttemptFailed,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    tpot_of_each,
)
from pointsman.ports import Clock
from pointsman.primitives import EngineSeconds, InstanceId, Term, Tokens
from pointsman.runtime.containment import RateLimit
from pointsman.runtime.telemetry import ENGINE_FAILURES, HANDOVERS_WITHOUT_TRANSFER
from pointsman.runtime.tracing import NO_SPAN, Span
from pointsman_ingress import metrics
from pointsman_ingress.context import RequestContext
from pointsman_ingress.engine.disaggregation import NO_TRANSFER, PrefillResult
from pointsman_ingress.engine.prefix_fetch import FetchOutcome
from pointsman_ingress.engine.streams import StreamTail
from pointsman_ingress.engine.usage import Usage, capped
from pointsman_ingress.placement.pools import Pool

log = structlog.get_logger()

DETAIL_CHARACTERS_MAX = 500
GAPS_MAX = 100_000

_transfer_warnings = RateLimit()  # of all requests of this process

EQUAL, FEWER, MORE, UNKNOWN = "equal", "fewer", "more", "unknown"


class RequestLifecycle:
    def __init__(self, context: RequestContext, clock: Clock, span: Span = NO_SPAN) -> None:
        self.request = context.command.request  # a retry may change it
        self.grant: RouteGranted | None = None  # current or last; None while queued
        self.sent_at = context.command.arrived_at
        self.retries = 0
        self.retries_counted = 0  # towards `--retries-max`: those after refused connections do not count
        self.reached_engine = False  # False if every failed engine refused the connection
        self.reason: str | None = None  # None: not ended; empty: no failure
        self.usage = Usage()
        self.stream: StreamTail | None = None  # that the client gets
        self._context = context
        self._span = span
        self._clock = clock
        self._first_token_at: EngineSeconds | None = None
        self._part_at: EngineSeconds = 0.0
        self._gaps: list[EngineSeconds] = []
        self._prefill_cached: Tokens | None = None
        self.transfer_from = InstanceId("")  # the prefill engine whose KV cache the present engine fetches
        self._without_transfer = False
        self._failure_logged = False
        self._fetch_failed = False

    @property
    def pool(self) -> Pool:
        return self._context.pool

    @property
    def ended(self) -> bool:
        return self.reason is not None

    @property
    def instance(self) -> InstanceId:
        return self.grant.instance if self.grant is not None else InstanceId("")

    def granted(self, grant: RouteGranted) -> None:
        self.grant = grant
        self.sent_at = self._clock.now()
        self.transfer_from = InstanceId("")
        self._without_transfer = self._failure_logged = self._fetch_failed = False

    def fetched(self, fetch: PrefixFetch, outcome: FetchOutcome) -> None:
        grant = self.grant
        assert grant is not None, "only a granted request fetches"
        self.sent_at = self._clock.now()
        self._fetch_failed = bool(outcome.failure)
        if outcome.failure:
            log.warning("prefix_fetch_failed", request=self.request, source=fetch.source, reason=outcome.failure)
        event = PrefixFetchEnded(
            at=self.sent_at,
            request=self.request,
            instance=grant.instance,
            source=fetch.source,
            attempt=grant.attempt,
            tokens=outcome.tokens,
            seconds=outcome.seconds,
            source_seconds=outcome.source_seconds,
            failure=outcome.failure,
        )
        self._log(event)

    def handed_over(self, grant: RouteGranted, prefill: PrefillResult) -> None:
        self.granted(grant)
        self._prefill_cached = prefill.cached_tokens
        if prefill.transfer:
            self.transfer_from = grant.prefilled_by
        elif prefill.cached_tokens is not None:
            self._without_transfer = True
            HANDOVERS_WITHOUT_TRANSFER.labels(self.pool.name, grant.prefilled_by).inc()
            if _transfer_warnings.allows():
                log.warning(
                    "handover_without_transfer",
                    request=self.request,
                    instance=grant.prefilled_by,
                    reason=f"it {NO_TRANSFER}",
                )

    def requeued(self, *, refused: bool) -> None:
        """`refused`: the engine refused the connection."""
        self.grant = None
        self.retries += 1
        self.retries_counted += not refused
        self._prefill_cached = None

    def attempt_failed(self, failure: AttemptFailure, *, status: int = 0, detail: str = "") -> None:
        """Logged once per grant, even if the request stays there."""
        self.reached_engine = self.reached_engine or failure != "connect_failure"
        grant = self.grant
        if self._failure_logged or grant is None:
            return
        self._failure_logged = True
        ENGINE_FAILURES.labels(self.pool.name, grant.instance, failure).inc()
        self.pool.in_flight.failed(grant.instance)
        event = RequestAttemptFailed(
            at=self._clock.now(),
            request=self.request,
            instance=grant.instance,
            attempt=grant.attempt,
            failure=failure,
            status=status,
            detail=detail[:DETAIL_CHARACTERS_MAX],
            prefilled_by=self.transfer_from,
        )
        self._log(event)

    def first_token(self) -> None:
        now = self._first_token_at = self._part_at = self._clock.now()
        ttft = now - self._context.command.arrived_at
        event = PrefillFinished(
            at=now, request=self.request, instance=self.instance, ttft=ttft, prefill=now - self.sent_at
        )
        self._log(event)
        if self.grant is not None:
            self.pool.in_flight.first_token(self.grant)

    def next_part(self) -> None:
        """Of a stream, after the first."""
        if len(self._gaps) < GAPS_MAX:
            now = self._clock.now()
            self._gaps.append(now - self._part_at)
            self._part_at = now

    def finished(self, usage: Usage, *, output_tokens: Tokens) -> None:
        """`output_tokens`: the engine's count, or the number of stream events."""
        self._end()
        if self._prefill_cached is not None:  # the decode engine reports its own
            usage = msgspec.structs.replace(usage, cached_tokens=self._prefill_cached)
        self.usage = usage = self._believed(usage)
        output_tokens = capped(output_tokens, self._context.usage_max.completion_tokens)
        now, arrived_at = self._clock.now(), self._context.command.arrived_at
        first_token_at = now if self._first_token_at is None else self._first_token_at
        event = RequestFinished(
            at=now,
            request=self.request,
            instance=self.instance,
            e2e=now - arrived_at,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            ttft=first_token_at - arrived_at,
            tpot=(now - first_token_at) / (output_tokens - 1) if output_tokens > 1 else 0.0,
            predicted_cached_tokens=self._predicted_cached_tokens,
            tbt_p90=tbt_p90(self._gaps),
            without_transfer=self._without_transfer,
        )
        self._log(event)
        self._measure(event, output_tokens)

    def failed(self, reason: str, status: int) -> None:
        """`reason`: a FailReason, or the leader's RejectReason."""
        reason = str(reason)
        self._end(reason)
        self._log(
            RequestFailed(
                at=self._clock.now(),
                request=self.request,
                reason=reason,
                status=status,
                instance=self.instance,
                output_tokens=self._delivered_tokens,
            )
        )

    def cancelled(self, cause: CancelCause) -> None:
        self._end(cause)
        self._log(
            RequestCancelled(
                at=self._clock.now(),
                request=self.request,
                reason=cause.sentence,
                instance=self.instance,
                cause=cause,
                output_tokens=self._delivered_tokens,
            )
        )

    def ended_by_leader(self) -> None:
        self._end()

    def _log(self, event: LogEvent) -> None:
        self.pool.events.append_soon(event, on_stored=self._span.stored(event))

    def _end(self, reason: str = "") -> None:
        assert not self.ended, "a request has one end"
        self.reason = reason

    @property
    def _delivered_tokens(self) -> Tokens:
        """-1 unless it streams."""
        if self.stream is None:
            return -1
        return capped(self.stream.delivered_tokens, self._context.usage_max.completion_tokens)

    def _believed(self, reported: Usage) -> Usage:
        usage = reported.capped(self._context.usage_max)
        if usage != reported:
            log.warning(
                "usage_not_believed",
                request=self.request,
                instance=self.instance,
                prompt_tokens=reported.prompt_tokens,
                completion_tokens=reported.completion_tokens,
                cached_tokens=reported.cached_tokens,
            )
        return usage

    @property
    def _predicted_cached_tokens(self) -> Tokens:
        grant = self.grant
        if (
            grant is None
            or grant.term == Term(0)
            or grant.prefilled_by
            or not self._context.comparable
            or self._fetch_failed
        ):
            return -1
        return grant.hit_tokens

    def _measure(self, event: RequestFinished, output_tokens: Tokens) -> None:
        command, pool, of_model = self._context.command, self.pool.name, self._context.metrics
        of_model.finished(event.e2e, self.sent_at - command.arrived_at)
        of_model.first_token(event.ttft, command.slo_ttft)
        if output_tokens > 1 and self._first_token_at is not None:
            tpot = tpot_of_each(event.tpot, output_tokens, command.answers)
            of_model.output(tpot, event.tbt_p90, command.slo_tpot)
        of_engine = metrics.of_engine(pool, self._context.model, event.instance)
        of_engine.prompt_tokens.inc(max(0, event.prompt_tokens))
        of_engine.output_tokens.inc(max(0, event.completion_tokens))
        of_engine.cached_tokens.inc(max(0, event.cached_tokens))
        if self.grant is None:
            return
        of_engine.predicted_cached_tokens.inc(self.grant.hit_tokens)
        expected, reported = event.predicted_cached_tokens, event.cached_tokens
        outcome = compared(expected, reported, granularity=self.pool.block_keys.block_tokens)
        metrics.cache_predictions(pool, event.instance, outcome).inc()
        if outcome in (FEWER, MORE):
            log.info(
                "cached_tokens_mismatch",
                request=event.request,
                instance=event.instance,
                predicted=expected,
                reported=reported,
                prompt_tokens=event.prompt_tokens,
            )


def tbt_p90(gaps: list[EngineSeconds]) -> EngineSeconds:
    """Nine in ten gaps are at most this long (Mooncake's TBT, FAST'25). 0 with fewer than two."""
    return sorted(gaps)[ceil(0.9 * len(gaps)) - 1] if len(gaps) > 1 else 0.0


def compared(predicted: Tokens, reported: Tokens, *, granularity: Tokens) -> str:
    """-1 is unknown. Predictions are multiples of `granularity`, engine blocks may be smaller."""
    if predicted < 0 or reported < 0:
        return UNKNOWN
    if reported < predicted:
        return FEWER
    return EQUAL if reported - predicted < granularity else MORE
