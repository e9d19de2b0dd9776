"""Whether a text ends in repetition without end, the way small models do. Knows token ids only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

PERIOD = 64
"""The longest piece, in tokens, whose repetition is looked for."""
TIMES = 4
"""How often a piece has to stand in a row, the first included."""
STRETCH = 48
"""How many tokens they have to be, all together."""


def repeats(tokens: Sequence[int]) -> int | None:
    """Where the repetition at the end begins, behind its first piece; None where there is none.

    `tokens[:repeats(tokens)]` has the piece once.
    """
    text = np.asarray(tokens, dtype=np.int64)
    for period in range(1, min(PERIOD, len(text) // TIMES) + 1):
        apart = np.flatnonzero(text[period:] != text[:-period])
        start = int(apart[-1]) + 1 if len(apart) else 0
        if len(text) - start >= max(TIMES * period, STRETCH):
            return start + period
    return None
