"""One request's life as the log tells it: first token, and exactly one end.

Before a grant the leader writes the end, after it this module does. A second end is a defect and asserted against.
Nothing here waits: events go to the log off the request's path.
"""

from prometheus_client import Counter as Metric

from pointsman.chassis.telemetry import (
    CACHED_TOKENS,
    E2E_SECONDS,
    PREDICTED_CACHED_TOKENS,
    PROMPT_TOKENS,
    SLO_OUTCOMES,
    TPOT_SECONDS,
    TTFT_SECONDS,
)
from pointsman.contracts.commands import RouteGranted
from pointsman.contracts.requests import PrefillFinished, RequestCancelled, RequestFailed, RequestFinished
from pointsman.ports import Clock, EventLog
from pointsman.primitives import InstanceId, RequestId, Seconds, Tokens
from pointsman_ingress.proxy import Usage

_OUTCOME = {met: SLO_OUTCOMES.labels(name) for met, name in ((True, "met"), (False, "missed"))}


class Life:
    """From the moment a valid request may leave a trace. All times are engine seconds."""

    def __init__(
        self, request: RequestId, *, arrived_at: Seconds, slo_ttft: Seconds, log: EventLog, clock: Clock
    ) -> None:
        self.request = request
        self.over = False
        self.grant: RouteGranted | None = None
        """Where it is being served; None while it waits for a place."""
        self._arrived_at = arrived_at
        self._slo_ttft = slo_ttft
        self._log = log
        self._clock = clock
        self._sent_at = arrived_at
        self._first_at: Seconds | None = None

    @property
    def instance(self) -> InstanceId:
        return self.grant.instance if self.grant is not None else InstanceId("")

    def granted(self, grant: RouteGranted) -> None:
        """It is sent to an engine now; its end is ours to write."""
        self.grant = grant
        self._sent_at = self._clock.now()

    def waits_again(self) -> None:
        """Its engine failed; it is the scheduler's once more."""
        self.grant = None

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
        )
        self._log.append_soon(event)
        self._measure(event, output_tokens)

    def failed(self, reason: str, status: int) -> None:
        self._end()
        event = RequestFailed(
            at=self._clock.now(), request=self.request, reason=reason, status=status, instance=self.instance
        )
        self._log.append_soon(event)

    def cancelled(self, reason: str) -> None:
        self._end()
        event = RequestCancelled(at=self._clock.now(), request=self.request, reason=reason, instance=self.instance)
        self._log.append_soon(event)

    def _end(self) -> None:
        assert not self.over, "a request has one end"
        self.over = True

    def _measure(self, event: RequestFinished, output_tokens: Tokens) -> None:
        TTFT_SECONDS.observe(event.ttft)
        E2E_SECONDS.observe(event.e2e)
        _OUTCOME[event.ttft <= self._slo_ttft].inc()
        if output_tokens > 1 and self._first_at is not None:
            TPOT_SECONDS.observe(event.tpot)
        prompt, cached, predicted = _token_metrics(event.instance)
        prompt.inc(max(0, event.prompt_tokens))
        cached.inc(max(0, event.cached_tokens))
        if self.grant is not None:
            predicted.inc(self.grant.hit_tokens)


_metrics_of: dict[InstanceId, tuple[Metric, Metric, Metric]] = {}


def _token_metrics(instance: InstanceId) -> tuple[Metric, Metric, Metric]:
    """Finding a metric by its labels costs more than counting; a fleet has few instances."""
    found = _metrics_of.get(instance)
    if found is None:
        labelled = (metric.labels(instance) for metric in (PROMPT_TOKENS, CACHED_TOKENS, PREDICTED_CACHED_TOKENS))
        prompt, cached, predicted = labelled
        found = _metrics_of[instance] = (prompt, cached, predicted)
    return found
