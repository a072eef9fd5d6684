"""The service difference of two tenants that both wait stays within the bound that each fair ordering states.

Service is what the ordering charges: weighted tokens to compute (or of the prompt) and of output. With U = input weight
* most tokens of a prompt + output weight * most output tokens that one tenant has inside the engine at a time, the
bounds over every stretch of time in which both wait are

- dlpm: 2(U + Q) (Theorem 4.1 of "Locality-aware Fair Scheduling in LLM Serving");
- fair_edf: 2(U + lead_tokens_max), and what requests were charged that were placed to be on time: fairness does not delay them;
- vtc: 2U.

They hold for the Dispatcher as a whole: it grants as many as the window takes, and books each before it picks the next.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.policies.ordering import OrderingPolicy
from pointsman.policies.ordering.deficit_longest_prefix_match import DeficitLongestPrefixMatch
from pointsman.policies.ordering.fair_deadlines import FairDeadlines
from pointsman.policies.ordering.first_come_first_served import FirstComeFirstServed
from pointsman.policies.ordering.virtual_token_counter import VirtualTokenCounter
from pointsman.primitives import InstanceId, Tenant
from pointsman.state.best_effort import TENANTS_REMEMBERED_MAX
from pointsman.state.trackers.client_service import ClientService
from pointsman.state.trackers.queue_deficits import QueueDeficits
from tests.support.events import BLOCK, stored
from tests.support.examples import examples
from tests.support.single_server import INSTANCE, SingleServer

BLOCKS_MAX, OUTPUT_MAX, RUNNING_MAX = 30, 400, 4
OUTPUT_WEIGHT = 2.0
Q = 2000.0
U = (BLOCKS_MAX * BLOCK + 1) + OUTPUT_WEIGHT * OUTPUT_MAX * RUNNING_MAX

BOUNDS: list[tuple[OrderingPolicy, float]] = [
    (DeficitLongestPrefixMatch(quantum_tokens=Q, output_weight=OUTPUT_WEIGHT), 2 * (U + Q)),
    (FairDeadlines(lead_tokens_max=Q, output_weight=OUTPUT_WEIGHT), 2 * (U + Q)),
    (VirtualTokenCounter(output_weight=OUTPUT_WEIGHT), 2 * U),
]


@dataclass(frozen=True)
class Work:
    """A request as a tenant would send it: prompt and shared part in blocks, output tokens, objective in seconds."""

    blocks: int
    shared: int
    output: int
    slo_ttft: float


works = st.builds(
    Work,
    blocks=st.integers(1, BLOCKS_MAX),
    shared=st.integers(0, BLOCKS_MAX),
    output=st.integers(0, OUTPUT_MAX),
    slo_ttft=st.sampled_from((0.5, 5.0, 60.0)),
)
tenants_work = st.lists(works, min_size=1, max_size=12)
TENANTS = "fgh"
GRANTS = 80


@dataclass(frozen=True)
class Moment:
    """Who sends what, after so many more prefills."""

    prefills: int
    arrivals: list[tuple[str, Work]]


patterns = st.lists(
    st.builds(
        Moment,
        prefills=st.integers(0, 3),
        arrivals=st.lists(st.tuples(st.sampled_from(TENANTS), works), max_size=6),
    ),
    min_size=10,
    max_size=50,
)

fair_orderings = pytest.mark.parametrize(("policy", "bound"), BOUNDS, ids=[policy.name for policy, _ in BOUNDS])


@fair_orderings
@examples(40)
@given(pattern=patterns, window=st.sampled_from((1, 1000, 4000)), decode_seconds=st.sampled_from((0.0, 0.5, 5.0)))
def test_whoever_waits_at_the_same_time_gets_alike_whenever_requests_come(
    policy: OrderingPolicy, bound: float, pattern: list[Moment], window: int, decode_seconds: float
) -> None:
    """The bound, for every two tenants and every stretch in which both wait, however long it lasts."""
    tenants = Tenants(policy, window=window, decode_seconds=decode_seconds)
    for moment in pattern:
        tenants.run(moment.prefills)
        for name, work in moment.arrivals:
            tenants.send(name, work)
    tenants.run()

    for one, other in combinations(TENANTS, 2):
        assert tenants.greatest_difference(one, other) <= bound + tenants.exempt


@fair_orderings
@examples(15)
@given(
    first=tenants_work,
    second=tenants_work,
    third=tenants_work,
    head_start=st.integers(0, 12),
    window=st.sampled_from((1, 4000)),
)
def test_tenants_that_always_wait_get_alike(
    policy: OrderingPolicy,
    bound: float,
    first: list[Work],
    second: list[Work],
    third: list[Work],
    head_start: int,
    window: int,
) -> None:
    """The third tenant comes and goes; the second begins after the first was alone for a while."""
    tenants = Tenants(policy, window=window, decode_seconds=0.5)
    tenants.keep_waiting("f", first)
    tenants.run(head_start)
    for number in range(GRANTS):
        tenants.keep_waiting("f", first)
        tenants.keep_waiting("g", second)
        if number % 10 == 0:
            tenants.send_all("h", third)
        tenants.run(1)

    assert tenants.greatest_difference("f", "g") <= bound + tenants.exempt


@examples(30)
@given(pattern=patterns, window=st.sampled_from((1, 4000)), decode_seconds=st.sampled_from((0.0, 5.0)))
def test_nobody_gets_more_than_the_bound_beyond_who_waits(
    pattern: list[Moment], window: int, decode_seconds: float
) -> None:
    """Theorem 4.2: one waits throughout, the others come and go as they like."""
    tenants = Tenants(BOUNDS[0][0], window=window, decode_seconds=decode_seconds)
    for moment in pattern:
        tenants.keep_waiting("f", [Work(blocks=3, shared=1, output=100, slo_ttft=5.0)])
        for name, work in moment.arrivals:
            tenants.send(name, work)
        tenants.run(moment.prefills)

    for other in "gh":
        assert tenants.greatest_lead(other, over="f") <= BOUNDS[0][1]


@pytest.mark.parametrize("as_published", [True, False])
def test_forgiven_debts_let_who_waits_with_one_long_request_at_a_time_get_more(as_published: bool) -> None:
    """Line 12 of Algorithm 1 resets the balance of who waits again, so that Theorem 4.2 needs requests shorter than Q."""
    policy = DeficitLongestPrefixMatch(quantum_tokens=200.0, as_published=as_published)
    tenants = Tenants(policy, window=1, decode_seconds=0.0)
    for _ in range(60):
        tenants.keep_waiting("f", [Work(blocks=1, shared=0, output=0, slo_ttft=5.0)])
        tenants.keep_waiting("g", [Work(blocks=BLOCKS_MAX, shared=0, output=0, slo_ttft=5.0)], requests=1)
        tenants.run(1)

    bound = 2 * (BLOCKS_MAX * BLOCK + 1 + 200)
    assert (tenants.greatest_lead("g", over="f") > bound) == as_published


@pytest.mark.parametrize("as_published", [True, False])
def test_who_was_away_has_saved_nothing(as_published: bool) -> None:
    """Theorem 4.2 for a tenant that comes back after long: refills that others needed meanwhile are not its credit."""
    policy = DeficitLongestPrefixMatch(quantum_tokens=200.0, as_published=as_published)
    tenants = Tenants(policy, window=1, decode_seconds=0.0)
    work = Work(blocks=BLOCKS_MAX, shared=0, output=0, slo_ttft=5.0)
    tenants.send("g", work)
    for number in range(GRANTS):
        tenants.keep_waiting("f", [work])
        if number >= GRANTS // 2:
            tenants.keep_waiting("g", [work])
        tenants.run(1)

    assert tenants.greatest_lead("g", over="f") <= 2 * (BLOCKS_MAX * BLOCK + 1 + 200)


def test_an_ordering_that_is_not_fair_breaks_the_bound() -> None:
    """So the properties above could fail: one tenant came first with more than the loosest bound."""
    tenants = Tenants(FirstComeFirstServed(), window=1, decode_seconds=0.0)
    work = Work(blocks=BLOCKS_MAX, shared=0, output=0, slo_ttft=5.0)
    tenants.send_all("f", [work] * 12)
    tenants.send("g", work)
    tenants.run()

    assert tenants.greatest_difference("f", "g") > max(bound for _, bound in BOUNDS)


@dataclass(frozen=True)
class Standing:
    """What each tenant was charged so far, and how many of its requests wait."""

    charged: dict[str, float]
    waiting: dict[str, int]


class Tenants:
    """Three tenants before one engine, and how they stood after every event that could change it."""

    def __init__(self, policy: OrderingPolicy, *, window: int, decode_seconds: float) -> None:
        """`window`: uncached tokens that may be inside the engine before their first token."""
        self.standings: list[Standing] = []
        self._server = SingleServer(
            policy, busy=True, running_max=RUNNING_MAX, decode_seconds=decode_seconds, prefill_window_tokens=window
        )
        self._pays_for_cached = isinstance(policy, VirtualTokenCounter)
        self._keeps_predictions = isinstance(policy, FairDeadlines)
        self._hot = {name: self._server.fresh_keys(BLOCKS_MAX) for name in TENANTS}
        self._sent = 0
        for number, keys in enumerate(self._hot.values()):
            self._server.state.apply(stored(INSTANCE, number + 1, keys))

    def send(self, name: str, work: Work) -> None:
        self._sent += 1
        shared = min(work.shared, work.blocks)
        keys = [*self._hot[name][:shared], *self._server.fresh_keys(work.blocks - shared)]
        self._server.arrive(f"{name}{self._sent}", keys=keys, tenant=name, output=work.output, slo_ttft=work.slo_ttft)
        self._note()

    def send_all(self, name: str, works: Iterable[Work]) -> None:
        for work in works:
            self.send(name, work)

    def keep_waiting(self, name: str, works: Sequence[Work], *, requests: int = 4) -> None:
        while self._server.waiting(name) < requests:
            self.send(name, works[self._sent % len(works)])

    def run(self, prefills: int | None = None) -> None:
        """Let the engine prefill so many, or all."""
        done = 0
        while (prefills is None or done < prefills) and self._server.run(1):
            done += 1
            self._note()

    def greatest_difference(self, one: str, other: str) -> float:
        """Between what the two were charged in any stretch of time in which both waited throughout.

        Between two notes requests only leave the line, so who waits at both has waited in between.
        """
        greatest = 0.0
        stretch: list[float] = []
        for standing in self.standings:
            if not (standing.waiting[one] and standing.waiting[other]):
                stretch.clear()
                continue
            stretch.append(standing.charged[one] - standing.charged[other])
            greatest = max(greatest, max(stretch) - min(stretch))
        return greatest

    @property
    def exempt(self) -> float:
        """What was charged for requests that fairness does not delay."""
        if not self._keeps_predictions:
            return 0.0
        served = [self._server.served(name) for name in TENANTS]
        return sum(one.promised_tokens + OUTPUT_WEIGHT * one.promised_output_tokens for one in served)

    def greatest_lead(self, one: str, *, over: str) -> float:
        """What `one` was charged beyond `over`, at most, in any stretch of time in which `over` waited throughout."""
        greatest, least = 0.0, float("inf")
        for standing in self.standings:
            lead = standing.charged[one] - standing.charged[over]
            least = min(least, lead) if standing.waiting[over] else float("inf")
            greatest = max(greatest, lead - least)
        return greatest

    def _note(self) -> None:
        self.standings.append(
            Standing(
                charged={name: self._charged(name) for name in TENANTS},
                waiting={name: self._server.waiting(name) for name in TENANTS},
            )
        )

    def _charged(self, name: str) -> float:
        served = self._server.served(name)
        prompt = served.prompt_tokens if self._pays_for_cached else served.computed_tokens
        return prompt + OUTPUT_WEIGHT * served.output_tokens


def test_a_refill_goes_to_all_without_and_as_often_as_it_takes() -> None:
    server = SingleServer(DeficitLongestPrefixMatch(quantum_tokens=100.0), busy=True)
    for number in range(2):
        server.arrive(f"deep{number}", blocks=5, tenant="deep")
        server.arrive(f"shallow{number}", blocks=2, tenant="shallow")
    deficits = server.state.tracker(QueueDeficits)
    instance, waiting = InstanceId(INSTANCE), {Tenant("deep"), Tenant("shallow")}

    assert server.run(1) == ["deep0"]
    assert deficits.balance(instance, Tenant("deep")) == 100 - 321
    assert deficits.in_turn(instance, waiting) == {"shallow"}
    assert server.run(1) == ["shallow0"]
    assert deficits.in_turn(instance, waiting) == {"shallow"}, "in debt by 29, which one quantum covers"
    assert server.run(1) == ["shallow1"]
    assert deficits.balance(instance, Tenant("deep")) == 100 - 321 + 300 - 321, "granted after two refills more"


def test_a_book_forgets_tenants_that_do_not_wait_when_it_is_full() -> None:
    server = SingleServer(VirtualTokenCounter(), busy=True)
    for number in range(TENANTS_REMEMBERED_MAX + 50):
        server.arrive(f"r{number}", blocks=1, tenant=f"t{number}")
        server.run(1)

    service = server.state.tracker(ClientService)
    assert service.balance(InstanceId(INSTANCE), Tenant("t0")) == 0.0
    assert service.balance(InstanceId(INSTANCE), Tenant(f"t{TENANTS_REMEMBERED_MAX + 40}")) > 0.0
