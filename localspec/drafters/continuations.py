"""What may come next at a point of a text, and how likely each is.

Three things are asked: what followed the longest suffixes where they stood before, what stands at the place that the
text is being copied from, and what followed the same tokens in earlier sessions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from math import log
from typing import TYPE_CHECKING

from localspec.drafters.alignment import LONG, Alignment, new_rate, odds, right_again
from localspec.drafters.automaton import ROOT, UNDOABLE, SuffixAutomaton
from localspec.drafters.evidence import DOUBT, UNSEEN, Features
from localspec.drafters.evidence import chance as chance_of
from localspec.tokens import Level

if TYPE_CHECKING:
    from localspec.ngrams.store import Found, NgramStore

Levels = Sequence[tuple[Level, Callable[[], "NgramStore"]]]
"""What earlier sessions left, by level; stores are asked for anew each time, since they grow."""

_SUFFIXES = 2
"""Suffixes that are asked for what followed them, the longest first; only those that differ in their places count."""
_RECENT = 6
"""Tokens that stores look at."""
_MOST = 128
"""Longer matches, and more places, count as so many."""
_LOG = [0.0, *(log(n) for n in range(1, _MOST + 1))]
At = tuple[int, int, int, float, tuple[int, ...]]
"""A point in the text, or behind it on the way of a draft: the state of the longest suffix that stood before; its
length; the place that the next token is expected to be copied from, an index in the text, -1 for none; how often this
place was right lately; the last tokens, for the stores, where there are any."""
Step = tuple[float, int, Level, At, Features]
"""A token that may come next: its chance, its id, who knew it, the point behind it, and what the chance was judged by.
Tuples without names, here and above: they are made for every token and draft, and names cost ten times as much."""


class Continuations:
    """Follows one text token by token."""

    def __init__(self, shortest: int = 1, levels: Levels = ()) -> None:
        """shortest: tokens of the context that must match for it to be asked."""
        self.text: list[int] = []
        self._shortest = shortest
        self._levels = tuple(levels)
        self._automaton = SuffixAutomaton()
        self._alignment = Alignment()
        self._undo: deque[Alignment] = deque(maxlen=UNDOABLE)
        """Before each of the latest tokens."""
        self._end: At | None = None
        """The end of the text, once it was asked for,"""
        self._at_end: list[Step] | None = None
        """and what may follow there: asked whether to propose, and again for the proposal."""

    def append(self, token: int) -> None:
        """Go on by one token."""
        automaton, text = self._automaton, self.text
        self._undo.append(self._alignment)
        self._end = self._at_end = None
        automaton.append(token)
        text.append(token)
        matched = automaton.length[automaton.link[automaton.whole]]
        self._alignment = self._alignment.after(text, token, matched, automaton.place)

    def shorten(self, steps: int) -> bool:
        """Take back the last tokens; False when they are more than can be taken back, and nothing was done."""
        if not self._automaton.shorten(steps):
            return False
        self._end = self._at_end = None
        for _ in range(steps):
            self._alignment = self._undo.pop()
            self.text.pop()
        return True

    def now(self) -> At:
        """The end of the text."""
        if self._end is None:
            automaton, alignment = self._automaton, self._alignment
            state = automaton.link[automaton.whole]
            matched = automaton.length[state] if state > ROOT else 0
            if matched < self._shortest:
                state, matched = ROOT, 0
            recent = tuple(self.text[-_RECENT:]) if self._levels else ()
            self._end = state, matched, alignment.place, alignment.rate, recent
        return self._end

    def steps(self, at: At, further: int = 0) -> list[Step]:
        """What may follow: the favourites of the suffixes, the token at the place copied from, and what stores know;
        with `further` so many followers of the longest suffix too. Each token once, in no order."""
        if at is not self._end or further:
            return self._steps(at, further)
        if self._at_end is None:
            self._at_end = self._steps(at, 0)
        return self._at_end

    def _steps(self, at: At, further: int) -> list[Step]:
        automaton = self._automaton
        link, favourite = automaton.link, automaton.favourite
        state, _, place, _, recent = at
        suffixes: list[int] = []
        while state > ROOT and len(suffixes) < _SUFFIXES:
            if favourite[state] >= 0:
                suffixes.append(state)
            state = link[state]
        tokens = [favourite[suffix] for suffix in suffixes]
        if further and suffixes:
            tokens += [token for token, _ in islice(automaton.followers(suffixes[0]), further)]
        expected = self.text[place] if 0 <= place < len(self.text) else -1
        if expected >= 0:
            tokens.append(expected)
        stored, level = self._stored(recent) if recent else ([], "context")
        if stored:
            tokens.append(stored[-1].token)
        if len(tokens) > 1:
            tokens = list(dict.fromkeys(tokens))
        return [self._step(token, at, suffixes, expected, stored, level) for token in tokens]

    def _step(self, token: int, at: At, suffixes: list[int], expected: int, stored: list[Found], level: Level) -> Step:
        # For every token of the text and every draft: no call that can be spared.
        automaton = self._automaton
        count, last, size, step = automaton.count, automaton.last, automaton.size, automaton.step
        _, matched, place, rate, recent = at
        state, chance, places = ROOT, UNSEEN, 0
        for suffix in reversed(suffixes):
            behind = step(suffix, token)
            # The place at the end of the context has no follower yet.
            places = count[suffix] - (last[suffix] == size)
            if behind >= 0:
                state, longest = behind, suffix
                chance = (count[behind] + DOUBT * chance) / (places + DOUBT)
            else:
                chance = DOUBT * chance / (places + DOUBT)
        here = sure = unsure = 0.0
        if expected == token:
            level, here, sure = "context", 1.0, odds(rate)
            rate, place = right_again(rate), place + 1
        elif expected >= 0:
            unsure = odds(rate)
        features: Features
        if state > ROOT:
            if longest != suffixes[0]:
                matched = automaton.length[longest]
            level = "context"
            features = (
                1.0,
                1.0,
                log(chance / (1.0 - chance)),
                _LOG[places if places < _MOST else _MOST],
                0.0 if automaton.branches(suffixes[0]) else 1.0,
                here,
                sure,
                unsure,
            )
        else:
            features = (1.0, 0.0, 0.0, 0.0, 0.0, here, sure, unsure)
            state, matched = self._elsewhere(token, suffixes)
        if place < 0 and matched >= LONG - 1:
            place, rate = last[state], new_rate(matched + 1)
        if recent:
            recent = (*recent[1:], token)
            if stored:
                features += _of_stores(stored, token)
        behind_it = state, matched + 1, place, rate, recent
        return chance_of(features), token, level, behind_it, features

    def matched(self, at: At, level: Level) -> int:
        """Tokens before a point that stood before, as far as `level` knows."""
        if level == "context":
            return at[1]
        stored, _ = self._stored(at[4])
        return stored[-1].order if stored else 0

    def _stored(self, recent: tuple[int, ...]) -> tuple[list[Found], Level]:
        """What the level with the longest match knows; of equals the first."""
        stored: list[Found] = []
        level: Level = "context"
        for name, store in self._levels:
            found = store().matches(recent)
            if len(found) > len(stored):
                stored, level = found, name
        return stored, level

    def _elsewhere(self, token: int, suffixes: list[int]) -> tuple[int, int]:
        """The state behind the longest suffix that the token ever followed, other than those asked, and the suffix's
        length; the root, and -1, where it never stood."""
        automaton = self._automaton
        suffix = automaton.link[suffixes[-1]] if suffixes else ROOT
        while suffix >= ROOT:
            state = automaton.step(suffix, token)
            if state >= 0:
                return state, automaton.length[suffix]
            suffix = automaton.link[suffix]
        return ROOT, -1


def _of_stores(stored: list[Found], token: int) -> Features:
    """What the longest known order says of a token, and what it says of another where it says that one."""
    best = stored[-1]
    chance = UNSEEN
    for found in stored:
        hits = found.hits if found.token == best.token else 0
        chance = (hits + DOUBT * chance) / (found.seen + DOUBT)
    blended = log(chance / (1.0 - chance))
    if token != best.token:
        return 0.0, 0.0, 0.0, 0.0, blended
    return 1.0, blended, _LOG[best.order], float(best.hits == best.seen), 0.0
