"""Who got their first token on time lately, by length of prompt and by tenant, and who is owed how much.

An *outcome* is a first token, on time or late; a refusal, which counts as late; or another end after the deadline of
one that waited. A client that goes away before its deadline is none, nor is the refusal of a prompt that takes longer
than its objective even alone: nobody could have kept that. Tallies are over the last `OUTCOMES_WINDOW` outcomes.

*Groups* are the tenths of prompts by their length among the last `LENGTHS_WINDOW` arrivals, so that "long" follows the
traffic, and the tenants. Prompts of equal length are all in one tenth, that of the middle one.

What a group is *owed* is counted in requests: each outcome adds the share that its group should have on time, and
takes one off if it was on time (a virtual queue: Neely, *Stochastic Network Optimization*, 2010, section 4.4). Such a
count remembers what a window forgets, so who acts on it gets the share right in the long run and not almost right. It
is never below 0, for what a group got beyond its share shall not be held against it later, and never above `OWED_MAX`,
for what cannot be kept shall not be tried for ever.
"""

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
from typing_extensions import override

from pointsman.contracts.reasons import RejectReason
from pointsman.contracts.requests import RequestFinished
from pointsman.primitives import Seconds, Tenant, Tokens
from pointsman.state.trackers.base import Tracker
from pointsman.state.workload import Request, Stage

OUTCOMES_WINDOW = 1_000
LENGTHS_WINDOW = 1_000
DECILES = 10
OWED_MAX = 40.0
OUTCOMES_TO_BEGIN = 50
"""Outcomes before which nobody is owed anything: shares of so few mean nothing."""

LEVEL_OUTCOMES = 20
"""Outcomes after which the tenants' fair share is worked out again."""

"""The reason of refusals that are no outcomes."""


@dataclass(slots=True)
class Tally:
    """Outcomes of one group, in requests and in prompt tokens, and the requests that it is owed."""

    requests: int = 0
    on_time: int = 0
    tokens: Tokens = 0
    tokens_on_time: Tokens = 0
    owed: float = 0.0

    @property
    def attainment(self) -> float:
        """Share of its requests that were on time; of an empty group, all."""
        return self.on_time / self.requests if self.requests else 1.0

    def count(self, tokens: Tokens, on_time: bool, sign: int) -> None:
        self.requests += sign
        self.tokens += sign * tokens
        if on_time:
            self.on_time += sign
            self.tokens_on_time += sign * tokens

    def owe(self, requests: float) -> None:
        """So many more, or fewer where that is negative."""
        self.owed = min(OWED_MAX, max(0.0, self.owed + requests))


class Outcome(msgspec.Struct, frozen=True):
    decile: int
    tenant: Tenant
    tokens: Tokens
    on_time: bool


class Attainment(Tracker):
    """`deciles[0]` are the shortest prompts. `tenants` are those with outcomes in the window."""

    def __init__(self, *, decile_share: float = 0.0, tenant_share: float = 0.0) -> None:
        """`decile_share`: of the overall attainment, what each tenth should have on time. `tenant_share`: what each
        tenant should have, of the share of its prompt tokens that is its fair part of all those on time
        (`fair_level`): of its requests, all of which count alike, for its long ones already have their tenth."""
        self.overall = Tally()
        self.deciles = tuple(Tally() for _ in range(DECILES))
        self.tenants: dict[Tenant, Tally] = {}
        self._decile_share = decile_share
        self._tenant_share = tenant_share
        self._outcomes: deque[Outcome] = deque()
        self._lengths: deque[Tokens] = deque()
        self._sorted_lengths: list[Tokens] = []
        self._level = 0.0
        self._level_outcomes = 0

    def decile(self, prompt_tokens: Tokens) -> int:
        """Which tenth of the recent prompts this length belongs to: 0 the shortest, 9 the longest."""
        return tenth(self._sorted_lengths, prompt_tokens)

    @override
    def arrived(self, request: Request, at: Seconds) -> None:
        self._lengths.append(request.prompt_tokens)
        insort(self._sorted_lengths, request.prompt_tokens)
        if len(self._lengths) > LENGTHS_WINDOW:
            del self._sorted_lengths[bisect_left(self._sorted_lengths, self._lengths.popleft())]

    @override
    def first_token(self, request: Request, at: Seconds) -> None:
        self._take_in(request, on_time=at <= request.deadline)

    @override
    def refused(self, request: Request, at: Seconds, reason: str) -> None:
        if reason != RejectReason.SLO_UNREACHABLE:
            self._take_in(request, on_time=False)

    @override
    def ended(self, request: Request, at: Seconds, finished: RequestFinished | None) -> None:
        waited = request.stage in (Stage.PENDING, Stage.PREFILL, Stage.HANDED_OVER)
        if waited and finished is None and at > request.deadline:
            self._take_in(request, on_time=False)

    def _take_in(self, request: Request, *, on_time: bool) -> None:
        outcome = Outcome(self.decile(request.prompt_tokens), request.tenant, request.prompt_tokens, on_time)
        self._outcomes.append(outcome)
        self._count(outcome, 1)
        if len(self._outcomes) > OUTCOMES_WINDOW:
            self._count(self._outcomes.popleft(), -1)
        if self.overall.requests >= OUTCOMES_TO_BEGIN:
            self._owe(outcome)

    def _count(self, outcome: Outcome, sign: int) -> None:
        tenant = self.tenants.setdefault(outcome.tenant, Tally())
        for tally in (self.overall, self.deciles[outcome.decile], tenant):
            tally.count(outcome.tokens, outcome.on_time, sign)
        if not tenant.requests:
            del self.tenants[outcome.tenant]

    def _owe(self, outcome: Outcome) -> None:
        self.deciles[outcome.decile].owe(self._decile_share * self.overall.attainment - outcome.on_time)
        if len(self.tenants) > 1:
            tenant = self.tenants[outcome.tenant]
            due = self._tenant_share * min(1.0, self._fair_level() / tenant.tokens)
            tenant.owe(due - outcome.on_time)

    def _fair_level(self) -> float:
        if not self._level_outcomes:
            self._level = fair_level((tally.tokens for tally in self.tenants.values()), self.overall.tokens_on_time)
            self._level_outcomes = LEVEL_OUTCOMES
        self._level_outcomes -= 1
        return self._level


def tenth(ordered: Sequence[Tokens], prompt_tokens: Tokens) -> int:
    """The place of a length among others, in tenths; of equal ones, the place of the middle one."""
    if not ordered:
        return 0
    first, behind = bisect_left(ordered, prompt_tokens), bisect_right(ordered, prompt_tokens)
    middle = (first + max(first, behind - 1)) // 2
    return min(DECILES - 1, middle * DECILES // len(ordered))


def fair_level(asked: Iterable[float], available: float) -> float:
    """What each may get at most so that all together get what is available: those who ask for less get all of it, and
    what they leave is dealt out evenly among the others (max-min fairness). Infinite where there is enough for all."""
    ordered = sorted(asked)
    for served, amount in enumerate(ordered):
        part = available / (len(ordered) - served)
        if amount > part:
            return part
        available -= amount
    return float("inf")
