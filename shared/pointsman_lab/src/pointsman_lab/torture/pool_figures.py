"""Queries of the pool model: sets, sums and predictions, each computed from single requests and blocks."""

from itertools import accumulate

from pointsman.primitives import BlockKey, EngineSeconds, Epoch, InstanceId, RequestId, Sequence, Tokens
from pointsman_lab.torture.answer_lengths import AnswerLengths
from pointsman_lab.torture.ejections import HealthRecords, Peer
from pointsman_lab.torture.pool_records import (
    DECODING,
    HANDED_OVER,
    NO_EPOCH,
    PENDING,
    PREFILL,
    BookedRequest,
    Learned,
    ModelledInstance,
    Pace,
    Promise,
    leading,
)

STALL_SECONDS: EngineSeconds = 3.0
ABORTED_SECONDS: EngineSeconds = 10.0


class PoolFigures:
    def __init__(self, *, block_tokens: Tokens, speed: float, model: str) -> None:
        self.model = model
        self.block_tokens = block_tokens
        self.speed = speed
        self.sequence: Sequence = 0
        self.term = 0
        self.fenced = 0
        self.instances: dict[InstanceId, ModelledInstance] = {}
        self.requests: dict[RequestId, BookedRequest] = {}
        self.ended: set[RequestId] = set()
        self.unserved: set[RequestId] = set()
        """Ended by a rejection or a failure."""
        self.grants = 0
        self.now: EngineSeconds = 0.0
        """By the leader's clock."""
        self._given_up: dict[RequestId, str] = {}
        """The tenants of requests that may come again under another id."""
        self.learned: dict[InstanceId, Learned] = {}
        self.paces: dict[InstanceId, Pace] = {}
        self.health = HealthRecords()
        self.answers = AnswerLengths()
        self.working_since: dict[InstanceId, EngineSeconds] = {}
        self._aborted: dict[InstanceId, tuple[EngineSeconds, EngineSeconds]] = {}
        """By instance: time of the last redispatch, and start of its idle time."""
        self._newest: dict[InstanceId, Epoch] = {}
        self._decided: set[tuple[int, int]] = set()
        self._promises: list[Promise] = []
        self._confirming: list[Promise] = []
        self._delivered: list[Promise] = []
        self._outage: tuple[EngineSeconds, EngineSeconds] = (0.0, 0.0)
        self._turn = 0

    def at(self, instance: InstanceId, *stages: str) -> list[BookedRequest]:
        found = [r for r in self.requests.values() if r.instance == instance and r.stage in stages]
        return sorted(found, key=lambda request: request.turn)

    def hit_blocks(self, keys: list[BlockKey], instance: InstanceId) -> int:
        """Leading blocks of a prompt that the instance holds or is about to hold."""
        known = self.instances.get(instance)
        held = leading(keys, known.keys if known is not None else set())
        return max(held, leading(keys, self.promised(instance)))

    def hit_blocks_max(self, keys: list[BlockKey], instance: InstanceId) -> int:
        known = self.instances.get(instance)
        delivered = {key for prefix in self._delivered if prefix.instance == instance for key in prefix.keys}
        return leading(keys, delivered | self.promised(instance) | (known.keys if known is not None else set()))

    def promised(self, instance: InstanceId) -> set[BlockKey]:
        return {key for promise in self._promises if promise.instance == instance for key in promise.keys}

    def uncached(self, prompt_tokens: Tokens, hit_blocks: int, instance: InstanceId) -> Tokens:
        """Tokens to compute: a hit saves whole engine blocks, and never the last token."""
        width = self.instances[instance].engine_block_tokens
        savable = prompt_tokens - 1 - (prompt_tokens - 1) % width
        return prompt_tokens - max(0, min(hit_blocks * self.block_tokens, savable)) if hit_blocks else prompt_tokens

    def prefill_cost(self, prompt_tokens: Tokens, uncached: Tokens, instance: InstanceId) -> EngineSeconds:
        cost, cached = self.instances[instance].cost, prompt_tokens - uncached
        squares = prompt_tokens**2 - cached**2
        return cost.fixed_s + max(cost.floor_s, cost.per_token_s * uncached + cost.per_token_squared_s * squares)

    def expected(self, instance: InstanceId, seconds: EngineSeconds, tokens: Tokens) -> EngineSeconds:
        pace = self.paces.get(instance)
        return pace.learned.expect(seconds, tokens) if pace is not None else seconds

    def full_step(self, instance: InstanceId) -> EngineSeconds:
        pace = self.paces.get(instance)
        return pace.full_step if pace is not None else 0.0

    def expected_prefill(self, instance: InstanceId, seconds: EngineSeconds, tokens: Tokens) -> EngineSeconds:
        """Of one prompt."""
        learned = self.learned.get(instance)
        return learned.expect(seconds, tokens, alone=True) if learned is not None else seconds

    def engine_work(self, instance: InstanceId, now: EngineSeconds) -> tuple[EngineSeconds, Tokens]:
        inside = self.at(instance, PREFILL)
        if not inside:
            return 0.0, 0
        seconds, tokens = sum(r.seconds for r in inside), sum(r.uncached for r in inside)
        beside = self.paces[instance].beside if instance in self.paces else 0.0
        fitting = [bool(beside) and work <= beside for work in accumulate(request.seconds for request in inside[1:])]
        step = [inside[0], *(request for request, fits in zip(inside[1:], fitting, strict=True) if fits)]
        work, computed = sum(r.seconds for r in step), sum(r.uncached for r in step)
        passed = max(0.0, now - self.working_since.get(instance, 0.0))
        if passed >= work or not work:
            return seconds - work, tokens - computed
        return seconds - passed, tokens - int(computed * (passed / work))

    def queued(self, instance: InstanceId, now: EngineSeconds) -> EngineSeconds:
        """Expected seconds until a new request begins its prefill."""
        seconds, tokens = self.engine_work(instance, now)
        waiting = self.at(instance, PENDING)
        return self.expected(
            instance, seconds + sum(r.seconds for r in waiting), tokens + sum(r.uncached for r in waiting)
        )

    def kv_wait(self, instance: InstanceId, request: BookedRequest, tpot_max: EngineSeconds) -> EngineSeconds:
        """Until others have freed the KV blocks that the request lacks: a full cache is turned over once in an answer."""
        known, there = self.instances[instance], self.at(instance, PENDING, PREFILL, HANDED_OVER, DECODING)
        if known.role == "prefill" or known.kv_capacity_tokens <= 0:
            return 0.0
        answer = self.answers.expected(request.tenant, request.max_output_tokens)
        needed = sum(one.prompt_tokens + answer for one in (*there, request))
        return max(0.0, needed / known.kv_capacity_tokens - 1) * answer * min(request.slo_tpot, tpot_max)

    def stalled(self, instance: InstanceId, now: EngineSeconds) -> EngineSeconds:
        inside, waiting = self.at(instance, PREFILL), self.at(instance, PENDING)
        since = now
        if inside:
            seen = [request for request in inside if request.streaming]
            if seen and now > seen[0].granted_at + seen[0].engine_seconds:
                since = self.working_since[instance]
        elif waiting:
            since = max(self.working_since.get(instance, 0.0), waiting[0].placed_at)
        taken_at, idle_since = self._aborted.get(instance, (0.0, 0.0))
        if taken_at and now - taken_at <= ABORTED_SECONDS:
            since = min(since, idle_since)
        return now - since if now - since > STALL_SECONDS else 0.0

    def has_room(self, instance: InstanceId, tokens: Tokens, *, window_tokens: Tokens, running_max: int) -> bool:
        """Whether the engine may get so many more uncached tokens. One prefill may always be in it."""
        inside = self.at(instance, PREFILL)
        if len(inside) + len(self.at(instance, HANDED_OVER, DECODING)) + 1 > running_max:
            return False
        return not inside or sum(r.uncached for r in inside) + tokens <= window_tokens

    def ready(
        self, request: BookedRequest, excluded: tuple[InstanceId, ...] | list[InstanceId] = ()
    ) -> list[InstanceId]:
        """Instances for its prompt that have not failed it: ready; if none is, ejected; if none is, ready but for their silent
        worker."""
        able = {
            name: known
            for name, known in self.instances.items()
            if known.role != "decode" and known.serves(request) and name not in excluded
        }
        return self._taking(able)

    def decoders(self) -> list[InstanceId]:
        decoders = {name: known for name, known in self.instances.items() if known.role != "prefill"}
        return self._taking(decoders)

    def _taking(self, instances: dict[InstanceId, ModelledInstance]) -> list[InstanceId]:
        ready = sorted(name for name, known in instances.items() if known.status == "ready")
        ejected = sorted(name for name, known in instances.items() if known.status == "ejected")
        silent = (name for name, known in instances.items() if known.suspected and known.standing == "ready")
        return ready or ejected or sorted(silent)

    def on_trial(self, instance: InstanceId) -> bool:
        """Whether it takes one request at a time: half-open, and another instance has its role."""
        known = self.instances.get(instance)
        if known is None or not known.half_open:
            return False
        for part in ("prefill", "decode"):
            able = self._taking({name: k for name, k in self.instances.items() if k.role in (part, "both")})
            if instance in able and not all(self.instances[name].half_open for name in able):
                return True
        return False

    def tried_by(self, instance: InstanceId) -> list[BookedRequest]:
        first = self.health.of(instance).phase_from
        return [r for r in self.at(instance, PREFILL, HANDED_OVER, DECODING) if r.grant >= first]

    def peers(self) -> list[Peer]:
        return [
            Peer(
                id=name,
                role=known.role,
                whole=known.status == "ready" and not known.half_open,
                unwell=known.ejected or known.half_open,
                half_open=known.half_open,
                waits=[(r.granted_at, r.engine_seconds) for r in self.at(name, PREFILL) if r.streaming],
            )
            for name, known in self.instances.items()
        ]

    def newest_epoch(self, instance: InstanceId) -> Epoch:
        return self._newest.get(instance, NO_EPOCH)
