"""Chooses the instance that decodes what another one prefills; checked again at the hand-over. Source: Mooncake
(FAST'25), Algorithm 1, section 4.1. Order: least predicted time per output token; within `tie_share` of it the most
prompt cached, then the most free KV cache; instances without room last. The time per token is what the instance showed
lately at that load, else the cost model (`DecodeCost`), else unknown and unchecked. Requests in prefill count, so that
a burst spreads. Bias: free KV cache ignores shared blocks. Limit: transfer time ignores other transfers in flight."""

from collections.abc import Collection
from dataclasses import asdict, dataclass, field

from pointsman.bounds import check_settings
from pointsman.contracts.decisions import DecodeCandidate, Settings
from pointsman.contracts.reasons import RejectReason
from pointsman.policies.admission.base import Refusal
from pointsman.primitives import EngineSeconds, InstanceId, Tokens
from pointsman.state import fold_versions
from pointsman.state.fleet import Instance
from pointsman.state.instance_status import has_trial_request
from pointsman.state.state import State
from pointsman.state.workload import EMPTY_QUEUE, NO_INSTANCE, Request

OUTPUT_TOKENS_RESERVED: Tokens = 512
"""Bound of the output tokens per request that count as used KV cache."""

RETRY_SECONDS: EngineSeconds = 1.0

UNKNOWN_ROOM = -1


@dataclass(frozen=True, slots=True)
class DecodeAssignment:
    instance: InstanceId = NO_INSTANCE
    reason: str = ""
    considered: list[DecodeCandidate] = field(default_factory=list)
    transfer_seconds: EngineSeconds = 0.0


SAME_INSTANCE = DecodeAssignment()


@dataclass(frozen=True, slots=True)
class DecodeChoice:
    chosen: DecodeCandidate
    reason: str
    considered: list[DecodeCandidate]

    @property
    def assignment(self) -> DecodeAssignment:
        return DecodeAssignment(self.chosen.instance, self.reason, self.considered, self.chosen.transfer_seconds)


@dataclass(frozen=True, slots=True)
class DecodeRefusal:
    refusal: Refusal
    considered: list[DecodeCandidate]


@dataclass(frozen=True)
class DecodePlacement:
    """`tie_share`: relative difference below which times per token are equal."""

    load_check: bool = True
    tie_share: float = 0.05

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def settings(self) -> Settings:
        """Non-default settings only, so that events of pools without split carry none."""
        defaults = asdict(DEFAULT_DECODE_PLACEMENT)
        return {name: value for name, value in asdict(self).items() if value != defaults[name]}

    def choose(
        self,
        state: State,
        request: Request,
        now: EngineSeconds,
        *,
        excluded: Collection[InstanceId] = (),
        planned: InstanceId | None = None,
        check_load: bool = True,
    ) -> DecodeChoice | DecodeRefusal:
        """`planned`: kept unless it exceeds its SLO now. `check_load` False ignores the load."""
        hits = state.hits(request.keys)
        fleet = state.fleet
        able = [i for i in fleet.decoders if i not in excluded and fleet[i].can_serve(request)]
        if fleet.on_trial:
            able = [i for i in able if i not in fleet.on_trial or not has_trial_request(state, i)] or able
        considered = [decode_candidate(state, fleet[i], request, now, hits.get(i, 0)) for i in able]
        if not considered:
            refusal = Refusal(RejectReason.NO_INSTANCE, "no instance that decodes is ready", RETRY_SECONDS)
            return DecodeRefusal(refusal, [])
        good = [c for c in considered if not check_load or self.fast_enough(c, request)]
        if (
            not good
            and state.settings.fold_version >= fold_versions.SLOW_DECODERS
            and all(_slow_alone(state, fleet[i], request) for i in able)
        ):
            good = considered
        if not good:
            return DecodeRefusal(_too_slow(considered, request), considered)
        kept = next((c for c in good if c.instance == planned), None)
        if kept is not None:
            return DecodeChoice(kept, "as planned", considered)
        return self._least_loaded(good, kv_tokens(state, request), considered)

    def fast_enough(self, candidate: DecodeCandidate, request: Request) -> bool:
        """True if the predicted TPOT meets the SLO or is unknown."""
        tpot = candidate.predicted_tpot
        return not self.load_check or tpot is None or tpot <= request.slo_tpot or request.max_output_tokens == 1

    def _least_loaded(
        self, good: list[DecodeCandidate], needed: Tokens, considered: list[DecodeCandidate]
    ) -> DecodeChoice:
        roomy = [c for c in good if c.free_tokens == UNKNOWN_ROOM or c.free_tokens >= needed]
        among = roomy or good
        loads = _loads(among)
        least = min(loads)
        near = [c for c, load in zip(among, loads, strict=True) if load <= least * (1 + self.tie_share)]
        chosen = min(near, key=lambda c: (c.transfer_tokens, -c.free_tokens, c.instance))
        return DecodeChoice(chosen, _reason(chosen, full=not roomy), considered)


DEFAULT_DECODE_PLACEMENT = DecodePlacement()


def decode_candidate(
    state: State, instance: Instance, request: Request, now: EngineSeconds, hit_blocks: int
) -> DecodeCandidate:
    queue = state.workload.queues.get(instance.id, EMPTY_QUEUE)
    expected = [other for other in queue.expected.values() if other.id != request.id]
    others = [*queue.decoding.values(), *expected]
    missing = request.prompt_tokens - state.latency.cached_tokens(instance, hit_blocks, request.prompt_tokens)
    capacity, rate = instance.kv_capacity_tokens, instance.transfer_tokens_per_s
    inside = [*others, *queue.prefill.values()]
    return DecodeCandidate(
        instance=instance.id,
        requests=answers_of(state, others),
        predicted_tpot=_predicted_tpot(state, instance, request, others, now),
        free_tokens=max(0, capacity - sum(kv_tokens(state, other) for other in inside)) if capacity else UNKNOWN_ROOM,
        transfer_tokens=missing,
        transfer_seconds=missing / rate if rate > 0 else 0.0,
    )


def _predicted_tpot(
    state: State, instance: Instance, request: Request, others: list[Request], now: EngineSeconds
) -> EngineSeconds | None:
    shown = state.decode_load.predicted_tpot(instance.id, request, now, others=answers_of(state, others))
    return _tpot_by_cost(state, instance, [request, *others]) if shown is None else shown


def _tpot_by_cost(state: State, instance: Instance, requests: list[Request]) -> EngineSeconds | None:
    cost = instance.decode
    if cost is None:
        return None
    context = sum(request.prompt_tokens for request in requests)
    return cost.step_s + cost.per_request_s * answers_of(state, requests) + cost.per_context_token_s * context


def _slow_alone(state: State, instance: Instance, request: Request) -> bool:
    """Whether it would miss its SLO beside no other. That is no matter of load, and to refuse it would be for ever."""
    tpot = _tpot_by_cost(state, instance, [request])
    return tpot is not None and tpot > request.slo_tpot


def kv_tokens(state: State, request: Request) -> Tokens:
    answers = state.decode_load.answers_of(request)
    return request.prompt_tokens + answers * min(request.max_output_tokens, OUTPUT_TOKENS_RESERVED)


def answers_of(state: State, requests: Collection[Request]) -> int:
    """Answers that an instance generates at once for them."""
    return sum(map(state.decode_load.answers_of, requests))


def _loads(candidates: list[DecodeCandidate]) -> list[float]:
    times = [c.predicted_tpot for c in candidates if c.predicted_tpot is not None]
    return times if len(times) == len(candidates) else [float(c.requests) for c in candidates]


def _reason(chosen: DecodeCandidate, *, full: bool) -> str:
    tpot = chosen.predicted_tpot
    pace = f"{tpot * 1000:.1f} ms a token" if tpot is not None else "least load"
    room = ", though it is full" if full else ""
    return f"{pace} beside {chosen.requests} others, {chosen.transfer_tokens} tokens to fetch{room}"


def _too_slow(considered: list[DecodeCandidate], request: Request) -> Refusal:
    best = min(considered, key=lambda c: (c.predicted_tpot or 0.0, c.instance))
    detail = (
        f"predicted time per output token is {(best.predicted_tpot or 0.0) * 1000:.0f} ms on {best.instance}, which "
        f"decodes fastest now; the objective is {request.slo_tpot * 1000:g} ms"
    )
    return Refusal(RejectReason.SLO_TPOT, detail, RETRY_SECONDS)
