"""Statistics whose odds of a false alarm are known: the chi-square test of counts. Knows nothing of models."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def chi_square_tail(statistic: float, freedom: int) -> float:
    """P(chi-square with `freedom` degrees >= statistic): the regularised upper incomplete gamma function."""
    a, x = freedom / 2, statistic / 2
    if x <= 0:
        return 1.0
    front = math.exp(-x + a * math.log(x) - math.lgamma(a))
    if x < a + 1:
        term = total = 1 / a
        n = a
        while term > total * 1e-16:
            n += 1
            term *= x / n
            total += term
        return max(1 - total * front, 0.0)
    b, c = x + 1 - a, 1e300
    d = h = 1 / b
    for i in range(1, 10_000):  # Lentz's continued fraction
        an = -i * (i - a)
        b += 2
        d = 1 / (an * d + b)
        c = b + an / c
        h *= d * c
        if abs(d * c - 1) < 1e-15:
            break
    return front * h


def chi_square(
    counts: Sequence[int] | np.ndarray, probabilities: Sequence[float] | np.ndarray, *, least: float = 5.0
) -> float:
    """p-value of `counts` under `probabilities`; cells that expect less than `least` are put together.

    A count in a cell of probability 0 is a p-value of 0.
    """
    observed, p = np.asarray(counts, np.float64).ravel(), np.asarray(probabilities, np.float64).ravel()
    if observed.shape != p.shape:
        raise ValueError("one probability per count")
    if observed[p <= 0].sum():
        return 0.0
    expected = p / p.sum() * observed.sum()
    order = np.argsort(expected, kind="stable")
    observed, expected = observed[order], expected[order]
    pool = int((expected < least).sum())
    # Together they may still expect too little, and one lucky draw would look impossible: the next one joins them.
    while 0 < pool < len(expected) and expected[:pool].sum() < least:
        pool += 1
    if pool:
        observed = np.append(observed[:pool].sum(), observed[pool:])
        expected = np.append(expected[:pool].sum(), expected[pool:])
    if len(expected) < 2:
        return 1.0
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return chi_square_tail(statistic, len(expected) - 1)
