"""How long answers will be, learned from those that finished, for each tenant. An answer that was cut off at its
`max_output_tokens` only says that it would have been longer. So a survival curve is kept (the actuarial estimate, a
Kaplan-Meier curve over bands): for each band of lengths how many answers entered it, how many ended in it, and after how
many tokens of it. A tenant's curve is shrunk to the pool's (of one model), the pool's to that of answers of
OUTPUT_TOKENS_FIRST tokens on average."""

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import pairwise
from math import expm1

from pointsman.primitives import Tenant, Tokens

OUTPUT_TOKENS_FIRST = 256.0
"""Mean answer before any was seen."""
FADE = 0.97
"""Per answer: about the last 30."""
TENANTS_MAX = 10_000
"""The one without answers for longest is dropped first."""

EDGES: tuple[Tokens, ...] = (0, *(2**power for power in range(4, 18)), 2**62)
BANDS = tuple((start, end - start) for start, end in pairwise(EDGES))


@dataclass(slots=True)
class OutputCurve:
    """By band. An answer that was cut off within a band entered it in part."""

    entered: list[float] = field(default_factory=lambda: [0.0] * len(BANDS))
    ended: list[float] = field(default_factory=lambda: [0.0] * len(BANDS))
    ended_tokens: list[float] = field(default_factory=lambda: [0.0] * len(BANDS))

    def learn(self, tokens: Tokens, *, cut_off: bool) -> None:
        self.entered[:] = [answers * FADE for answers in self.entered]
        self.ended[:] = [answers * FADE for answers in self.ended]
        self.ended_tokens[:] = [counted * FADE for counted in self.ended_tokens]
        for band, (start, width) in enumerate(BANDS):
            if tokens <= start:
                break
            inside = min(tokens - start, width)
            if cut_off or tokens > start + width:
                self.entered[band] += inside / width
            else:
                self.entered[band] += 1.0
                self.ended[band] += 1.0
                self.ended_tokens[band] += inside


def _ending_first(width: Tokens) -> tuple[float, float]:
    """Of answers that are as likely to end at each token."""
    share = -expm1(-width / OUTPUT_TOKENS_FIRST)
    return share, OUTPUT_TOKENS_FIRST - width * (1 - share) / share


_FIRST = tuple(_ending_first(width) for _, width in BANDS)
_NO_ANSWERS = OutputCurve()


class OutputLengths:
    def __init__(self) -> None:
        self._pool = OutputCurve()
        self._tenants: OrderedDict[Tenant, OutputCurve] = OrderedDict()

    def learn(self, tenant: Tenant, tokens: Tokens, max_output_tokens: Tokens) -> None:
        """An answer of `tokens` finished."""
        if tokens <= 0:
            return
        known = self._tenants.get(tenant)
        if known is None:
            known = self._tenants[tenant] = OutputCurve()
            if len(self._tenants) > TENANTS_MAX:
                self._tenants.popitem(last=False)
        self._tenants.move_to_end(tenant)
        cut_off = 0 < max_output_tokens <= tokens
        self._pool.learn(tokens, cut_off=cut_off)
        known.learn(tokens, cut_off=cut_off)

    def expected(self, tenant: Tenant, max_output_tokens: Tokens) -> float:
        """Mean tokens of an answer that is cut off at `max_output_tokens`, from 0 to that."""
        own, pool = self._tenants.get(tenant, _NO_ANSWERS), self._pool
        expected, survival = 0.0, 1.0
        for band, (start, width) in enumerate(BANDS):
            if start >= max_output_tokens:
                break
            share, tokens = _FIRST[band]
            for curve in (pool, own):  # each shrunk to the one before, which counts as one answer
                ended = curve.ended[band] + share
                tokens = (curve.ended_tokens[band] + share * tokens) / ended
                share = ended / (curve.entered[band] + 1.0)
            length = min(width, max_output_tokens - start)
            expected += survival * ((1 - share) * length + share * min(tokens, length))
            survival *= 1 - share
        return expected
