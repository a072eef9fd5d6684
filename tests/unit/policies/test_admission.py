"""What each admission policy lets in, sends elsewhere or refuses, and that the floors of the fair one hold."""

import heapq
from collections import defaultdict
from dataclasses import dataclass
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import RequestGranted, RequestPlaced, RequestRejected, Settings
from pointsman.contracts.reasons import CancelCause
from pointsman.contracts.requests import RequestFinished
from pointsman.policies.admission import AdmissionPolicy
from pointsman.policies.admission.predicted_ttft import PredictedTtft
from pointsman.policies.admission.predicted_ttft_fair import PredictedTtftFair
from pointsman.policies.admission.predicted_ttft_global import PredictedTtftGlobal
from pointsman.policies.dispatch import Dispatcher
from pointsman.policies.ordering.first_come_first_served import FirstComeFirstServed
from pointsman.policies.policy_set import PolicySet, policy_set, recorded_policy_set
from pointsman.policies.queue_limits import PREFILL_WINDOW_TOKENS
from pointsman.policies.routing import RoutingPolicy
from pointsman.policies.routing.least_loaded import LeastLoaded
from pointsman.policies.routing.round_robin import RoundRobin
from pointsman.primitives import InstanceId, RequestId, Tenant
from pointsman.state.state import FOLD_VERSION, PoolSettings
from pointsman.state.trackers.attainment import OWED_MAX, Attainment, Tally, fair_level, tenth
from pointsman.state.trackers.decode_load import DecodeFit
from tests.support.events import BLOCK, finished, first_token, route
from tests.support.examples import examples
from tests.support.leading import leader_of

FLEET = ("a", "b", "c")


def pool(
    admission: AdmissionPolicy,
    *,
    routing: RoutingPolicy | None = None,
    instances: tuple[str, ...] = FLEET,
    settings: PoolSettings | None = None,
    window_tokens: int = PREFILL_WINDOW_TOKENS,
) -> Dispatcher:
    policies = PolicySet(
        routing=routing or RoundRobin(),
        admission=admission,
        ordering=FirstComeFirstServed(),
        prefill_window_tokens=window_tokens,
    )
    return leader_of(instances, policies, settings=settings)


def answered(request: str, instance: str, *, at: float, tpot: float) -> RequestFinished:
    return finished(request, instance, at=at, completion_tokens=10, tpot=tpot)


def ask(
    dispatcher: Dispatcher, request: str, first_key: int, blocks: int, now: float = 0.0, **fields: object
) -> LogEvent:
    command = route(request, list(range(first_key, first_key + blocks)), arrived_at=now, **fields)  # type: ignore[arg-type]
    return next(e for e in dispatcher.route(command, now) if isinstance(e, RequestPlaced | RequestRejected))


def teach(dispatcher: Dispatcher, instance: str, *, answers: int, tpot: float, at: float) -> None:
    for number in range(answers):
        name = f"taught-{at}-{number}"
        ask(dispatcher, name, 10_000 + number, 1, at)
        dispatcher.state.apply(first_token(name, instance, at=at))
        dispatcher.state.apply(answered(name, instance, at=at, tpot=tpot))


@pytest.mark.parametrize(
    "policy",
    [PredictedTtft(tpot_check=True), PredictedTtftGlobal(tpot_check=True), PredictedTtftFair(tpot_check=True)],
    ids=lambda p: p.name,
)
def test_a_slow_decode_refuses_only_where_there_is_evidence(policy: AdmissionPolicy) -> None:
    dispatcher = pool(policy, instances=("a",))
    teach(dispatcher, "a", answers=5, tpot=0.4, at=1.0)
    without = ask(dispatcher, "few", 1, 1, 1.0, slo_tpot=0.1)
    teach(dispatcher, "a", answers=15, tpot=0.4, at=2.0)
    refused = ask(dispatcher, "slow", 1, 1, 2.0, slo_tpot=0.1)
    patient = ask(dispatcher, "patient", 1, 1, 2.0, slo_tpot=0.5)
    faded = ask(dispatcher, "later", 1, 1, 90.0, slo_tpot=0.1)

    assert isinstance(without, RequestPlaced)
    assert isinstance(refused, RequestRejected)
    assert (refused.reason, refused.detail) == (
        "slo_tpot", "predicted time per output token is 400 ms on a, the objective is 100 ms",
    )  # fmt: skip
    assert isinstance(patient, RequestPlaced)
    assert isinstance(faded, RequestPlaced), "who is refused teaches nothing, so old evidence must not refuse for ever"


@pytest.mark.parametrize(("version", "of_two", "of_eight"), [(FOLD_VERSION, "60 ms", "180 ms"), (9, "", "")])
def test_the_speed_of_several_answers_is_that_of_each_beside_the_others(
    version: int, of_two: str, of_eight: str
) -> None:
    """The engine takes 20 ms a token and 20 ms more for each answer; each has 11 tokens. Logs of before learned 19 ms a
    token of four answers, as of one; they are replayed so."""
    dispatcher = pool(PredictedTtft(tpot_check=True), instances=("a",), settings=PoolSettings(fold_version=version))
    for number in range(20):
        for answers, seconds in ((1, 0.04), (4, 0.1)):
            name, tokens = f"taught-{number}-{answers}", 11 * answers
            ask(dispatcher, name, 10_000 + number, 1, 1.0, answers=answers)
            dispatcher.state.apply(first_token(name, "a", at=1.0))
            end = answered(name, "a", at=1.0, tpot=10 * seconds / (tokens - 1))
            dispatcher.state.apply(msgspec.structs.replace(end, completion_tokens=tokens))

    for answers, told in ((2, of_two), (8, of_eight)):
        answer = ask(dispatcher, f"r{answers}", 1, 1, 1.0, answers=answers, slo_tpot=0.05)
        detail = answer.detail if isinstance(answer, RequestRejected) else ""
        assert detail == (f"predicted time per output token is {told} on a, the objective is 50 ms" if told else "")


def test_the_tpot_objective_counts_only_where_it_is_asked_for() -> None:
    dispatcher = pool(PredictedTtft(), instances=("a",))
    teach(dispatcher, "a", answers=40, tpot=9.0, at=1.0)

    assert isinstance(ask(dispatcher, "r", 1, 1, 1.0), RequestPlaced)


@given(st.lists(st.tuples(st.integers(1, 200), st.floats(0.001, 2.0)), min_size=1, max_size=30))
@examples(100)
def test_predicted_tpot_never_falls_with_load_and_is_never_negative(points: list[tuple[int, float]]) -> None:
    fit = DecodeFit()
    for number, (decoding, seconds) in enumerate(points):
        fit.learn(decoding, seconds, float(number))

    predictions = [fit.seconds_per_token(decoding) for decoding in (1, 10, 100, 1000)]

    assert predictions == sorted(predictions)
    assert predictions[0] >= -1e-9


def test_a_fit_through_a_line_finds_it() -> None:
    fit = DecodeFit()
    for decoding in range(1, 40):
        fit.learn(decoding, 0.02 + 0.001 * decoding, float(decoding))

    assert fit.seconds_per_token(60) == pytest.approx(0.08)


def test_the_global_look_finds_room_beyond_the_choice() -> None:
    dispatcher = pool(PredictedTtftGlobal())
    for number, blocks in enumerate((60, 60, 10)):
        ask(dispatcher, f"before{number}", 1000 * number, blocks)

    sent_on = ask(dispatcher, "r", 9000, 60, slo_ttft=5.0)

    assert isinstance(sent_on, RequestPlaced)
    assert (sent_on.instance, sent_on.reason) == ("c", "a would miss the objective: first token soonest")
    assert [candidate.instance for candidate in sent_on.candidates] == list(FLEET)


def test_the_global_look_refuses_what_is_late_everywhere_and_names_the_soonest() -> None:
    dispatcher = pool(PredictedTtftGlobal())
    for number, blocks in enumerate((60, 60, 40)):
        ask(dispatcher, f"before{number}", 1000 * number, blocks)

    refused = ask(dispatcher, "r", 9000, 60, slo_ttft=5.0)

    assert isinstance(refused, RequestRejected)
    assert refused.reason == "slo_ttft"
    assert "6.40 s on c" in refused.detail


DOCUMENT = 150
"""Blocks of a prompt whose prefill takes 9.6 s."""


@pytest.mark.parametrize("policy", [PredictedTtft, PredictedTtftGlobal, PredictedTtftFair], ids=lambda p: p.name)
def test_what_is_late_even_alone_is_refused_for_its_wait_only_where_that_has_a_limit(
    policy: type[PredictedTtft],
) -> None:
    unlimited, limited = pool(policy(), instances=("a",)), pool(policy(best_effort_wait_max=300.0), instances=("a",))
    asked = [
        [ask(dispatcher, f"r{number}", 1000 * number, DOCUMENT) for number in range(60)]
        for dispatcher in (unlimited, limited)
    ]
    waits = [placed.queue_seconds for placed in asked[0] if isinstance(placed, RequestPlaced) and placed.best_effort]

    assert len(waits) == 60
    assert max(waits) > 500.0
    served = [event for event in asked[1] if isinstance(event, RequestPlaced)]
    refused = [event for event in asked[1] if isinstance(event, RequestRejected)]
    assert max(event.queue_seconds for event in served) <= 300.0
    assert len(served) == sum(wait <= 300.0 for wait in waits)
    assert {event.reason for event in refused} == {"best_effort_full"}
    assert refused[0].retry_after == pytest.approx(waits[len(served)] - 300.0)


@pytest.mark.parametrize("policy", [PredictedTtft, PredictedTtftGlobal, PredictedTtftFair], ids=lambda p: p.name)
@pytest.mark.parametrize("again", [RequestPlaced, RequestRejected])
def test_best_effort_that_waited_longer_than_its_objective_is_served_by_another_engine_when_one_fails(
    policy: type[PredictedTtft], again: type[LogEvent]
) -> None:
    """Logs of before refused it; they are replayed so."""
    version = FOLD_VERSION if again is RequestPlaced else 9
    dispatcher = pool(policy(), instances=("a", "b"), settings=PoolSettings(fold_version=version))
    ask(dispatcher, "first", 1, DOCUMENT)
    late = ask(dispatcher, "late", 1000, DOCUMENT)
    dispatcher.state.apply(first_token("first", "a", at=30.0))
    dispatcher.state.apply(answered("first", "a", at=30.0, tpot=0.0))
    granted = [event for name in "ab" for event in dispatcher.grant_waiting(InstanceId(name), 30.0)]
    assert isinstance(late, RequestPlaced)
    assert late.best_effort
    (grant,) = [event for event in granted if isinstance(event, RequestGranted)]

    decided = ask(dispatcher, "late", 1000, DOCUMENT, 32.0, attempt=2, excluded=[grant.instance])

    assert isinstance(decided, again)
    if isinstance(decided, RequestPlaced):
        assert decided.best_effort
        assert decided.instance != grant.instance


@pytest.mark.parametrize("policy", [PredictedTtft, PredictedTtftGlobal, PredictedTtftFair], ids=lambda p: p.name)
@pytest.mark.parametrize("blocks", [DOCUMENT, 10])
@pytest.mark.parametrize("version", [FOLD_VERSION, 9])
def test_a_request_that_its_leader_gave_up_is_not_late_for_that_under_another_id(
    policy: type[PredictedTtft], blocks: int, version: int
) -> None:
    """A document is late even alone and stays best effort. Logs of before refused both; they are replayed so."""
    dispatcher = pool(policy(), instances=("a", "b"), settings=PoolSettings(fold_version=version))
    first = ask(dispatcher, "first", 1, blocks)
    dispatcher.cancel_any(RequestId("first"), CancelCause.GRANT_UNHEARD, 60.0)

    command = route("again", list(range(1, blocks + 1)), instead_of=RequestId("first"))
    again = next(e for e in dispatcher.route(command, 60.0) if isinstance(e, RequestPlaced | RequestRejected))

    assert isinstance(first, RequestPlaced)
    assert isinstance(again, RequestPlaced if version == FOLD_VERSION else RequestRejected)
    if isinstance(again, RequestPlaced):
        assert again.best_effort == first.best_effort == (blocks == DOCUMENT)


@pytest.mark.parametrize("policy", [PredictedTtft, PredictedTtftGlobal, PredictedTtftFair], ids=lambda p: p.name)
@pytest.mark.parametrize(
    ("fleet", "blocks", "settings", "expected"),
    [
        (("a", "b"), 30, {}, "b"),
        (("a",), 30, {}, "slo_ttft"),
        (("a",), 15, {}, "a"),
        (("a",), 30, {"overtaking_max": 1.0}, "a"),
    ],
    ids=["another has room", "none has room", "a short prefill", "as before the setting"],
)
def test_a_long_prefill_does_not_overtake_best_effort_requests(
    policy: type[PredictedTtft], fleet: tuple[str, ...], blocks: int, settings: dict[str, float], expected: str
) -> None:
    """The document takes 9.6 s; 30 blocks take 1.9, 15 take 1.0; of the objective of 5 s a quarter is 1.25. Engines take one
    prompt at once. The document waits, as others do, and it is not its turn, as others were just before."""
    dispatcher = pool(policy(**settings), instances=fleet, window_tokens=1)  # type: ignore[arg-type]
    for number, name in enumerate(fleet):
        ask(dispatcher, f"earlier-{name}", 20_000 + 1000 * number, DOCUMENT)
    for name in fleet:
        dispatcher.state.apply(first_token(f"earlier-{name}", name, at=9.6))
        dispatcher.state.apply(answered(f"earlier-{name}", name, at=9.6, tpot=0.0))
    for number in range(2 * len(fleet)):
        ask(dispatcher, f"before-{number}", 1000 * number, 2, 9.6)
    document = ask(dispatcher, "document", 8000, DOCUMENT, 9.6)

    decided = ask(dispatcher, "r", 9000, blocks, 9.6)

    assert isinstance(document, RequestPlaced)
    assert (document.instance, document.best_effort) == ("a", True)
    if isinstance(decided, RequestPlaced):
        assert (decided.instance, decided.best_effort) == (expected, False)
    else:
        assert isinstance(decided, RequestRejected)
        assert decided.reason == expected


def test_the_refusal_tells_when_the_prefill_would_begin_though_nobody_waits() -> None:
    dispatcher = pool(PredictedTtft(best_effort_wait_max=5.0), instances=("a",))
    first = ask(dispatcher, "first", 1, DOCUMENT)
    assert isinstance(first, RequestPlaced)
    refused = ask(dispatcher, "second", 1000, DOCUMENT)

    assert not dispatcher.state.best_effort.waits
    assert isinstance(refused, RequestRejected)
    assert refused.detail == (
        "the prompt alone takes 9.60 s, more than its objective of 5 s, and its prefill would begin in 10 s; the limit "
        "for such requests is 5 s (best_effort_wait_max)"
    )


def test_a_record_that_names_no_limit_of_the_wait_was_decided_with_300_seconds() -> None:
    for wait_max, recorded in ((0.0, True), (60.0, True), (300.0, False)):
        policies = policy_set(admission="predicted_ttft", settings={"admission.best_effort_wait_max": wait_max})

        assert ("admission.best_effort_wait_max" in policies.settings) is recorded
        again = recorded_policy_set(policies.routing.name, decode_settings(policies.settings))
        assert again.admission == policies.admission


def decode_settings(told: Settings) -> Settings:
    """As they are read from a log."""
    return msgspec.json.decode(msgspec.json.encode(told), type=Settings)


WARM_UP = 300
"""Outcomes that do not count: debts must first grow to the prices that the floors take."""


@dataclass(frozen=True)
class Sender:
    """A tenant: requests a second, and the lengths of its prompts in blocks."""

    tenant: str
    rate: float
    blocks: tuple[int, ...]


class Overload:
    """Poisson arrivals on instances that prefill one request after the other; attainment by length and by tenant."""

    def __init__(self, admission: AdmissionPolicy, senders: list[Sender], *, seed: int, seconds: float) -> None:
        self.dispatcher = pool(admission, routing=LeastLoaded())
        self.outcomes: list[tuple[str, int, bool]] = []
        self._busy_until: dict[str, float] = defaultdict(float)
        self._events: list[tuple[float, int, str, str]] = []
        self._arrivals = self._draw(senders, Random(seed), seconds)
        for number, (at, _, _) in enumerate(self._arrivals):
            heapq.heappush(self._events, (at, number, "arrives", ""))
        while self._events:
            self._step(*heapq.heappop(self._events))

    def attained(self, *, tenant: str = "", blocks: int = 0) -> float:
        chosen = [met for who, size, met in self.outcomes[WARM_UP:] if tenant in ("", who) and blocks in (0, size)]
        return sum(chosen) / len(chosen)

    def _draw(self, senders: list[Sender], chance: Random, seconds: float) -> list[tuple[float, str, int]]:
        arrivals: list[tuple[float, str, int]] = []
        for sender in senders:
            at = chance.expovariate(sender.rate)
            while at < seconds:
                arrivals.append((at, sender.tenant, chance.choice(sender.blocks)))
                at += chance.expovariate(sender.rate)
        return sorted(arrivals)

    def _step(self, now: float, number: int, what: str, instance: str) -> None:
        arrived_at, tenant, blocks = self._arrivals[number]
        if what == "arrives":
            keys = list(range(1000 * number + 1, 1000 * number + 1 + blocks))
            events = self.dispatcher.route(route(str(number), keys, arrived_at=now, tenant=Tenant(tenant)), now)
            if isinstance(events[-1], RequestRejected):
                self.outcomes.append((tenant, blocks, False))
        else:
            self.dispatcher.state.apply(first_token(str(number), instance, at=now))
            self.dispatcher.state.apply(answered(str(number), instance, at=now, tpot=0.0))
            self.outcomes.append((tenant, blocks, now <= arrived_at + 5.0))
            events = self.dispatcher.grant_waiting(InstanceId(instance), now)
        for event in events:
            if isinstance(event, RequestGranted):
                self._prefill(event, now)

    def _prefill(self, granted: RequestGranted, now: float) -> None:
        seconds = self.dispatcher.state.workload.requests[granted.request].prefill_seconds
        ends = self._busy_until[granted.instance] = max(now, self._busy_until[granted.instance]) + seconds
        heapq.heappush(self._events, (ends, int(granted.request), "prefilled", granted.instance))


SHORT, LONG = 12, 55
MIXED = (*(SHORT,) * 8, *(LONG,) * 2)


def test_long_prompts_keep_their_floor_past_saturation() -> None:
    senders = [Sender("t", 4.5, MIXED)]
    unfair = Overload(PredictedTtftGlobal(), senders, seed=1, seconds=600)
    fair = Overload(PredictedTtftFair(), senders, seed=1, seconds=600)

    assert unfair.attained(blocks=LONG) < 0.3 * unfair.attained()
    assert fair.attained(blocks=LONG) >= 0.9 * 0.6 * fair.attained(), "the floor, nearly: the price is bounded"
    assert fair.attained() > 0.5, (
        "a long one takes the room of almost five: the floor costs some of the short ones, not most"
    )


def test_a_modest_tenant_is_not_refused_for_a_greedy_one() -> None:
    senders = [Sender("greedy", 6.0, (SHORT,)), Sender("modest", 0.6, (SHORT,))]
    unfair = Overload(PredictedTtftGlobal(), senders, seed=1, seconds=600)
    fair = Overload(PredictedTtftFair(), senders, seed=1, seconds=600)

    assert unfair.attained(tenant="modest") < 0.75
    assert fair.attained(tenant="modest") >= 0.8
    assert fair.attained() >= unfair.attained() - 0.03, "the same work is done, for others"


def test_below_saturation_nobody_is_held_back() -> None:
    senders = [Sender("t", 1.0, MIXED)]

    assert Overload(PredictedTtftFair(), senders, seed=3, seconds=300).attained() > 0.97


def test_prompts_are_sorted_into_tenths_of_the_recent_traffic() -> None:
    dispatcher = pool(PredictedTtftFair())
    for number in range(100):
        ask(dispatcher, f"r{number}", 1000 * number, 1 + number, slo_ttft=1e6)

    seen = dispatcher.state.tracker(Attainment).of("standard")
    assert [seen.decile(blocks * BLOCK + 1) for blocks in (1, 11, 55, 100, 500)] == [0, 1, 5, 9, 9]


def test_equal_lengths_are_in_the_tenth_of_their_middle() -> None:
    assert [tenth([1, 2, 3, 4, 5, 9, 9, 9, 9, 9], tokens) for tokens in (1, 5, 9)] == [0, 4, 7]
    assert tenth([], 7) == 0


def test_refusals_are_outcomes_unless_nobody_could_have_been_on_time() -> None:
    dispatcher = pool(PredictedTtftFair(hard_limit=True))
    for number in range(3):
        ask(dispatcher, f"before{number}", 1000 * number, 60)
    seen = dispatcher.state.tracker(Attainment).of("standard")

    impossible = ask(dispatcher, "impossible", 8000, 60, slo_ttft=1.0)
    assert isinstance(impossible, RequestRejected)
    assert (impossible.reason, seen.overall.requests) == ("slo_unreachable", 0)

    late = ask(dispatcher, "late", 9000, 60, slo_ttft=5.0)
    assert isinstance(late, RequestRejected)
    assert (late.reason, seen.overall.requests, seen.overall.attainment) == ("slo_ttft", 1, 0.0)


def test_a_prompt_without_work_passes_at_any_price() -> None:
    dispatcher = pool(PredictedTtftFair(), instances=("a",))
    ask(dispatcher, "before", 1, 40)
    seen = dispatcher.state.tracker(Attainment).of("standard")
    seen.deciles[9].owed = 40.0

    assert isinstance(ask(dispatcher, "cached", 1, 40, slo_ttft=5.0), RequestPlaced)
    refused = ask(dispatcher, "cold", 9000, 20, slo_ttft=5.0)
    assert isinstance(refused, RequestRejected)
    assert refused.reason == "held_back"
    assert 0 < refused.retry_after <= 2.6, "no longer than the queue"


@pytest.mark.parametrize(
    ("at_c", "blocks", "work_max", "instance"),
    [(10, 30, 1.0, "c"), (10, 30, 0.0, ""), (10, 50, 1.0, ""), (50, 30, 1.0, "")],
    ids=["little work", "as before the setting", "more work than others wait for", "room nowhere"],
)
def test_what_does_not_fit_behind_a_queue_moves_to_where_it_fits(
    at_c: int, blocks: int, work_max: float, instance: str
) -> None:
    dispatcher = pool(PredictedTtftFair(held_work_max=work_max))
    for number, ahead in enumerate((60, 60, at_c)):
        ask(dispatcher, f"before{number}", 1000 * number, ahead)
    dispatcher.state.tracker(Attainment).of("standard").deciles[9].owed = 40.0

    decided = ask(dispatcher, "r", 9000, blocks, slo_ttft=10.0)

    if instance:
        assert isinstance(decided, RequestPlaced)
        assert (decided.instance, decided.reason) == (instance, "a keeps room for others: first token soonest")
    else:
        assert isinstance(decided, RequestRejected)
        assert decided.reason == "held_back"


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.floats(0.1, 0.9))
def test_what_is_owed_is_the_most_that_any_latest_stretch_lacks(outcomes: list[bool], share: float) -> None:
    tally = Tally()
    for on_time in outcomes:
        tally.owe(share - on_time)

    lacks = [sum(share - on_time for on_time in outcomes[start:]) for start in range(len(outcomes))]
    assert tally.owed == pytest.approx(max(0.0, *lacks))


def test_debts_are_bounded() -> None:
    tally = Tally()
    for _ in range(1000):
        tally.owe(0.9)

    assert tally.owed == OWED_MAX


@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=12), st.floats(0.0, 1000.0))
def test_fair_levels_deal_out_exactly_what_is_there(asked: list[float], available: float) -> None:
    level = fair_level(asked, available)

    dealt = sum(min(amount, level) for amount in asked)
    assert dealt == pytest.approx(min(available, sum(asked)))
