"""Limits of tenants, judged by an account of its own (`pointsman_lab.torture.limits_model`) and by plain counts."""

from collections import defaultdict

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.contracts.block_keys import unpack_keys
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import RequestGranted, RequestPlaced, RequestRejected
from pointsman.contracts.reasons import CancelCause
from pointsman.contracts.requests import RequestArrived, RequestCancelled, RequestFailed
from pointsman.contracts.tenants import TenantPolicies, TenantPoliciesSet, TenantPolicy
from pointsman.primitives import InstanceId, RequestId, Tenant, Tokens
from pointsman.state.kv_shares import best_effort_turn
from pointsman.state.tenants import Account
from pointsman.state.workload import OverLimit, Stage
from pointsman_lab.torture.limits_model import LIMIT_REASONS, LimitsModel
from tests.support.events import finished, first_token
from tests.support.examples import examples
from tests.support.limited_pool import DAY, TENANTS, LimitedPool


def named(**policies: TenantPolicy) -> TenantPolicies:
    return TenantPolicies(tenants={Tenant(name): policy for name, policy in policies.items()})


def refusals(log: list[LogEvent]) -> list[RequestRejected]:
    return [event for event in log if isinstance(event, RequestRejected) and event.reason in LIMIT_REASONS]


def let_in(log: list[LogEvent]) -> dict[str, list[float]]:
    refused = {event.request for event in refusals(log)}
    arrivals: dict[str, list[float]] = defaultdict(list)
    tenants: dict[str, str] = {}
    for event in log:
        if isinstance(event, RequestArrived) and event.request not in refused:
            tenants[event.request] = event.tenant
            if tenants.get(event.instead_of) != event.tenant:  # else the same request again
                arrivals[event.tenant].append(event.at)
    return arrivals


@examples(25)
@given(seed=st.integers(0, 2**32), start=st.sampled_from([0.0, DAY - 5.0, 1.78e9]))
def test_every_answer_agrees_with_an_account_of_its_own(seed: int, start: float) -> None:
    pool = LimitedPool(seed, start=start)
    pool.live(300)

    assert LimitsModel().check(pool.log) == []


def test_the_traffic_of_these_tests_meets_every_limit() -> None:
    log = [event for seed in range(12) for event in LimitedPool(seed).live(300).log]

    assert {event.reason for event in refusals(log)} == LIMIT_REASONS
    assert sum(isinstance(event, TenantPoliciesSet) for event in log) > 20


@examples(25)
@given(seed=st.integers(0, 2**32), rate=st.floats(0.2, 30.0), load=st.floats(1.0, 60.0))
def test_no_span_has_more_requests_than_the_rate_and_one_bucket(seed: int, rate: float, load: float) -> None:
    pool = LimitedPool(seed)
    pool.set_policies(named(a=TenantPolicy(requests_per_second=rate)))
    pool.live(300, rate=load, policies=False)

    times = let_in(pool.log)["a"]
    for first, begin in enumerate(times):
        for last in range(first, len(times)):
            assert last - first + 1 <= 1.0 + rate / 2 + rate * (times[last] - begin) + 1e-3
    assert all("requests a second" in event.detail for event in refusals(pool.log))


@examples(25)
@given(seed=st.integers(0, 2**32), most=st.integers(1, 6))
def test_concurrency_counts_each_request_once_until_its_end(seed: int, most: int) -> None:
    pool = LimitedPool(seed)
    pool.set_policies(named(a=TenantPolicy(concurrency=most)))

    for _ in range(20):
        pool.live(20, policies=False)
        mine = [request for request in pool.state.workload.requests.values() if request.tenant == "a"]
        assert len(mine) <= most
        account = pool.state.tenants.named.get(Tenant("a"))
        assert (account.in_flight if account is not None else 0) == len(mine)


@examples(20)
@given(seed=st.integers(0, 2**32), weight=st.sampled_from([0.0, 0.25, 1.0]))
def test_after_the_last_end_nothing_is_in_flight_and_each_answer_is_charged_once(seed: int, weight: float) -> None:
    """Without requests that break off, a day's use is the sum of what the engines reported."""
    pool = LimitedPool(seed)
    policy = TenantPolicy(tokens_per_day=10**12, concurrency=1_000, kv_share=0.5)
    pool.set_policies(TenantPolicies(default=policy, cached_token_weight=weight))
    pool._break_off = lambda: None  # type: ignore[method-assign]
    pool.live(300, policies=False)
    pool.end_all()

    expected: dict[str, float] = defaultdict(float)
    model = LimitsModel()
    assert model.check(pool.log) == []
    for tenant in TENANTS:
        expected[tenant] = sum(model.uses[tenant].by_day.values()) if tenant in model.uses else 0.0
    accounts = pool.state.tenants.unnamed
    assert {tenant: account.in_flight for tenant, account in accounts.items() if account.in_flight} == {}
    assert {tenant: account.kv_tokens for tenant, account in accounts.items() if account.kv_tokens} == {}
    for tenant, account in accounts.items():
        assert account.used == pytest.approx(expected[tenant])


def test_a_tenant_without_limits_is_never_refused_by_one() -> None:
    pool = LimitedPool(3)
    pool.set_policies(named(a=TenantPolicy(requests_per_second=0.1, concurrency=1, tokens_per_minute=1)))
    pool.live(600, policies=False)

    tenants = {event.request: event.tenant for event in pool.log if isinstance(event, RequestArrived)}
    assert {tenants[event.request] for event in refusals(pool.log)} == {"a"}
    assert list(pool.state.tenants.named) == ["a"]
    assert not pool.state.tenants.unnamed


def test_who_comes_back_when_told_is_let_in() -> None:
    limits = {
        "requests_per_second": TenantPolicy(requests_per_second=0.7),
        "tokens_per_minute": TenantPolicy(tokens_per_minute=3_000),
        "tokens_per_day": TenantPolicy(tokens_per_day=400),
    }
    for name, policy in limits.items():
        for start in (0.0, 1_790_000_000.25):
            pool = LimitedPool(1, start=start)
            pool.set_policies(named(a=policy))
            refused: list[RequestRejected] = []
            while not refused:
                refused = refusals(pool.arrive("a"))
            pool.now += 0.999 * refused[0].retry_after
            assert refusals(pool.arrive("a")), name
            pool.now += 0.001001 * refused[0].retry_after
            assert not refusals(pool.arrive("a")), name


def test_a_refusal_names_the_tenants_own_limit_and_no_instance() -> None:
    pool = LimitedPool(1)
    pool.set_policies(named(a=TenantPolicy(concurrency=1)))
    pool.arrive("a")

    arrived, refused = pool.arrive("a")

    assert isinstance(arrived, RequestArrived)
    assert isinstance(refused, RequestRejected)
    assert (refused.reason, refused.detail) == ("concurrency_exceeded", "the limit of 1 requests at a time is used up")
    assert (refused.settings, refused.candidates, refused.retry_after) == ({}, [], 1.0)


def test_a_refused_request_is_not_in_flight_in_the_account_of_a_later_leader() -> None:
    """The log may have an end before an arrival that its leader did not know of when it refused the request."""
    pool = LimitedPool(1)
    pool.set_policies(named(a=TenantPolicy(concurrency=1)))
    first = next(event for event in pool.arrive("a") if isinstance(event, RequestArrived)).request
    pool.arrive("a")
    end = RequestCancelled(at=pool.now, request=first, reason="asked")
    as_stored = [*pool.log[:-2], end, *pool.log[-2:]]
    pool.seen(end)
    pool.now += 1.0
    within, beyond = pool.arrive("a"), pool.arrive("a")

    model, refusal = LimitsModel(), refusals(pool.log)[0]
    problem = f"{refusal.request} was refused ({refusal.detail}) within the limits of a"
    assert model.check(as_stored) == [problem]

    assert model.check(within) == []
    arrived = next(event for event in beyond if isinstance(event, RequestArrived))
    placed = next(event for event in within if isinstance(event, RequestPlaced))
    placed = msgspec.structs.replace(placed, request=arrived.request)
    assert model.check([arrived, placed]) == [f"{arrived.request} was placed, but exceeds the concurrency of a"]


def _begun(pool: LimitedPool) -> tuple[RequestId, InstanceId] | None:
    """None: refused."""
    pool.now += 1.0
    granted = [event for event in pool.arrive("a", max_output_tokens=2_000) if isinstance(event, RequestGranted)]
    if not granted:
        return None
    pool.seen(first_token(granted[0].request, granted[0].instance, at=pool.now))
    return granted[0].request, granted[0].instance


def _answered(pool: LimitedPool, tokens: Tokens) -> None:
    begun = _begun(pool)
    assert begun is not None
    request, instance = begun
    prompt_tokens = pool.state.workload.requests[request].prompt_tokens
    pool.seen(finished(request, instance, at=pool.now, prompt_tokens=prompt_tokens, completion_tokens=tokens))


def _broken_off(
    kind: str, pool: LimitedPool, request: RequestId, delivered: Tokens
) -> RequestFailed | RequestCancelled:
    if kind == "failed":
        return RequestFailed(at=pool.now, request=request, reason="x", status=502, output_tokens=delivered)
    return RequestCancelled(at=pool.now, request=request, reason="x", output_tokens=delivered)


@pytest.mark.parametrize("kind", ["failed", "cancelled"])
def test_who_breaks_off_long_answers_after_short_ones_pays_for_what_it_got(kind: str) -> None:
    pool = LimitedPool(1)
    pool.set_policies(named(a=TenantPolicy(tokens_per_day=40_000)))
    for _ in range(60):
        _answered(pool, 1)
    before = pool.state.tenants.named[Tenant("a")].used
    broken_off = 0
    while (begun := _begun(pool)) is not None:
        pool.seen(_broken_off(kind, pool, begun[0], 1_000))
        broken_off += 1

    assert broken_off <= (40_000 - before) // 1_000 + 1
    assert [event.reason for event in refusals(pool.log)] == ["quota_exceeded"]
    assert LimitsModel().check(pool.log) == []


@pytest.mark.parametrize(("delivered", "further"), [(-1, 0), (0, 0), (255, 0), (256, 0), (257, 1), (1_000, 744)])
def test_a_broken_answer_pays_as_predicted_or_more(delivered: Tokens, further: Tokens) -> None:
    """256 is the usual output of a tenant without answers."""
    pool = LimitedPool(1)
    pool.set_policies(named(a=TenantPolicy(tokens_per_day=40_000)))
    begun = _begun(pool)
    assert begun is not None
    account = pool.state.tenants.named[Tenant("a")]
    before = account.used

    pool.seen(RequestCancelled(at=pool.now, request=begun[0], reason="x", output_tokens=delivered))

    assert account.used - before == further


def test_each_answer_to_a_request_counts_towards_its_tenants_tokens_and_kv_share() -> None:
    """256 is the usual output of a tenant without answers, in all 32 answers 8,192; `a` may hold 20,000 of 40,000 tokens."""
    pool = LimitedPool(1)
    pool.set_policies(named(a=TenantPolicy(tokens_per_day=1_000_000, kv_share=0.5)))
    for _ in range(3):
        pool.arrive("a", max_output_tokens=10**6, answers=32)
        pool._first_token()
    granted = [event.request for event in pool.log if isinstance(event, RequestGranted)]
    account = pool.state.tenants.named[Tenant("a")]

    assert granted == ["r1", "r2"]
    assert account.kv_tokens == 2 * (257 + 32 * 256)
    assert account.used >= 2 * 32 * 256


def _given_up(pool: LimitedPool) -> None:
    """The first request, of tenant `a`, once it is at an engine."""
    pool.arrive("a", max_output_tokens=50)
    pool.decided(pool.leader.cancel_any(RequestId("r1"), CancelCause.GRANT_UNHEARD, pool.now))


@pytest.mark.parametrize(("blocks", "logged", "judged"), [(4, 4, 1), (64, 64, 1), (65, 64, 2), (500, 64, 2)])
def test_a_refused_request_leaves_few_keys_in_the_log_and_is_judged_again_only_to_shorten_them(
    blocks: int, logged: int, judged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, calls = LimitedPool(1), list[float]()
    pool.set_policies(named(a=TenantPolicy(concurrency=1)))
    pool.arrive("a")
    over_limit = Account.over_limit

    def counted(account: Account, policy: TenantPolicy, at: float) -> OverLimit | None:
        calls.append(at)
        return over_limit(account, policy, at)

    monkeypatch.setattr(Account, "over_limit", counted)

    log = pool.arrive("a", blocks=blocks)

    assert len(refusals(log)) == 1
    (arrival,) = [event for event in log if isinstance(event, RequestArrived)]
    assert len(unpack_keys(arrival.keys)) == logged
    assert len(calls) == judged


@pytest.mark.parametrize(("version", "prompts"), [(10, 1), (9, 2)])
def test_a_request_that_comes_again_under_another_id_is_charged_once(version: int, prompts: int) -> None:
    """Logs of before charged it twice; they are replayed so. A prompt has 257 tokens, 50 of output are expected."""
    pool = LimitedPool(1, fold_version=version)
    pool.set_policies(named(a=TenantPolicy(requests_per_second=5.0, tokens_per_day=40_000)))
    _given_up(pool)
    pool.arrive("a", max_output_tokens=50, instead_of=RequestId("r1"))

    account = pool.state.tenants.named[Tenant("a")]
    assert account.used == prompts * 257 + 46  # expected of at most 50 tokens of output
    assert account.requests is not None
    assert account.requests.level_at(pool.now) == pytest.approx(3.5 - prompts)
    assert len(pool.state.hotness._window) == prompts
    assert account.in_flight == 1


def test_only_the_tenant_that_had_asked_comes_again_beyond_its_limits_and_once() -> None:
    pool = LimitedPool(1)
    pool.set_policies(TenantPolicies(default=TenantPolicy(requests_per_second=0.1)))
    _given_up(pool)
    pool.arrive("b")

    assert refusals(pool.arrive("b", instead_of=RequestId("r1")))
    assert not refusals(pool.arrive("a", instead_of=RequestId("r1")))
    assert refusals(pool.arrive("a", instead_of=RequestId("r1")))
    assert LimitsModel().check(pool.log) == []


def test_the_usual_answer_is_learned_from_each_of_several() -> None:
    one, several = LimitedPool(1), LimitedPool(1)
    for pool, answers in ((one, 1), (several, 4)):
        pool.arrive("a", max_output_tokens=2_000, answers=answers)
        pool._first_token()
        request = pool.state.workload.requests[RequestId("r1")]
        end = finished("r1", request.instance, at=pool.now)
        pool.seen(msgspec.structs.replace(end, completion_tokens=100 * answers))

    expected = one.state.output_lengths.expected(Tenant("a"), 2_000)
    assert several.state.output_lengths.expected(Tenant("a"), 2_000) == expected


def test_a_refused_request_is_neither_a_hot_prefix_nor_an_outcome() -> None:
    pool = LimitedPool(1, admission="predicted_ttft_fair")
    pool.set_policies(named(a=TenantPolicy(concurrency=1)))
    pool.arrive("a")
    known = [repr(vars(tracker)) for tracker in pool.state.trackers[:-1]]
    arrivals = len(pool.state.hotness._window)

    for _ in range(50):
        assert refusals(pool.arrive("a"))

    assert [repr(vars(tracker)) for tracker in pool.state.trackers[:-1]] == known
    assert len(pool.state.hotness._window) == arrivals


def test_over_its_kv_share_a_tenant_waits_while_others_pass_and_goes_on_when_there_is_room() -> None:
    """Of 40,000 tokens `a` may have 2,000: seven of its requests of 257 and one token of output, not nine."""
    pool = LimitedPool(1)
    pool.set_policies(named(a=TenantPolicy(kv_share=0.05)))
    for _ in range(9):
        assert not refusals(pool.arrive("a", max_output_tokens=1))
        for request in list(pool.state.workload.requests.values()):
            if request.stage.value == "prefill":
                pool._first_token()
    granted = [event for event in pool.log if isinstance(event, RequestGranted)]
    assert len(granted) == 7

    other = pool.arrive("b", max_output_tokens=1)
    assert [event.request for event in other if isinstance(event, RequestGranted)] == ["r10"]

    pool.log.clear()
    pool.finish(pool.state.workload.requests[granted[0].request])
    assert [event.request for event in pool.log if isinstance(event, RequestGranted)] == ["r8"]


def test_a_share_that_is_free_again_is_used_wherever_its_tenant_waits() -> None:
    pool = LimitedPool(1)
    pool.set_policies(named(a=TenantPolicy(kv_share=0.05)))
    while not any(r.stage is Stage.PENDING for r in pool.state.workload.requests.values()):
        pool.arrive("a", blocks=1, max_output_tokens=1)
        pool._first_token()
    (waiting,) = [r for r in pool.state.workload.requests.values() if r.stage is Stage.PENDING]
    elsewhere = next(
        r for r in pool.state.workload.requests.values() if r.stage is Stage.DECODING and r.instance != waiting.instance
    )
    pool.log.clear()
    pool.finish(elsewhere)

    assert [event.request for event in pool.log if isinstance(event, RequestGranted)] == [waiting.id]


@pytest.mark.parametrize("fold_version", [9, 8])
def test_a_large_request_over_the_share_is_not_overtaken_by_small_ones_of_its_tenant(fold_version: int) -> None:
    """Of 40,000 tokens `a` may have 2,000: a request of 1,600 waits until the small ones in flight have ended."""
    pool = LimitedPool(1, fold_version=fold_version)
    pool.set_policies(named(a=TenantPolicy(kv_share=0.05)))

    def small() -> None:
        pool.arrive("a", max_output_tokens=1)
        for request in list(pool.state.workload.requests.values()):
            if request.stage is Stage.PREFILL and request.prompt_tokens < 1_000:
                pool.seen(first_token(request.id, request.instance, at=pool.now))

    for _ in range(3):
        small()
    pool.arrive("a", blocks=25, max_output_tokens=1)

    def large_waits() -> bool:
        return pool.state.workload.requests[RequestId("r4")].stage is Stage.PENDING

    assert large_waits()
    for _ in range(30):
        small()
        oldest = next(r for r in pool.state.workload.requests.values() if r.stage is Stage.DECODING)
        pool.finish(oldest)
        if not large_waits():
            break

    assert large_waits() is (fold_version < 9)


@pytest.mark.parametrize("turn_of", ["b", None])
def test_best_effort_that_waits_for_its_share_does_not_hold_up_the_turn_of_others(turn_of: str | None) -> None:
    pool = LimitedPool(1)
    pool.set_policies(named(a=TenantPolicy(kv_share=0.001)))
    pool.arrive("a", max_output_tokens=1)
    for tenant in filter(None, ("a", turn_of)):
        pool.arrive(tenant, blocks=100)
        request = pool.state.workload.requests[RequestId(f"r{pool.numbers}")]
        request.best_effort, request.stage = True, Stage.PENDING
        pool.state.best_effort.placed(request, pool.now)

    turn = best_effort_turn(pool.state, pool.now)

    assert (turn[0].tenant if turn else None) == turn_of


def test_a_request_larger_than_its_tenants_share_runs_alone() -> None:
    pool = LimitedPool(1)
    pool.set_policies(named(a=TenantPolicy(kv_share=0.001)))

    first, second = pool.arrive("a"), pool.arrive("a")

    assert any(isinstance(event, RequestGranted) for event in first)
    assert not any(isinstance(event, RequestGranted) for event in second)
    pool.end_all()
    assert LimitsModel().check(pool.log) == []


def test_names_of_tenants_are_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pointsman.state.tenants.UNNAMED_MAX", 50)
    pool = LimitedPool(1)
    pool.set_policies(
        TenantPolicies(
            default=TenantPolicy(requests_per_second=1.0), tenants={Tenant("a"): TenantPolicy(concurrency=9)}
        )
    )
    pool.arrive("a")
    for number in range(400):
        pool.now += 1.0
        pool.arrive(f"name-{number}")
        pool.end_all()

    assert len(pool.state.tenants.unnamed) == 50
    assert list(pool.state.tenants.named) == ["a"]


def test_what_is_left_is_told() -> None:
    pool = LimitedPool(1)
    pool.set_policies(named(a=TenantPolicy(requests_per_second=4.0, tokens_per_day=10_000)))
    assert pool.state.tenants.rate_limits(Tenant("b"), pool.now) is None
    pool.arrive("a", max_output_tokens=1)
    pool.arrive("a", max_output_tokens=1)

    limits = pool.state.tenants.rate_limits(Tenant("a"), pool.now)

    assert limits is not None
    assert limits.requests is not None
    assert limits.tokens is not None
    assert (limits.requests.limit, limits.requests.remaining, limits.requests.reset) == (4, 1, 0.5)
    assert (limits.tokens.limit, limits.tokens.reset) == (10_000, DAY)
    assert limits.tokens.remaining == 10_000 - 257 - 1 - 65 - 1
