"""Statistical checks whose odds of a false alarm are stated, for tests: each raises AssertionError or returns p."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

FALSE_ALARM = 1e-6
"""Odds at which a check calls a deviation a bug. Seeds are fixed, so a green test stays green; these are the odds that
a right program met when its seed was first chosen."""


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


def chi_square(counts: Sequence[int] | np.ndarray, probabilities: Sequence[float] | np.ndarray) -> float:
    """p-value of `counts` under `probabilities`; cells expecting less than 5 are put together.

    A count in a cell of probability 0 is a p-value of 0.
    """
    observed, p = np.asarray(counts, np.float64).ravel(), np.asarray(probabilities, np.float64).ravel()
    assert observed.shape == p.shape
    if observed[p <= 0].sum():
        return 0.0
    expected = p / p.sum() * observed.sum()
    small = expected < 5
    merged_o = np.append(observed[~small], observed[small].sum())
    merged_e = np.append(expected[~small], expected[small].sum())
    keep = merged_e > 0
    merged_o, merged_e = merged_o[keep], merged_e[keep]
    if len(merged_o) < 2:
        return 1.0
    statistic = float(((merged_o - merged_e) ** 2 / merged_e).sum())
    return chi_square_tail(statistic, len(merged_o) - 1)


def kolmogorov_smirnov(cumulative: np.ndarray) -> float:
    """p-value (asymptotic) of values already put through their distribution function being uniform."""
    n = len(cumulative)
    u = np.sort(cumulative)
    steps = np.arange(n)
    distance = max(float((u - steps / n).max()), float(((steps + 1) / n - u).max()))
    lam = (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n)) * distance
    return max(min(2 * sum((-1) ** (k - 1) * math.exp(-2 * (k * lam) ** 2) for k in range(1, 101)), 1.0), 0.0)
