"""The suffix automaton against brute force: matches, counts, places, favourites, and taking tokens back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.drafters.automaton import DEEPEST, ROOT, UNDOABLE, SuffixAutomaton

TEXTS = st.lists(st.integers(0, 3), max_size=DEEPEST)
"""Short enough for all places to be counted."""


def _ends(text: Sequence[int], part: Sequence[int]) -> list[int]:
    """Where `part` ends in `text`."""
    n = len(part)
    return [end for end in range(n, len(text) + 1) if list(text[end - n : end]) == list(part)]


def _longest_match(text: Sequence[int]) -> int:
    """Length of the longest suffix that stood before."""
    return max((n for n in range(1, len(text)) if len(_ends(text, text[-n:])) > 1), default=0)


def _after(automaton: SuffixAutomaton, part: Sequence[int]) -> int:
    state = ROOT
    for token in part:
        state = automaton.step(state, token)
        if state < 0:
            break
    return state


def _built(text: Sequence[int]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    automaton.extend(text)
    return automaton


def _content(automaton: SuffixAutomaton) -> dict[str, Any]:
    return {name: value for name, value in vars(automaton).items() if name != "_undo"}


def _check(automaton: SuffixAutomaton, text: list[int]) -> None:
    assert automaton.size == len(text)
    assert automaton.length[automaton.link[automaton.whole]] == _longest_match(text) if text else True
    for start in range(len(text)):
        for end in range(start + 1, len(text) + 1):
            part = text[start:end]
            state, ends = _after(automaton, part), _ends(text, part)
            assert automaton.count[state] == len(ends)
            assert automaton.last[state] == ends[-1]
            behind = [text[place] for place in ends if place < len(text)]
            assert {token for token, _ in automaton.followers(state)} == set(behind)
            for token, target in automaton.followers(state):
                assert automaton.count[target] == behind.count(token)
                assert automaton.step(state, token) == target
            if behind:
                most = max(behind.count(token) for token in behind)
                assert behind.count(automaton.favourite[state]) == most
            else:
                assert automaton.favourite[state] == -1


@given(TEXTS)
def test_every_substring_has_its_places_followers_and_favourite(text: list[int]) -> None:
    _check(_built(text), text)


@given(TEXTS, st.lists(st.integers(0, 3), max_size=4))
def test_nothing_else_is_a_substring(text: list[int], part: list[int]) -> None:
    assert (_after(_built(text), part) >= 0) == (not part or bool(_ends(text, part)))


@given(TEXTS)
def test_suffix_links_lead_through_all_suffixes_that_differ_in_their_places(text: list[int]) -> None:
    automaton = _built(text)
    state, lengths = automaton.whole, set()
    while state > ROOT:
        lengths.add(automaton.length[state])
        state = automaton.link[state]
    expected = {
        n for n in range(1, len(text) + 1) if n == len(text) or _ends(text, text[-n:]) != _ends(text, text[-n - 1 :])
    }
    assert lengths == expected


@given(TEXTS, st.integers(0, DEEPEST), TEXTS)
def test_tokens_taken_back_leave_nothing_behind(text: list[int], steps: int, more: list[int]) -> None:
    steps = min(steps, len(text))
    kept = text[: len(text) - steps]
    automaton = _built(text)
    assert automaton.shorten(steps)
    assert _content(automaton) == _content(_built(kept))
    automaton.extend(more)
    assert _content(automaton) == _content(_built(kept + more))


def test_more_than_can_be_taken_back_is_left_alone() -> None:
    text = [i % 7 for i in range(UNDOABLE + 10)]
    automaton = _built(text)
    assert not automaton.shorten(UNDOABLE + 1)
    assert _content(automaton) == _content(_built(text))
    assert automaton.shorten(UNDOABLE)
    assert not automaton.shorten(1)
    assert _content(automaton) == _content(_built(text[:10]))


def test_a_repetition_without_end_is_counted_where_it_is_longest() -> None:
    text = [5] * 500
    automaton = _built(text)
    longest = automaton.link[automaton.whole]
    assert automaton.length[longest] == 499
    assert automaton.count[longest] == 2
    assert automaton.count[_after(automaton, [5])] == DEEPEST + 1
    assert automaton.favourite[longest] == 5


def _faulty(name: str) -> SuffixAutomaton:
    """An automaton with one part left out."""
    automaton = SuffixAutomaton()
    if name == "never prefers":
        automaton._prefer = lambda *_: None  # type: ignore[method-assign]
    elif name == "keeps the first transition only":
        lead = automaton._lead
        automaton._lead = lambda state, token, target, log: (  # type: ignore[method-assign]
            lead(state, token, target, log) if automaton.favourite[state] < 0 else None
        )
    elif name == "forgets to log":
        lead = automaton._lead
        automaton._lead = lambda state, token, target, log: lead(state, token, target, [])  # type: ignore[method-assign]
    return automaton


@pytest.mark.parametrize("fault", ["never prefers", "keeps the first transition only", "forgets to log"])
def test_faults_are_found(fault: str) -> None:
    text = [1, 2, 1, 2, 3, 1, 2, 3, 2, 1]
    automaton = _faulty(fault)

    def run() -> None:
        automaton.extend(text)
        _check(automaton, text)
        automaton.shorten(4)
        assert _content(automaton)["count"] == _content(_built(text[:-4]))["count"]
        _check(automaton, text[:-4])

    with pytest.raises((AssertionError, IndexError)):
        run()
