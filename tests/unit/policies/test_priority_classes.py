"""Priority classes: who is granted first, what a class sees ahead of it, and who has to leave a full queue."""

from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import RequestGranted, RequestPlaced, RequestRejected
from pointsman.contracts.tenants import TenantPolicies, TenantPoliciesSet, TenantPolicy
from pointsman.policies.dispatch import Dispatcher
from pointsman.policies.dispatch.queue_bound import CLASS_SHARE
from pointsman.policies.ordering import ORDERING_POLICIES
from pointsman.policies.policy_set import policy_set
from pointsman.primitives import InstanceId, Tenant, Term
from pointsman.state.priority_classes import LOWER_SHARE
from pointsman.state.state import PoolSettings, State
from pointsman.state.trackers.attainment import Attainment
from pointsman.state.workload import Stage
from tests.support.events import BLOCK, finished, first_token, joined, route
from tests.support.examples import examples

LONGEST_SECONDS = 31 * BLOCK * 0.001
ENGINE = InstanceId("a")


class Pool:
    """One engine that takes one request at a time; prompts are of `blocks` blocks that nobody else has."""

    def __init__(
        self, *, engines: int = 1, fold_version: int = 4, admission: str = "none", window: int = 1, **settings: Any
    ) -> None:
        told = policy_set(admission=admission, prefill_window_tokens=window, **settings)
        self.state = State(PoolSettings(fold_version=fold_version), told.trackers())
        self.leader = Dispatcher(self.state, told, term=Term(1))
        self.now = 0.0
        self.asked = 0
        for number in range(engines):
            self.state.apply(joined(chr(ord("a") + number)))

    def ask(self, tenant: str = "t", *, blocks: int = 2, **fields: Any) -> list[LogEvent]:
        self.asked += 1
        keys = [1000 * self.asked + block for block in range(blocks)]
        fields = {"slo_ttft": 1e6} | fields
        name = f"{tenant}-{self.asked}"
        return self.leader.route(route(name, keys, arrived_at=self.now, tenant=tenant, **fields), self.now)

    def serve(self) -> str:
        """Let the engine finish what it has, and return what it gets then."""
        prefill = self.state.workload.queues[ENGINE].prefill.values()
        if not prefill:
            return ""
        (request,) = prefill
        self.now += request.prefill_seconds
        self.state.apply(first_token(request.id, "a", at=self.now, prefill=request.prefill_seconds))
        self.state.apply(finished(request.id, "a", at=self.now))
        granted = [e for e in self.leader.grant_waiting(ENGINE, self.now) if isinstance(e, RequestGranted)]
        return granted[0].request if granted else ""

    def waiting(self) -> Counter[str]:
        return Counter(r.tenant for r in self.state.workload.requests.values() if r.stage is Stage.PENDING)


def rejected(events: list[LogEvent]) -> list[RequestRejected]:
    return [event for event in events if isinstance(event, RequestRejected)]


@pytest.mark.parametrize("ordering", ORDERING_POLICIES)
def test_higher_classes_are_granted_first_under_every_ordering(ordering: str) -> None:
    pool = Pool(ordering=ordering)
    for priority in ("standard", "batch", "interactive", "batch", "standard", "interactive"):
        pool.ask(priority, priority=priority)

    order = [pool.serve().split("-")[0] for _ in range(5)]

    assert order == ["interactive", "interactive", "standard", "batch", "batch"]


def test_lower_classes_get_their_guaranteed_share_of_the_work() -> None:
    """While interactive work never ends, each of the others gets 5% of it."""
    pool = Pool()
    work: Counter[str] = Counter()
    for _ in range(600):
        for priority in ("interactive", "batch", "standard"):
            pool.ask(priority, priority=priority)
        work[pool.serve().split("-")[0]] += 1

    for lower in ("batch", "standard"):
        assert work[lower] / work["interactive"] == pytest.approx(LOWER_SHARE, rel=0.15)


@examples(40)
@given(seed=st.integers(0, 2**32))
def test_no_class_waits_longer_than_its_share_of_the_work_allows(seed: int) -> None:
    """At any moment of its waiting, a class has got LOWER_SHARE of what higher ones got since it began to wait, but for one
    request of its own and one of theirs."""
    chance, pool = Random(seed), Pool()
    pool.ask("first", priority="interactive", blocks=1)
    since: dict[str, float] = {}
    ranks = {"batch": 0, "standard": 1, "interactive": 2}
    for _ in range(300):
        for priority in ranks:
            if chance.random() < 0.6:
                pool.ask(priority, priority=priority, blocks=chance.randint(1, 30))
        pool.serve()
        if not pool.state.workload.queues[ENGINE].prefill:
            continue
        (granted,) = pool.state.workload.queues[ENGINE].prefill.values()
        waiting = {r.priority for r in pool.state.workload.requests.values() if r.stage is Stage.PENDING}
        for name in ("batch", "standard"):
            if name not in waiting:
                since.pop(name, None)
            elif granted.priority == name:
                since[name] = since.get(name, 0.0) - granted.prefill_seconds
            elif ranks[granted.priority] > ranks[name]:
                since[name] = since.get(name, 0.0) + LOWER_SHARE * granted.prefill_seconds
            assert since.get(name, 0.0) <= 2 * LONGEST_SECONDS


def test_a_lower_class_leaves_room_in_the_engine_while_a_higher_one_is_in_use() -> None:
    """The window has 1,600 tokens; prompts have 129."""

    def granted_batch(*, silence: float) -> int:
        pool = Pool(window=1_600)
        pool.ask("before", priority="interactive", blocks=1)
        pool.serve()
        pool.now += silence
        for _ in range(20):
            pool.ask("batch", priority="batch")
        return len(pool.state.workload.queues[ENGINE].prefill)

    assert granted_batch(silence=1.0) == 400 // 129
    assert granted_batch(silence=61.0) == 1_600 // 129


def test_a_class_does_not_see_the_pending_work_of_lower_ones_but_they_see_it() -> None:
    pool = Pool(admission="predicted_ttft")
    pool.ask("running", blocks=1)
    for _ in range(10):
        assert not rejected(pool.ask("batch", priority="batch", blocks=15))

    (placed,) = [e for e in pool.ask("now", priority="interactive", slo_ttft=1.5) if isinstance(e, RequestPlaced)]
    assert placed.queue_seconds < 0.1
    assert rejected(pool.ask("later", priority="batch", slo_ttft=1.5))
    (placed,) = [e for e in pool.ask("between", priority="standard", slo_ttft=1.5) if isinstance(e, RequestPlaced)]
    assert 0.1 < placed.queue_seconds < 0.4


@pytest.mark.parametrize("version", [9, 8])
def test_a_class_that_cannot_be_granted_does_not_save_up_more_than_a_second(version: int) -> None:
    """Its only tenant has no share of the KV capacity left while 1,200 s of other work are granted."""
    pool = Pool(fold_version=version)
    pool.state.apply(
        TenantPoliciesSet(
            at=0.0, policies=TenantPolicies(tenants={Tenant("limited"): TenantPolicy(kv_share=1e-6)}), by="alice"
        )
    )
    for _ in range(5):
        pool.ask("limited", priority="batch", blocks=20)
    held = pool.state.tenants.named[Tenant("limited")]
    held.kv_tokens += 1
    pool.serve()
    for _ in range(600):
        pool.ask("other", priority="interactive", blocks=31)
        pool.serve()
    credit = pool.state.workload.queues[ENGINE].classes["batch"].credit

    held.kv_tokens -= 1
    assert (credit <= 1.0) is (version == 9)
    assert credit > 0.0


def test_what_late_batch_requests_are_owed_is_no_price_for_other_classes() -> None:
    """`predicted_ttft_fair` keeps room for groups below their floor: within a class."""
    pool, seen = Pool(), Attainment(decile_share=0.6, tenant_share=0.8)
    pool.ask("running", blocks=1)
    pool.ask("late", priority="batch")
    pool.ask("late")
    pool.ask("others", priority="batch")
    batch, standard, others = list(pool.state.workload.requests.values())[1:]

    for _ in range(100):
        seen.outcome(batch, 0.0, on_time=False)
        seen.outcome(others, 0.0, on_time=True)
        seen.outcome(standard, 0.0, on_time=True)

    assert seen.of("batch").tenants[Tenant("late")].owed > 1
    assert seen.of("standard").tenants[Tenant("late")].owed == 0
    assert all(tally.owed == 0 for tally in seen.of("standard").deciles)


def test_one_tenant_may_fill_the_queue_until_others_want_a_place() -> None:
    pool = Pool(pending_max=10)
    for _ in range(20):
        pool.ask("greedy")
    assert pool.waiting() == {"greedy": 10}
    assert rejected(pool.ask("greedy"))[0].reason == "queue_full"

    displaced = [event for _ in range(9) for event in rejected(pool.ask("modest"))]

    assert pool.waiting() == {"greedy": 5, "modest": 5}
    newest_first = [event.request for event in displaced[:5]]
    assert newest_first == ["greedy-11", "greedy-10", "greedy-9", "greedy-8", "greedy-7"]
    assert [event.displaced_by for event in displaced[:5]] == [f"modest-{n}" for n in range(22, 27)]
    assert {(event.reason, event.retry_after > 0) for event in displaced} == {("queue_full", True)}


def max_min(demands: dict[str, int], weights: dict[str, float], places: int) -> dict[str, float]:
    """Shares by water-filling, from the definition."""
    shares = dict.fromkeys(demands, 0.0)
    active = dict(demands)
    left = float(places)
    while active and left > 1e-9:
        level = min(left / sum(weights[t] for t in active), min((demands[t] - shares[t]) / weights[t] for t in active))
        for tenant in list(active):
            shares[tenant] += level * weights[tenant]
            left -= level * weights[tenant]
            if shares[tenant] >= demands[tenant] - 1e-9:
                del active[tenant]
    return shares


@examples(60)
@given(
    demands=st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 40), min_size=1),
    places=st.integers(3, 30),
    heavy=st.sampled_from("abcdef"),
    seed=st.integers(0, 1000),
)
def test_a_full_queue_holds_the_max_min_fair_shares(
    demands: dict[str, int], places: int, heavy: str, seed: int
) -> None:
    pool = Pool(pending_max=places)
    pool.leader.set_tenant_policies(TenantPolicies(tenants={Tenant(heavy): TenantPolicy(weight=3.0)}), 0.0, by="")
    pool.ask("running")
    arrivals = [tenant for tenant, count in demands.items() for _ in range(count)]
    Random(seed).shuffle(arrivals)

    for tenant in arrivals:
        pool.ask(tenant)

    waiting = pool.waiting()
    shares = max_min(demands, {tenant: 3.0 if tenant == heavy else 1.0 for tenant in demands}, places)
    assert waiting.total() == min(places, sum(demands.values()))
    for tenant, share in shares.items():
        assert abs(waiting[tenant] - share) <= 1.0 + 1e-9 or waiting[tenant] >= share, (waiting, shares)
        assert waiting[tenant] > share - 1.0 - 1e-9, (waiting, shares)


def test_higher_classes_displace_lower_ones_down_to_their_guaranteed_share() -> None:
    pool = Pool(pending_max=40)
    pool.ask("running")
    for _ in range(40):
        pool.ask("batch", priority="batch")

    for _ in range(60):
        pool.ask("interactive", priority="interactive")

    kept = round(CLASS_SHARE * 40)
    assert pool.waiting() == {"batch": kept, "interactive": 40 - kept}
    assert rejected(pool.ask("batch", priority="batch"))[0].displaced_by == ""


def test_a_class_without_its_guaranteed_share_gets_places_of_the_one_that_has_most() -> None:
    pool = Pool(pending_max=40)
    pool.ask("running")
    for _ in range(60):
        pool.ask("interactive", priority="interactive")

    for _ in range(60):
        pool.ask("batch", priority="batch")

    assert pool.waiting() == {"batch": 2, "interactive": 38}


def test_logs_from_before_tenants_shared_the_queue_refuse_the_newcomer() -> None:
    pool = Pool(pending_max=10, fold_version=3)
    for _ in range(20):
        pool.ask("greedy")

    (refused,) = rejected(pool.ask("modest"))

    assert (refused.request, refused.displaced_by) == ("modest-21", "")


def test_a_refused_newcomer_displaces_nobody() -> None:
    """Admission refuses it after the queue has a place for it."""
    pool = Pool(pending_max=10, admission="predicted_ttft", settings={"admission.hard_limit": True})
    for _ in range(20):
        pool.ask("greedy")

    refused = rejected(pool.ask("modest", slo_ttft=0.01))

    assert [event.request for event in refused] == ["modest-21"]
    assert pool.waiting() == {"greedy": 10}
