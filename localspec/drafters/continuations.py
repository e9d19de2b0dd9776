"""What may come next at a point of a text, and how likely each is.

Four things are asked: what followed the longest suffixes where they stood before, what stands at the place that the
text is being copied from, what stands at the place in an earlier answer that it repeats, and what followed the same
tokens in earlier sessions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from math import exp, log
from operator import mul
from typing import TYPE_CHECKING

from localspec.drafters.alignment import LONG, Alignment, again, new_rate, odds
from localspec.drafters.automaton import ROOT, UNDOABLE, SuffixAutomaton
from localspec.drafters.evidence import DOUBT, UNSEEN, WEIGHTS, Features
from localspec.ngrams.answers import DEEPEST, END
from localspec.tokens import Level

if TYPE_CHECKING:
    from localspec.ngrams.answers import Answers
    from localspec.ngrams.store import Found, NgramStore

Levels = Sequence[tuple[Level, Callable[[], "NgramStore"]]]
"""What earlier sessions left, by level; stores are asked for anew each time, since they grow."""

_SUFFIXES = 2
"""Suffixes that are asked for what followed them, the longest first; only those that differ in their places count."""
_RECENT = 6
"""Tokens that the counts of stores look at."""
_MOST = 128
"""Longer matches, and more places, count as so many."""
_LOG = [0.0, *(log(n) for n in range(1, _MOST + 1))]
_ONE, _FOUND, _BLEND, _PLACES, _AGREED, _SHORTER, _LENGTH = WEIGHTS[:7]
_HERE, _BOTH, _SURE, _UNSURE, _AGAIN, _AGAIN_SURE, _AGAIN_UNSURE = WEIGHTS[7:14]
_OF_STORES = WEIGHTS[14:]
"""In the order of `evidence.NAMES`."""
_OF_CONTEXT = _ONE + _FOUND
Earlier = tuple[tuple[int, ...], int, float]
"""The last tokens, for the counts; the place in the answers that is repeated, -1 for none; how often it was right
lately."""
At = tuple[int, int, int, float, Earlier | None]
"""A point in the text, or behind it on the way of a draft: the state of the longest suffix that stood before; its
length; the place that the next token is expected to be copied from, an index in the text, -1 for none; how often this
place was right lately; what earlier sessions are asked by, where there are any."""
Step = tuple[float, int, Level, At]
"""A token that may come next: its chance, its id, who knew it, and the point behind it.
Tuples without names, here and above: they are made for every token and draft, and names cost ten times as much."""


class Continuations:
    """Follows one text token by token."""

    def __init__(self, levels: Levels = ()) -> None:
        self.text: list[int] = []
        self._levels = tuple(levels)
        self._automaton = SuffixAutomaton()
        self._alignment = Alignment()
        self._repeated = Alignment()
        """The same in earlier answers,"""
        self._answers: Answers | None = None
        """of which it is a place,"""
        self._answered: Level = "context"
        """and which this level keeps."""
        self._undo: deque[tuple[Alignment, Alignment, Answers | None]] = deque(maxlen=UNDOABLE)
        """Before each of the latest tokens."""
        self._end: At | None = None
        """The end of the text, once it was asked for,"""
        self._at_end: list[Step] | None = None
        """and what may follow there: asked whether to propose, and again for the proposal;"""
        self._known_at_end: tuple[int, Level] = 0, "context"
        """the longest order that a store knew there, and its level."""

    def append(self, token: int) -> None:
        """Go on by one token."""
        automaton, text = self._automaton, self.text
        self._undo.append((self._alignment, self._repeated, self._answers))
        self._end = self._at_end = None
        automaton.append(token)
        text.append(token)
        matched = automaton.length[automaton.link[automaton.whole]]
        self._alignment = self._alignment.after(text, token).moved(matched, automaton.place)
        if self._levels:
            self._repeated = self._repeating(token)

    def _repeating(self, token: int) -> Alignment:
        """The place in earlier answers, once `token` was appended."""
        place, before = self._repeated, self._answers
        self._answered, answers = self._kept()
        if answers is not before:
            # Another one was learned meanwhile: places are not what they were.
            self._answers, place = answers, Alignment()
        if answers is None:
            return place
        if place.place >= 0:
            place = Alignment() if answers.ids[place.place] == END else place.after(answers.ids, token)
        # Answers are sorted by no more tokens: a place that was right about so many is not compared with others.
        return place if place.run >= DEEPEST else place.moved(*answers.longest(self.text))

    def _kept(self) -> tuple[Level, Answers | None]:
        """The answers of the first level that keeps any."""
        for level, store in self._levels:
            answers = store().answers
            if answers.ids:
                return level, answers
        return "context", None

    def shorten(self, steps: int) -> bool:
        """Take back the last tokens; False when they are more than can be taken back, and nothing was done."""
        if not self._automaton.shorten(steps):
            return False
        self._end = self._at_end = None
        for _ in range(steps):
            self._alignment, self._repeated, self._answers = self._undo.pop()
            self.text.pop()
        return True

    def now(self) -> At:
        """The end of the text."""
        if self._end is None:
            automaton, alignment = self._automaton, self._alignment
            state = automaton.link[automaton.whole]
            state, matched = (state, automaton.length[state]) if state > ROOT else (ROOT, 0)
            earlier: Earlier | None = None
            if self._levels:
                earlier = tuple(self.text[-_RECENT:]), self._repeated.place, self._repeated.rate
            self._end = state, matched, alignment.place, alignment.rate, earlier
        return self._end

    def candidates(self) -> list[tuple[float, int, Features]]:
        """Chance, id and what is known of each token that may come next: NAMES of `evidence` says what, for fitting."""
        seen: dict[int, Features] = {}
        return [(chance, token, seen[token]) for chance, token, *_ in self._steps(self.now(), 0, seen)]

    def steps(self, at: At, further: int = 0) -> list[Step]:
        """What may follow: the favourites of the suffixes, the tokens at the places copied from and repeated, and what
        stores know; with `further` so many followers of the longest suffix too. Each token once, in no order."""
        if at is not self._end or further:
            return self._steps(at, further)
        if self._at_end is None:
            self._at_end = self._steps(at, 0)
        return self._at_end

    def _steps(self, at: At, further: int, seen_of: dict[int, Features] | None = None) -> list[Step]:
        # For every draft: one long function, since calls are what it would cost most.
        automaton = self._automaton
        link, favourite, count, last = automaton.link, automaton.favourite, automaton.count, automaton.last
        only, target, size = automaton.only, automaton.target, automaton.size
        state, matched, place, rate, earlier = at
        suffixes: list[tuple[int, int]] = []
        tokens: list[int] = []
        while state > ROOT and len(suffixes) < _SUFFIXES:
            token = favourite[state]
            if token >= 0:
                # The place at the end of the context has no follower yet.
                suffixes.append((state, count[state] - (last[state] == size)))
                if token not in tokens:
                    tokens.append(token)
            state = link[state]
        longest, places = suffixes[0] if suffixes else (ROOT, 0)
        shorter = token if len(suffixes) > 1 else -1
        if further and suffixes:
            tokens += [token for token, _ in islice(automaton.followers(longest), further) if token not in tokens]
        expected, sure = -1, 0.0
        if 0 <= place < size:
            expected, sure = self.text[place], odds(rate)
            if expected not in tokens:
                tokens.append(expected)
        stored: Sequence[Found] = ()
        known_to: Level = "context"
        again_expected, again_sure = -1, 0.0
        if earlier is not None:
            recent, again_place, again_rate = earlier
            stored, known_to = self._stored(recent)
            if stored and stored[-1].token not in tokens:
                tokens.append(stored[-1].token)
            if again_place >= 0 and self._answers is not None:
                found = self._answers.ids[again_place]
                if found != END:
                    again_expected, again_sure = found, odds(again_rate)
                    if found not in tokens:
                        tokens.append(found)
            if at is self._end:
                self._known_at_end = stored[-1].order if stored else 0, known_to
        agreed = only[longest] >= 0
        of_context = _OF_CONTEXT + _PLACES * _LOG[places if places < _MOST else _MOST] + (_AGREED if agreed else 0.0)
        suffixes.reverse()
        steps: list[Step] = []
        for token in tokens:
            state, deepest, chance = ROOT, ROOT, UNSEEN
            for suffix, seen in suffixes:
                behind = target[suffix] if only[suffix] == token else automaton.step(suffix, token)
                if behind >= 0:
                    state, deepest, hits = behind, suffix, count[behind]
                    # Of a deep state not every place was counted: never fewer than of what is behind it.
                    chance = (hits + DOUBT * chance) / ((seen if seen > hits else hits) + DOUBT)
                else:
                    chance = DOUBT * chance / (seen + DOUBT)
            level: Level = "context"
            if state > ROOT:
                length = matched if deepest == longest else automaton.length[deepest]
                blended = log(chance / (1.0 - chance))
                total = of_context + _BLEND * blended
                if token == shorter:
                    total += _SHORTER
                # At the place that is copied from, its rate says how long the match is.
                total += _BOTH if token == expected else _LENGTH * _LOG[length if length < _MOST else _MOST]
            else:
                state, length = self._elsewhere(token, suffixes)
                blended, total = 0.0, _ONE
                if token != expected:
                    level = self._answered if token == again_expected else known_to
            if token == expected:
                total += _HERE
                if token != again_expected:
                    total += _SURE * sure  # else both speak of one and the same copy, and count once
                next_place, next_rate = place + 1, again(rate, True)
            else:
                total += _UNSURE * sure
                next_place, next_rate = place, rate
                if place < 0 and length >= LONG - 1:
                    next_place, next_rate = last[state], new_rate(length + 1)
            then: Earlier | None = None
            if earlier is not None:
                if token == again_expected:
                    total += _AGAIN + _AGAIN_SURE * again_sure
                    then = (*recent[1:], token), again_place + 1, again(again_rate, True)
                else:
                    total += _AGAIN_UNSURE * again_sure
                    then = (*recent[1:], token), again_place, again_rate
                if stored:
                    total += sum(map(mul, _OF_STORES, _of_stores(stored, token)))
            behind_it = state, length + 1, next_place, next_rate, then
            steps.append((1.0 / (1.0 + exp(-total)), token, level, behind_it))
            if seen_of is not None:
                here = token == expected
                context = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
                if blended:
                    many, long = _LOG[min(places, _MOST)], _LOG[min(length, _MOST)]
                    context = 1.0, blended, many, float(agreed), float(token == shorter), 0.0 if here else long
                alone = 0.0 if token == again_expected else sure
                at_place = (1.0, float(blended != 0.0), alone, 0.0) if here else (0.0, 0.0, 0.0, sure)
                at_again = (1.0, again_sure, 0.0) if token == again_expected else (0.0, 0.0, again_sure)
                seen_of[token] = 1.0, *context, *at_place, *at_again, *(_of_stores(stored, token) if stored else ())
        return steps

    def matched(self, level: Level) -> int:
        """Tokens before the end of the text that stood before, as far as `level` knew when `steps` was asked there."""
        if level == "context":
            return self.now()[1]
        order, known_to = self._known_at_end
        return max(order if level == known_to else 0, self._repeated.run if level == self._answered else 0)

    def _stored(self, recent: tuple[int, ...]) -> tuple[list[Found], Level]:
        """What the level with the longest match knows; of equals the first."""
        stored: list[Found] = []
        level: Level = "context"
        for name, store in self._levels:
            found = store().matches(recent)
            if len(found) > len(stored):
                stored, level = found, name
        return stored, level

    def _elsewhere(self, token: int, suffixes: list[tuple[int, int]]) -> tuple[int, int]:
        """The state behind the longest suffix that the token ever followed, other than those asked, and the suffix's
        length; the root, and -1, where it never stood."""
        automaton = self._automaton
        suffix = automaton.link[suffixes[0][0]] if suffixes else ROOT
        while suffix >= ROOT:
            state = automaton.step(suffix, token)
            if state >= 0:
                return state, automaton.length[suffix]
            suffix = automaton.link[suffix]
        return ROOT, -1


def _of_stores(stored: Sequence[Found], token: int) -> Features:
    """What the longest known order says of a token, and what it says of another where it says that one."""
    best = stored[-1]
    chance = UNSEEN
    for found in stored:
        hits = found.hits if found.token == best.token else 0
        chance = (hits + DOUBT * chance) / (found.seen + DOUBT)
    blended = log(chance / (1.0 - chance))
    if token != best.token:
        return 0.0, 0.0, 0.0, blended
    return 1.0, blended, float(best.hits == best.seen), 0.0
