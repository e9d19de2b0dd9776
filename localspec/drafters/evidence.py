"""How likely a copied token is to be what comes next: counts, the length of the match, and how copies fared so far.

Counts of the suffixes are blended from the shortest to the longest (Dirichlet prior; MacKay and Bauman Peto 1995), and
the blend is judged by a logistic model whose weights go on learning from every token of the text, as in the mixers of
Mahoney 2005 ("Adaptive weighing of context models for lossless data compression"): where copies hold, as in an edit,
the next one is trusted sooner than in free prose.
"""

from __future__ import annotations

from math import exp
from operator import mul

UNSEEN = 0.02
"""Chance of a token that nothing speaks for."""
DOUBT = 2.0
"""Places that the shorter suffix's estimate is worth against a longer one's."""
RATE = 0.02
"""Step of the weights per token."""

Weights = tuple[float, ...]
Features = tuple[float, ...]
"""The values of NAMES; those of the stores are left out where none was asked or none knew anything."""
NAMES = (
    "one",
    "lately: log odds of how often the likeliest came",
    "context: found",
    "context: log odds of the blend",
    "context: log of its places",
    "context: all places agree",
    "place: it says so",
    "place: log odds of its rate, where it says so",
    "place: log odds of its rate, where it says otherwise",
    "store: found",
    "store: log odds of the blend",
    "store: log of the order",
    "store: all agree",
    "store: log odds of the blend, where it says otherwise",
)
"""What the model looks at."""
PRIOR: Weights = (-3.7, 0.1, 2.38, 0.88, 0.29, 1.16, 0.7, 0.47, -0.52, 0.79, 0.21, 0.48, 1.26, -0.42)
"""Weights before any token was seen (`python -m localspec.bench.fit`)."""


class Evidence:
    """The model and its weights in one text."""

    def __init__(self, weights: Weights = PRIOR) -> None:
        self.weights = weights

    def chance(self, seen: Features) -> float:
        """Chance that the token is what comes next."""
        return 1.0 / (1.0 + exp(-sum(map(mul, self.weights, seen))))

    def observe(self, seen: Features, chance: float, hit: bool) -> None:
        """Whether it was; `chance`: what was said of it."""
        step, weights = RATE * (hit - chance), self.weights
        moved = [weight + step * value for weight, value in zip(weights, seen, strict=False)]
        self.weights = (*moved, *weights[len(moved) :])
