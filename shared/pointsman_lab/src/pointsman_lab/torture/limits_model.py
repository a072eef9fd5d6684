"""An independent account of what tenants use, from the events alone and by the rules of docs/policies.md: who was let in over
a limit, who was refused within them, and which limit an answer names. Slow: each judgement goes through the whole history
of the tenant since its policy was set. In: the log in the order in which its leader applied it. Out: violations."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import ceil, inf

from msgspec import structs

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import (
    HandOverRefused,
    RequestEnd,
    RequestGranted,
    RequestHandedOver,
    RequestMigrated,
    RequestPlaced,
    RequestRejected,
    may_come_again,
)
from pointsman.contracts.fleet import InstanceJoined, InstanceLeft
from pointsman.contracts.requests import (
    PrefillFinished,
    RequestArrived,
    RequestCancelled,
    RequestEvent,
    RequestFailed,
    RequestFinished,
)
from pointsman.contracts.tenants import TenantPolicies, TenantPoliciesSet, TenantPolicy
from pointsman.primitives import Tenant
from pointsman.state.output_lengths import OutputLengths

LIMIT_REASONS = {"rate_limited", "concurrency_exceeded", "quota_exceeded"}
DAY = 86_400
SLACK_SECONDS = 1e-5


@dataclass
class Use:
    """`charges`: (time, weighted tokens) in order, of which some may be of before the history begins. `starts`: level of
    each bucket, and when, as it does."""

    running: set[str] = field(default_factory=set)
    requests: list[tuple[float, float]] = field(default_factory=list)
    charges: list[tuple[float, float]] = field(default_factory=list)
    starts: dict[str, tuple[float, float]] = field(default_factory=dict)
    by_day: dict[int, float] = field(default_factory=lambda: defaultdict(float))


@dataclass
class Known:
    tenant: str
    arrival: RequestArrived
    expected: str = ""
    """The limit that it exceeds, for `wait` seconds."""
    wait: float = 0.0
    is_near: bool = False
    """Too close to a limit to judge: rounding decides."""
    place: str = "nowhere"
    """Then in a queue, an engine, handed over, decoding."""
    instance: str = ""
    rebound_from: str = ""
    uncached: int = 0
    placed_at: float = 0.0
    charged: float = 0.0
    kv: int = 0


class LimitsModel:
    def __init__(self) -> None:
        self.policies: TenantPolicies | None = None
        self.set_by = (0, 0)
        self.uses: dict[str, Use] = {}
        self.known: dict[str, Known] = {}
        self.ended: set[str] = set()
        self.given_up: dict[str, Known] = {}
        """Ended by their leader; they may come again under another id."""
        self.capacity: dict[str, int] = {}
        self.refused = 0
        self.answers = OutputLengths()

    def check(self, events: Iterable[LogEvent]) -> list[str]:
        return [found for event in events if (found := self.apply(event))]

    def apply(self, event: LogEvent) -> str:
        """Returns a violation, or ''."""
        event = self._dated(event)
        match event:
            case TenantPoliciesSet():
                decided = (event.stamp.term, event.stamp.number) if event.stamp is not None else self.set_by
                if decided >= self.set_by:  # else it comes behind a later one
                    self.set_by = decided
                    self._set(event.policies, event.at)
            case InstanceJoined():
                self.capacity[event.instance] = event.kv_capacity_tokens
            case InstanceLeft():
                self.capacity.pop(event.instance, None)
            case RequestArrived():
                self._arrive(event)
            case RequestPlaced() | RequestMigrated():
                return self._place(event)
            case RequestGranted():
                return self._grant(event)
            case PrefillFinished():
                self._first_token(event)
            case RequestHandedOver() | HandOverRefused():
                if (known := self.known.get(event.request)) and known.place != "decoding":
                    known.place = "handed over"
                    known.instance = event.instance if isinstance(event, RequestHandedOver) else event.source
            case RequestRejected() if event.reason in LIMIT_REASONS:
                return self._refuse(event)
            case RequestFinished() | RequestFailed() | RequestCancelled() | RequestRejected():
                self._end(event)
            case _:
                pass
        return ""

    def _dated(self, event: LogEvent) -> LogEvent:
        known = self.known.get(event.request) if event.stamp is None and isinstance(event, RequestEvent) else None
        if known is None or not known.arrival.sent_at:
            return event
        return structs.replace(event, at=event.at + known.arrival.at - known.arrival.sent_at)

    def policy(self, tenant: str) -> TenantPolicy:
        policies = self.policies or TenantPolicies()
        return dict(policies.tenants).get(tenant, policies.default)  # type: ignore[call-overload, no-any-return]

    def _use(self, tenant: str) -> Use:
        return self.uses.setdefault(tenant, Use())

    def _set(self, policies: TenantPolicies, at: float) -> None:
        """Buckets keep their level; new ones are full."""
        tenants = {known.tenant for known in self.known.values()} | set(self.uses)
        before = {tenant: self._levels(tenant, at) for tenant in tenants}
        was_limited = {tenant for tenant in tenants if _limited(self.policy(tenant))} if self.policies else set()
        self.policies = policies
        for tenant in tenants:
            if not _limited(self.policy(tenant)):
                self.uses.pop(tenant, None)
                continue
            if tenant not in was_limited:
                self.uses[tenant] = Use()
            use = self._use(tenant)
            use.requests, use.charges = [], []
            use.starts = {
                name: (inf if level is None or tenant not in was_limited else level, at)
                for name, level in before[tenant].items()
            }
            use.running = {name for name, known in self.known.items() if known.tenant == tenant and not known.expected}
            for known in self.known.values():
                if known.tenant == tenant and known.place not in ("nowhere", "queue"):
                    known.kv = known.arrival.prompt_tokens + self._output(known)

    def _levels(self, tenant: str, at: float) -> dict[str, float | None]:
        policy, use = self.policy(tenant), self._use(tenant)
        rate, speed = policy.requests_per_second, policy.tokens_per_minute / 60
        return {
            "requests": _level(use.starts.get("requests", (inf, at)), use.requests, rate, at) if rate else None,
            "tokens": _level(use.starts.get("tokens", (inf, at)), use.charges, speed, at) if speed else None,
        }

    def _arrive(self, event: RequestArrived) -> None:
        if event.request in self.known or event.request in self.ended:
            return
        known = self.known[event.request] = Known(event.tenant, event)
        before = self.given_up.get(event.instead_of)
        comes_again = before is not None and before.tenant == event.tenant
        if before is not None and comes_again:
            known.charged = self.given_up.pop(event.instead_of).charged
        policy = self.policy(event.tenant)
        if self.policies is None or not _limited(policy):
            return
        if comes_again:
            self._use(event.tenant).running.add(event.request)
            return
        use = self._use(event.tenant)
        use.starts = use.starts or {"requests": (inf, event.at), "tokens": (inf, event.at)}
        levels = self._levels(event.tenant, event.at)
        requests, tokens = levels["requests"], levels["tokens"]
        waits = {
            "requests": max(0.0, 1 - requests) / policy.requests_per_second if requests is not None else 0.0,
            "tokens": max(0.0, -tokens) * 60 / policy.tokens_per_minute if tokens is not None else 0.0,
            "concurrency": float(bool(policy.concurrency) and len(use.running) >= policy.concurrency),
            "day": 0.0,
        }
        if policy.tokens_per_day and use.by_day[int(event.at // DAY)] >= policy.tokens_per_day - 1e-6:
            waits["day"] = (event.at // DAY + 1) * DAY - event.at
        known.is_near = 0 < max(waits.values()) <= SLACK_SECONDS
        known.expected = max(waits, key=waits.__getitem__) if max(waits.values()) > SLACK_SECONDS else ""
        known.wait = max(waits.values())
        if not known.expected:
            self._let_in(known)

    def _let_in(self, known: Known) -> None:
        use = self._use(known.tenant)
        use.running.add(known.arrival.request)
        use.requests.append((known.arrival.at, 1.0))

    def _refuse(self, event: RequestRejected) -> str:
        known = self.known.pop(event.request, None)
        self.ended.add(event.request)
        self.refused += 1
        if known is None:
            return f"{event.request} was refused by a limit, but never arrived"
        self._use(known.tenant).running.discard(event.request)  # in the log's order it may have been within the limits
        if not known.expected:
            return (
                ""
                if known.is_near
                else f"{event.request} was refused ({event.detail}) within the limits of {known.tenant}"
            )
        wait, named = known.wait, {"requests": "rate_limited", "tokens": "rate_limited", "day": "quota_exceeded"}
        if event.reason != named.get(known.expected, "concurrency_exceeded"):
            return f"{event.request} was refused as {event.reason}, but exceeds {known.expected}"
        if known.place != "nowhere":
            return f"{event.request} was refused by a limit after it was placed"
        if (
            known.expected != "concurrency"
            and abs(max(0.0, known.arrival.at + wait - event.at) - event.retry_after) > 2 * SLACK_SECONDS
        ):
            return f"{event.request} is to come back after {event.retry_after} s, but may after {wait} s"
        return ""

    def _place(self, event: RequestPlaced | RequestMigrated) -> str:
        known = self.known.get(event.request)
        if known is None:
            return ""
        if known.expected:
            return f"{event.request} was placed, but exceeds the {known.expected} of {known.tenant}"
        known.placed_at = event.at
        known.rebound_from = (
            event.source if isinstance(event, RequestMigrated) and event.rebound else known.rebound_from
        )
        self._queue(known, event.instance, event.uncached_tokens, event.at)
        return ""

    def _queue(self, known: Known, instance: str, uncached: int, at: float) -> None:
        known.place, known.instance, known.uncached, known.kv = "queue", instance, uncached, 0
        if _limited(self.policy(known.tenant)):
            self._charge(known, self._weighted(uncached, known) + self._output(known), at)

    def _first_token(self, event: PrefillFinished) -> None:
        known = self.known.get(event.request)
        if known is None:
            return
        if event.stamp is None and known.rebound_from == event.instance and known.place in ("queue", "engine"):
            self._queue(known, event.instance, known.arrival.prompt_tokens, event.at)  # it was never taken out of there
            known.place = "engine"
        if known.instance == event.instance and known.place in ("engine", "handed over"):
            known.place = "decoding"

    def _grant(self, event: RequestGranted) -> str:
        known = self.known.get(event.request)
        if known is None:
            return ""
        is_there = known.instance == event.instance and known.place in ("queue", "engine")
        if event.stamp is None and not is_there and known.place != "decoding" and event.instance in self.capacity:
            self._queue(known, event.instance, known.arrival.prompt_tokens, event.at)  # its ingress chose
        if known.place != "queue" or known.instance != event.instance:
            return ""
        known.place = "engine"
        policy = self.policy(known.tenant)
        if not _limited(policy):
            return ""
        before = sum(other.kv for other in self.known.values() if other.tenant == known.tenant)
        known.kv = known.arrival.prompt_tokens + self._output(known)
        room = policy.kv_share * sum(max(0, tokens) for tokens in self.capacity.values())
        if policy.kv_share and room and before and before + known.kv > room and event.stamp is not None:
            return (
                f"{event.request} was granted beyond the KV share of {known.tenant}: {before} + {known.kv} > {room:g}"
            )
        return ""

    def _end(self, event: RequestEnd) -> None:
        known = self.known.pop(event.request, None)
        self.ended.add(event.request)
        if known is not None and not known.expected and may_come_again(event):
            self.given_up[event.request] = known
        if known is not None and isinstance(event, RequestFinished):
            of_each = ceil(event.completion_tokens / known.arrival.answers)
            self.answers.learn(Tenant(known.tenant), of_each, known.arrival.max_output_tokens)
        if known is None or not _limited(self.policy(known.tenant)):
            return
        use = self._use(known.tenant)
        use.running.discard(event.request)
        if isinstance(event, RequestFinished):
            prompt = event.prompt_tokens if event.prompt_tokens >= 0 else known.arrival.prompt_tokens
            cached = event.cached_tokens if event.cached_tokens >= 0 else known.arrival.prompt_tokens - known.uncached
            output = event.completion_tokens if event.completion_tokens >= 0 else self._output(known)
            self._charge(
                known, prompt - min(prompt, cached) + self._cached_weight * min(prompt, cached) + output, event.at
            )
            return
        seen = 0 if isinstance(event, RequestRejected) else max(0, event.output_tokens)  # by its client, of the answer
        prompt_paid = 0.0 if known.place in ("nowhere", "queue") else self._weighted(known.uncached, known)
        has_begun = known.place in ("handed over", "decoding")
        if not has_begun or (seen and prompt_paid + seen > known.charged):
            self._charge(known, prompt_paid + seen, event.at)

    @property
    def _cached_weight(self) -> float:
        return self.policies.cached_token_weight if self.policies is not None else 0.0

    def _weighted(self, uncached: int, known: Known) -> float:
        return uncached + self._cached_weight * (known.arrival.prompt_tokens - uncached)

    def _output(self, known: Known) -> int:
        answer = self.answers.expected(Tenant(known.tenant), known.arrival.max_output_tokens)
        return round(answer * known.arrival.answers)

    def _charge(self, known: Known, total: float, at: float) -> None:
        use, more = self._use(known.tenant), total - known.charged
        if not more:
            return
        known.charged = total
        use.charges.append((at, more))
        day = int(at // DAY)
        if more > 0 or int(known.placed_at // DAY) >= day:
            use.by_day[day] = max(0.0, use.by_day[day] + more)


def _limited(policy: TenantPolicy) -> bool:
    limits = (policy.requests_per_second, policy.concurrency, policy.tokens_per_minute, policy.tokens_per_day)
    return any(limits) or policy.kv_share > 0


def _level(start: tuple[float, float], taken: list[tuple[float, float]], rate: float, at: float) -> float:
    size, (level, since) = 1.0 + rate / 2, start
    level = min(size, level)
    for moment, amount in taken:
        level = min(size, level + rate * max(0.0, moment - since)) - amount
        level, since = min(size, level), max(since, moment)
    return min(size, level + rate * max(0.0, at - since))
