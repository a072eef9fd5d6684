"""Requests in flight, and the queue of each instance. A request is *pending*, then granted and *in prefill* until its
first token, then *decoding*. With split prefill and decode it is *expected* by its decode instance from placement on
and *handed over* after the prefill. Work is in prefill seconds by the uncorrected cost model. A queue that holds several
priority classes counts the work of each (`priority_classes`)."""

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from typing import ClassVar

from pointsman.contracts.decisions import TierTokens
from pointsman.contracts.reasons import RejectReason
from pointsman.contracts.tenants import Priority
from pointsman.primitives import (
    BlockKey,
    EngineSeconds,
    Epoch,
    InstanceId,
    RequestId,
    Sequence,
    SessionId,
    Tenant,
    Tokens,
)
from pointsman.state.derived import Derived
from pointsman.state.fold_versions import CLASS_CREDIT, FETCHES_OUTSIDE, FOLD_VERSION
from pointsman.state.priority_classes import (
    BEST_EFFORT,
    CREDIT_SECONDS_MAX,
    LOWEST,
    PendingClass,
    QueueClass,
    note_grant,
    work_from,
)

ENDED_REMEMBERED_MAX = 10_000


NO_INSTANCE = InstanceId("")
NO_REQUEST = RequestId("")
NO_EPOCH = Epoch(-1)


class Stage(StrEnum):
    ARRIVED = "arrived"
    PENDING = "pending"
    PREFILL = "prefill"
    HANDED_OVER = "handed over"
    """Prefilled elsewhere; `instance` fetches the KV cache and decodes."""
    DECODING = "decoding"


UNGRANTED = (Stage.ARRIVED, Stage.PENDING)
"""No engine has it. In all other stages one has, or two."""


@dataclass(frozen=True, slots=True)
class OverLimit:
    """The limit of its tenant that an arrival exceeds, in words, and when it would have passed."""

    reason: RejectReason
    limit: str
    passes_at: EngineSeconds


@dataclass(frozen=True, slots=True)
class AttemptBefore:
    """Where and when an attempt of a request was sent. `granted_at`: 0 if it was not, or is not known."""

    attempt: int
    instance: InstanceId
    epoch: Epoch
    granted_at: EngineSeconds
    grant: int
    prefill_epoch: Epoch = NO_EPOCH


@dataclass(slots=True, eq=False)
class Request:
    """From its arrival to its end. What a placement said is that of the newest one; seconds are engine seconds, and work is
    by the uncorrected cost model."""

    id: RequestId
    tenant: Tenant
    session: SessionId
    keys: list[BlockKey]
    """Of the whole blocks of its prompt."""
    prompt_tokens: Tokens
    max_output_tokens: Tokens
    """Of each of its `answers`."""
    slo_ttft: EngineSeconds
    slo_tpot: EngineSeconds
    arrived_at: EngineSeconds
    """By the leader's clock, if `clock_offset` is known."""
    exact: bool
    """False if its tokens were guessed, so that `keys` may differ from the engine's."""
    streaming: bool
    priority: Priority = "standard"
    adapter: str = ""
    followed: bool = False
    """Its ingress names it about once a second as long as it has it."""
    alias: str = ""
    context_tokens: Tokens = 0
    """Prompt and demanded output; 0: unknown."""
    stage: Stage = Stage.ARRIVED
    attempt: int = 1
    excluded: tuple[InstanceId, ...] = ()
    """Instances that failed it."""
    instance: InstanceId = NO_INSTANCE
    epoch: Epoch = NO_EPOCH
    """Of `instance`, then."""
    hit_blocks: int = 0
    """Leading blocks that count as cached there, promised ones included."""
    held_blocks: int = 0
    """Of these, what events had told of as of `placed_as_of`: the engine is to have as much cached."""
    placed_as_of: Sequence = 0
    """Last log entry before placement."""
    uncached_tokens: Tokens = 0
    loads: tuple[TierTokens, ...] = ()
    """Cached tokens that only slower tiers hold, and `load_seconds` to load them."""
    load_seconds: EngineSeconds = 0.0
    prefill_seconds: EngineSeconds = 0.0
    """Of its `uncached_tokens`."""
    step_seconds: EngineSeconds = 0.0
    """Of a full step of the engine, at most what was ahead of it."""
    predicted_ttft: EngineSeconds = 0.0
    """From `placed_at` on, as is the upper value (`TtftIntervals`); 0: nothing was predicted."""
    predicted_ttft_upper: EngineSeconds = 0.0
    placed_at: EngineSeconds = 0.0
    granted_at: EngineSeconds = 0.0
    grant: int = 0
    """Its place among all grants."""
    attempts_before: tuple[AttemptBefore, ...] = ()
    """Of those before the newest, the ones that were placed."""
    engine_seconds: EngineSeconds = 0.0
    """Prefill work in the engine at its grant, its own included, and `engine_tokens`, the uncached tokens of that."""
    engine_tokens: Tokens = 0
    decode: InstanceId = NO_INSTANCE
    """Expected decode instance; NO_INSTANCE: `instance` decodes too."""
    prefilled_by: InstanceId = NO_INSTANCE
    handed_over_at: EngineSeconds = 0.0
    """To `instance`, if `prefilled_by` another; `granted_at` is the prefill's."""
    prefill_epoch: Epoch = NO_EPOCH
    """Of `prefilled_by`, then; NO_EPOCH: it is not known to have prefilled anything."""
    rebind: bool = False
    """Its ingress polls for a re-binding until the engine answers."""
    rebound_from: InstanceId = NO_INSTANCE
    """The engine where it was aborted before its first token; at most once."""
    best_effort: bool = False
    """Late even alone, and admitted: it yields to requests that can be on time."""
    fetch_from: InstanceId = NO_INSTANCE
    """Where its instance fetches the first `fetch_blocks` blocks of its prompt; of its grant."""
    fetch_blocks: int = 0
    fetch_seconds: EngineSeconds = 0.0
    """Predicted."""
    fetching: bool = False
    """Granted; its ingress sends it when the fetch has ended."""
    copy_to: InstanceId = NO_INSTANCE
    """Which fetches the first `copy_blocks` blocks of its prompt after its first token; of its grant."""
    copy_blocks: int = 0
    copy_seconds: EngineSeconds = 0.0
    """Predicted."""
    refused: bool = False
    """It ends by a rejection."""
    over_limit: OverLimit | None = None
    answers: int = 1
    """How many it asks for (`n`)."""
    instead_of: RequestId = NO_REQUEST
    """Taken in under that id, which its leader ended; empty also where the fold knows of none."""
    charged_tokens: float = 0.0
    """Weighted tokens charged to its tenant so far."""
    kv_tokens: Tokens = 0
    """Of its tenant's share of the KV capacity."""
    clock_offset: EngineSeconds = 0.0
    """Turns dates of its ingress into the leader's; 0: not known."""
    arrived_by_ingress: EngineSeconds = 0.0

    @property
    def awaits_decoder(self) -> bool:
        """Prefilled, but no decode instance could take it."""
        return self.stage is Stage.HANDED_OVER and self.instance == self.prefilled_by

    @property
    def deadline(self) -> EngineSeconds:
        return self.arrived_at + self.slo_ttft

    @property
    def newest_attempt(self) -> AttemptBefore:
        return AttemptBefore(self.attempt, self.instance, self.epoch, self.granted_at, self.grant, self.prefill_epoch)

    @property
    def queue_class(self) -> QueueClass:
        return BEST_EFFORT if self.best_effort else self.priority


@dataclass(slots=True, eq=False)
class InstanceQueue:
    DERIVED: ClassVar[Derived] = {"_step": lambda: None}

    pending: dict[RequestId, Request] = field(default_factory=dict)
    prefill: dict[RequestId, Request] = field(default_factory=dict)
    decoding: dict[RequestId, Request] = field(default_factory=dict)
    expected: dict[RequestId, Request] = field(default_factory=dict)
    """Prefilled elsewhere, to be decoded here. In `decoding` after the hand-over."""
    pending_seconds: EngineSeconds = 0.0
    pending_tokens: Tokens = 0
    classes: dict[QueueClass, PendingClass] = field(default_factory=dict)
    """Pending work by class; a class that had some stays."""
    classes_pending: int = 0
    prefill_seconds: EngineSeconds = 0.0
    prefill_tokens: Tokens = 0
    prompt_tokens: Tokens = 0
    """Of all `requests`."""
    working_since: EngineSeconds = 0.0
    """Last grant into an empty engine, or last first token."""
    beside_seconds: EngineSeconds = 0.0
    """Work that a step of the engine does beside its first prompt; 0: not known."""
    aborted_at: EngineSeconds = 0.0
    """Last abort for lack of a first token; 0 after the next first token."""
    aborted_since: EngineSeconds = 0.0
    """Since when the engine had finished no prefill then."""
    _step: tuple[EngineSeconds, Tokens] | None = None

    @property
    def has_best_effort(self) -> bool:
        known = self.classes.get(BEST_EFFORT)
        return known is not None and known.requests > 0

    @property
    def best_effort_seconds(self) -> EngineSeconds:
        """Pending."""
        known = self.classes.get(BEST_EFFORT)
        return known.seconds if known is not None and known.requests else 0.0

    @property
    def _only_fetches(self) -> bool:
        """Whether no prompt is inside the engine."""
        return all(request.fetching for request in self.prefill.values())

    @property
    def queued_tokens(self) -> Tokens:
        return self.pending_tokens + self.prefill_tokens

    @property
    def queued_requests(self) -> int:
        return len(self.pending) + len(self.prefill)

    @property
    def requests(self) -> int:
        return len(self.pending) + len(self.prefill) + len(self.decoding)

    def engine_left(self, now: EngineSeconds) -> tuple[EngineSeconds, Tokens]:
        """Prefill work left in the engine, and its uncached tokens."""
        if not self.prefill:
            return 0.0, 0
        (work, tokens), passed = self.step, now - self.working_since
        if passed >= work or not work:
            done, done_tokens = work, tokens
        elif passed > 0:
            done, done_tokens = passed, int(tokens * (passed / work))
        else:
            done, done_tokens = 0.0, 0
        return max(0.0, self.prefill_seconds - done), self.prefill_tokens - done_tokens

    @property
    def step(self) -> tuple[EngineSeconds, Tokens]:
        """Work of the step that the engine is at, and its tokens: its first prompt, and what it does beside it."""
        if self._step is None:
            inside = (request for request in self.prefill.values() if not request.fetching)  # in the engine yet
            first = next(inside, None)
            work, tokens = (first.prefill_seconds, first.uncached_tokens) if first else (0.0, 0)
            beside = 0.0
            for request in inside if self.beside_seconds else ():
                beside += request.prefill_seconds
                if beside > self.beside_seconds:
                    break
                work += request.prefill_seconds
                tokens += request.uncached_tokens
            self._step = work, tokens
        return self._step

    def engine_seconds_left(self, now: EngineSeconds) -> EngineSeconds:
        return self.engine_left(now)[0]

    def queue_seconds(self, now: EngineSeconds) -> EngineSeconds:
        return self.work_ahead(now)[0]

    def work_ahead(self, now: EngineSeconds, priority: QueueClass = LOWEST) -> tuple[EngineSeconds, Tokens]:
        """Prefill work ahead of a new request, and its tokens. Pending work of lower classes is behind it."""
        pending_seconds, pending_tokens = self.pending_seconds, self.pending_tokens
        if priority != LOWEST and self.pending:
            pending_seconds, pending_tokens = work_from(self.classes, priority)
        if not self.prefill:
            return pending_seconds, pending_tokens
        seconds, tokens = self.engine_left(now)
        return seconds + pending_seconds, tokens + pending_tokens

    def enqueue(self, request: Request) -> None:
        self.pending[request.id] = request
        self.prompt_tokens += request.prompt_tokens
        self.pending_seconds += request.prefill_seconds
        self.pending_tokens += request.uncached_tokens
        known = self.classes.get(request.queue_class)
        if known is None:
            known = self.classes[request.queue_class] = PendingClass()
        if not known.requests:
            self.classes_pending += 1
            known.begin(request.prefill_seconds)
        known.requests += 1
        known.seconds += request.prefill_seconds
        known.tokens += request.uncached_tokens

    def grant(self, request: Request, now: EngineSeconds, *, fold_version: int = FOLD_VERSION) -> None:
        if self.classes_pending > 1:
            credit_max = CREDIT_SECONDS_MAX if fold_version >= CLASS_CREDIT else inf
            note_grant(self.classes, request.queue_class, request.prefill_seconds, credit_max=credit_max)
        self._take_pending(request)
        if not self.prefill or (fold_version >= FETCHES_OUTSIDE and self._only_fetches):
            self.working_since = now
        seconds, tokens = self.engine_left(now)
        request.engine_seconds = seconds + request.prefill_seconds
        request.engine_tokens = tokens + request.uncached_tokens
        self.prefill[request.id] = request
        self._step = None
        self.prefill_seconds += request.prefill_seconds
        self.prefill_tokens += request.uncached_tokens

    def reprice(self, request: Request, seconds: EngineSeconds, tokens: Tokens, *, waits_in: QueueClass) -> None:
        """Its prefill is other work than was placed. `waits_in`: its class, if it is pending."""
        more_seconds, more_tokens = seconds - request.prefill_seconds, tokens - request.uncached_tokens
        request.prefill_seconds, request.uncached_tokens = seconds, tokens
        self._step = None
        if request.id in self.pending:
            known = self.classes[waits_in]
            known.seconds += more_seconds
            known.tokens += more_tokens
            self.pending_seconds += more_seconds
            self.pending_tokens += more_tokens
        elif request.id in self.prefill:
            self.prefill_seconds += more_seconds
            self.prefill_tokens += more_tokens

    def enter_after_fetch(self, request: Request, now: EngineSeconds) -> None:
        """It enters the engine behind what was granted meanwhile."""
        del self.prefill[request.id]
        if self._only_fetches:
            self.working_since = now
        self.prefill[request.id] = request
        self._step = None
        request.engine_seconds, request.engine_tokens = self.engine_left(now)

    def finish_prefill(self, request: Request, now: EngineSeconds) -> None:
        self._take_prefill(request)
        self.working_since = now
        self.decoding[request.id] = request

    def transfer_out(self, request: Request, now: EngineSeconds) -> None:
        self._take_prefill(request)
        self.prompt_tokens -= request.prompt_tokens
        self.working_since = now

    def transfer_in(self, request: Request) -> None:
        self.decoding[request.id] = request
        self.prompt_tokens += request.prompt_tokens

    def learn_step(self, beside_seconds: EngineSeconds) -> None:
        self.beside_seconds = beside_seconds
        self._step = None

    def note_abort(self, now: EngineSeconds) -> None:
        """Called before aborting a request, whose stall time would be lost with it."""
        since = self.working_since
        self.aborted_since = min(self.aborted_since, since) if self.aborted_at else since
        self.aborted_at = now

    def remove(self, request: Request) -> None:
        if request.id in self.pending:
            self._take_pending(request)
        elif request.id in self.prefill:
            self._take_prefill(request)
        elif self.decoding.pop(request.id, None) is None:
            return
        self.prompt_tokens -= request.prompt_tokens

    def has_room(self, tokens: Tokens, *, window_tokens: Tokens, running_max: int) -> bool:
        """Whether the engine may get so many more uncached tokens. An empty engine always may."""
        if len(self.prefill) + len(self.decoding) >= running_max:
            return False
        return not self.prefill or self.prefill_tokens + tokens <= window_tokens

    def _take_pending(self, request: Request) -> None:
        del self.pending[request.id]
        # Exactly 0 for an empty queue, whatever the rounding.
        self.pending_seconds = max(0.0, self.pending_seconds - request.prefill_seconds) if self.pending else 0.0
        self.pending_tokens -= request.uncached_tokens
        known = self.classes[request.queue_class]
        known.requests -= 1
        known.seconds -= request.prefill_seconds
        known.tokens -= request.uncached_tokens
        if not known.requests:
            self.classes_pending -= 1

    def _take_prefill(self, request: Request) -> None:
        del self.prefill[request.id]
        self._step = None
        self.prefill_seconds = max(0.0, self.prefill_seconds - request.prefill_seconds) if self.prefill else 0.0
        self.prefill_tokens -= request.uncached_tokens


EMPTY_QUEUE = InstanceQueue()
"""Of an instance without requests. Read only."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """`arrived_at` and `attempt` identify the command: clients may reuse ids."""

    arrived_at: EngineSeconds
    attempt: int
    reason: str
    detail: str
    retry_after: EngineSeconds


@dataclass(frozen=True, slots=True)
class GivenUp:
    """Of a request that its leader ended and that its ingress may ask for again, under another id."""

    tenant: Tenant
    charged_tokens: float
    best_effort: bool


class Workload:
    DERIVED: ClassVar[Derived] = {"changed": set}

    def __init__(self) -> None:
        self.requests: dict[RequestId, Request] = {}
        self.grants = 0
        self.queues: dict[InstanceId, InstanceQueue] = {}
        """Read only: what changes one takes it from `queue`."""
        self.changed: set[InstanceId] = set()
        """Whose queues may have changed since somebody (`InstanceColumns`) cleared it."""
        self._ended: OrderedDict[RequestId, str] = OrderedDict()
        self._rejections: dict[RequestId, Rejection] = {}
        self._given_up: dict[RequestId, GivenUp] = {}

    def queue(self, instance: InstanceId) -> InstanceQueue:
        """To change it."""
        self.changed.add(instance)
        queue = self.queues.get(instance)
        if queue is None:
            queue = self.queues[instance] = InstanceQueue()
        return queue

    def drop_idle_queue(self, instance: InstanceId) -> bool:
        """Returns whether the instance has none now."""
        known = self.queues.get(instance)
        if known is not None and (known.requests or known.expected):
            return False
        self.queues.pop(instance, None)
        self.changed.discard(instance)
        return True

    def expect(self, request: Request, instance: InstanceId) -> None:
        """Set the decode instance; NO_INSTANCE: the one that prefills it."""
        if request.decode:
            self.queue(request.decode).expected.pop(request.id, None)
        request.decode = instance
        if instance:
            self.queue(instance).expected[request.id] = request

    def end_of(self, request: RequestId) -> str | None:
        return self._ended.get(request)

    def rejection_of(self, request: RequestId, *, arrived_at: EngineSeconds, attempt: int) -> Rejection | None:
        known = self._rejections.get(request)
        return known if known is not None and (known.arrived_at, known.attempt) == (arrived_at, attempt) else None

    def reject(self, request: RequestId, rejection: Rejection) -> None:
        self._rejections[request] = rejection

    def give_up(self, request: Request) -> None:
        self._given_up[request.id] = GivenUp(request.tenant, request.charged_tokens, request.best_effort)

    def pop_given_up(self, request: RequestId, tenant: Tenant) -> GivenUp | None:
        """Of this tenant; a request comes again once."""
        known = self._given_up.get(request)
        if known is None or known.tenant != tenant:
            return None
        return self._given_up.pop(request)

    def end(self, request: RequestId, how: str) -> Request | None:
        """None if it is not in flight. Ends of unknown requests are remembered: a later arrival has no effect."""
        known = self.requests.pop(request, None)
        if known is not None and known.instance:
            self.queue(known.instance).remove(known)
        if known is not None or request not in self._ended:
            self._ended[request] = how
            if len(self._ended) > ENDED_REMEMBERED_MAX:
                forgotten, _ = self._ended.popitem(last=False)
                self._rejections.pop(forgotten, None)
                self._given_up.pop(forgotten, None)
        return known
