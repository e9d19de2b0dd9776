"""What an answer teaches."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localspec.ngrams.lessons import LEAST, LONGEST_PERIOD, lessons, loops


def prose(count: int, seed: int = 1) -> list[int]:
    return [random.Random(seed * 10_000 + i).randrange(1_000, 40_000) for i in range(count)]


def slow_loops(text: list[int]) -> list[bool]:
    """By the definition: every period, every stretch."""
    looping = [False] * len(text)
    for period in range(1, LONGEST_PERIOD + 1):
        start = period
        while start < len(text):
            end = start
            while end < len(text) and text[end] == text[end - period]:
                end += 1
            if end - start >= max(2 * period, LEAST):
                looping[start:end] = [True] * (end - start)
            start = end + 1
    return looping


@settings(max_examples=150)
@given(st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(1, 30)), max_size=4))
def test_loops_are_what_the_definition_says(parts: list[tuple[list[int], int]]) -> None:
    text = [token for pattern, times in parts for token in pattern * times]
    assert loops(text).tolist() == slow_loops(text)


def test_an_answer_is_one_lesson_behind_the_end_of_its_prompt() -> None:
    tail, answer = prose(20), prose(50, 2)
    assert lessons(tail, answer) == [(tail[-6:] + answer, 6)]
    assert lessons([], answer) == [(answer, 0)]
    assert lessons(tail[:2], answer[:1]) == [(tail[:2] + answer[:1], 2)]


def test_what_is_too_short_to_have_a_context_is_no_lesson() -> None:
    assert lessons([], [1, 2]) == lessons([1], [2]) == lessons([1, 2], []) == lessons([], []) == []


@pytest.mark.parametrize("period", [1, 2, 3, 17, 127, 128])
def test_a_loop_to_the_end_teaches_its_first_period(period: int) -> None:
    answer, loop = prose(200), prose(period, 3)
    assert lessons([7], answer + loop * (2_000 // period)) == [([7, *answer, *loop], 1)]
    # The answer may have begun with it.
    assert lessons([7, 8], loop * (2_000 // period)) == [([7, 8, *loop], 2)]


def test_a_longer_period_is_no_loop() -> None:
    loop = prose(LONGEST_PERIOD + 1)
    assert lessons([], loop * 5) == [(loop * 5, 0)]


@pytest.mark.parametrize(("period", "least"), [(1, 24), (12, 24), (13, 26), (50, 100)])
def test_how_long_a_repetition_may_be(period: int, least: int) -> None:
    before, pattern, after = prose(10), prose(period, 2), prose(30, 3)
    for repeated in (least - 1, least):
        stretch = (pattern * (repeated // period + 2))[: period + repeated]
        found = lessons([], before + stretch + after)
        if repeated < least:
            assert found == [(before + stretch + after, 0)]
        else:
            assert found == [(before + pattern, 0), (after, 0)]


def test_pieces_behind_a_loop_take_no_context_from_it() -> None:
    a, b, c = prose(40), prose(40, 2), prose(40, 3)
    found = lessons([1, 2, 3, 4, 5, 6, 7], a + [5] * 60 + b + [6, 7] * 40 + c)
    assert found == [([2, 3, 4, 5, 6, 7, *a, 5], 6), ([*b, 6, 7], 0), (c, 0)]


def test_ordinary_repetition_stays() -> None:
    items = [token for i in range(12) for token in (5, 9, *prose(6, i), 13)]
    answer = [8, 8, *items, 3, 3, 3, 3]
    assert lessons([], answer) == [(answer, 0)]
