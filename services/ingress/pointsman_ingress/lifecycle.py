"""One request's life as the log tells it: first token, and exactly one end.

Before a grant the leader writes the end, after it this module does. A second end is a defect and asserted against.
Nothing here waits: events go to the log off the request's path.
"""

from collections.abc import Callable

import structlog
from prometheus_client import Counter as Metric

from pointsman.contracts.commands import RouteGranted
from pointsman.contracts.reasons import CancelCause
from pointsman.contracts.requests import (
    AttemptFailure,
    PrefillFinished,
    RequestAttemptFailed,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
)
from pointsman.ports import Clock
from pointsman.primitives import InstanceId, RequestId, Seconds, Term, Tokens
from pointsman.runtime.telemetry import (
    ATTEMPT_FAILURES,
    CACHE_PREDICTIONS,
    CACHED_TOKENS,
    E2E_REQUEST_LATENCY_SECONDS,
    PREDICTED_CACHED_TOKENS,
    PROMPT_TOKENS,
    SLO_OUTCOMES,
    TIME_PER_OUTPUT_TOKEN_SECONDS,
    TIME_TO_FIRST_TOKEN_SECONDS,
)
from pointsman_ingress.engine.proxy import Usage
from pointsman_ingress.placement.pools import Pool

log = structlog.get_logger()

DETAIL_CHARACTERS_MAX = 500
"""Of what an engine's failure is described by in the log."""

EQUAL, FEWER, MORE, UNKNOWN = "equal", "fewer", "more", "unknown"

_OUTCOME = {met: SLO_OUTCOMES.labels(name) for met, name in ((True, "met"), (False, "missed"))}


class RequestLifecycle:
    """From the moment a valid request may leave a trace. All times are engine seconds."""

    def __init__(
        self,
        request: RequestId,
        *,
        pool: Pool,
        arrived_at: Seconds,
        slo_ttft: Seconds,
        clock: Clock,
        comparable: bool,
    ) -> None:
        """`pool`: in whose log it lives. `comparable`: whether the engine's cached tokens are those predicted."""
        self.request = request
        self.pool = pool
        self.over = False
        self.reached = False
        """Whether an engine that failed it may have begun with it. Engines that do not even take a connection cost nobody anything."""
        self.grant: RouteGranted | None = None
        """Where it is being served; None while it waits for a place."""
        self.may_go_elsewhere: Callable[[], bool] = lambda: False
        """Tells whether it may be sent to another engine than the one that has it, and claims its place in the retry budget
        if so. Asked only where that engine refuses it or is too slow."""
        self.usage = Usage()
        """What the engine says that it took."""
        self.reason = ""
        """Why it did not end well."""
        self.retries = 0
        """How many further engines it was sent to because one failed."""
        self._arrived_at = arrived_at
        self._slo_ttft = slo_ttft
        self._comparable = comparable
        self._log = pool.events
        self._clock = clock
        self._sent_at = arrived_at
        self._first_at: Seconds | None = None
        self._prefill_cached: Tokens | None = None
        self._failure_told = False
        """Whether the log knows that the engine failed it that has it now."""

    @property
    def instance(self) -> InstanceId:
        return self.grant.instance if self.grant is not None else InstanceId("")

    def granted(self, grant: RouteGranted) -> None:
        """It is sent to an engine now; its end is ours to write."""
        self.grant = grant
        self._sent_at = self._clock.now()
        self._failure_told = False

    def handed_over(self, grant: RouteGranted, cached_tokens: Tokens | None) -> None:
        """Another engine goes on with it. `cached_tokens`: what the one that prefilled it had of it, -1 if it does not
        say; None where nobody did."""
        self.granted(grant)
        self._prefill_cached = cached_tokens

    def rebound(self, grant: RouteGranted) -> None:
        """The leader has taken it out of its engine, which had not answered: it starts again in another."""
        self.granted(grant)

    def told_of(self, usage: Usage) -> Usage:
        """The usage as this request's prefill had it: the engine that decodes tells of its own cache."""
        if self._prefill_cached is None:
            return usage
        return Usage(usage.prompt_tokens, usage.completion_tokens, self._prefill_cached)

    @property
    def sent_at(self) -> Seconds:
        """When it was sent to its engine."""
        return self._sent_at

    @property
    def sent_seconds(self) -> Seconds:
        """How long ago it was sent to its engine."""
        return self._clock.now() - self._sent_at

    def attempt_failed(self, failure: AttemptFailure, *, status: int = 0, detail: str = "") -> None:
        """The engine that has it failed it. Told at most once for each time it is sent to an engine, also where it stays
        there because nobody else could take it: a first byte that comes too late is evidence all the same."""
        self.reached = self.reached or failure != "connect_failure"
        grant = self.grant
        if self._failure_told or grant is None:
            return
        self._failure_told = True
        ATTEMPT_FAILURES.labels(grant.instance, failure).inc()
        self.pool.under_way.failed(grant.instance)
        event = RequestAttemptFailed(
            at=self._clock.now(),
            request=self.request,
            instance=grant.instance,
            attempt=grant.attempt,
            failure=failure,
            status=status,
            detail=detail[:DETAIL_CHARACTERS_MAX],
        )
        self._log.append_soon(event)

    def waits_again(self) -> None:
        """Its engine failed; it is the scheduler's once more."""
        self.grant = None
        self.retries += 1
        self._prefill_cached = None

    def ended_by_leader(self) -> None:
        self._end()

    def first_token(self) -> None:
        now = self._clock.now()
        self._first_at = now
        self._log.append_soon(
            PrefillFinished(
                at=now,
                request=self.request,
                instance=self.instance,
                ttft=now - self._arrived_at,
                prefill=now - self._sent_at,
            )
        )

    def finished(self, usage: Usage, *, output_tokens: Tokens) -> None:
        """Delivered whole. `output_tokens`: the engine's count or, failing that, the number of stream events."""
        self._end()
        self.usage = usage
        now = self._clock.now()
        first_at = now if self._first_at is None else self._first_at
        event = RequestFinished(
            at=now,
            request=self.request,
            instance=self.instance,
            e2e=now - self._arrived_at,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            ttft=first_at - self._arrived_at,
            tpot=(now - first_at) / (output_tokens - 1) if output_tokens > 1 else 0.0,
            predicted_cached_tokens=self._predicted_cached_tokens,
        )
        self._log.append_soon(event)
        self._measure(event, output_tokens)

    @property
    def _predicted_cached_tokens(self) -> Tokens:
        """What the leader expected; -1 where nobody did, or where it cannot be compared with what the engine says."""
        grant = self.grant
        if grant is None or grant.term == Term(0) or grant.prefilled_by or not self._comparable:
            return -1
        return grant.hit_tokens

    def failed(self, reason: str, status: int) -> None:
        self._end(reason)
        event = RequestFailed(
            at=self._clock.now(), request=self.request, reason=reason, status=status, instance=self.instance
        )
        self._log.append_soon(event)

    def cancelled(self, cause: CancelCause) -> None:
        self._end(cause)
        event = RequestCancelled(
            at=self._clock.now(), request=self.request, reason=cause.sentence, instance=self.instance, cause=cause
        )
        self._log.append_soon(event)

    def _end(self, reason: str = "") -> None:
        assert not self.over, "a request has one end"
        self.over = True
        self.reason = reason

    def _measure(self, event: RequestFinished, output_tokens: Tokens) -> None:
        TIME_TO_FIRST_TOKEN_SECONDS.observe(event.ttft)
        E2E_REQUEST_LATENCY_SECONDS.observe(event.e2e)
        _OUTCOME[event.ttft <= self._slo_ttft].inc()
        if output_tokens > 1 and self._first_at is not None:
            TIME_PER_OUTPUT_TOKEN_SECONDS.observe(event.tpot)
        prompt, cached, predicted = _token_metrics(event.instance)
        prompt.inc(max(0, event.prompt_tokens))
        cached.inc(max(0, event.cached_tokens))
        if self.grant is not None:
            predicted.inc(self.grant.hit_tokens)
            self._compare(event)

    def _compare(self, event: RequestFinished) -> None:
        """Count and log what came of the predicted hit."""
        expected, reported = event.predicted_cached_tokens, event.cached_tokens
        outcome = compared(expected, reported, granularity=self.pool.keys.block_tokens)
        CACHE_PREDICTIONS.labels(event.instance, outcome).inc()
        if outcome in (FEWER, MORE):
            log.info(
                "cached_tokens_mismatch",
                request=event.request,
                instance=event.instance,
                predicted=expected,
                reported=reported,
                prompt_tokens=event.prompt_tokens,
            )


def compared(predicted: Tokens, reported: Tokens, *, granularity: Tokens) -> str:
    """How the cached tokens that the engine reports compare with those predicted; -1 where one does not say. Hits are
    predicted in blocks of `granularity` tokens, and an engine with smaller ones may use a part of the next."""
    if predicted < 0 or reported < 0:
        return UNKNOWN
    if reported < predicted:
        return FEWER
    return EQUAL if reported - predicted < granularity else MORE


_metrics_of: dict[InstanceId, tuple[Metric, Metric, Metric]] = {}


def _token_metrics(instance: InstanceId) -> tuple[Metric, Metric, Metric]:
    """Finding a metric by its labels costs more than counting; a fleet has few instances."""
    found = _metrics_of.get(instance)
    if found is None:
        labelled = (metric.labels(instance) for metric in (PROMPT_TOKENS, CACHED_TOKENS, PREDICTED_CACHED_TOKENS))
        prompt, cached, predicted = labelled
        found = _metrics_of[instance] = (prompt, cached, predicted)
    return found
