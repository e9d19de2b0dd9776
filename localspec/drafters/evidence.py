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
PRIOR = (0.0, 1.0, 0.5)
"""Weights before any token was seen: constant, log odds of the blend, log of the match's length."""
RATE = 0.02
"""Step of the weights per token."""
_LONGEST = 32
"""Longer matches count as this long."""

Features = tuple[float, float]
Weights = tuple[float, float, float]


def blend(counts: Iterable[tuple[int, int]]) -> float:
    """Chance of a token by (how often it followed, how often anything did) of each suffix, the shortest first."""
    chance = UNSEEN
    for hits, seen in counts:
        chance = (hits + DOUBT * chance) / (seen + DOUBT)
    return chance


def features(chance: float, matched: int) -> Features:
    """What the model looks at: the blend, strictly between 0 and 1, and the tokens that matched, at least 1."""
    return log(chance / (1.0 - chance)), log(min(matched, _LONGEST))


class Evidence:
    """The model and its weights in one text."""

    def __init__(self) -> None:
        self.weights: Weights = PRIOR

    def chance(self, seen: Features) -> float:
        """Chance that the token is what comes next."""
        constant, odds, length = self.weights
        return 1.0 / (1.0 + exp(-(constant + odds * seen[0] + length * seen[1])))

    def observe(self, seen: Features, hit: bool) -> None:
        """Whether it was."""
        constant, odds, length = self.weights
        step = RATE * (hit - self.chance(seen))
        self.weights = (constant + step, odds + step * seen[0], length + step * seen[1])
