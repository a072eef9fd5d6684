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
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from pointsman.contracts.decisions import Settings
from pointsman.contracts.requests import RequestFinished
from pointsman.primitives import EngineSeconds, InstanceId, RequestId, Tenant
from pointsman.simulation.simulator import Scenario, Simulation
from pointsman.simulation.workload import ARRIVALS, GENERATORS, WorkloadRequest
from pointsman.simulation.workload.requests import BlockIds
from pointsman.state.trackers.base import Tracker
from pointsman.state.workload import Request, Stage
from tests.support.examples import examples

INSTANCES = 3
REQUESTS = 300
OUTPUT_WEIGHT = 2.0
Q_OF_INSTANCE = 2_048.0
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


@dataclass(frozen=True)
class Bounds:
    """`quantum`: of a queue."""

    quantum: float
    as_published: bool = False

    def broken_by(self, kept: Ledger) -> set[str]:
        """Theorems."""
        books = [book for instance, book in kept.books.items() if instance != ALL]
        pool, others = kept.books[ALL], len(kept.clients) - 1
        bound = 2 * (kept.u + self.quantum)
        over = {
            "4.1": max(book.both for book in books) > bound,
            "5.1": pool.both > INSTANCES * bound,
        }
        if self.as_published:
            over["A.2"] = kept.latency > others * (kept.u + 2 * self.quantum)
        else:
            over["4.2"] = max(book.waits for book in books) > bound
            over["5.2"] = pool.waits > INSTANCES * bound
            over["A.4"] = kept.latency > others * bound
        return {theorem for theorem, is_over in over.items() if is_over}


def ledger(requests: Sequence[WorkloadRequest], bounds: Bounds, ordering: str = "dlpm") -> Ledger:
    settings: Settings = {"quantum_tokens": Q_OF_INSTANCE, "as_published": bounds.as_published}
    if ordering == "dlpm":
        settings |= {"order.quantum_tokens": bounds.quantum, "order.as_published": bounds.as_published}
    scenario = Scenario(
        instances=INSTANCES,
        routing="d2lpm",
        ordering=ordering,
        routing_settings=settings,
        prefill_only=all(request.output_tokens == 1 for request in requests),
    )
    simulation = Simulation(scenario, requests)
    kept = Ledger({RequestId(str(row.number)): row.output_tokens for row in simulation.outcome.rows})
    simulation.state.trackers = (*simulation.state.trackers, kept)
    simulation.run()
    return kept


def judged(seed: int) -> list[WorkloadRequest]:
    """One of eight clients sends eight times as many. Answers have one token, so that U is small and the bounds are tight."""
    asked = GENERATORS["llm_as_judge_s1"](REQUESTS, rate=4.0, chance=random.Random(seed))
    timed = ARRIVALS["poisson"](asked, rate=200.0, chance=random.Random(seed))
    return [replace(request, output_tokens=1) for request in timed]


@pytest.mark.parametrize("bounds", [Bounds(512.0), Bounds(4_096.0), Bounds(512.0, as_published=True)])
def test_no_bound_is_broken_where_lpm_breaks_all(bounds: Bounds) -> None:
    kept = ledger(judged(1), bounds)
    books = [book for instance, book in kept.books.items() if instance != ALL]

    assert len(books) == INSTANCES
    assert min(book.both for book in books) > 0
    assert kept.books[ALL].both > 0, "they do wait everywhere for a while"
    assert kept.latency > 0
    assert not bounds.broken_by(kept)


@pytest.mark.parametrize(("ordering", "quantum"), [("lpm", 512.0), ("dlpm", 1e12)])
def test_without_a_finite_quantum_every_bound_is_broken(ordering: str, quantum: float) -> None:
    """So the properties could fail. A.5: with an infinite quantum DLPM is LPM."""
    kept = ledger(judged(1), Bounds(quantum), ordering)

    assert Bounds(512.0).broken_by(kept) == {"4.1", "4.2", "5.1", "5.2", "A.4"}
    assert Bounds(512.0, as_published=True).broken_by(kept) == {"4.1", "5.1", "A.2"}


@dataclass(frozen=True)
class Load:
    """`clients`: weight of each among the senders, and blocks of its prefix. Prompts have up to `own_tokens_max` more."""

    clients: list[tuple[int, int]]
    own_tokens_max: int
    answer_tokens_max: int
    seed: int

    def requests(self) -> list[WorkloadRequest]:
        chance, ids = random.Random(self.seed), BlockIds()
        prefixes = [ids.take(blocks) for _, blocks in self.clients]
        return [
            ids.request(
                prefixes[client],
                chance.randint(self.own_tokens_max // 2, self.own_tokens_max),
                output_tokens=chance.randint(1, self.answer_tokens_max),
                tenant=Tenant(f"client-{client}"),
                arrival_s=number / 1_000,
            )
            for number, client in enumerate(
                chance.choices(range(len(prefixes)), weights=[weight for weight, _ in self.clients], k=REQUESTS)
            )
        ]


loads = st.builds(
    Load,
    clients=st.lists(st.tuples(st.integers(1, 8), st.integers(0, 4)), min_size=2, max_size=3),
    own_tokens_max=st.integers(500, 1_500),
    answer_tokens_max=st.sampled_from([1, 20]),
    seed=st.integers(0, 999),
)


@given(loads, st.sampled_from([256.0, 1_024.0, 4_096.0]), st.booleans())
@examples(60)
def test_no_load_breaks_a_bound(load: Load, quantum: float, as_published: bool) -> None:
    """With `lpm` as ordering the simplest one does."""
    bounds = Bounds(quantum, as_published)

    assert not bounds.broken_by(ledger(load.requests(), bounds))
