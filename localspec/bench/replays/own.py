"""localspec's own n-gram drafter as a rule: it stops by its own confidence, at one fixed bound, without any clock."""

from __future__ import annotations

from collections.abc import Sequence

from localspec.bench.replays.rule import Rule
from localspec.drafters.ngram import NgramDrafter
from localspec.drafters.protocol import Draw
from localspec.noise import Noise
from localspec.settings import Settings

LEAST = 0.2
"""A draft ends before the first token that is less likely than this to be accepted along with all before it."""


class Localspec(Rule):
    """The drafter's proposal as long as the chance of the whole path is at least `least`.

    A further draft adds as many accepted tokens as its path is likely, and wastes a row otherwise: of all rules that
    waste as much, one bound for every path accepts most.
    """

    name = "localspec"

    def __init__(self, least: float = LEAST) -> None:
        super().__init__()
        self.least = least
        self.confidence: list[float] = []
        """Of the latest proposal, as far as it was kept."""
        self._drafter = NgramDrafter()
        self._draw = Draw(Settings(), Noise(0), 2**31 - 1)

    def commit(self, tokens: Sequence[int]) -> None:
        super().commit(tokens)
        self._drafter.commit(tokens)

    def propose(self, limit: int) -> list[int]:
        proposal = self._drafter.propose(limit, self._draw)
        self.confidence = []
        path = 1.0
        for chance in (proposal.confidence or []) if proposal else []:
            path *= chance
            if path < self.least:
                break
            self.confidence.append(chance)
        return proposal.tokens[: len(self.confidence)] if proposal else []
