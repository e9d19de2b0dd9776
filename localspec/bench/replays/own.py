"""localspec's own n-gram drafter as a rule: it stops by its own confidence, at one fixed bound, without any clock."""

from __future__ import annotations

from collections.abc import Sequence

from localspec.bench.replays.rule import Rule
from localspec.drafters.ngram import NgramDrafter
from localspec.drafters.protocol import Draw
from localspec.noise import Noise
from localspec.settings import Settings

LEAST = 0.07
"""A draft ends before the first token whose worth is less than this."""
_FURTHER = 4
"""Drafts beyond the limit that are asked for, to see what the pass behind it would bring."""


def worthwhile(confidence: Sequence[float], least: float) -> int:
    """How many drafts to keep of some with these chances, each given those before it.

    A draft whose path has chance P is accepted with P and wasted with 1 - P. Accepted, it saves its share of a pass:
    1/v where the pass behind it would bring v tokens, itself included, had the draft ended before it. So each is worth
    P/v against 1 - P, and kept where that is at least `least` against 1 - `least`. A copy that may be one is thus
    tried with a token or two, and followed at length once these were right: the next pass knows more.
    """
    value = [1.0]
    for chance in reversed(confidence):
        value.append(1.0 + chance * value[-1])
    value.reverse()
    path = 1.0
    for n, chance in enumerate(confidence):
        path *= chance
        if path * (1 - least) < least * (1 - path) * value[n + 1]:
            return n
    return len(confidence)


class Localspec(Rule):
    """The drafter's proposal as far as each draft is worth the row that it may waste."""

    name = "localspec"

    def __init__(self, least: float = LEAST, drafter: NgramDrafter | None = None) -> None:
        super().__init__()
        self.least = least
        self.confidence: list[float] = []
        """Of the latest proposal, as far as it was kept."""
        self._drafter = NgramDrafter() if drafter is None else drafter
        self._draw = Draw(Settings(), Noise(0), 2**31 - 1)

    def commit(self, tokens: Sequence[int]) -> None:
        super().commit(tokens)
        self._drafter.commit(tokens)

    def propose(self, limit: int) -> list[int]:
        proposal = self._drafter.propose(limit + _FURTHER, self._draw)
        confidence = (proposal.confidence or []) if proposal else []
        kept = min(worthwhile(confidence, self.least), limit)
        self.confidence = confidence[:kept]
        return proposal.tokens[:kept] if proposal else []
