"""How long answers are expected to be, for the reference model: a survival curve over bands of lengths, summed from
single answers. A tenant's curve counts one answer of the pool's, the pool's one of FIRST tokens on average."""

from itertools import pairwise
from math import exp

from pointsman.primitives import Tokens

FIRST = 256.0
FADE = 0.97
BANDS = tuple(pairwise((0, *(16 * 2**power for power in range(14)), 2**62)))


class AnswerLengths:
    def __init__(self) -> None:
        self._answers: list[tuple[str, Tokens, bool]] = []

    def finished(self, tenant: str, tokens: Tokens, limit: Tokens) -> None:
        if tokens > 0:
            self._answers.append((tenant, tokens, 0 < limit <= tokens))

    def expected(self, tenant: str, limit: Tokens) -> float:
        own = [(tokens, cut) for name, tokens, cut in self._answers if name == tenant]
        everybody = [(tokens, cut) for _, tokens, cut in self._answers]
        mean, still_going = 0.0, 1.0
        for start, end in BANDS:
            if start >= limit:
                break
            going_on = exp(-(end - start) / FIRST)
            prior = (1 - going_on, FIRST - (end - start) * going_on / (1 - going_on))
            share, tokens = _ending(own, start, end, _ending(everybody, start, end, prior))
            room = min(end, limit) - start
            mean += still_going * ((1 - share) * room + share * min(tokens, room))
            still_going *= 1 - share
        return mean


def _ending(
    answers: list[tuple[Tokens, bool]], start: Tokens, end: Tokens, prior: tuple[float, float]
) -> tuple[float, float]:
    """Of the answers that got to `start`: which share ended before `end`, and after how many tokens from there."""
    reached, ended, tokens_of_ended = 1.0, prior[0], prior[0] * prior[1]
    for age, (tokens, cut) in enumerate(reversed(answers)):
        weight = FADE**age
        if start < tokens <= end and not cut:
            reached += weight
            ended += weight
            tokens_of_ended += weight * (tokens - start)
        elif tokens > start:
            reached += weight * (min(tokens, end) - start) / (end - start)
    return ended / reached, tokens_of_ended / ended
