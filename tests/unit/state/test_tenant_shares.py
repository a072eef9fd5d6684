"""Who got more of a pool's work than its max-min fair share."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.contracts.reasons import RejectReason
from pointsman.primitives import InstanceId, RequestId, Tenant
from pointsman.state.trackers.tenant_shares import COMPARED_AFTER, HALF_LIFE_SECONDS, TENANTS_MAX, TenantShares
from pointsman.state.workload import NO_INSTANCE, Request, Stage
from tests.support.events import route
from tests.support.examples import examples


def asked(tenant: str, tokens: int, at: float = 0.0) -> Request:
    command = route("r", [])
    return Request(
        id=RequestId("r"), tenant=Tenant(tenant), session=command.session, keys=[], prompt_tokens=tokens,
        max_output_tokens=1, slo_ttft=5.0, slo_tpot=0.1, arrived_at=at, exact=False, streaming=False,
        stage=Stage.PENDING, instance=InstanceId("a"), uncached_tokens=tokens, placed_at=at,
    )  # fmt: skip


def unplaced(tenant: str, tokens: int) -> Request:
    request = asked(tenant, tokens)
    request.stage, request.instance = Stage.ARRIVED, NO_INSTANCE
    return request


def shares(demands: dict[str, int], served: dict[str, int], at: float = 0.0) -> TenantShares:
    found = TenantShares()
    for tenant, tokens in demands.items():
        found.placed(asked(tenant, tokens, at), at)
    for tenant, tokens in served.items():
        found.granted(asked(tenant, tokens, at), at)
    for _ in range(max(COMPARED_AFTER, len(demands))):
        found.granted(asked(next(iter(served)), 0, at), at)
    return found


def test_the_flooder_is_beyond_its_share_and_the_others_are_not() -> None:
    found = shares({"flood": 8000, "b": 1000, "c": 1000}, {"flood": 3000, "b": 500, "c": 500})

    # fair: 2,000 for the flooder, 1,000 for each other; but nobody with one and a half equal shares (2,000) is beyond
    assert found.excess(Tenant("flood")) == pytest.approx(1000 / 4000)
    assert found.excess(Tenant("b")) == found.excess(Tenant("unknown")) == 0.0


def test_who_asks_for_more_than_others_may_have_what_they_leave() -> None:
    found = shares({"big": 8000, "b": 100, "c": 100}, {"big": 3800, "b": 100, "c": 100})

    assert found.excess(Tenant("big")) == 0.0


def test_a_tenant_alone_has_no_share() -> None:
    assert shares({"a": 1000}, {"a": 1000}).excess(Tenant("a")) == 0.0


def test_what_was_placed_elsewhere_again_is_asked_for_once() -> None:
    found = TenantShares()
    for tenant in ("a", "b"):
        found.placed(asked(tenant, 1000), 0.0)
    for _ in range(5):
        found.unplaced(asked("a", 1000), 1.0)
        found.placed(asked("a", 1000), 0.0)
    once = shares({"a": 1000, "b": 1000}, {"a": 900, "b": 100})
    found.granted(asked("a", 900), 0.0)
    found.granted(asked("b", 100), 0.0)
    for _ in range(COMPARED_AFTER):
        found.granted(asked("b", 0), 0.0)

    assert found.excess(Tenant("a")) == pytest.approx(once.excess(Tenant("a")), abs=1e-9)


@given(
    amounts=st.dictionaries(st.sampled_from("abcdef"), st.tuples(st.integers(1, 10**6), st.floats(0, 1)), min_size=2),
    later=st.floats(0, 1e9),
)
@examples(200)
def test_excess_is_the_share_above_a_level_found_by_filling_and_does_not_depend_on_the_time(
    amounts: dict[str, tuple[int, float]], later: float
) -> None:
    demands = {tenant: demand for tenant, (demand, _) in amounts.items()}
    served = {tenant: round(demand * share) for tenant, (demand, share) in amounts.items()}
    total = sum(served.values())

    now, then = shares(demands, served), shares(demands, served, at=later)

    low, high = 0.0, float(max(demands.values()))
    for _ in range(80):
        level = (low + high) / 2
        low, high = (level, high) if sum(min(level, d) for d in demands.values()) < total else (low, level)
    level = max(high, 1.5 * total / len(demands))
    beyond = sum(max(0.0, tokens - level) for tokens in served.values()) / total if total else 0.0
    for tenant, tokens in served.items():
        expected = beyond if tokens > level else 0.0
        assert now.excess(Tenant(tenant)) == pytest.approx(expected, abs=1e-6)
        assert then.excess(Tenant(tenant)) == pytest.approx(now.excess(Tenant(tenant)), abs=1e-6)


def test_service_of_long_ago_is_forgotten() -> None:
    found = shares({"flood": 8000, "b": 1000, "c": 1000}, {"flood": 3000, "b": 500, "c": 500})

    for _ in range(2):
        for tenant in ("b", "c"):
            found.placed(asked(tenant, 1000), 30 * HALF_LIFE_SECONDS)
            found.granted(asked(tenant, 1000), 30 * HALF_LIFE_SECONDS)

    assert found.excess(Tenant("flood")) == 0.0


@pytest.mark.parametrize(("version", "kept"), [(15, TENANTS_MAX), (14, 2 * TENANTS_MAX + 2)])
def test_of_a_flood_of_names_the_newest_are_kept_and_who_goes_on_asking(version: int, kept: int) -> None:
    found = TenantShares()
    found.fold_version = version
    for number in range(TENANTS_MAX):
        found.refused(unplaced(f"refused-{number}", 1), 0.0, RejectReason.QUEUE_FULL)
        found.placed(asked(f"served-{number}", 1), 0.0)
        if number % 1000 == 0:
            for tenant in ("regular", "other"):
                found.placed(asked(tenant, 10**6), 0.0)
    for number in range(TENANTS_MAX):
        found.granted(asked(f"served-{number}", 1), 0.0)
    for _ in range(2 * TENANTS_MAX):
        found.granted(asked("regular", 100), 0.0)

    assert len(found._demands) == len(found._prompts) == kept
    assert len(found._served) <= kept
    assert found._demands[Tenant("regular")] == 10 * 10**6
    assert found.excess(Tenant("regular")) > 0.4
    assert found.lack(Tenant("other")) == 1.0


def test_a_tenant_lacks_what_others_had_of_its_fair_share() -> None:
    found = shares({"a": 4000, "b": 4000, "c": 100}, {"a": 3000, "b": 1000, "c": 100})

    # fair: 2,000 each for the two that ask for more
    assert found.lack(Tenant("b")) == pytest.approx(0.5)
    assert found.lack(Tenant("a")) == found.lack(Tenant("c")) == found.lack(Tenant("unknown")) == 0.0
    assert shares({"a": 1000}, {"a": 10}).lack(Tenant("a")) == 0.0


def test_a_refused_prompt_counts_for_the_part_that_its_tenant_usually_lacks_in_caches() -> None:
    found = TenantShares()
    placed = asked("a", 1000)
    placed.uncached_tokens = 250
    for _ in range(2):
        found.placed(placed, 0.0)
    found.refused(unplaced("a", 4000), 0.0, RejectReason.SLO_TTFT)
    found.placed(asked("b", 5000), 0.0)
    for tokens, tenant in ((500, "a"), (4000, "b"), *((0, "b"),) * COMPARED_AFTER):
        found.granted(asked(tenant, tokens), 0.0)

    assert found.lack(Tenant("a")) == pytest.approx(1 - 500 / 1500)


@pytest.mark.parametrize(("version", "tokens"), [(9, 1000), (8, 2000)])
def test_a_request_that_loses_its_place_has_asked_once(version: int, tokens: int) -> None:
    found = TenantShares()
    found.fold_version = version
    found.placed(asked("a", 1000), 0.0)
    found.refused(asked("a", 1000), 0.0, RejectReason.QUEUE_FULL)

    assert found._demands == {"a": tokens}
    assert found._refused == 1.0


def test_best_effort_is_no_part_of_what_is_refused() -> None:
    found = TenantShares()
    late = unplaced("a", 1000)
    late.best_effort = True
    found.refused(late, 0.0, RejectReason.QUEUE_FULL)

    assert (found._demands, found._refused) == ({}, 0.0)


def many_are_refused(found: TenantShares) -> bool:
    return found.many_refused


@pytest.mark.parametrize(("version", "every"), [(13, 5), (12, 6)])
def test_many_are_refused_by_the_latest_requests_and_late_alone_does_not_count(version: int, every: int) -> None:
    found = TenantShares()
    found.fold_version = version
    for number in range(3000):
        found.placed(asked("a", 100), 0.0)
        if number % every == 0:  # one of `every` + 1: a sixth, a seventh
            found.refused(unplaced("b", 100), 0.0, RejectReason.SLO_TTFT)
        found.refused(unplaced("b", 100), 0.0, RejectReason.SLO_UNREACHABLE)

    assert not many_are_refused(found)
    for number in range(3000):
        found.placed(asked("a", 100), 0.0)
        if number % (every - 2) == 0:  # a fourth, a fifth
            found.refused(unplaced("b", 100), 0.0, RejectReason.SLO_TTFT)
    assert many_are_refused(found)
    for _ in range(5000):
        found.placed(asked("a", 100), 0.0)
    assert not many_are_refused(found)


@pytest.mark.parametrize(("version", "many"), [(13, False), (12, True)])
def test_refusals_of_who_is_beyond_its_share_are_not_many(version: int, many: bool) -> None:
    found = shares({"flood": 8000, "b": 1000, "c": 1000}, {"flood": 3000, "b": 500, "c": 500})
    found.fold_version = version
    for _ in range(300):
        found.refused(unplaced("flood", 100), 0.0, RejectReason.SLO_TTFT)
        found.placed(asked("b", 1), 0.0)

    assert many_are_refused(found) is many
    for _ in range(300):
        found.refused(unplaced("b", 1), 0.0, RejectReason.SLO_TTFT)
    assert many_are_refused(found)


def test_placements_of_who_is_beyond_its_share_hide_no_refusals_of_others() -> None:
    found = shares({"flood": 8000, "b": 1000, "c": 1000}, {"flood": 3000, "b": 500, "c": 500})
    for _ in range(300):
        found.placed(asked("flood", 1), 0.0)
        found.placed(asked("flood", 1), 0.0)
        found.placed(asked("flood", 1), 0.0)
        found.placed(asked("flood", 1), 0.0)
        found.refused(unplaced("b", 1), 0.0, RejectReason.SLO_TTFT)

    assert many_are_refused(found)
