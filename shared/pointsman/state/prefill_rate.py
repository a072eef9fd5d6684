"""What the first tokens of an engine, one after another, show (decision 87). An engine computes several prompts in one
step, and their first tokens come together at its end. So a prompt takes longer than its own work, a queue of prompts does
not, and when a request that waits gets its first token depends on what shares its step."""

from dataclasses import dataclass, field
from typing import ClassVar

from pointsman.primitives import EngineSeconds, Tokens
from pointsman.state.correction import Correction
from pointsman.state.derived import Derived

SAME_STEP = 0.5
"""A first token that comes after less than this share of its own work was computed in the step of the one before."""
STEP_FADE = 0.98
"""Per step: about the last 50."""
COVERAGE = 0.8
MARGIN_STEP = 0.05
MARGIN_MAX = 2.0


@dataclass(slots=True)
class PrefillRate:
    """Of one engine. `correction`: of the work that it completes, step by step. `beside_seconds`, `beside_tokens`: work by
    the cost model that a step does beside its first prompt, which may have begun in an earlier one; the most, fading. The
    others are sums over the last step, which counts once the next one has a first token."""

    DERIVED: ClassVar[Derived] = {"_step_seconds": lambda: None}

    correction: Correction = field(default_factory=Correction)
    beside_seconds: EngineSeconds = 0.0
    beside_tokens: float = 0.0
    passed: EngineSeconds = 0.0
    work: EngineSeconds = 0.0
    tokens: Tokens = 0
    work_beside: EngineSeconds = 0.0
    tokens_beside: Tokens = 0
    most_tokens: Tokens = 0
    _step_seconds: EngineSeconds | None = field(default=None, compare=False)

    def first_token(self, *, passed: EngineSeconds, work: EngineSeconds, tokens: Tokens) -> None:
        """`passed`: since the first token before it, or since an idle engine got work. `work`: by the cost model."""
        passed = max(0.0, passed)
        if not self.work or passed >= SAME_STEP * work:
            self._count()
            self.passed = self.work = self.work_beside = 0.0
            self.tokens = self.tokens_beside = self.most_tokens = 0
        else:
            self.work_beside += work
            self.tokens_beside += tokens
        self.passed += passed
        self.work += work
        self.tokens += tokens
        self.most_tokens = max(self.most_tokens, tokens)

    @property
    def step_seconds(self) -> EngineSeconds:
        """Of a full step."""
        if self._step_seconds is None:
            self._step_seconds = self.correction.seconds(self.beside_seconds, int(self.beside_tokens))
        return self._step_seconds

    def _count(self) -> None:
        if not self.work:
            return
        self._step_seconds = None
        self.beside_seconds, self.beside_tokens = STEP_FADE * self.beside_seconds, STEP_FADE * self.beside_tokens
        beside = min(self.work_beside, self.passed)  # what was booked may have been cached
        if beside > self.beside_seconds:
            self.beside_seconds, self.beside_tokens = beside, self.tokens_beside * (beside / self.work_beside)
        self.correction.learn(
            predicted=self.work, observed=self.passed, tokens=self.tokens, own_tokens=self.most_tokens
        )


@dataclass(slots=True)
class StepMargin:
    """How much later than predicted the first tokens of requests that wait come, in full steps: COVERAGE of them come
    within `steps`. Learned by gradient steps on the pinball loss, over all engines of a pool."""

    steps: float = 0.5

    def learn(self, late: EngineSeconds, step: EngineSeconds) -> None:
        """`late`: beyond the predicted TTFT. `step`: of its engine; 0: it did not wait."""
        if step > 0:
            beyond = late > self.steps * step
            self.steps = min(MARGIN_MAX, max(0.0, self.steps + MARGIN_STEP * (beyond - (1 - COVERAGE))))
