"""llama.cpp's n-gram cache (`common/ngram-cache.cpp`): counts of this context, of earlier ones, and of a corpus."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from localspec.bench.replays.rule import Rule

LAX = {1: (2, 66), 2: (2, 50), 3: (1, 50), 4: (1, 50)}
"""Per length of the n-gram, how often it must have been seen in the context to be used, and the share in percent that
its follower must hold;"""
STRICT = {1: (4, 75), 2: (3, 66), 3: (2, 66), 4: (2, 66)}
"""and in earlier contexts;"""
STATIC, STATIC_GATE = 2, (2, 50)
"""the length and the gate of the corpus's n-grams."""

Counts = dict[tuple[int, ...], Counter[int]]
_NONE: Mapping[int, int] = {}


def counts() -> Counts:
    """An empty table: n-gram to followers."""
    return defaultdict(Counter)


def count(table: Counts, text: Sequence[int], start: int, lengths: Sequence[int] = tuple(LAX)) -> None:
    """Count what follows the n-grams before `text[start:]`."""
    for i in range(start, len(text)):
        for n in lengths:
            if n <= i:
                table[tuple(text[i - n : i])][text[i]] += 1


class LlamaCpp(Rule):
    """Token by token, over the draft itself: the follower of the longest n-gram that passes its gates, first of the
    context, else of earlier contexts, else of the corpus. Among several the corpus has its say."""

    name = "llama.cpp n-gram cache"

    def __init__(self, earlier: Counts | None = None, corpus: Counts | None = None) -> None:
        super().__init__()
        self._context = counts()
        self._earlier = earlier or {}
        self._corpus = corpus or {}

    def commit(self, tokens: Sequence[int]) -> None:
        start = len(self.text)
        self.text.extend(tokens)
        count(self._context, self.text, start)

    def propose(self, limit: int) -> list[int]:
        drafts: list[int] = []
        while len(drafts) < limit:
            text = [*self.text[-max(LAX) :], *drafts]
            corpus = self._corpus.get(tuple(text[-STATIC:]), _NONE)
            found = _follower(self._context, LAX, text, corpus)
            if found is None:
                found = _follower(self._earlier, STRICT, text, corpus)
            if found is None:
                found = _follower(self._corpus, {STATIC: STATIC_GATE}, text, _NONE)
            if found is None:
                break
            drafts.append(found)
        return drafts


def _follower(
    table: Counts, gates: Mapping[int, tuple[int, int]], text: list[int], corpus: Mapping[int, int]
) -> int | None:
    for n in sorted(gates, reverse=True):
        followers = table.get(tuple(text[-n:])) if n <= len(text) else None
        if followers is None:
            continue
        token = max(followers, key=lambda token: followers[token] * (100 * corpus.get(token, 0) or 1))
        samples, percent = gates[n]
        seen = followers.total()
        if seen >= samples and 100 * followers[token] >= percent * seen:
            return token
    return None
