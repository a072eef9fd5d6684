"""The plug-in's order of admission, as vLLM's scheduler uses it, with vLLM left out."""

from collections import Counter
from dataclasses import dataclass, field
from itertools import combinations
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.primitives import InstanceId, Tenant
from pointsman.state.trackers.queue_deficits import QueueDeficits
from pointsman.state.trackers.tenant_accounts import Account
from pointsman_vllm.deficits import CLIENTS_REMEMBERED_MAX, Deficits
from pointsman_vllm.settings import FairnessSettings, WrongSettingError, fairness_settings
from pointsman_vllm.waiting_queue import LOOKS_MAX, WaitingQueue, client_of
from tests.support.examples import examples

QUANTUM, OUTPUT_WEIGHT = 500.0, 2.0
PROMPT_MAX, OUTPUT_MAX, RUNNING_MAX = 400, 50, 4
U = PROMPT_MAX + OUTPUT_WEIGHT * OUTPUT_MAX * RUNNING_MAX
BOUND = 2 * (U + QUANTUM)
CLIENTS = "abc"


@dataclass(eq=False)
class Request:
    """What the line looks at, and what a model would make of it."""

    request_id: str
    client: str = ""
    num_tokens: int = 100
    cached: int = 0
    output: int = 1
    arrival_time: float = 0.0
    num_preemptions: int = 0
    num_computed_tokens: int = 0
    running: bool = False

    @property
    def sampling_params(self) -> Any:
        return SimpleNamespace(extra_args={"pointsman_client": self.client} if self.client else None)


def line_of(*requests: Request, ageing_tokens: float = 0.0, quantum: float = QUANTUM) -> WaitingQueue[Request]:
    deficits = Deficits(quantum=quantum, input_weight=1.0, output_weight=OUTPUT_WEIGHT)
    line = WaitingQueue[Request](
        deficits, cached_tokens=lambda r: r.cached, runs=lambda r: r.running, ageing_tokens=ageing_tokens
    )
    for request in requests:
        line.add_request(request)
    return line


def admit(line: WaitingQueue[Request]) -> Request:
    """As vLLM does within a step."""
    request = line.pop_request()
    request.running, request.num_computed_tokens = True, request.cached
    return request


def admitted_in_turn(line: WaitingQueue[Request]) -> str:
    line.begin_step()
    return "".join(admit(line).request_id for _ in range(len(line)))


@dataclass
class Engine:
    """Steps as vLLM's: admit while there is a slot, then one token for each that runs."""

    line: WaitingQueue[Request]
    deficits: Deficits
    running: list[Request] = field(default_factory=list)
    served: Counter[str] = field(default_factory=Counter)
    widest: float = 0.0
    """The most that one of two clients got more than the other over a stretch of time in which both waited."""
    _differences: dict[tuple[str, str], list[int]] = field(default_factory=dict)

    def step(self) -> None:
        self.line.begin_step()
        admitted = []
        while self.line and len(self.running) < RUNNING_MAX:
            request = admit(self.line)
            self.running.append(request)
            admitted.append(request)
            self.served[request.client] += request.num_tokens - request.cached
        assert not self.line or len(self.running) == RUNNING_MAX
        for request in admitted:
            self.line.admitted(request, request.cached)
        self.line.end_step()
        for request in self.running:
            self.deficits.generated(request.client, 1)
            self.served[request.client] += int(OUTPUT_WEIGHT)
            request.output -= 1
        self.running = [request for request in self.running if request.output > 0]
        self._look()

    def _look(self) -> None:
        waiting = {request.client for request in self.line}
        for pair in combinations(CLIENTS, 2):
            if not waiting.issuperset(pair):
                self._differences.pop(pair, None)
                continue
            seen = self._differences.setdefault(pair, [])
            seen.append(self.served[pair[0]] - self.served[pair[1]])
            self.widest = max(self.widest, max(seen) - min(seen))


works = st.tuples(
    st.sampled_from(CLIENTS), st.integers(1, PROMPT_MAX), st.floats(0, 1), st.integers(1, OUTPUT_MAX), st.integers(0, 8)
)


@given(st.lists(works, min_size=20, max_size=120))
@examples(80)
def test_clients_that_wait_at_the_same_time_get_alike_and_no_slot_stays_empty(
    arrivals: list[tuple[str, int, float, int, int]],
) -> None:
    """Theorem 4.1: at no time did one get more than 2(U + Q) more than another while both waited."""
    deficits = Deficits(quantum=QUANTUM, input_weight=1.0, output_weight=OUTPUT_WEIGHT)
    line = WaitingQueue[Request](deficits, cached_tokens=lambda r: r.cached, runs=lambda r: r.running, ageing_tokens=0)
    engine = Engine(line, deficits)
    for number, (client, tokens, shared, output, pause) in enumerate(arrivals):
        line.add_request(Request(str(number), client, tokens, int(shared * tokens), output))
        for _ in range(pause):
            engine.step()
            assert engine.widest <= BOUND
        assert all(deficits.balance(c) <= QUANTUM for c in CLIENTS)
    while line:
        engine.step()
        assert engine.widest <= BOUND


def test_a_quantum_that_nobody_uses_up_breaks_the_bound() -> None:
    """So the property above could fail."""
    deficits = Deficits(quantum=1e9, input_weight=1.0, output_weight=OUTPUT_WEIGHT)
    line = WaitingQueue[Request](deficits, cached_tokens=lambda r: r.cached, runs=lambda r: r.running, ageing_tokens=0)
    engine = Engine(line, deficits)
    for number in range(20):
        line.add_request(Request(str(number), "a", PROMPT_MAX))
    line.add_request(Request("late", "b"))
    while len(line) > 1:
        engine.step()

    assert engine.widest > BOUND


def test_the_longest_match_goes_first_within_a_turn_and_waiting_makes_up_for_less() -> None:
    short, long = Request("s", cached=10, arrival_time=0.0), Request("l", cached=90, arrival_time=1.0)

    assert admitted_in_turn(line_of(short, long)) == "ls"
    assert admitted_in_turn(line_of(short, long, ageing_tokens=100.0)) == "sl"
    assert admitted_in_turn(line_of(Request("1"), Request("2"), Request("3"))) == "123"


def test_who_floods_takes_turns_with_who_sends_little_even_within_one_step() -> None:
    flood = [Request("f", "a") for _ in range(8)]
    for number, request in enumerate(flood):
        request.request_id = f"{number}"
    line = line_of(*flood, Request("x", "b"), Request("y", "b"), quantum=100.0)

    assert admitted_in_turn(line) == "0x1y234567"


def test_one_that_was_passed_over_keeps_its_place_and_pays_nothing() -> None:
    line = line_of(Request("1", "a"), Request("2", "a"), Request("3", "a"))
    line.begin_step()
    passed_over = line.pop_request()
    admit(line)
    line.prepend_requests([passed_over])
    line.begin_step()

    assert passed_over.request_id == "1"
    assert [request.request_id for request in line] == ["1", "3"]
    assert line.peek_request() is passed_over


def test_one_that_was_put_back_comes_before_everybody_and_does_not_pay_twice() -> None:
    deficits = Deficits(quantum=QUANTUM, input_weight=1.0, output_weight=OUTPUT_WEIGHT)
    line = WaitingQueue[Request](deficits, cached_tokens=lambda r: r.cached, runs=lambda r: r.running, ageing_tokens=0)
    back = Request("back", "a")
    line.add_request(back)
    line.begin_step()
    line.admitted(admit(line), 0)
    line.end_step()
    paid = deficits.balance("a")
    back.running, back.num_preemptions = False, 1
    line.add_request(Request("hit", "a", cached=99))
    line.prepend_request(back)
    line.begin_step()
    again = admit(line)
    line.admitted(again, 0)

    assert again is back
    assert deficits.balance("a") == paid == QUANTUM - 100


def test_who_hangs_up_is_gone_and_strangers_are_passed_over() -> None:
    first, second = Request("1", "a"), Request("2", "b")
    line = line_of(first, second)
    line.remove_requests([first, Request("unknown")])
    line.remove_request(first)

    assert len(line) == 1
    assert list(line) == [second]
    line.remove_request(second)
    assert not line
    with pytest.raises(IndexError):
        line.peek_request()


@pytest.mark.parametrize("clients", [1, 3, 500])
def test_a_step_looks_up_a_bounded_number_of_prefixes(clients: int) -> None:
    looked = []

    def look(request: Request) -> int:
        looked.append(request)
        return 0

    deficits = Deficits(quantum=QUANTUM, input_weight=1.0, output_weight=OUTPUT_WEIGHT)
    line = WaitingQueue[Request](deficits, cached_tokens=look, runs=lambda r: r.running, ageing_tokens=0)
    for number in range(1000):
        line.add_request(Request(str(number), f"c{number % clients}"))
    line.begin_step()
    line.peek_request()

    assert 0 < len(looked) <= LOOKS_MAX


def test_clients_that_do_not_wait_are_forgotten_beyond_a_bound() -> None:
    deficits = Deficits(quantum=10.0, input_weight=1.0, output_weight=1.0)
    for number in range(CLIENTS_REMEMBERED_MAX + 50):
        deficits.admit(f"c{number}", 25, {f"c{number}"})

    assert len(deficits._balances) == CLIENTS_REMEMBERED_MAX
    deficits.generated("c0", 5)
    assert deficits.balance("c0") == 0


def test_a_request_without_a_client_belongs_to_the_anonymous_one() -> None:
    assert client_of(Request("1", "a")) == "a"
    assert client_of(Request("2")) == ""


def test_the_arithmetic_is_that_of_the_dlpm_in_pointsmans_own_scheduler() -> None:
    chance = Random(3)
    engine = Deficits(quantum=100.0, input_weight=1.0, output_weight=2.0)
    ours = QueueDeficits(quantum=100.0, input_weight=1.0, output_weight=2.0)
    instance = InstanceId("engine-1")
    for _ in range(2000):
        waiting = chance.sample(CLIENTS, chance.randrange(1, 4))
        book = ours._accounts.setdefault(instance, Account())
        book.waiting = {Tenant(client): 1 for client in waiting}
        book.balances = dict.fromkeys(book.waiting, 0.0) | book.balances
        turn = engine.in_turn(waiting)
        assert frozenset(turn) == ours.in_turn(instance, book.waiting)
        client, tokens = chance.choice(turn), chance.randrange(400)
        engine.admit(client, tokens, waiting)
        ours.charge_input(book, SimpleNamespace(tenant=client, uncached_tokens=tokens))  # type: ignore[arg-type]
        engine.generated(client, tokens // 9)
        ours.charge_output(book, Tenant(client), tokens // 9)
        assert [engine.balance(c) for c in CLIENTS] == [ours.balance(instance, Tenant(c)) for c in CLIENTS]


def test_fairness_settings_come_from_the_environment_and_must_fit() -> None:
    given_quantum = {"POINTSMAN_VLLM_QUANTUM_TOKENS": "256", "POINTSMAN_VLLM_OUTPUT_WEIGHT": ""}

    assert fairness_settings(given_quantum) == FairnessSettings(quantum_tokens=256.0)
    with pytest.raises(WrongSettingError, match="POINTSMAN_VLLM_QUANTUM_TOKENS must be a number above 0, not '0'"):
        fairness_settings({"POINTSMAN_VLLM_QUANTUM_TOKENS": "0"})
