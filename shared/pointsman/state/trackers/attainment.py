"""On-time shares by tenth of prompt length and by tenant, over the last OUTCOMES_WINDOW outcomes of a priority class, and
the on-time requests owed to each group: a class owes nothing to another. What a group is *owed* is a virtual queue
(Neely, *Stochastic Network Optimization*, 2010, section 4.4) from 0 to OWED_MAX: each outcome adds the target share and
takes 1 off if it was on time. So the long-run share meets the target."""

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
from typing_extensions import override

from pointsman.contracts.tenants import Priority
from pointsman.primitives import EngineSeconds, Tenant, Tokens
from pointsman.state.fold_versions import EMPTY_PROMPTS
from pointsman.state.trackers.base import OutcomeTracker
from pointsman.state.workload import Request

OUTCOMES_WINDOW = 1_000
LENGTHS_WINDOW = 1_000
DECILES = 10
OWED_MAX = 40.0
OUTCOMES_TO_BEGIN = 50

LEVEL_OUTCOMES = 20


@dataclass(slots=True)
class Tally:
    """Requests and prompt tokens of one group, and the requests it is owed."""

    requests: int = 0
    on_time: int = 0
    tokens: Tokens = 0
    tokens_on_time: Tokens = 0
    owed: float = 0.0

    @property
    def attainment(self) -> float:
        return self.on_time / self.requests if self.requests else 1.0

    def count(self, tokens: Tokens, on_time: bool, sign: int) -> None:
        self.requests += sign
        self.tokens += sign * tokens
        if on_time:
            self.on_time += sign
            self.tokens_on_time += sign * tokens

    def owe(self, requests: float) -> None:
        self.owed = min(OWED_MAX, max(0.0, self.owed + requests))


class Outcome(msgspec.Struct, frozen=True):
    decile: int
    tenant: Tenant
    tokens: Tokens
    on_time: bool


class Attainment(OutcomeTracker):
    def __init__(self, *, decile_share: float = 0.0, tenant_share: float = 0.0) -> None:
        """Target shares: of each tenth, relative to the overall attainment; of each tenant, relative to its fair part
        (`fair_level`)."""
        self._shares = (decile_share, tenant_share)
        self._classes: dict[Priority, ClassAttainment] = {}

    def of(self, priority: Priority) -> "ClassAttainment":
        return self._classes.get(priority) or ClassAttainment(*self._shares)

    @override
    def arrived(self, request: Request, at: EngineSeconds) -> None:
        self._kept(request.priority).arrived(request.prompt_tokens)

    @override
    def outcome(self, request: Request, at: EngineSeconds, *, on_time: bool, refused: bool = False) -> None:
        least = 1 if self.fold_version >= EMPTY_PROMPTS else 0
        self._kept(request.priority).outcome(request, on_time=on_time, tokens_min=least)

    def _kept(self, priority: Priority) -> "ClassAttainment":
        known = self._classes.get(priority)
        if known is None:
            known = self._classes[priority] = ClassAttainment(*self._shares)
        return known


class ClassAttainment:
    """`deciles[0]`: the shortest prompts. `tenants`: those with outcomes in the window."""

    def __init__(self, decile_share: float, tenant_share: float) -> None:
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
        return tenth(self._sorted_lengths, prompt_tokens)

    def arrived(self, prompt_tokens: Tokens) -> None:
        self._lengths.append(prompt_tokens)
        insort(self._sorted_lengths, prompt_tokens)
        if len(self._lengths) > LENGTHS_WINDOW:
            del self._sorted_lengths[bisect_left(self._sorted_lengths, self._lengths.popleft())]

    def outcome(self, request: Request, *, on_time: bool, tokens_min: Tokens = 1) -> None:
        """`tokens_min`: of a tenant, where its fair part is compared with them; 0 before fold version 9."""
        outcome = Outcome(self.decile(request.prompt_tokens), request.tenant, request.prompt_tokens, on_time)
        self._outcomes.append(outcome)
        self._count(outcome, 1)
        if len(self._outcomes) > OUTCOMES_WINDOW:
            self._count(self._outcomes.popleft(), -1)
        if self.overall.requests >= OUTCOMES_TO_BEGIN:
            self._owe(outcome, tokens_min)

    def _count(self, outcome: Outcome, sign: int) -> None:
        tenant = self.tenants.setdefault(outcome.tenant, Tally())
        for tally in (self.overall, self.deciles[outcome.decile], tenant):
            tally.count(outcome.tokens, outcome.on_time, sign)
        if not tenant.requests:
            del self.tenants[outcome.tenant]

    def _owe(self, outcome: Outcome, tokens_min: Tokens) -> None:
        self.deciles[outcome.decile].owe(self._decile_share * self.overall.attainment - outcome.on_time)
        if len(self.tenants) > 1:
            tenant = self.tenants[outcome.tenant]
            due = self._tenant_share * min(1.0, self._fair_level() / max(tokens_min, tenant.tokens))
            tenant.owe(due - outcome.on_time)

    def _fair_level(self) -> float:
        if not self._level_outcomes:
            self._level = fair_level((tally.tokens for tally in self.tenants.values()), self.overall.tokens_on_time)
            self._level_outcomes = LEVEL_OUTCOMES
        self._level_outcomes -= 1
        return self._level


def tenth(ordered: Sequence[Tokens], prompt_tokens: Tokens) -> int:
    """Of equal lengths, the middle one counts."""
    if not ordered:
        return 0
    first, behind = bisect_left(ordered, prompt_tokens), bisect_right(ordered, prompt_tokens)
    middle = (first + max(first, behind - 1)) // 2
    return min(DECILES - 1, middle * DECILES // len(ordered))


def fair_level(demands: Iterable[float], available: float) -> float:
    """Max-min fair cap on each amount, so that the sum is `available`; infinite if all fit."""
    ordered = sorted(demands)
    for served, amount in enumerate(ordered):
        part = available / (len(ordered) - served)
        if amount > part:
            return part
        available -= amount
    return float("inf")
