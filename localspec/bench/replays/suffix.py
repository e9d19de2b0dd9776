"""Suffix decoding (Oliaro et al. 2024) as in Arctic Inference: a tree over the text, one over earlier outputs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from localspec.bench.replays.rule import Rule

DEPTH, FACTOR, LEAST = 24, 1.0, 0.1
"""vLLM's defaults for this method."""


class Tree:
    """How often each path of at most DEPTH tokens stood in some texts, and what followed it."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[int, ...]] = Counter()
        self.followers: dict[tuple[int, ...], list[int]] = defaultdict(list)

    def add(self, text: Sequence[int], start: int) -> None:
        """Count the paths that end in `text[start:]`."""
        for end in range(start + 1, len(text) + 1):
            for n in range(1, min(DEPTH, end) + 1):
                path = tuple(text[end - n : end])
                self.counts[path] += 1
                if self.counts[path] == 1:
                    self.followers[path[:-1]].append(path[-1])

    def best(self, text: Sequence[int], least: int, limit: int) -> tuple[list[int], float]:
        """Drafts and score: for each length of match the most frequent path behind it, the one whose probabilities add
        up to most; of equals that of the longer match. Matches must have stood `least` times."""
        best: list[int] = []
        best_score = 0.0
        for n in range(1, min(DEPTH, len(text) - 1) + 1):
            match = tuple(text[-n:])
            if self.counts[match] < least:
                break
            drafts, score = self._path(match, min(limit, int(n * FACTOR)))
            if score >= best_score:
                best, best_score = drafts, score
        return best, best_score

    def _path(self, node: tuple[int, ...], limit: int) -> tuple[list[int], float]:
        """A token's probability is its node's count over its parent's, multiplied along the path, which ends below a
        probability, at the end of the text, at the tree's depth, or when it is as long as the match."""
        drafts: list[int] = []
        chance, score = 1.0, 0.0
        while len(drafts) < limit and len(node) < DEPTH and node in self.followers:
            token = max(self.followers[node], key=lambda follower: self.counts[(*node, follower)])
            chance *= self.counts[(*node, token)] / self.counts[node]
            if chance < LEAST:
                break
            drafts.append(token)
            score += chance
            node = (*node, token)
        return drafts, score


class SuffixDecoding(Rule):
    """The better of the drafts of its own text and of earlier outputs; of equals its own."""

    name = "suffix decoding"

    def __init__(self, earlier: Tree | None = None) -> None:
        super().__init__()
        self._own = Tree()
        self._earlier = earlier

    def commit(self, tokens: Sequence[int]) -> None:
        start = len(self.text)
        self.text.extend(tokens)
        self._own.add(self.text, start)

    def propose(self, limit: int) -> list[int]:
        drafts, score = self._own.best(self.text, 2, limit)
        if self._earlier is not None:
            earlier, theirs = self._earlier.best(self.text, 1, limit)
            if theirs > score:
                return earlier
        return drafts
