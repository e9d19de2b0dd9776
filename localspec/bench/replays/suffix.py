"""Suffix decoding (Oliaro et al. 2024) as in Arctic Inference, with one tree over prompt and output."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from localspec.bench.replays.rule import Rule


class SuffixDecoding(Rule):
    """For each length of match the most frequent path behind it; the path whose probabilities add up to most is taken.

    A token's probability is its node's count over its parent's, multiplied along the path; a path ends below a
    probability of 0.1, at the end of the text, at the tree's depth, or when it is as long as the match. Equal scores:
    the longer match. Depth 24, factor 1 and the least probability are vLLM's defaults for this method.
    """

    name = "suffix decoding"
    depth, factor, least = 24, 1.0, 0.1

    def __init__(self) -> None:
        super().__init__()
        self._counts: Counter[tuple[int, ...]] = Counter()
        self._followers: dict[tuple[int, ...], list[int]] = defaultdict(list)

    def commit(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.text.append(token)
            for n in range(1, min(self.depth, len(self.text)) + 1):
                path = tuple(self.text[-n:])
                self._counts[path] += 1
                if self._counts[path] == 1:
                    self._followers[path[:-1]].append(token)

    def propose(self, limit: int) -> list[int]:
        best: list[int] = []
        best_score = 0.0
        for n in range(1, min(self.depth, len(self.text) - 1) + 1):
            match = tuple(self.text[-n:])
            if self._counts[match] < 2:
                break
            drafts, score = self._path(match, min(limit, int(n * self.factor)))
            if score >= best_score:
                best, best_score = drafts, score
        return best

    def _path(self, node: tuple[int, ...], limit: int) -> tuple[list[int], float]:
        drafts: list[int] = []
        chance, score = 1.0, 0.0
        while len(drafts) < limit and len(node) < self.depth and self._followers[node]:
            token = max(self._followers[node], key=lambda follower: self._counts[(*node, follower)])
            chance *= self._counts[(*node, token)] / self._counts[node]
            if chance < self.least:
                break
            drafts.append(token)
            score += chance
            node = (*node, token)
        return drafts, score
