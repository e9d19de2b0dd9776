"""How likely a copied token is to be what comes next: a logistic model of what is known of it.

Counts of the suffixes are blended from the shortest to the longest (Dirichlet prior; MacKay and Bauman Peto 1995); the
blend is one input beside whatever else speaks for or against the token, as in the mixers of Mahoney 2005 ("Adaptive
weighing of context models for lossless data compression"). The weights stay as they were fitted: going on to learn
them in each text made them no better.
"""

from __future__ import annotations

UNSEEN = 0.02
"""Chance of a token that nothing speaks for."""
DOUBT = 1.0
"""Places that the shorter suffix's estimate is worth against a longer one's."""

Weights = tuple[float, ...]
Features = tuple[float, ...]
"""The values of NAMES; those of the stores are left out where none was asked or none knew anything."""
NAMES = (
    "one",
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
WEIGHTS: Weights = (-3.88, 2.12, 0.79, 0.41, 1.03, 0.71, 0.56, -0.3, 1.02, 0.41, 0.46, 0.7, -0.48)
"""Fitted to recorded answers: `python -m localspec.bench.fit`."""
