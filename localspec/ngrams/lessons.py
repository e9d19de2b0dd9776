"""What an answer teaches: all of it, but not what it repeats without end.

A model that has fallen into a loop writes the same few tokens until it is stopped. Counted, that would outweigh
everything else it ever wrote. Knows nothing of files or counts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from localspec.ngrams.store import LONGEST, ORDERS

LONGEST_PERIOD = 128
"""Tokens."""
LEAST = 24
"""Tokens of repetition, beyond the first period, that are a loop; two more periods where these are longer."""

Lesson = tuple[Sequence[int], int]
"""Tokens, and where what was written begins among them: what is before is context only."""


def lessons(prompt_tail: Sequence[int], answer: Sequence[int]) -> list[Lesson]:
    """The pieces of `answer` outside its loops, of which the first periods stay.

    prompt_tail: what stood before the answer, the last 6 tokens of it at least where there are so many. A piece that
    stands behind a loop has no context: that would be the loop's.
    """
    looping = loops(answer)
    edges = np.flatnonzero(np.diff(looping, prepend=True, append=True)).tolist()
    found: list[Lesson] = []
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        before = list(prompt_tail[-LONGEST:]) if start == 0 else []
        if len(before) + end - start > ORDERS[0]:
            found.append((before + list(answer[start:end]), len(before)))
    return found


def loops(tokens: Sequence[int]) -> NDArray[np.bool_]:
    """Which tokens repeat, in a loop, what stood a period of 1 to 128 tokens before them; shape [tokens]."""
    text = np.asarray(tokens, dtype=np.int64)
    looping = np.zeros(text.size, np.bool_)
    for period in range(1, min(LONGEST_PERIOD, text.size - LEAST) + 1):
        # Runs of equal tokens lie between the places that differ; the text's two ends are such places too.
        differs = np.flatnonzero(text[period:] != text[:-period]) + period
        edges = np.concatenate(([period - 1], differs, [text.size]))
        for run in np.flatnonzero(np.diff(edges) > max(2 * period, LEAST)).tolist():
            looping[edges[run] + 1 : edges[run + 1]] = True
    return looping
