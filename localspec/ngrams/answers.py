"""The latest answers, whole: where the end of a text stood in them, and so what it may be a copy of.

Counts of n-grams look a few tokens back; an answer that comes again nearly word for word is known by more. Positions
are sorted by what stands before them, read backwards, so that those behind a common suffix lie together: a suffix array
(Manber and Myers 1993) of the reversed ids, in which the longest suffix is found by bisection.

Knows nothing of files or counts.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from struct import Struct, pack

import numpy as np
from numpy.typing import NDArray

MOST_TOKENS = 1 << 16
"""The latest that are kept: some hundreds of answers."""
END = 0xFFFF_FFFF
"""Behind each answer, where nothing is expected."""
SHORTEST, DEEPEST = 2, 32
"""Tokens of the matches that are looked for; by DEEPEST positions are sorted."""
_PLACES = 64
"""Places of one match among which the latest is taken."""
_BYTES = 4
_ABOVE = b"\xff" * _BYTES
"""No token sorts behind it."""
_KEY = Struct(f">{DEEPEST}I")

Tokens = NDArray[np.uint32]


class Answers:
    """Ids of answers, the latest last, which are never changed: who follows them keeps its own."""

    def __init__(self, tokens: Tokens | None = None) -> None:
        """tokens: of shape [n], END behind each answer; `joined` makes them."""
        self.tokens: Tokens = np.empty(0, np.uint32) if tokens is None else tokens
        self.ids = self.tokens.data
        """The same, for reading one: an index gives an int."""
        order = _sorted(self.tokens)
        self._pairs = (self.tokens[order - 1].astype(np.uint64) << 32 | self.tokens[order - 2]).data
        """The last two tokens before each position, in their order,"""
        self._starts = ((self.tokens.size - order) * _BYTES).data
        """and where the bytes of all of them begin among"""
        self._backwards = self.tokens[::-1].astype(">u4").tobytes()
        """the tokens, the last one first, as bytes that compare as the numbers do."""

    def longest(self, text: Sequence[int]) -> tuple[int, int]:
        """(tokens, place) of the longest suffix of the text, of SHORTEST to DEEPEST tokens, that stands in the answers
        with something behind it; place is the index of that, the latest of several. (0, 0) where none does."""
        pairs, starts = self._pairs, self._starts
        if not starts or len(text) < SHORTEST:
            return 0, 0
        pair = text[-1] << 32 | text[-2]
        low = bisect_left(pairs, pair)
        if low == len(pairs) or pairs[low] != pair:
            return 0, 0
        high = bisect_right(pairs, pair, low)
        wanted = text[: -DEEPEST - 1 : -1]
        key = _KEY.pack(*wanted) if len(wanted) == DEEPEST else pack(f">{len(wanted)}I", *wanted)
        if high - low == 1:
            return self._common(starts[low], key), self._place(starts[low])
        at = bisect_left(starts, key, low, high, key=self._content(len(key)))
        matched = max(self._common(starts[i], key) for i in (at - 1, at) if low <= i < high)
        key = key[: matched * _BYTES]
        low = bisect_left(starts, key, low, at, key=self._content(len(key)))
        high = bisect_right(starts, key + _ABOVE, at, high, key=self._content(len(key) + _BYTES))
        # The later a position, the fewer of the reversed bytes stand before it.
        return matched, self._place(min(starts[low : min(high, low + _PLACES)]))

    def _place(self, start: int) -> int:
        return len(self.ids) - start // _BYTES

    def _content(self, width: int) -> Callable[[int], bytes]:
        """What stands before the position whose bytes begin at `start`, so many bytes of it."""
        backwards = self._backwards
        return lambda start: backwards[start : start + width]

    def _common(self, start: int, key: bytes) -> int:
        """Tokens that stand before a position and at the beginning of the key."""
        content = self._backwards[start : start + len(key)]
        differing = int.from_bytes(content) ^ int.from_bytes(key[: len(content)])
        return (len(content) * 8 - differing.bit_length()) // (_BYTES * 8)


def joined(tokens: Tokens, answers: Iterable[Sequence[int]], most: int = MOST_TOKENS) -> Tokens:
    """More answers behind those there are, the latest `most` tokens of all."""
    parts = [tokens, *(np.array([*answer, END], np.uint32) for answer in answers)]
    return np.concatenate(parts)[-most:] if most > 0 else tokens[:0]


def _sorted(tokens: Tokens) -> NDArray[np.int64]:
    """Positions that have SHORTEST tokens before them and one behind, in the order of at most DEEPEST tokens before
    them, the nearest first: ordered by one token, then by twice as many each time (prefix doubling)."""
    size = tokens.size
    # Of the positions 0 to n; before the first there is nothing, which sorts before any token.
    ranks = np.zeros(size + 1, np.int64)
    ranks[1:] = np.unique(tokens, return_inverse=True)[1] + 1
    done = 1
    while done < DEEPEST:
        further = np.zeros(size + 1, np.int64)
        further[done:] = ranks[: max(size + 1 - done, 0)]
        ranks = np.unique(ranks * (ranks.max() + 1) + further, return_inverse=True)[1]
        done *= 2
    order = np.argsort(ranks)
    inside = np.zeros(size + 1, np.bool_)
    inside[SHORTEST:size] = (tokens[SHORTEST:] != END) & (tokens[SHORTEST - 1 : -1] != END)
    return order[inside[order]]
