"""Who got their first token on time lately, by length of prompt and by tenant.

Over the last `OUTCOMES_WINDOW` outcomes. An outcome is a first token, on time or late; a refusal, which counts as
late; or another end after the deadline. A client that goes away before its deadline is none. Prompts are sorted into
tenths by their length among the last `LENGTHS_WINDOW` arrivals, so that "long" follows the traffic.
"""

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass

from typing_extensions import override

from pointsman.contracts.requests import RequestFinished
from pointsman.primitives import Seconds, Tenant, Tokens
from pointsman.state.memories.base import Memory
from pointsman.state.workload import Request, Stage

OUTCOMES_WINDOW = 1_000
LENGTHS_WINDOW = 1_000
DECILES = 10


@dataclass(slots=True)
class Tally:
    """Outcomes of one group, in requests and in prompt tokens."""

    requests: int = 0
    on_time: int = 0
    tokens: Tokens = 0
    tokens_on_time: Tokens = 0

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


@dataclass(frozen=True, slots=True)
class Outcome:
    decile: int
    tenant: Tenant
    tokens: Tokens
    on_time: bool


class Attainment(Memory):
    """`deciles[0]` are the shortest prompts. `tenants` are those with outcomes in the window."""

    def __init__(self) -> None:
        self.overall = Tally()
        self.deciles = tuple(Tally() for _ in range(DECILES))
        self.tenants: dict[Tenant, Tally] = {}
        self._outcomes: deque[Outcome] = deque()
        self._lengths: deque[Tokens] = deque()
        self._sorted_lengths: list[Tokens] = []

    def decile(self, prompt_tokens: Tokens) -> int:
        """Which tenth of the recent prompts this length belongs to: 0 the shortest, 9 the longest."""
        if not self._sorted_lengths:
            return 0
        rank = bisect_left(self._sorted_lengths, prompt_tokens)
        return min(DECILES - 1, rank * DECILES // len(self._sorted_lengths))

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
    def ended(self, request: Request, at: Seconds, finished: RequestFinished | None) -> None:
        refused = request.stage is Stage.ARRIVED
        if refused or (request.stage is not Stage.DECODING and finished is None and at > request.deadline):
            self._take_in(request, on_time=False)

    def _take_in(self, request: Request, *, on_time: bool) -> None:
        outcome = Outcome(self.decile(request.prompt_tokens), request.tenant, request.prompt_tokens, on_time)
        self._outcomes.append(outcome)
        self._count(outcome, 1)
        if len(self._outcomes) > OUTCOMES_WINDOW:
            self._count(self._outcomes.popleft(), -1)

    def _count(self, outcome: Outcome, sign: int) -> None:
        tenant = self.tenants.setdefault(outcome.tenant, Tally())
        for tally in (self.overall, self.deciles[outcome.decile], tenant):
            tally.count(outcome.tokens, outcome.on_time, sign)
        if not tenant.requests:
            del self.tenants[outcome.tenant]
