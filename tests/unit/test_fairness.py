"""The service difference of two tenants that always wait stays within the bound that each fair ordering states.

Service is what the ordering charges: weighted tokens to compute (or of the prompt) and of output. With U = input weight
* most tokens of a prompt + output weight * most output tokens that one tenant has inside the engine at a time, the
bounds over every stretch of time in which both wait are

- dlpm: 2(U + Q) (Theorem 5.1 of "Locality-aware Fair Scheduling in LLM Serving");
- fair_edf: 2(U + lead_tokens_max);
- vtc: 2U.
"""

from dataclasses import dataclass
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.policies.ordering import OrderingPolicy
from pointsman.policies.ordering.deficit_longest_prefix_match import DeficitLongestPrefixMatch
from pointsman.policies.ordering.fair_deadlines import FairDeadlines
from pointsman.policies.ordering.virtual_token_counter import VirtualTokenCounter
from pointsman.primitives import InstanceId, Tenant
from pointsman.state.memories.client_service import ClientService
from pointsman.state.memories.queue_deficits import QueueDeficits
from pointsman.state.memories.tenant_accounts import TENANTS_REMEMBERED_MAX
from tests.support.events import BLOCK, stored
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
GRANTS = 80


@pytest.mark.parametrize(("policy", "bound"), BOUNDS, ids=[policy.name for policy, _ in BOUNDS])
@settings(max_examples=25, deadline=None)
@given(first=tenants_work, second=tenants_work, third=tenants_work, head_start=st.integers(0, 12))
def test_tenants_that_always_wait_get_alike(
    policy: OrderingPolicy, bound: float, first: list[Work], second: list[Work], third: list[Work], head_start: int
) -> None:
    """The third tenant comes and goes; the second begins after the first was alone for a while."""
    server = SingleServer(policy, busy=True, running_max=RUNNING_MAX, decode_seconds=0.5)
    backlog = Backlog(server, pays_for_cached=isinstance(policy, VirtualTokenCounter))
    backlog.keep("f", first)
    server.run(head_start)
    for number in range(GRANTS):
        backlog.keep("f", first)
        backlog.keep("g", second)
        if number % 10 == 0:
            backlog.send("h", third)
        backlog.note()
        server.run(1)

    spread = list(accumulate(ours - theirs for ours, theirs in backlog.services))
    assert max(spread) - min(spread) <= bound


class Backlog:
    """Keeps tenants waiting, and notes what each was charged since the last note."""

    def __init__(self, server: SingleServer, *, pays_for_cached: bool) -> None:
        self.server = server
        self._pays_for_cached = pays_for_cached
        self.services: list[tuple[float, float]] = []
        self._hot = {name: server.fresh_keys(BLOCKS_MAX) for name in "fgh"}
        self._sent = dict.fromkeys("fgh", 0)
        self._last = (0.0, 0.0)
        for number, name in enumerate("fgh"):
            server.state.apply(stored(INSTANCE, number + 1, self._hot[name]))

    def keep(self, name: str, works: list[Work]) -> None:
        while self.server.waiting(name) < 4:
            self.send(name, works)

    def send(self, name: str, works: list[Work]) -> None:
        work = works[self._sent[name] % len(works)]
        self._sent[name] += 1
        shared = min(work.shared, work.blocks)
        keys = [*self._hot[name][:shared], *self.server.fresh_keys(work.blocks - shared)]
        self.server.arrive(
            f"{name}{self._sent[name]}", keys=keys, tenant=name, output=work.output, slo_ttft=work.slo_ttft
        )

    def note(self) -> None:
        services = (self._service("f"), self._service("g"))
        self.services.append((services[0] - self._last[0], services[1] - self._last[1]))
        self._last = services

    def _service(self, name: str) -> float:
        served = self.server.served(name)
        prompt = served.prompt_tokens if self._pays_for_cached else served.computed_tokens
        return prompt + OUTPUT_WEIGHT * served.output_tokens


def test_a_refill_goes_to_all_without_and_as_often_as_it_takes() -> None:
    server = SingleServer(DeficitLongestPrefixMatch(quantum_tokens=100.0), busy=True)
    for number in range(2):
        server.arrive(f"deep{number}", blocks=5, tenant="deep")
        server.arrive(f"shallow{number}", blocks=2, tenant="shallow")
    deficits = server.state.recall(QueueDeficits)
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

    service = server.state.recall(ClientService)
    assert service.balance(InstanceId(INSTANCE), Tenant("t0")) == 0.0
    assert service.balance(InstanceId(INSTANCE), Tenant(f"t{TENANTS_REMEMBERED_MAX + 40}")) > 0.0
