"""Every request that has no end yet, and the work that each instance has before it.

A request is *pending* in an instance's queue, then granted and *in prefill* until its first token, then
*decoding*. Where prefill and decode are split it is *expected* by the instance that will decode it from its placement
on, and *handed over* to it after its prefill: from then on it is that one's. Work is counted in prefill seconds of the instance's own cost model, before its learned correction.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import StrEnum

from pointsman.primitives import BlockKey, Epoch, InstanceId, RequestId, Seconds, Sequence, SessionId, Tenant, Tokens

ENDED_REMEMBERED_MAX = 10_000
"""Requests whose end is remembered, so that a repeated command is answered like the first."""


NO_INSTANCE = InstanceId("")
NO_EPOCH = Epoch(-1)


class Stage(StrEnum):
    ARRIVED = "arrived"
    PENDING = "pending"
    PREFILL = "prefill"
    HANDED_OVER = "handed over"
    """Its prefill is over, elsewhere; the KV cache is on its way to `instance`, which will decode it."""
    DECODING = "decoding"


@dataclass(slots=True, eq=False)
class Request:
    """One request under way. Placement fields are those of its last placement."""

    id: RequestId
    tenant: Tenant
    session: SessionId
    keys: list[BlockKey]
    prompt_tokens: Tokens
    max_output_tokens: Tokens
    slo_ttft: Seconds
    slo_tpot: Seconds
    arrived_at: Seconds
    exact: bool
    streaming: bool
    adapter: str = ""
    """The LoRA adapter that an instance must have to serve it; empty where it asks for none."""
    followed: bool = False
    """Whether its ingress names it until its end, so that silence about it means that there is no ingress."""
    alias: str = ""
    """The name that an instance must answer to, where it is not asked for by the model's own."""
    context_tokens: Tokens = 0
    """Prompt and demanded output, for which an instance must have room; 0 where nobody knows."""
    stage: Stage = Stage.ARRIVED
    attempt: int = 1
    excluded: tuple[InstanceId, ...] = ()
    instance: InstanceId = NO_INSTANCE
    epoch: Epoch = NO_EPOCH
    hit_blocks: int = 0
    held_blocks: int = 0
    """Leading blocks that the instance held, by its own events, when the request was placed there."""
    placed_as_of: Sequence = 0
    """Last entry of the log that was known then."""
    uncached_tokens: Tokens = 0
    prefill_seconds: Seconds = 0.0
    predicted_ttft: Seconds = 0.0
    placed_at: Seconds = 0.0
    granted_at: Seconds = 0.0
    engine_seconds: Seconds = 0.0
    """Prefill work before its first token when it was granted, its own included, uncorrected."""
    engine_tokens: Tokens = 0
    """The same in uncached tokens."""
    decode: InstanceId = NO_INSTANCE
    """Who expects it, to decode it after its prefill; NO_INSTANCE where `instance` does all that is left."""
    prefilled_by: InstanceId = NO_INSTANCE
    """Who prefilled it, once it was handed over."""
    rebind: bool = False
    """Whether its ingress asks, until the engine answers, if it is to go elsewhere."""
    rebound_from: InstanceId = NO_INSTANCE
    """Out of whose engine it was taken, before its first token, to start again elsewhere; once at most."""

    @property
    def awaits_decoder(self) -> bool:
        """Its prefill is over, and nobody could take it then; its ingress has been told."""
        return self.stage is Stage.HANDED_OVER and self.instance == self.prefilled_by

    @property
    def deadline(self) -> Seconds:
        return self.arrived_at + self.slo_ttft


@dataclass(slots=True, eq=False)
class InstanceQueue:
    """What one instance has before it: pending requests in the order they came, then those inside the engine."""

    pending: dict[RequestId, Request] = field(default_factory=dict)
    prefill: dict[RequestId, Request] = field(default_factory=dict)
    decoding: dict[RequestId, Request] = field(default_factory=dict)
    expected: dict[RequestId, Request] = field(default_factory=dict)
    """What others prefill or will, to be decoded here. In `decoding` from the moment it is handed over."""
    pending_seconds: Seconds = 0.0
    pending_tokens: Tokens = 0
    prefill_seconds: Seconds = 0.0
    prefill_tokens: Tokens = 0
    working_since: Seconds = 0.0
    """When the engine began the prefill it is at: the last grant into an empty engine, or the last first token."""
    aborted_at: Seconds = 0.0
    """When a request was last taken out of the engine for want of its first token; 0 once there was a first token since."""
    aborted_since: Seconds = 0.0
    """Since when the engine had finished no prefill then."""

    @property
    def load_tokens(self) -> Tokens:
        """Uncached prompt tokens that wait here or are being prefilled."""
        return self.pending_tokens + self.prefill_tokens

    @property
    def waiting(self) -> int:
        """Requests that have no first token yet."""
        return len(self.pending) + len(self.prefill)

    @property
    def requests(self) -> int:
        return len(self.pending) + len(self.prefill) + len(self.decoding)

    def engine_left(self, now: Seconds) -> tuple[Seconds, Tokens]:
        """Prefill work inside the engine that is not done yet, uncorrected, and its uncached tokens."""
        if not self.prefill:
            return 0.0, 0
        first = next(iter(self.prefill.values()))
        work, passed = first.prefill_seconds, now - self.working_since
        if passed >= work or not work:
            done, done_tokens = work, first.uncached_tokens
        elif passed > 0:
            done, done_tokens = passed, int(first.uncached_tokens * (passed / work))
        else:
            done, done_tokens = 0.0, 0
        return max(0.0, self.prefill_seconds - done), self.prefill_tokens - done_tokens

    def engine_seconds_left(self, now: Seconds) -> Seconds:
        """Prefill work inside the engine that is not done yet, uncorrected."""
        return self.engine_left(now)[0]

    def queue_seconds(self, now: Seconds) -> Seconds:
        """Prefill work before a request that comes now, uncorrected."""
        return self.work_ahead(now)[0]

    def work_ahead(self, now: Seconds) -> tuple[Seconds, Tokens]:
        """Prefill work before a request that comes now and waits for all others, uncorrected, and its tokens."""
        if not self.prefill:
            return self.pending_seconds, self.pending_tokens
        seconds, tokens = self.engine_left(now)
        return seconds + self.pending_seconds, tokens + self.pending_tokens

    def enqueue(self, request: Request) -> None:
        self.pending[request.id] = request
        self.pending_seconds += request.prefill_seconds
        self.pending_tokens += request.uncached_tokens

    def grant(self, request: Request, now: Seconds) -> None:
        self._take_pending(request)
        if not self.prefill:
            self.working_since = now
        seconds, tokens = self.engine_left(now)
        request.engine_seconds = seconds + request.prefill_seconds
        request.engine_tokens = tokens + request.uncached_tokens
        self.prefill[request.id] = request
        self.prefill_seconds += request.prefill_seconds
        self.prefill_tokens += request.uncached_tokens

    def finish_prefill(self, request: Request, now: Seconds) -> None:
        self._take_prefill(request)
        self.working_since = now
        self.decoding[request.id] = request

    def transfer_out(self, request: Request, now: Seconds) -> None:
        """Its prefill is over, and it goes elsewhere."""
        self._take_prefill(request)
        self.working_since = now

    def note_abort(self, now: Seconds) -> None:
        """A request is about to be taken out of the engine: with it would go what tells that the engine stalls."""
        since = self.working_since
        self.aborted_since = min(self.aborted_since, since) if self.aborted_at else since
        self.aborted_at = now

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is; one that is not here is a no-op."""
        if request.id in self.pending:
            self._take_pending(request)
        elif request.id in self.prefill:
            self._take_prefill(request)
        else:
            self.decoding.pop(request.id, None)

    def has_room(self, tokens: Tokens, *, window_tokens: Tokens, running_max: int) -> bool:
        """Whether the engine may be given so many more uncached tokens by these bounds. One request always may be in it."""
        if len(self.prefill) + len(self.decoding) >= running_max:
            return False
        return not self.prefill or self.prefill_tokens + tokens <= window_tokens

    def _take_pending(self, request: Request) -> None:
        del self.pending[request.id]
        # An empty line weighs exactly nothing, whatever rounding has left.
        self.pending_seconds = max(0.0, self.pending_seconds - request.prefill_seconds) if self.pending else 0.0
        self.pending_tokens -= request.uncached_tokens

    def _take_prefill(self, request: Request) -> None:
        del self.prefill[request.id]
        self.prefill_seconds = max(0.0, self.prefill_seconds - request.prefill_seconds) if self.prefill else 0.0
        self.prefill_tokens -= request.uncached_tokens


@dataclass(frozen=True, slots=True)
class Rejection:
    """What an ingress was told of a request that was rejected. `arrived_at` and `attempt` tell the command that was answered so
    from that of another request under the same id, which clients may use again."""

    arrived_at: Seconds
    attempt: int
    reason: str
    detail: str
    retry_after: Seconds


class Workload:
    """Requests by id, and a line for each instance that has any."""

    def __init__(self) -> None:
        self.requests: dict[RequestId, Request] = {}
        self.queues: dict[InstanceId, InstanceQueue] = {}
        self._ended: OrderedDict[RequestId, str] = OrderedDict()
        self._rejections: dict[RequestId, Rejection] = {}
        """Of those in `_ended`."""

    def queue(self, instance: InstanceId) -> InstanceQueue:
        queue = self.queues.get(instance)
        if queue is None:
            queue = self.queues[instance] = InstanceQueue()
        return queue

    def expect(self, request: Request, instance: InstanceId) -> None:
        """From now on this instance, and no other, will decode the request; NO_INSTANCE: the one that prefills it."""
        if request.decode:
            self.queue(request.decode).expected.pop(request.id, None)
        request.decode = instance
        if instance:
            self.queue(instance).expected[request.id] = request

    def end_of(self, request: RequestId) -> str | None:
        """How a request ended (the event's name), while that is remembered."""
        return self._ended.get(request)

    def rejection_of(self, request: RequestId, *, arrived_at: Seconds, attempt: int) -> Rejection | None:
        """How this very command was answered, if by a rejection, while that is remembered."""
        told = self._rejections.get(request)
        return told if told is not None and (told.arrived_at, told.attempt) == (arrived_at, attempt) else None

    def reject(self, request: RequestId, rejection: Rejection) -> None:
        """Remember what was said of a request that has just ended so."""
        self._rejections[request] = rejection

    def end(self, request: RequestId, how: str) -> Request | None:
        """Take a request out for good. None if it is not under way: its second end is a no-op.

        The end of one that was never heard of is remembered too: an ingress writes faster than a leader whose link is
        slow, so an end can stand in the log before the arrival, which must then begin nothing.
        """
        known = self.requests.pop(request, None)
        if known is not None:
            self.queue(known.instance).remove(known)
            if known.decode:
                self.expect(known, NO_INSTANCE)
        if known is not None or request not in self._ended:
            self._ended[request] = how
            if len(self._ended) > ENDED_REMEMBERED_MAX:
                forgotten, _ = self._ended.popitem(last=False)
                self._rejections.pop(forgotten, None)
        return known
