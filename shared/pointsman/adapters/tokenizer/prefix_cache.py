"""Encodes text, from an LRU cache of pieces where possible. Text is cut at special tokens, as tokenizers do, and in
long parts between words. The latter is verified: the ids of context and piece together must begin with the context's;
otherwise the whole text is encoded. Thread-safe: encoding runs outside the lock."""

import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

PIECE_CHARS = 1024
CONTEXT_CHARS = 128
CACHED_TOKENS_MAX = 5_000_000
"""Each piece counts PIECE_TOKENS more: some 60 MB in all."""
PIECE_TOKENS = 100
BATCH_CHARS = 64 * 1024
"""Text encoded at once: the backend takes some hundred bytes for each token of it."""

WINDOW_CHARS = 16 * 1024

_WORD_GAP = re.compile(r"(?<=[^\W\d_])(?= [^\W\d_])")


class _Piece(NamedTuple):
    """`context`: the special token or words before `text`; empty at the start."""

    context: str
    text: str


class PrefixCache:
    def __init__(self, backend: Backend, *, cached_tokens_max: int = CACHED_TOKENS_MAX) -> None:
        """`backend` must have no post-processor."""
        self._backend = backend
        self._tokens_max = cached_tokens_max
        self._plain_tokens, self._added_token = _cutting_tokens(backend.get_added_tokens_decoder().values())
        self._longest_added = max(
            (len(token.content) for token in backend.get_added_tokens_decoder().values()), default=0
        )
        self._lock = threading.Lock()
        self._ids: OrderedDict[_Piece, array[int]] = OrderedDict()
        self.cached_tokens = 0

    def encode(self, text: str) -> list[int]:
        pieces = list(self._cut(text))
        with self._lock:
            known = {piece: ids for piece in pieces if (ids := self._recall(piece)) is not None}
        missing = list(dict.fromkeys(piece for piece in pieces if piece not in known))
        if missing:
            encoded: dict[_Piece, array[int]] = {}
            if not all(self._encode(batch, encoded) for batch in _batches(missing)):
                return self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
            with self._lock:
                self._remember(encoded)
            known |= encoded
        result: list[int] = []
        for piece in pieces:
            result.extend(known[piece])
        return result

    def _cut(self, text: str) -> Iterator[_Piece]:
        special, start = "", 0
        for match in _matches(self._added_token, text, self._longest_added) if self._added_token else ():
            if match.group() in self._plain_tokens:
                yield from _cut_between_words(special, text[start : match.start()])
                special, start = match.group(), match.end()
        yield from _cut_between_words(special, text[start:])

    def _recall(self, piece: _Piece) -> "array[int] | None":
        ids = self._ids.get(piece)
        if ids is not None:
            self._ids.move_to_end(piece)
        return ids

    def _encode(self, pieces: Sequence[_Piece], known: "dict[_Piece, array[int]]") -> bool:
        """Adds to `known`. Returns whether all cuts pass verification."""
        texts = [text for piece in pieces for text in (piece.context, piece.context + piece.text)]
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        for number, piece in enumerate(pieces):
            before, both = encodings[2 * number].ids, encodings[2 * number + 1].ids
            if both[: len(before)] != before:
                return False
            own = both if piece.context in self._plain_tokens else both[len(before) :]
            known[piece] = array("I", own)
        return True

    def _remember(self, encoded: "dict[_Piece, array[int]]") -> None:
        for piece, ids in encoded.items():
            if piece not in self._ids:
                self._ids[piece] = ids
                self.cached_tokens += len(ids) + PIECE_TOKENS
        while self.cached_tokens > self._tokens_max:
            _, oldest = self._ids.popitem(last=False)
            self.cached_tokens -= len(oldest) + PIECE_TOKENS


def _batches(pieces: Sequence[_Piece]) -> Iterator[Sequence[_Piece]]:
    first, chars = 0, 0
    for number, piece in enumerate(pieces):
        chars += len(piece.context) + len(piece.text)
        if chars >= BATCH_CHARS:
            yield pieces[first : number + 1]
            first, chars = number + 1, 0
    if first < len(pieces):
        yield pieces[first:]


def _cutting_tokens(added: Iterable[AddedToken]) -> tuple[frozenset[str], re.Pattern[str] | None]:
    """Special tokens to cut at, and a pattern of all added tokens (leftmost, longest match). Tokens that strip blanks
    or need word edges are not cut at."""
    found_first = [token for token in added if not token.normalized and token.content]
    if any(token.single_word for token in found_first):
        return frozenset(), None
    plain = frozenset(
        token.content
        for token in found_first
        if not (token.lstrip or token.rstrip) and token.content == token.content.strip()
    )
    contents = sorted((token.content for token in found_first), key=len, reverse=True)
    return plain, re.compile("|".join(map(re.escape, contents))) if plain else None


def _matches(pattern: re.Pattern[str], text: str, longest: int) -> Iterator[re.Match[str]]:
    start = 0
    while match := _search(pattern, text, start, longest):
        yield match
        start = match.end()


def _search(pattern: re.Pattern[str], text: str, start: int, longest: int) -> re.Match[str] | None:
    """By windows, because a search holds the GIL. `longest`: of what the pattern looks at."""
    while start < len(text):
        match = pattern.search(text, start, start + WINDOW_CHARS + longest)
        if match and match.start() < start + WINDOW_CHARS:
            return match
        start += WINDOW_CHARS
    return None


def _cut_between_words(special: str, text: str) -> Iterator[_Piece]:
    context, start = special, 0
    while gap := _search(_WORD_GAP, text, start + PIECE_CHARS, 2):
        yield _Piece(context, text[start : gap.start()])
        start = gap.start()
        words = _WORD_GAP.search(text, start - CONTEXT_CHARS)
        context = text[words.start() if words and words.start() < start else start - CONTEXT_CHARS : start]
    yield _Piece(context, text[start:])
