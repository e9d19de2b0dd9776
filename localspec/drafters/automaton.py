"""Every substring of a growing token sequence, with how often and where it stood last: a suffix automaton.

Blumer et al. 1985, "The smallest automaton recognizing the subwords of a text". A state stands for substrings that
end at the same places; its link leads to the state of the longest suffix of them that ends at more places. Each token
adds at most two states and, over the whole text, at most three transitions: amortised constant time. The longest suffix
of the text that stood there before is the link of the state of the whole text.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

UNDOABLE = 64
"""The latest tokens that can be taken back at the cost of having added them."""
DEEPEST = 32
"""Links followed to count a new place. Only a text that repeats itself without end has more, and there only the
longer substrings are counted, so that a token costs the same however long the repetition is."""
ROOT = 0
_NOTHING, _SEVERAL = -1, -2


class SuffixAutomaton:
    """States are numbers from 0 on, 0 the empty string; tokens are numbers from 0 on."""

    def __init__(self) -> None:
        self.size = 0
        """Tokens of the text."""
        self.whole = ROOT
        """The state of the whole text."""
        self.place = 0
        """Tokens up to the end of the latest earlier place of the longest suffix that stood before; 0 without one."""
        self.length = array("i", [0])
        """Length of a state's longest substring."""
        self.link = array("i", [-1])
        self.count = array("i", [0])
        """Places where a state's substrings end."""
        self.last = array("i", [0])
        """The latest of these places: tokens up to the end of the substring."""
        self.favourite = array("i", [_NOTHING])
        """The token that followed most often, the latest of equals; -1 before any did."""
        self.only = array("i", [_NOTHING])
        """The token of a state's only transition; -1 where it has none, -2 where it has several."""
        self.target = array("i", [0])
        """Where that transition leads."""
        self._targets: dict[int, dict[int, int]] = {}
        """Token to state, of states with several transitions."""
        self._undo: deque[list[tuple[Any, int, Any]]] = deque(maxlen=UNDOABLE)
        """What each of the latest tokens overwrote: container, place, old value."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        for token in tokens:
            self.append(token)

    def shorten(self, steps: int) -> bool:
        """Take back the last tokens; False when they are more than can be taken back, and nothing was done."""
        if steps > len(self._undo):
            return False
        for _ in range(steps):
            self._take_back()
        return True

    def step(self, state: int, token: int) -> int:
        """The state behind `token`; -1 where it never followed."""
        only = self.only[state]
        if only == token:
            return self.target[state]
        if only == _SEVERAL:
            return self._targets[state].get(token, -1)
        return -1

    def followers(self, state: int) -> Iterable[tuple[int, int]]:
        """(token, state behind it) of all that ever followed."""
        only = self.only[state]
        if only == _SEVERAL:
            return self._targets[state].items()
        return () if only == _NOTHING else ((only, self.target[state]),)

    def branches(self, state: int) -> bool:
        """Whether more than one token ever followed."""
        return self.only[state] == _SEVERAL

    def append(self, token: int) -> None:
        """Append one token."""
        length, link, count, last = self.length, self.link, self.count, self.last
        only, target = self.only, self.target
        log: list[tuple[Any, int, Any]] = []
        self.size = size = self.size + 1
        new = self._state(size, -1, 1, _NOTHING, _NOTHING, 0)
        state, before = self.whole, self.whole
        found = -1
        while state >= 0:
            found = self.step(state, token)
            if found >= 0:
                break
            self._lead(state, token, new, log)
            state = link[state]
        if state < 0:
            link[new] = ROOT
        elif length[found] == length[state] + 1:
            link[new] = found
        else:
            copy = self._state(
                length[state] + 1, link[found], count[found], self.favourite[found], only[found], target[found]
            )
            last[copy] = last[found]
            if only[found] == _SEVERAL:
                self._targets[copy] = dict(self._targets[found])
            log.append((link, found, link[found]))
            link[found] = link[new] = copy
            while state >= 0 and self.step(state, token) == found:
                self._lead(state, token, copy, log)
                state = link[state]
        state = link[new]
        place, self.place = self.place, last[state] if state > ROOT else 0
        for _ in range(DEEPEST):
            if state <= ROOT:
                break
            log.append((last, state, last[state]))
            count[state] += 1
            last[state] = size
            state = link[state]
        self._prefer(before, token, log)
        log.append((place, new, before))
        self.whole = new
        self._undo.append(log)

    def _state(self, length: int, link: int, count: int, favourite: int, only: int, target: int) -> int:
        self.length.append(length)
        self.link.append(link)
        self.count.append(count)
        self.last.append(length)
        self.favourite.append(favourite)
        self.only.append(only)
        self.target.append(target)
        return len(self.length) - 1

    def _prefer(self, state: int, token: int, log: list[tuple[Any, int, Any]]) -> None:
        """`token` has just followed the text that ends in `state`: it may be the favourite of its suffixes now."""
        link, count, favourite = self.link, self.count, self.favourite
        for _ in range(DEEPEST + 1):
            old = favourite[state]
            if old != token and (old < 0 or count[self.step(state, token)] >= count[self.step(state, old)]):
                log.append((favourite, state, old))
                favourite[state] = token
            state = link[state]
            if state <= ROOT:
                return

    def _lead(self, state: int, token: int, target: int, log: list[tuple[Any, int, Any]]) -> None:
        """Let `token` lead from `state` to `target`."""
        only = self.only[state]
        if only == _SEVERAL:
            targets = self._targets[state]
            log.append((targets, token, targets.get(token)))
            targets[token] = target
        elif only in (_NOTHING, token):
            log.append((self.target, state, self.target[state]))
            log.append((self.only, state, only))
            self.only[state], self.target[state] = token, target
        else:
            log.append((self._targets, state, None))
            log.append((self.only, state, only))
            self._targets[state] = {only: self.target[state], token: target}
            self.only[state] = _SEVERAL

    def _take_back(self) -> None:
        log = self._undo.pop()
        self.place, new, before = log.pop()
        for container, place, old in reversed(log):
            if old is None:
                del container[place]
            else:
                container[place] = old
            if container is self.last:
                self.count[place] -= 1
        for state in range(new, len(self.length)):
            self._targets.pop(state, None)
        for column in (self.length, self.link, self.count, self.last, self.favourite, self.only, self.target):
            del column[new:]
        self.whole = before
        self.size -= 1
