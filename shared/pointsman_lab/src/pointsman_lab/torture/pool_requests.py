"""The fold of requests and promises in the pool model."""

from pointsman.contracts.block_keys import unpack_keys
from pointsman.contracts.cache import BlocksRemoved, CacheCleared, CacheEvent
from pointsman.contracts.decisions import (
    HandOverRefused,
    RequestEnd,
    RequestGranted,
    RequestHandedOver,
    RequestMigrated,
    RequestPlaced,
    RequestRejected,
    may_come_again,
)
from pointsman.contracts.requests import (
    PrefillFinished,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
)
from pointsman.primitives import EngineSeconds, InstanceId, Tokens
from pointsman_lab.torture.ejections import FirstToken, Served
from pointsman_lab.torture.pool_figures import PoolFigures
from pointsman_lab.torture.pool_records import (
    ARRIVED,
    DECODING,
    HANDED_OVER,
    NO_EPOCH,
    NO_INSTANCE,
    OVERDUE_SECONDS,
    PENDING,
    PREFILL,
    BookedRequest,
    Learned,
    Pace,
    Promise,
    leading,
)

CONFIRMED_SECONDS: EngineSeconds = 2.0
"""Wall seconds for which a prompt is promised after its first token."""
DELIVERED_SECONDS: EngineSeconds = 45.0
SETTLED_SECONDS: EngineSeconds = 0.25
"""Wall seconds that what was delivered may count beyond its end: it is looked through that often."""
WRONG_SECONDS: EngineSeconds = 60.0
"""An end that is so far ahead was dated by a wrong clock."""
HELD_UP_SECONDS_MIN, HELD_UP_SECONDS_MAX = 0.25, 10.0
"""Wall seconds without a scheduler: less is not an outage, more adds no budget."""
BACKLOG_SHARE = 0.1


class PoolRequests(PoolFigures):
    def _promise(self, request: BookedRequest) -> None:
        """Nothing at an instance that is not there."""
        request.promise = Promise(request.instance, request.keys)
        if request.instance in self.instances:
            self._promises.append(request.promise)

    def _release(self, promise: Promise | None) -> None:
        if promise in self._promises:
            self._promises.remove(promise)

    def _confirm(self, request: BookedRequest, at: EngineSeconds) -> None:
        promise, request.promise = request.promise, None
        if promise is not None:
            promise.until = at + CONFIRMED_SECONDS * self.speed
            self._confirming.append(promise)

    def _settle(self, now: EngineSeconds) -> None:
        wrong = now + WRONG_SECONDS * self.speed
        while self._confirming and not now < (self._confirming[0].until or 0.0) <= wrong:
            self._release(self._confirming.pop(0))
        while self._delivered and (self._delivered[0].until or 0.0) + SETTLED_SECONDS * self.speed <= now:
            self._delivered.pop(0)

    def _evict(self, event: CacheEvent) -> None:
        if isinstance(event, CacheCleared):
            self._delivered = [prefix for prefix in self._delivered if prefix.instance != event.instance]
            lost = [p for p in self._confirming if p.instance == event.instance]
        elif isinstance(event, BlocksRemoved) and not event.expired:
            keys = set(unpack_keys(event.keys))
            for prefix in self._delivered:
                if prefix.instance == event.instance:
                    prefix.keys = [key for key in prefix.keys if key not in keys]
            lost = [p for p in self._confirming if p.instance == event.instance and not keys.isdisjoint(p.keys)]
        else:
            return
        for promise in lost:
            self._confirming.remove(promise)
            self._release(promise)

    def _arrive(self, event: RequestArrived) -> None:
        if event.request not in self.requests and event.request not in self.ended:
            offset = event.at - event.sent_at if event.sent_at else None
            self.requests[event.request] = BookedRequest(
                id=event.request,
                keys=unpack_keys(event.keys),
                prompt_tokens=event.prompt_tokens,
                arrived_at=event.arrived_at + (offset or 0.0),
                offset=offset,
                slo_ttft=event.slo_ttft + self._extra_time(event),
                slo_tpot=event.slo_tpot,
                tenant=event.tenant,
                max_output_tokens=event.max_output_tokens,
                streaming=event.streaming,
                adapter=event.adapter,
                alias=event.alias,
                context_tokens=event.context_tokens,
                arrival=event.stamp,
                comes_again=self._given_up.get(event.instead_of) == event.tenant,
            )

    def _extra_time(self, event: RequestArrived) -> EngineSeconds:
        """Budget that an outage adds to the requests it delayed, and to those behind them."""
        began, lasted = self._outage
        left = max(0.0, lasted - BACKLOG_SHARE * max(0.0, event.at - began))
        if event.held_up >= HELD_UP_SECONDS_MIN * self.speed:
            waited = min(event.held_up, HELD_UP_SECONDS_MAX * self.speed)
            if waited > left:
                self._outage, left = (event.at, waited), waited
        return left

    def _place(self, event: RequestPlaced) -> None:
        request = self.requests.get(event.request)
        if request is None or (request.stage != ARRIVED and event.attempt <= request.attempt):
            return
        self._withdraw(request)
        request.slo_ttft += event.lost_seconds
        request.attempt, request.excluded = event.attempt, tuple(event.excluded)
        self._queue(request, event.instance, event.uncached_tokens, event.prefill_seconds)
        request.decode, request.placed_at = event.decode, event.at

    def _migrate(self, event: RequestMigrated) -> None:
        request = self.requests.get(event.request)
        if request is None or (request.stage, request.instance) != (
            PREFILL if event.rebound else PENDING,
            event.source,
        ):
            return
        if event.rebound:
            since = self.working_since.get(event.source, 0.0)
            idle = min(since, self._aborted.get(event.source, (0.0, since))[1])
            self._aborted[event.source] = (event.at, idle)
            source = self.instances.get(event.source)
            if source is not None and source.epoch == request.epoch and event.overdue > OVERDUE_SECONDS:
                self.health.failed(event.request, event.source, event.at, request.grant, proven=False)
        self._withdraw(request)
        self._queue(request, event.instance, event.uncached_tokens, event.prefill_seconds)
        request.decode, request.placed_at = event.decode, event.at
        request.rebound_from = event.source if event.rebound else request.rebound_from

    def _queue(self, request: BookedRequest, instance: InstanceId, uncached: Tokens, seconds: EngineSeconds) -> None:
        request.stage, request.instance, request.prefilled_by = PENDING, instance, NO_INSTANCE
        request.epoch = self.newest_epoch(instance)
        request.uncached, request.seconds = uncached, seconds
        self._next_turn(request)
        self._promise(request)

    def _withdraw(self, request: BookedRequest) -> None:
        if request.stage == ARRIVED:
            return
        if request.stage != DECODING:
            self._release(request.promise)
        request.promise, request.decode, request.stage = None, NO_INSTANCE, ARRIVED

    def _next_turn(self, request: BookedRequest) -> None:
        self._turn += 1
        request.turn = self._turn

    def _grant(self, event: RequestGranted) -> None:
        request = self.requests.get(event.request)
        if request is None:
            return
        there = request.instance == event.instance and request.stage in (PENDING, PREFILL)
        if event.stamp is None and not there:
            if request.stage == DECODING or event.instance not in self.instances:
                return
            request.attempt = event.attempt
            self._requeue_at(request, event.instance)
            request.decode = event.decode or request.decode
        if request.stage == PENDING and request.instance == event.instance:
            request.rebind = event.rebind
            self._enter(request, event.at)

    def _requeue_at(self, request: BookedRequest, instance: InstanceId) -> None:
        self._withdraw(request)
        if request.rebound_from == instance:
            request.rebound_from = NO_INSTANCE
        uncached = request.prompt_tokens
        self._queue(request, instance, uncached, self.prefill_cost(request.prompt_tokens, uncached, instance))

    def _enter(self, request: BookedRequest, at: EngineSeconds) -> None:
        if not self.at(request.instance, PREFILL):
            self.working_since[request.instance] = at
        seconds, tokens = self.engine_work(request.instance, at)
        request.engine_seconds, request.engine_tokens = seconds + request.seconds, tokens + request.uncached
        request.stage, request.granted_at = PREFILL, at
        self.grants += 1
        request.grant = self.grants
        request.sent[request.attempt] = (request.instance, request.epoch, request.grant)
        self._next_turn(request)

    def _first_token(self, event: PrefillFinished) -> None:
        request = self.requests.get(event.request)
        if request is None:
            return
        learnable = event.stamp is None and request.rebound_from == NO_INSTANCE
        from_source = event.stamp is None and request.rebound_from == event.instance != NO_INSTANCE
        if from_source and event.instance in self.instances and request.stage in (PENDING, PREFILL):
            self._requeue_at(request, event.instance)  # its ingress had not read the redispatch
            self._enter(request, event.at)
        if request.instance != event.instance or request.stage not in (PREFILL, HANDED_OVER):
            return
        if request.stage == PREFILL:
            if learnable:
                self._learn(request, event.at, event.prefill)
            self.working_since[event.instance] = event.at
            request.decode = NO_INSTANCE
            if event.stamp is None:
                self._aborted.pop(event.instance, None)
        request.stage = DECODING
        self._confirm(request, event.at)

    def _learn(self, request: BookedRequest, at: EngineSeconds, prefill: EngineSeconds) -> None:
        took = FirstToken(at, request.grant, prefill, request.engine_seconds)
        self.health.of(request.instance).first_tokens.append(took)
        pace = self.paces.setdefault(request.instance, Pace())
        pace.first_token(at - self.working_since.get(request.instance, 0.0), request.seconds, request.uncached)
        learned = self.learned.setdefault(request.instance, Learned())
        learned.learn(request.engine_seconds, at - request.granted_at, request.engine_tokens, request.uncached)

    def _hand_over(self, event: RequestHandedOver | HandOverRefused, to: InstanceId) -> None:
        request = self.requests.get(event.request)
        if request is None or event.attempt < request.attempt:
            return
        if request.stage == PREFILL and request.instance == event.source:
            if event.prefill > 0:
                self._learn(request, event.at, event.prefill)
            self.working_since[event.source] = event.at
            self._confirm(request, event.at)
        elif request.awaits_decoder and request.instance == event.source != to:
            self._release(request.promise)
        else:
            gone = request.stage == DECODING or (request.stage == HANDED_OVER and request.instance == to)
            if event.stamp is not None or gone:
                return
            self._withdraw(request)
        request.stage, request.attempt, request.decode = HANDED_OVER, event.attempt, NO_INSTANCE
        request.instance, request.prefilled_by = to, event.source
        request.prefill_epoch = self.newest_epoch(event.source) if event.prefill > 0 else NO_EPOCH
        request.epoch = self.newest_epoch(to)
        self._next_turn(request)
        self._promise(request)

    def _end(self, event: RequestEnd) -> None:
        self.ended.add(event.request)
        if isinstance(event, RequestRejected | RequestFailed):
            self.unserved.add(event.request)
        if not isinstance(event, RequestFinished):
            self.health.ended(event.request, given_up=isinstance(event, RequestCancelled))
        request = self.requests.pop(event.request, None)
        if request is None:
            return
        if may_come_again(event):
            self._given_up[event.request] = request.tenant
        if isinstance(event, RequestFinished):
            self.answers.finished(request.tenant, event.completion_tokens, request.max_output_tokens)
            self._deliver(request, event)
            if event.instance == request.instance:
                self.health.of(event.instance).served.append(Served(event.at, request.grant))
                prefiller = self.instances.get(request.prefilled_by)
                if prefiller is not None and prefiller.epoch == request.prefill_epoch:
                    self.health.of(request.prefilled_by).served.append(Served(event.at, request.grant))
        computed = isinstance(event, RequestFinished) and event.instance != (request.rebound_from or None)
        if computed and request.stage in (PREFILL, HANDED_OVER):
            self._confirm(request, event.at)
        elif request.stage in (PENDING, PREFILL, HANDED_OVER):
            self._release(request.promise)

    def _deliver(self, request: BookedRequest, event: RequestFinished) -> None:
        known = self.instances.get(event.instance)
        if known is not None and event.cached_tokens >= 0:
            until = event.at + DELIVERED_SECONDS * self.speed
            self._delivered.append(
                Promise(event.instance, request.keys[: event.cached_tokens // self.block_tokens], until)
            )
            held = self.block_tokens * leading(request.keys, known.keys)
            claims = (event.predicted_cached_tokens, held)
            known.surprises += any(abs(event.cached_tokens - tokens) > self.block_tokens for tokens in claims)
