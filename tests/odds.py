"""Statistical checks whose odds of a false alarm are stated, for tests: each returns a p-value."""

from __future__ import annotations

import math

import numpy as np

from localspec.verify.odds import chi_square, chi_square_tail

__all__ = ["FALSE_ALARM", "chi_square", "chi_square_tail", "kolmogorov_smirnov"]

FALSE_ALARM = 1e-6
"""Odds at which a check calls a deviation a bug. Seeds are fixed, so a green test stays green; these are the odds that
a right program met when its seed was first chosen."""


def kolmogorov_smirnov(cumulative: np.ndarray) -> float:
    """p-value (asymptotic) of values already put through their distribution function being uniform."""
    n = len(cumulative)
    u = np.sort(cumulative)
    steps = np.arange(n)
    distance = max(float((u - steps / n).max()), float(((steps + 1) / n - u).max()))
    lam = (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n)) * distance
    return max(min(2 * sum((-1) ** (k - 1) * math.exp(-2 * (k * lam) ** 2) for k in range(1, 101)), 1.0), 0.0)
