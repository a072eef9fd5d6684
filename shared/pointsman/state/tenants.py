"""Limits of tenants, and what each has used. In: policies in force (TenantPoliciesSet) and the life of requests. Out: for
an arrival the limit that it exceeds, for a tenant what is left. Only tenants with a limit have an account.

An arrival within the limits is counted; one over a limit is not, and the leader rejects it. Tokens are charged as
predicted at the placement and corrected at the end. A request may overdraw the tokens: the next ones wait for it."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, floor

from pointsman.contracts.envelope import Stamp
from pointsman.contracts.reasons import RejectReason
from pointsman.contracts.requests import RequestFinished
from pointsman.contracts.tenants import RateLimit, RateLimits, TenantPolicies, TenantPolicy
from pointsman.primitives import EngineSeconds, Tenant, Tokens
from pointsman.state.output_lengths import OUTPUT_TOKENS_FIRST, OutputLengths
from pointsman.state.token_bucket import TokenBucket
from pointsman.state.workload import UNGRANTED, OverLimit, Request, Stage

BURST_SECONDS: EngineSeconds = 0.5
"""Size of the buckets, beyond 1: a tenant at its limit would lose what a bucket of 1 cannot hold between two requests."""
MINUTE: EngineSeconds = 60.0
DAY: EngineSeconds = 86_400.0
CONCURRENCY_RETRY_SECONDS: EngineSeconds = 1.0
OUTPUT_FADE = 0.9
"""Of the usual answer before fold version 6."""
UNNAMED_MAX = 10_000
"""Accounts of tenants under the default policy; of those without requests, the one quiet longest is dropped first."""

_NO_POLICIES = TenantPolicies()


@dataclass(slots=True)
class Account:
    """`in_flight`: requests. `used`: tokens of `day`, a number of days since 1970. `output_tokens`: of usual answers, for
    fold versions before 6."""

    requests: TokenBucket | None = None
    tokens: TokenBucket | None = None
    in_flight: int = 0
    kv_tokens: Tokens = 0
    day: int = 0
    used: float = 0.0
    output_tokens: float = OUTPUT_TOKENS_FIRST

    def limit(self, policy: TenantPolicy, at: EngineSeconds) -> None:
        rate = policy.requests_per_second
        self.requests = _bucket(self.requests, rate, bucket_size(rate), at)
        rate = policy.tokens_per_minute / MINUTE
        self.tokens = _bucket(self.tokens, rate, bucket_size(rate), at)

    def over_limit(self, policy: TenantPolicy, at: EngineSeconds) -> OverLimit | None:
        """The limit that holds up the next request longest."""
        requests = self.requests.seconds_until(1.0, at) if self.requests is not None else 0.0
        tokens = self.tokens.seconds_until(0.0, at) if self.tokens is not None else 0.0
        busy = CONCURRENCY_RETRY_SECONDS if policy.concurrency and self.in_flight >= policy.concurrency else 0.0
        spent = _tomorrow(at) - at if policy.tokens_per_day and self.used_on(at) >= policy.tokens_per_day else 0.0
        wait = max(requests, tokens, busy, spent)
        if not wait:
            return None
        if wait == spent:
            return OverLimit(RejectReason.QUOTA_EXCEEDED, f"{policy.tokens_per_day:,} tokens a day (UTC)", at + wait)
        if wait == requests:
            limit = f"{policy.requests_per_second:g} requests a second"
            return OverLimit(RejectReason.RATE_LIMITED, limit, at + wait)
        if wait == tokens:
            return OverLimit(RejectReason.RATE_LIMITED, f"{policy.tokens_per_minute:,} tokens a minute", at + wait)
        return OverLimit(RejectReason.CONCURRENCY_EXCEEDED, f"{policy.concurrency} requests at a time", at + wait)

    def charge(self, tokens: float, at: EngineSeconds, *, since: EngineSeconds) -> None:
        """`tokens` below 0 gives back what was charged at `since`; a day that is over gets nothing back."""
        if self.tokens is not None:
            self.tokens.take(tokens, at)
        if (today := _day(at)) > self.day:
            self.day, self.used = today, 0.0
        if tokens > 0 or _day(since) >= self.day:
            self.used = max(0.0, self.used + tokens)

    def used_on(self, at: EngineSeconds) -> float:
        return self.used if _day(at) <= self.day else 0.0

    def rate_limits(self, policy: TenantPolicy, now: EngineSeconds) -> RateLimits | None:
        requests = _left(self.requests, ceil(policy.requests_per_second), now)
        tokens = _left(self.tokens, policy.tokens_per_minute, now)
        if policy.tokens_per_day:
            left = max(0, floor(policy.tokens_per_day - self.used_on(now)))
            if tokens is None or left < tokens.remaining:
                tokens = RateLimit(limit=policy.tokens_per_day, remaining=left, reset=_tomorrow(now) - now)
        return RateLimits(requests=requests, tokens=tokens) if requests or tokens else None


class Tenants:
    """The callbacks are those of a `Tracker`, called once policies are set. `policies`: None until then. `named`: accounts
    of tenants with a policy of their own. `limits_kv`: whether any policy has a share of the KV capacity."""

    def __init__(self, output_lengths: OutputLengths | None = None) -> None:
        """`output_lengths`: None before fold version 6."""
        self._output_lengths = output_lengths
        self.policies: TenantPolicies | None = None
        self.policies_decided: Stamp | None = None
        self.named: dict[Tenant, Account] = {}
        self.unnamed: OrderedDict[Tenant, Account] = OrderedDict()
        self.limits_kv = False

    def policy_of(self, tenant: Tenant) -> TenantPolicy:
        return (self.policies or _NO_POLICIES).of(tenant)

    def set_policies(self, policies: TenantPolicies, requests: Iterable[Request], at: EngineSeconds) -> None:
        """`requests`: all in flight. Accounts of tenants that keep limits go on."""
        known = self.named | self.unnamed
        self.policies, self.named, self.unnamed = policies, {}, OrderedDict()
        self.limits_kv = any(policy.kv_share for policy in (policies.default, *policies.tenants.values()))
        for tenant, account in known.items():
            account.in_flight = account.kv_tokens = 0
            if _has_limits(policies.of(tenant)):
                account.limit(policies.of(tenant), at)
                self._accounts(tenant)[tenant] = account
        for request in requests:
            account_or_none = self.account(request, at)
            request.kv_tokens = 0
            if account_or_none is not None and request.over_limit is None:
                account_or_none.in_flight += 1
                if request.stage not in UNGRANTED:
                    self._hold_kv(account_or_none, request)

    def account(self, request: Request, at: EngineSeconds) -> Account | None:
        """Opens one for a tenant with limits."""
        if self.policies is None:
            return None
        tenant = request.tenant
        accounts = self._accounts(tenant)
        account = accounts.get(tenant)
        if account is None:
            policy = self.policies.of(tenant)
            if not _has_limits(policy):
                return None
            account = accounts[tenant] = Account()
            account.limit(policy, at)
            self._drop_quiet()
        return account

    def take_in(self, request: Request, at: EngineSeconds, *, limited: bool) -> None:
        """Count an arrival. `limited`: unless it is over a limit, which is noted in it. One that comes again has taken its place
        in the rate of requests."""
        account = self.account(request, at)
        request.over_limit = None
        if account is None:
            return
        if limited:
            request.over_limit = account.over_limit(self.policy_of(request.tenant), at)
            if request.over_limit is not None:
                return
        if request.tenant in self.unnamed:
            self.unnamed.move_to_end(request.tenant)
        account.in_flight += 1
        if account.requests is not None and not request.instead_of:
            account.requests.take(1.0, at)

    def is_over_limit(self, tenant: Tenant, at: EngineSeconds) -> bool:
        """Whether a new request would be."""
        account = self._accounts(tenant).get(tenant)
        return account is not None and account.over_limit(self.policy_of(tenant), at) is not None

    def must_wait_for_kv(self, request: Request, capacity: Tokens) -> bool:
        """Whether its tenant would exceed its share. One with nothing in flight may always send one request. `capacity`:
        0 if unknown."""
        share = self.policy_of(request.tenant).kv_share
        account = self._known(request)
        if not share or not capacity or account is None or not account.kv_tokens:
            return False
        least, room = account.kv_tokens + request.prompt_tokens, share * capacity
        return least > room or least + self._expected_output(account, request) > room

    def rate_limits(self, tenant: Tenant, now: EngineSeconds) -> RateLimits | None:
        """None for a tenant without limits, or without requests so far."""
        account = self._accounts(tenant).get(tenant)
        return account.rate_limits(self.policy_of(tenant), now) if account is not None else None

    def placed(self, request: Request, at: EngineSeconds) -> None:
        account = self._known(request)
        if account is not None:
            cached = request.prompt_tokens - request.uncached_tokens
            self._charge(account, request, request.uncached_tokens, cached, self._expected_output(account, request), at)

    def granted(self, request: Request) -> None:
        account = self._known(request)
        if account is not None:
            self._hold_kv(account, request)

    def unplaced(self, request: Request) -> None:
        account = self._known(request)
        if account is not None:
            _release_kv(account, request)

    def ended(
        self, request: Request, at: EngineSeconds, finished: RequestFinished | None, delivered: Tokens = -1
    ) -> None:
        """Corrects the charge: by the engine's counts if it finished, else refunds what no engine worked on. An answer that
        broke off pays as predicted, or what was `delivered` (-1: unknown) if that is more."""
        account = self._known(request)
        if account is None:
            return
        account.in_flight -= 1
        _release_kv(account, request)
        computed, cached = request.uncached_tokens, request.prompt_tokens - request.uncached_tokens
        if finished is not None:
            prompt = finished.prompt_tokens if finished.prompt_tokens >= 0 else request.prompt_tokens
            cached = min(prompt, finished.cached_tokens if finished.cached_tokens >= 0 else cached)
            output = self._expected_output(account, request)
            if finished.completion_tokens >= 0:
                output = finished.completion_tokens
                account.output_tokens += (1 - OUTPUT_FADE) * (output - account.output_tokens)
            self._charge(account, request, prompt - cached, cached, output, at)
        elif request.stage in UNGRANTED:
            self._charge(account, request, 0, 0, max(0, delivered), at)
        elif request.stage is Stage.PREFILL:
            self._charge(account, request, computed, cached, max(0, delivered), at)
        elif delivered > 0:
            self._charge(account, request, computed, cached, delivered, at, least=request.charged_tokens)

    def _charge(
        self,
        account: Account,
        request: Request,
        computed: Tokens,
        cached: Tokens,
        output: Tokens,
        at: EngineSeconds,
        *,
        least: float = 0.0,
    ) -> None:
        """In place of what was charged for it before. `least`: it pays that much at least."""
        assert self.policies is not None
        tokens = max(least, computed + self.policies.cached_token_weight * cached + output)
        if tokens != request.charged_tokens:
            account.charge(tokens - request.charged_tokens, at, since=request.placed_at)
            request.charged_tokens = tokens

    def _hold_kv(self, account: Account, request: Request) -> None:
        request.kv_tokens = request.prompt_tokens + self._expected_output(account, request)
        account.kv_tokens += request.kv_tokens

    def _expected_output(self, account: Account, request: Request) -> Tokens:
        """Of all its answers."""
        if self._output_lengths is None:
            return max(0, min(request.max_output_tokens, round(account.output_tokens)))
        return round(self._output_lengths.expected(request.tenant, request.max_output_tokens) * request.answers)

    def _accounts(self, tenant: Tenant) -> dict[Tenant, Account]:
        return self.named if self.policies is not None and tenant in self.policies.tenants else self.unnamed

    def _known(self, request: Request) -> Account | None:
        return None if self.policies is None else self._accounts(request.tenant).get(request.tenant)

    def _drop_quiet(self) -> None:
        if len(self.unnamed) > UNNAMED_MAX:
            quiet = next((tenant for tenant, account in self.unnamed.items() if not account.in_flight), None)
            if quiet is not None:
                del self.unnamed[quiet]


def _has_limits(policy: TenantPolicy) -> bool:
    return bool(
        policy.requests_per_second
        or policy.concurrency
        or policy.tokens_per_minute
        or policy.tokens_per_day
        or policy.kv_share
    )


def bucket_size(rate: float) -> float:
    """Of a limit of `rate` a second: what may be used at once."""
    return 1.0 + rate * BURST_SECONDS


def _bucket(known: TokenBucket | None, rate: float, size: float, at: EngineSeconds) -> TokenBucket | None:
    if not rate:
        return None
    return known.resized(rate, size, at) if known is not None else TokenBucket(rate, size, size, at)


def _left(bucket: TokenBucket | None, limit: int, now: EngineSeconds) -> RateLimit | None:
    if bucket is None:
        return None
    remaining = max(0, min(limit, floor(bucket.level_at(now))))
    return RateLimit(limit=limit, remaining=remaining, reset=bucket.seconds_until(bucket.size, now))


def _release_kv(account: Account, request: Request) -> None:
    account.kv_tokens -= request.kv_tokens
    request.kv_tokens = 0


def _day(at: EngineSeconds) -> int:
    return int(at // DAY)


def _tomorrow(at: EngineSeconds) -> EngineSeconds:
    return (_day(at) + 1) * DAY
