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

Features = tuple[float, ...]
"""The values of NAMES; those of the stores are left out where none was asked or none knew anything."""
MODEL = {
    "one": -2.45,
    "context: found": 0.55,
    "context: log odds of the blend": 0.8,
    "context: log of its places": 0.4,
    "context: all places agree": 0.96,
    "context: the shorter suffix's favourite too": -0.71,
    "context: log of its length, where the place does not say so": 0.95,
    "place: it says so": -1.55,
    "place: it says so, and the context knows it too": 2.9,
    "place: log odds of its rate, where it says so": 0.51,
    "place: log odds of its rate, where it says otherwise": -0.28,
    "earlier answer: it says so": -0.75,
    "earlier answer: log odds of its rate, where it says so": 0.67,
    "earlier answer: log odds of its rate, where it says otherwise": -0.46,
    "store: found": 0.58,
    "store: log odds of the blend": 0.3,
    "store: all agree": 0.49,
    "store: log odds of the blend, where it says otherwise": -0.17,
}
"""What the model looks at, and its weights, fitted to recorded answers: `python -m localspec.bench.fit`."""
NAMES, WEIGHTS = tuple(MODEL), tuple(MODEL.values())
