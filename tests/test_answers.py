"""The latest answers, whole: the longest match is found, exactly, and what is kept is bounded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localspec.ngrams import answers as module
from localspec.ngrams.answers import DEEPEST, END, SHORTEST, Answers, joined

NONE = np.empty(0, np.uint32)
IDS = st.integers(0, 2) | st.sampled_from([END - 1, 1 << 20])
TEXTS = st.lists(IDS, max_size=30)


def kept(*texts: Sequence[int]) -> Answers:
    return Answers(joined(NONE, texts))


def slow_longest(ids: Sequence[int], text: Sequence[int]) -> tuple[int, int]:
    """By the definition: every place, token by token."""
    best = 0, 0
    for place in range(1, len(ids)):
        if END in (ids[place], ids[place - 1]):
            continue
        matched = 0
        while matched < min(place, len(text), DEEPEST) and ids[place - 1 - matched] == text[-1 - matched]:
            matched += 1
        if matched >= max(SHORTEST, best[0]):
            best = matched, place
    return best


def differs(texts: Sequence[Sequence[int]], text: Sequence[int]) -> bool:
    found = kept(*texts)
    return found.longest(text) != slow_longest(found.tokens.tolist(), text)


@settings(max_examples=200)
@given(st.lists(TEXTS, max_size=5), TEXTS, st.integers(0, 4), st.integers(0, 30))
def test_the_longest_match_is_what_the_definition_says(
    texts: list[list[int]], text: list[int], which: int, end: int
) -> None:
    assert not differs(texts, text)
    if texts:  # something that stands there, up to some point of it
        assert not differs(texts, text + texts[which % len(texts)][:end])


LONG = list(range(100, 100 + 2 * DEEPEST))
KNOWN: list[tuple[list[list[int]], list[int], tuple[int, int]]] = [
    ([[1, 2, 3]], [1, 2], (2, 2)),
    ([[1, 2, 3]], [9, 1, 2], (2, 2)),
    ([[1, 2]], [1, 2], (0, 0)),  # nothing behind it
    ([[1], [2, 3]], [1, 2], (0, 0)),  # no match reaches over an end
    ([[7, 1, 2, 3], [8, 1, 2, 4]], [1, 2], (2, 8)),  # the latest
    ([[7, 1, 2, 3], [8, 1, 2, 4]], [7, 1, 2], (3, 3)),  # the longest
    ([[7, 1, 2, 3], [8, 1, 2, 4]], [6, 7, 1, 2], (3, 3)),
    ([[1, 2, 5], [END - 1, 1, 2, 6], [1, 2, 7]], [3, 1, 2], (2, 11)),  # the beginnings of answers among them
    ([LONG, [1, *LONG[1:]]], LONG[: 2 * DEEPEST - 1], (DEEPEST, 4 * DEEPEST)),  # beyond the deepest, the latest
]


@pytest.mark.parametrize(("texts", "text", "found"), KNOWN)
def test_matches(texts: list[list[int]], text: list[int], found: tuple[int, int]) -> None:
    assert kept(*texts).longest(text) == found


def _unsorted(tokens: Any) -> Any:
    return np.arange(SHORTEST, max(tokens.size - 1, SHORTEST))


@pytest.mark.parametrize(
    ("name", "fault"),
    [("_PLACES", 1), ("_ABOVE", b"\x00\x00\x00\x07"), ("_sorted", _unsorted)],
)
def test_faults_are_found(name: str, fault: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, name, fault)
    assert any(kept(*texts).longest(text) != found for texts, text, found in KNOWN)


def test_of_very_many_places_some_are_looked_at() -> None:
    """Where a few tokens stood hundreds of times; the text behind one of them is right all the same."""
    found = kept(*([1, 2, 1_000 + i] for i in range(500)))
    matched, place = found.longest([1, 2])
    assert matched == 2
    assert found.ids[place] >= 1_000


def test_answers_are_joined_and_the_latest_stay() -> None:
    tokens = joined(NONE, [[1, 2, 3], [4]])
    assert tokens.tolist() == [1, 2, 3, END, 4, END]
    assert tokens.dtype == np.uint32
    assert joined(tokens, []).tolist() == tokens.tolist()
    assert joined(tokens, [[5, 6]], 5).tolist() == [4, END, 5, 6, END]
    assert joined(tokens, [list(range(9))], 3).tolist() == [7, 8, END]
    assert joined(tokens, [[5, 6]], 0).size == 0
    assert joined(tokens, [], 4).tolist() == [3, END, 4, END]


def test_few_tokens_or_none() -> None:
    for texts in ([], [[]], [[1]], [[1, 2]]):
        for text in ([], [1], [1, 2], [2, 1, 2]):
            assert kept(*texts).longest(text) == (0, 0)
