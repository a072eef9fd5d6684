"""What may be thousands at once, the leader decides in turns that are shorter than its lease."""

from collections.abc import Iterator
from itertools import chain

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import RequestGranted, RequestMigrated, RequestPlaced, RequestRejected
from pointsman.contracts.reasons import CancelCause
from pointsman.contracts.requests import RequestCancelled
from pointsman.contracts.tenants import TenantPolicies, TenantPolicy
from pointsman.policies.dispatch.migrations import RELOCATED_MAX
from pointsman.policies.dispatch.placement import PLACED_MAX
from pointsman.policies.policy_set import policy_set
from pointsman.primitives import InstanceId
from pointsman.state.workload import Request, Stage
from tests.support.events import joined, route
from tests.support.logged_leader import LoggedLeader

A, B = InstanceId("a"), InstanceId("b")
NOW = 1000.0
BLOCKS = 32


class Pool(LoggedLeader):
    """Requests that wait, most of them behind those that an engine's window has room for."""

    def __init__(self, *instances: InstanceId) -> None:
        self.lead(policy_set(admission="none", hold_seconds=60.0, hold_max=10_000), at=NOW)
        for instance in instances:
            self.happens(joined(instance, at=NOW, kv_capacity_tokens=1_000_000))
        day = TenantPolicies(default=TenantPolicy(tokens_per_day=10**9))
        self.decides(self.dispatcher.set_tenant_policies(day, NOW, by=""))

    def asks(self, requests: int) -> None:
        for number in range(requests):
            keys = [number * BLOCKS + block for block in range(BLOCKS)]
            self.decides(self.dispatcher.route(route(f"r{number}", keys, slo_ttft=3600.0, arrived_at=NOW), NOW))

    def in_stage(self, stage: Stage) -> list[Request]:
        return [request for request in self.state.workload.requests.values() if request.stage is stage]

    def ends_all(self) -> Iterator[LogEvent]:
        """As the leader does where their ingress is silent."""
        for request in list(self.state.workload.requests.values()):
            waits = request.stage is Stage.PENDING
            end = self.dispatcher.cancel_ungranted if waits else self.dispatcher.cancel_any
            yield from self.decides(end(request.id, CancelCause.INGRESS_SILENT, NOW))

    @property
    def charged(self) -> float:
        return sum(account.used for account in self.state.tenants.unnamed.values())


def test_who_is_ended_with_all_others_of_its_ingress_is_granted_no_more_and_pays_for_what_an_engine_got() -> None:
    pool = Pool(A)
    pool.asks(40)
    inside, waiting = pool.in_stage(Stage.PREFILL), pool.in_stage(Stage.PENDING)
    got = sum(request.uncached_tokens for request in inside)
    assert min(len(inside), len(waiting)) > 0

    ended = list(pool.ends_all())

    assert [type(event) for event in ended] == [RequestCancelled] * 40
    assert pool.charged == got
    assert pool.proven


def test_who_is_not_ended_gets_the_room_afterwards() -> None:
    pool = Pool(A)
    pool.asks(20)
    lost, waiting = pool.in_stage(Stage.PREFILL), pool.in_stage(Stage.PENDING)
    for request in lost:
        pool.decides(pool.dispatcher.cancel_any(request.id, CancelCause.ENGINE_IDLE, NOW))
    granted = pool.decides(pool.dispatcher.grant_everywhere(NOW))

    assert [type(event) for event in granted] == [RequestGranted] * len(lost)
    assert len(pool.in_stage(Stage.PENDING)) == len(waiting) - len(lost)
    assert pool.proven


def test_many_that_wait_for_the_first_instance_are_placed_in_several_turns() -> None:
    pool = Pool()
    pool.asks(PLACED_MAX * 2 + 50)
    pool.happens(joined(A, at=NOW, kv_capacity_tokens=1_000_000))
    turns = [pool.decides(pool.dispatcher.place_held(NOW)) for _ in range(4)]

    placed = [[event.request for event in turn if isinstance(event, RequestPlaced)] for turn in turns]
    assert [len(requests) for requests in placed] == [PLACED_MAX, PLACED_MAX, 50, 0]
    assert [*chain(*placed)] == [f"r{number}" for number in range(PLACED_MAX * 2 + 50)]
    assert pool.proven


def test_many_leave_an_instance_in_several_turns() -> None:
    pool = Pool(A)
    pool.asks(RELOCATED_MAX * 2 + 50)
    waiting = len(pool.in_stage(Stage.PENDING))
    pool.happens(joined(B, at=NOW, kv_capacity_tokens=1_000_000))
    moved = []
    turns = [pool.dispatcher.drain(A, "maintenance", NOW)]
    while len(turns) < 4:
        events = pool.decides(turns[-1])
        moved.append(sum(isinstance(event, RequestMigrated) for event in events))
        assert not any(isinstance(event, RequestRejected) for event in events)
        turns.append(pool.dispatcher.relocate_pending(NOW))

    assert moved == [RELOCATED_MAX, RELOCATED_MAX, waiting - 2 * RELOCATED_MAX]
    assert all(request.instance == B for request in pool.in_stage(Stage.PENDING))
    assert pool.proven
