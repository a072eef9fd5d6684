"""Which instance decodes what another one prefills, and whether it can still take it.

Source: Mooncake (FAST'25), Algorithm 1: beside the prefill instance the Conductor chooses a decode instance by its load,
and refuses a request that would miss its objective on the time to its first token or on the time between tokens; section
7.2 looks at the decode load again when the prefill is over, since it changes meanwhile.

Who decodes is chosen first, because all that prefill only hand over to the same one: the one with the least predicted
time per output token; of those about equal the one that has most of the prompt cached, so that the least is fetched,
then the one with most room for KV. Those without room come last. Load counts what is expected as well as what decodes,
so a burst that is still being prefilled spreads. The time per token is what the instance showed lately at that many
requests (`trackers.decode_load`), else what it costs by its worker's word (`DecodeCost`), else unknown and not checked.

An instance that does everything keeps what it prefills, for that costs no transfer, unless it would decode too slowly and
another one would not.

Bias: context counts by the prompts, and room as if no two prompts shared a block, so a decode instance with a hot prefix
looks fuller than it is. Limits: the time of a transfer is that of one alone; it does not know of others under way.
"""

from collections.abc import Collection
from dataclasses import asdict, dataclass, field

from pointsman.contracts.decisions import DecodeCandidate, Settings
from pointsman.contracts.reasons import RejectReason
from pointsman.policies.admission.base import Refusal
from pointsman.primitives import InstanceId, Seconds, Tokens
from pointsman.state.fleet import Instance
from pointsman.state.state import State
from pointsman.state.workload import NO_INSTANCE, InstanceQueue, Request

OUTPUT_TOKENS_RESERVED: Tokens = 512
"""How much of an answer room is kept for at most: clients ask for far more than they use."""

DECODE_RETRY_SECONDS: Seconds = 1.0
"""What a client is told to wait whom no decode instance can take: some answer will have ended by then."""

UNKNOWN_ROOM = -1

_NO_LINE = InstanceQueue()


@dataclass(frozen=True, slots=True)
class Pair:
    """What a placement says of who decodes; empty where whoever prefills does."""

    decode: InstanceId = NO_INSTANCE
    reason: str = ""
    considered: list[DecodeCandidate] = field(default_factory=list)
    transfer_seconds: Seconds = 0.0


ALONE = Pair()
"""One instance does all of it."""


@dataclass(frozen=True, slots=True)
class Decoder:
    """Who decodes it, and why."""

    chosen: DecodeCandidate
    reason: str
    considered: list[DecodeCandidate]

    @property
    def pair(self) -> Pair:
        return Pair(self.chosen.instance, self.reason, self.considered, self.chosen.transfer_seconds)


@dataclass(frozen=True, slots=True)
class NoDecoder:
    """Why nobody decodes it."""

    refusal: Refusal
    considered: list[DecodeCandidate]


@dataclass(frozen=True)
class Pairing:
    """`load_check`: whether a request is refused that would get its tokens too slowly wherever it is decoded.
    `tie_share`: times per token that differ by less than this share are equal."""

    load_check: bool = True
    tie_share: float = 0.05

    @property
    def settings(self) -> Settings:
        """Those that are not at their defaults: where nothing is split nobody need read of them."""
        usual = asdict(DEFAULT_PAIRING)
        return {name: value for name, value in asdict(self).items() if value != usual[name]}

    def choose(
        self,
        state: State,
        request: Request,
        now: Seconds,
        *,
        excluded: Collection[InstanceId] = (),
        planned: InstanceId | None = None,
        check: bool = True,
    ) -> Decoder | NoDecoder:
        """Who should decode this request after another instance has prefilled it. `planned`: who is to, unless something
        speaks against it now. `check` False looks for the best there is, whatever its load."""
        hits = state.hits(request.keys)
        fleet = state.fleet
        able = [i for i in fleet.decoders if i not in excluded and fleet[i].can_serve(request)]
        if fleet.on_trial:
            able = [i for i in able if i not in fleet.on_trial or not state.has_trial_request(i)] or able
        considered = [weigh(state, state.fleet[instance], request, now, hits.get(instance, 0)) for instance in able]
        if not considered:
            return NoDecoder(
                Refusal(RejectReason.NO_INSTANCE, "no instance that decodes is ready", DECODE_RETRY_SECONDS), []
            )
        good = [c for c in considered if not check or self.fast_enough(c, request)]
        if not good:
            return NoDecoder(_too_slow(considered, request), considered)
        kept = next((c for c in good if c.instance == planned), None)
        if kept is not None:
            return Decoder(kept, "as planned", considered)
        return self._least_loaded(good, request, considered)

    def fast_enough(self, candidate: DecodeCandidate, request: Request) -> bool:
        """Whether the answer would come as fast as its objective asks, as far as anybody can tell."""
        tpot = candidate.predicted_tpot
        return not self.load_check or tpot is None or tpot <= request.slo_tpot or request.max_output_tokens == 1

    def _least_loaded(
        self, good: list[DecodeCandidate], request: Request, considered: list[DecodeCandidate]
    ) -> Decoder:
        needed = _kv_tokens(request)
        roomy = [c for c in good if c.free_tokens == UNKNOWN_ROOM or c.free_tokens >= needed]
        among = roomy or good
        loads = _loads(among)
        least = min(loads)
        near = [c for c, load in zip(among, loads, strict=True) if load <= least * (1 + self.tie_share)]
        chosen = min(near, key=lambda c: (c.transfer_tokens, -c.free_tokens, c.instance))
        return Decoder(chosen, _reason(chosen, full=not roomy), considered)


DEFAULT_PAIRING = Pairing()


def weigh(state: State, instance: Instance, request: Request, now: Seconds, hit_blocks: int) -> DecodeCandidate:
    """What decoding the request there would mean."""
    line = state.workload.queues.get(instance.id, _NO_LINE)
    expected = [other for other in line.expected.values() if other.id != request.id]
    others = [*line.decoding.values(), *expected]
    missing = request.prompt_tokens - state.latency.cached_tokens(instance, hit_blocks, request.prompt_tokens)
    capacity, rate = instance.kv_capacity_tokens, instance.transfer_tokens_per_s
    inside = [*others, *line.prefill.values()]
    return DecodeCandidate(
        instance=instance.id,
        requests=len(others),
        predicted_tpot=_predicted_tpot(state, instance, request, others, now),
        free_tokens=max(0, capacity - sum(map(_kv_tokens, inside))) if capacity else UNKNOWN_ROOM,
        transfer_tokens=missing,
        transfer_seconds=missing / rate if rate > 0 else 0.0,
    )


def _predicted_tpot(
    state: State, instance: Instance, request: Request, others: list[Request], now: Seconds
) -> Seconds | None:
    shown = state.decode_load.predicted_tpot(instance.id, now, others=len(others))
    cost = instance.decode
    if shown is not None or cost is None:
        return shown
    context = request.prompt_tokens + sum(other.prompt_tokens for other in others)
    return cost.step_s + cost.per_request_s * (len(others) + 1) + cost.per_context_token_s * context


def _kv_tokens(request: Request) -> Tokens:
    """KV cache that a request needs by its end, about."""
    return request.prompt_tokens + min(request.max_output_tokens, OUTPUT_TOKENS_RESERVED)


def _loads(candidates: list[DecodeCandidate]) -> list[float]:
    """Times per token where they are known of all, else requests."""
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
    return Refusal(RejectReason.SLO_TPOT, detail, DECODE_RETRY_SECONDS)
