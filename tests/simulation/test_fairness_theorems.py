"""The bounds of "Locality-aware Fair Scheduling in LLM Serving" on whole simulated fleets, `d2lpm` with `dlpm`.

Service is what is charged: tokens to compute at the grant, twice the output tokens at the end. U = most tokens of a
grant + twice the most output tokens of one client inside an engine, both taken from the run; Q is the quantum of the
queue; W the instances.

- 4.1: at one instance, of two clients that both wait neither gets more than 2(U + Q) more.
- 4.2: nobody gets more than that more than a client that waits, if balances are kept.
- 5.1, 5.2: the same over all instances, for who waits at each: 2|W|(U + Q).
- A.2, A.4: before the first grant of a client that starts to wait, n - 1 others get at most (n - 1)(U + 2Q) there if its
  balance is reset (`as_published`), and 2(n - 1)(U + Q) if it is kept.
- A.5: an infinite quantum has no bound.
"""

import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import permutations

import pytest
from typing_extensions import override

from pointsman.contracts.decisions import Settings
from pointsman.contracts.requests import RequestFinished
from pointsman.primitives import EngineSeconds, InstanceId, RequestId, Tenant
from pointsman.simulation.simulator import Scenario, Simulation
from pointsman.simulation.workload import ARRIVALS, GENERATORS
from pointsman.state.trackers.base import Tracker
from pointsman.state.workload import Request, Stage

INSTANCES = 3
REQUESTS = 350
OUTPUT_WEIGHT = 2.0
Q_OF_INSTANCE = 2_048.0
SHORT_ANSWERS = ("llm_as_judge_s1",)
"""With answers of one token, so that U is small and the bounds are tight."""
ALL = InstanceId("all instances")


@dataclass
class Book:
    """At one instance, or at all. A client's entry in `lead` is what each other one got more than it since it began to
    wait, against the least such difference in that time."""

    charged: Counter[Tenant] = field(default_factory=Counter)
    waiting: dict[Tenant, bool] = field(default_factory=dict)
    both: float = 0.0
    """Most that one of two clients that wait got more than the other."""
    waits: float = 0.0
    """Most that anyone got more than a client that waits."""
    _least: dict[tuple[Tenant, Tenant], float] = field(default_factory=dict)
    _least_of_both: dict[tuple[Tenant, Tenant], float] = field(default_factory=dict)

    def note(self, waiting: dict[Tenant, bool]) -> None:
        self.waiting = waiting
        for behind, ahead in permutations(waiting, 2):
            more = self.charged[ahead] - self.charged[behind]
            self.waits = max(self.waits, self._rise(self._least, (behind, ahead), more, during=waiting[behind]))
            both = waiting[behind] and waiting[ahead]
            self.both = max(self.both, self._rise(self._least_of_both, (behind, ahead), more, during=both))

    @staticmethod
    def _rise(
        least: dict[tuple[Tenant, Tenant], float], pair: tuple[Tenant, Tenant], more: float, *, during: bool
    ) -> float:
        if not during:
            least.pop(pair, None)
            return 0.0
        least[pair] = min(more, least.get(pair, more))
        return more - least[pair]


class Ledger(Tracker):
    """Charges by its own rules, from the life of each request."""

    def __init__(self, outputs: dict[RequestId, int]) -> None:
        self.books: dict[InstanceId, Book] = defaultdict(Book)
        self.tokens_max = 0
        self.inside_max = 0.0
        self.latency = 0.0
        """Most that all others got at an instance before the first grant of one that started to wait there."""
        self.clients: set[Tenant] = set()
        self._outputs = outputs
        self._queued: Counter[tuple[InstanceId, Tenant]] = Counter()
        self._inside: Counter[tuple[InstanceId, Tenant]] = Counter()
        self._began: dict[tuple[InstanceId, Tenant], float] = {}

    @property
    def u(self) -> float:
        return self.tokens_max + self.inside_max

    @override
    def placed(self, request: Request, at: EngineSeconds) -> None:
        place = (request.instance, request.tenant)
        self.clients.add(request.tenant)
        if not self._queued[place]:
            self._began[place] = self._others(place)
        self._queued[place] += 1
        self._note(request.instance)

    @override
    def granted(self, request: Request, at: EngineSeconds) -> None:
        place = (request.instance, request.tenant)
        if place in self._began:
            self.latency = max(self.latency, self._others(place) - self._began.pop(place))
        self._queued[place] -= 1
        self._inside[place] += self._outputs[request.id]
        self.tokens_max = max(self.tokens_max, request.uncached_tokens)
        self.inside_max = max(self.inside_max, OUTPUT_WEIGHT * self._inside[place])
        self._charge(place, request.uncached_tokens)

    @override
    def ended(self, request: Request, at: EngineSeconds, finished: RequestFinished | None) -> None:
        assert request.stage is not Stage.PENDING
        assert finished is not None
        place = (request.instance, request.tenant)
        self._inside[place] -= self._outputs[request.id]
        self._charge(place, OUTPUT_WEIGHT * finished.completion_tokens)

    def _others(self, place: tuple[InstanceId, Tenant]) -> float:
        charged = self.books[place[0]].charged
        return charged.total() - charged[place[1]]

    def _charge(self, place: tuple[InstanceId, Tenant], tokens: float) -> None:
        instance, client = place
        for book in (self.books[instance], self.books[ALL]):
            book.charged[client] += tokens  # type: ignore[assignment]
        self._note(instance)

    def _note(self, instance: InstanceId) -> None:
        self.books[instance].note({client: self._queued[instance, client] > 0 for client in self.clients})
        known = [known for known in self.books if known != ALL]
        everywhere = {client: all(self._queued[one, client] for one in known) for client in self.clients}
        if len(known) == INSTANCES:
            self.books[ALL].note(everywhere)


@lru_cache
def ledger(workload: str, seed: int, quantum: float, *, as_published: bool, ordering: str = "dlpm") -> Ledger:
    requests = GENERATORS[workload](REQUESTS, rate=4.0, chance=random.Random(seed))
    requests = ARRIVALS["poisson"](requests, rate=200.0, chance=random.Random(seed))
    settings: Settings = {"quantum_tokens": Q_OF_INSTANCE, "as_published": as_published}
    if ordering == "dlpm":
        settings |= {"order.quantum_tokens": quantum, "order.as_published": as_published}
    scenario = Scenario(
        instances=INSTANCES,
        routing="d2lpm",
        ordering=ordering,
        routing_settings=settings,
        prefill_only=workload in SHORT_ANSWERS,
    )
    simulation = Simulation(scenario, requests)
    kept = Ledger({RequestId(str(row.number)): row.output_tokens for row in simulation.outcome.rows})
    simulation.state.trackers = (*simulation.state.trackers, kept)
    simulation.run()
    return kept


every_run = pytest.mark.parametrize(
    ("workload", "seed", "quantum", "as_published"),
    [
        ("llm_as_judge_s1", 1, 512.0, False),
        ("llm_as_judge_s1", 2, 4_096.0, True),
        ("tree_of_thoughts_s2", 3, 4_096.0, False),
        ("tree_of_thoughts_s2", 4, 512.0, True),
    ],
)


@every_run
def test_two_clients_that_wait_at_an_instance_get_alike_there(
    workload: str, seed: int, quantum: float, as_published: bool
) -> None:
    kept = ledger(workload, seed, quantum, as_published=as_published)
    books = [book for instance, book in kept.books.items() if instance != ALL]

    assert len(books) == INSTANCES
    assert min(book.both for book in books) > 0
    assert max(book.both for book in books) <= 2 * (kept.u + quantum), "Theorem 4.1"
    if not as_published:
        assert max(book.waits for book in books) <= 2 * (kept.u + quantum), "Theorem 4.2"


@every_run
def test_two_clients_that_wait_at_all_instances_get_alike_of_the_pool(
    workload: str, seed: int, quantum: float, as_published: bool
) -> None:
    kept = ledger(workload, seed, quantum, as_published=as_published)
    pool = kept.books[ALL]

    assert pool.both > 0, "they do wait everywhere for a while"
    assert pool.both <= 2 * INSTANCES * (kept.u + quantum), "Theorem 5.1"
    if not as_published:
        assert pool.waits <= 2 * INSTANCES * (kept.u + quantum), "Theorem 5.2"


@every_run
def test_who_starts_to_wait_is_served_before_others_got_much(
    workload: str, seed: int, quantum: float, as_published: bool
) -> None:
    kept = ledger(workload, seed, quantum, as_published=as_published)
    each = kept.u + 2 * quantum if as_published else 2 * (kept.u + quantum)

    assert 0 < kept.latency <= (len(kept.clients) - 1) * each, "Theorems A.2 and A.4"


@pytest.mark.parametrize(("ordering", "quantum"), [("lpm", 512.0), ("dlpm", 1e12)])
def test_without_a_finite_quantum_every_bound_is_broken(ordering: str, quantum: float) -> None:
    """So the properties above could fail. A.5: with an infinite quantum DLPM is LPM."""
    kept = ledger("llm_as_judge_s1", 1, quantum, as_published=False, ordering=ordering)
    books = [book for instance, book in kept.books.items() if instance != ALL]
    small = 512.0

    assert max(book.both for book in books) > 2 * (kept.u + small)
    assert max(book.waits for book in books) > 2 * (kept.u + small)
