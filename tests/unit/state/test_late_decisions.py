"""A decision whose write was sent again reaches the log behind later ones. Whoever reads the log then knows the same fleet and
the same tenants' limits as the leader, which made them in their order."""

from itertools import permutations

import pytest

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import LeaderElected
from pointsman.contracts.envelope import Stamp
from pointsman.contracts.fleet import (
    InstanceDraining,
    InstanceEjected,
    InstanceRoleChanged,
    InstanceUndrained,
    InstanceUnejected,
)
from pointsman.contracts.tenants import TenantPolicies, TenantPoliciesSet, TenantPolicy
from pointsman.primitives import Epoch, InstanceId, Tenant, Term
from pointsman.state.fold_versions import IN_ORDER
from pointsman.state.state import PoolSettings, State
from tests.support.events import joined, reported

A, EPOCH = InstanceId("a"), Epoch(1)


def stamp(number: int, term: int = 1) -> Stamp:
    return Stamp(term=Term(term), number=number, as_of=4)


def draining(number: int, **fields: object) -> InstanceDraining:
    return InstanceDraining(at=5.0, stamp=stamp(number), instance=A, epoch=EPOCH, **fields)  # type: ignore[arg-type]


def undrained(number: int, term: int = 1) -> InstanceUndrained:
    return InstanceUndrained(at=5.0, stamp=stamp(number, term), instance=A, epoch=EPOCH)


def changed(number: int) -> InstanceRoleChanged:
    return InstanceRoleChanged(at=5.0, stamp=stamp(number), instance=A, epoch=EPOCH, role="decode", left=0)


def ejected(number: int) -> InstanceEjected:
    return InstanceEjected(
        at=5.0, stamp=stamp(number), instance=A, epoch=EPOCH, cause="failed_probe", detail="", seconds=5.0, number=1
    )


def unejected(number: int) -> InstanceUnejected:
    return InstanceUnejected(at=5.0, stamp=stamp(number), instance=A, epoch=EPOCH, half_open=True)


def limits(number: int, requests_per_second: float) -> TenantPoliciesSet:
    policy = TenantPolicy(requests_per_second=requests_per_second)
    return TenantPoliciesSet(
        at=5.0, stamp=stamp(number), policies=TenantPolicies(tenants={Tenant("acme"): policy}), by="ops"
    )


EJECTIONS: list[LogEvent] = [ejected(1), unejected(2), ejected(3)]
DRAINED_AND_EJECTED: list[LogEvent] = [draining(1), ejected(2)]


def folded(*events: LogEvent, fold_version: int = IN_ORDER) -> State:
    state = State(PoolSettings(fold_version=fold_version))
    elected = LeaderElected(at=0.0, term=Term(1), scheduler="s", as_of=0, pool={}, policy="round_robin", settings={})
    before: list[LogEvent] = [
        elected,
        joined("a", role="prefill", role_switching=True),
        reported("a", 0, []),
        joined("b"),
    ]
    log: list[LogEvent] = [*before, *events]
    for sequence, event in enumerate(log, 1):
        state.apply(event, sequence)
    return state


def known(state: State) -> tuple[object, ...]:
    a = state.fleet[A]
    policies = state.tenants.policies
    return a.draining, a.leaving, a.becomes, a.role, a.ejected, a.half_open, policies


@pytest.mark.parametrize(
    ("decisions", "expected"),
    [
        pytest.param([draining(1, becomes="decode"), changed(2)], (False, False, "", "decode"), id="role"),
        pytest.param([draining(1, leaving=True), undrained(2)], (False, False, "", "prefill"), id="undrain"),
        pytest.param([undrained(1), draining(2), draining(3, leaving=True)], (True, True, "", "prefill"), id="drain"),
    ],
)
def test_a_drain_is_what_was_decided_last(decisions: list[LogEvent], expected: tuple[object, ...]) -> None:
    for order in permutations(decisions):
        assert known(folded(*order))[:4] == expected


def test_an_ejection_is_what_was_decided_last() -> None:
    for order in permutations(EJECTIONS):
        assert known(folded(*order))[4:6] == (True, False)
    for order in permutations(EJECTIONS[:2]):
        assert known(folded(*order))[4:6] == (False, True)


def test_the_limits_of_tenants_are_those_that_were_set_last() -> None:
    for order in permutations([limits(1, 5.0), limits(2, 7.0)]):
        policies = folded(*order).tenants.policies
        assert policies is not None
        assert policies.tenants[Tenant("acme")].requests_per_second == 7.0


def test_a_drain_and_an_ejection_do_not_take_the_place_of_each_other() -> None:
    for order in permutations(DRAINED_AND_EJECTED):
        assert known(folded(*order))[:1] + known(folded(*order))[4:5] == (True, True)


def test_a_drain_goes_on_under_the_next_epoch_and_so_does_its_order() -> None:
    rejoined = joined("a", epoch=2, role="prefill", role_switching=True)

    assert not folded(undrained(2), rejoined, draining(1)).fleet[A].draining
    assert folded(draining(2), rejoined, undrained(1)).fleet[A].draining


def test_a_forged_term_does_not_stop_what_its_leader_decides() -> None:
    forged = InstanceDraining(at=5.0, stamp=stamp(10**9, 10**9), instance=A, epoch=EPOCH)

    assert not folded(forged, undrained(1)).fleet[A].draining


def test_a_log_of_before_is_folded_in_its_own_order() -> None:
    assert folded(undrained(2), draining(1), fold_version=IN_ORDER - 1).fleet[A].draining
    assert not folded(undrained(2), draining(1)).fleet[A].draining
