"""How likely a copied token is to be what comes next: counts, the length of the match, and how copies fared so far.

Counts of the suffixes are blended from the shortest to the longest (Dirichlet prior; MacKay and Bauman Peto 1995), and
the blend is judged by a logistic model whose weights go on learning from every token of the text, as in the mixers of
Mahoney 2005 ("Adaptive weighing of context models for lossless data compression"): where copies hold, as in an edit,
the next one is trusted sooner than in free prose.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import exp, log

UNSEEN = 0.02
"""Chance of a token that nothing speaks for."""
DOUBT = 2.0
"""Places that the shorter suffix's estimate is worth against a longer one's."""
PRIOR = (-2.2, 0.55, 1.0, 0.5, 1.85)
"""Weights before any token was seen: of 1, of the blend's log odds, of the logs of the match's length and of its
places, and of whether all of these places had one follower. Fitted to the recorded streams."""
RATE = 0.02
"""Step of the weights per token."""
_LONGEST = 32
"""Longer matches count as this long,"""
_MOST = 32
"""and more places as this many."""

Features = tuple[float, float, float, float]
Weights = tuple[float, float, float, float, float]


def blend(counts: Iterable[tuple[int, int]]) -> float:
    """Chance of a token by (how often it followed, how often anything did) of each suffix, the shortest first."""
    chance = UNSEEN
    for hits, seen in counts:
        chance = (hits + DOUBT * chance) / (seen + DOUBT)
    return chance


def features(chance: float, matched: int, places: int, agreed: bool) -> Features:
    """What the model looks at.

    chance: the blend, strictly between 0 and 1. matched: tokens that matched, at least 1. places: earlier places of the
    match, at least 1. agreed: whether the same token followed at all of them.
    """
    return log(chance / (1.0 - chance)), log(min(matched, _LONGEST)), log(min(places, _MOST)), float(agreed)


class Evidence:
    """The model and its weights in one text."""

    def __init__(self) -> None:
        self.weights: Weights = PRIOR

    def chance(self, seen: Features) -> float:
        """Chance that the token is what comes next."""
        constant, odds, length, places, agreed = self.weights
        total = constant + odds * seen[0] + length * seen[1] + places * seen[2] + agreed * seen[3]
        return 1.0 / (1.0 + exp(-total))

    def observe(self, seen: Features, hit: bool) -> None:
        """Whether it was."""
        constant, odds, length, places, agreed = self.weights
        step = RATE * (hit - self.chance(seen))
        self.weights = (
            constant + step,
            odds + step * seen[0],
            length + step * seen[1],
            places + step * seen[2],
            agreed + step * seen[3],
        )
