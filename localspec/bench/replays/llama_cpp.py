"""The context level of llama.cpp's n-gram cache (`common/ngram-cache.cpp`), without its dynamic and static levels."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from localspec.bench.replays.rule import Rule

SAMPLES = {1: 2, 2: 2, 3: 1, 4: 1}
"""An n-gram must have been seen so often to be used,"""
PERCENT = {1: 66, 2: 50, 3: 50, 4: 50}
"""and its most frequent follower must hold this share."""


class LlamaCppContext(Rule):
    """Token by token, over the draft itself: the most frequent follower of the longest n-gram that passes its gates."""

    name = "llama.cpp context"

    def __init__(self) -> None:
        super().__init__()
        self._followers: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)

    def commit(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            for n in SAMPLES:
                if n <= len(self.text):
                    self._followers[tuple(self.text[-n:])][token] += 1
            self.text.append(token)

    def propose(self, limit: int) -> list[int]:
        drafts: list[int] = []
        while len(drafts) < limit:
            found = self._next([*self.text[-max(SAMPLES) :], *drafts])
            if found is None:
                break
            drafts.append(found)
        return drafts

    def _next(self, text: list[int]) -> int | None:
        for n in sorted(SAMPLES, reverse=True):
            followers = self._followers.get(tuple(text[-n:])) if n <= len(text) else None
            if followers is None:
                continue
            token, hits = followers.most_common(1)[0]
            seen = followers.total()
            if seen >= SAMPLES[n] and 100 * hits >= PERCENT[n] * seen:
                return token
        return None
