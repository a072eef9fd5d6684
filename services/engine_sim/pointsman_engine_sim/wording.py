"""Text of the simulated model: words that encode back to the same token, drawn from a seed."""

import json
import re
from itertools import islice
from random import Random
from typing import Protocol

WORDS_MAX = 2000
OPENINGS_MAX = 200
WORDS_MIN = 16
SENTENCE_WORDS = (5, 14)
_OPENING = re.compile(r"[A-Z][a-z]{1,11}")
_FIRST_WORD = re.compile(r" [A-Z][a-z]{1,11}")
_WORD = re.compile(r" [a-z]{2,12}")


class Vocabulary(Protocol):
    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


class Wording:
    def __init__(self, vocabulary: Vocabulary, *, seed: int = 0) -> None:
        """Scans the vocabulary. Raises ValueError if it has no words."""
        self._seed = seed
        self._texts: dict[int, str] = {}
        self.words = self._matching(vocabulary, _WORD, WORDS_MAX) or self._anything(vocabulary)
        self.openings = self._matching(vocabulary, _OPENING, OPENINGS_MAX) or self.words
        self.first_words = self._matching(vocabulary, _FIRST_WORD, OPENINGS_MAX)
        self.stops = self._marks(vocabulary, "." if self.first_words else ".\n")
        self.first_words = self.first_words or self.openings
        self._escaped = {token: json.dumps(text)[1:-1] for token, text in self._texts.items()}

    def passage(self, prompt_hash: int) -> "Passage":
        return Passage(self, Random(self._seed << 64 | prompt_hash))

    def text(self, ids: list[int]) -> str:
        return "".join([self._texts[token] for token in ids])

    def json_text(self, ids: list[int]) -> str:
        return "".join([self._escaped[token] for token in ids])

    def _marks(self, vocabulary: Vocabulary, marks: str) -> list[int]:
        tokens = {token: mark for mark in marks if (token := _single(vocabulary, mark)) is not None}
        self._texts |= tokens
        return list(tokens)

    def _matching(self, vocabulary: Vocabulary, pattern: re.Pattern[str], count_max: int) -> list[int]:
        found = (
            token
            for token in range(vocabulary.vocab_size)
            if pattern.fullmatch(text := vocabulary.decode([token])) and _single(vocabulary, text) == token
        )
        return self._known(vocabulary, list(islice(found, count_max)))

    def _anything(self, vocabulary: Vocabulary) -> list[int]:
        printable = (
            token
            for token in range(vocabulary.vocab_size)
            if (t := vocabulary.decode([token])).strip() and t.isprintable()
        )
        tokens = self._known(vocabulary, list(islice(printable, WORDS_MAX)))
        if not tokens:
            raise ValueError("the tokenizer's vocabulary has nothing that can be printed")
        return tokens

    def _known(self, vocabulary: Vocabulary, tokens: list[int]) -> list[int]:
        if len(tokens) < WORDS_MIN:
            return []
        self._texts |= {token: vocabulary.decode([token]) for token in tokens}
        return tokens


class Passage:
    def __init__(self, wording: Wording, random: Random) -> None:
        self._wording = wording
        self._random = random
        self._ids: list[int] = [random.choice(wording.openings)]

    def ids(self, start: int, stop: int) -> list[int]:
        while len(self._ids) < stop:
            self._continue()
        return self._ids[start:stop]

    def text(self, start: int, stop: int) -> str:
        return self._wording.text(self.ids(start, stop))

    def json_text(self, start: int, stop: int) -> str:
        return self._wording.json_text(self.ids(start, stop))

    def _continue(self) -> None:
        wording = self._wording
        self._ids += self._random.choices(wording.words, k=self._random.randint(*SENTENCE_WORDS))
        self._ids += wording.stops
        self._ids.append(self._random.choice(wording.first_words))


def _single(vocabulary: Vocabulary, text: str) -> int | None:
    ids = vocabulary.encode(text, add_special_tokens=False)
    return ids[0] if len(ids) == 1 else None
