"""The place that a text seems to be copied from, followed across single changes.

The longest suffix match forgets where it was at the first token that differs; whoever copies with changes (an edited
file, a quotation with a name replaced) goes on behind them. So the place is kept, as the match models of
Mahoney's compressors recover theirs, with how well it has predicted lately.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import NamedTuple

NOWHERE = -1
_MEMORY = 0.875
"""Weight that the rate keeps with each token."""
_START = 0.5
"""Rate of a place before it has been right about anything."""
_LEAST = 0.15
"""Below this rate a place is given up."""
LONG = 3
"""Tokens of a match that move the place there."""

_STEPS = 512
_RATES = [min(max(n / _STEPS, 0.003), 0.997) for n in range(_STEPS + 1)]
_ODDS = [log(rate / (1 - rate)) for rate in _RATES]


def odds(rate: float) -> float:
    """Logarithm of a rate's odds; no rate counts as nearer to 0 or 1 than 0.003."""
    return _ODDS[int(rate * _STEPS + 0.5)]


def new_rate(matched: int) -> float:
    """The rate of a place found by a match: as if it had been right about all that matched."""
    return 1 - (1 - _START) * _MEMORY**matched


def again(rate: float, right: bool) -> float:
    """The rate after one more token."""
    return rate * _MEMORY + (1 - _MEMORY) if right else rate * _MEMORY


class Alignment(NamedTuple):
    """Where the next token is expected to be copied from."""

    place: int = NOWHERE
    """Index in what is copied from; -1 for none."""
    rate: float = _START
    """How often the place was right lately, recent tokens weighing more."""
    run: int = 0
    """Tokens that it was right about since it was last wrong."""

    def after(self, source: Sequence[int], token: int) -> Alignment:
        """Once `token` came in the text. source: what is copied from, with a token behind the place; it may be the text
        itself, which holds `token` already."""
        place, rate, run = self
        if place < 0:
            return self
        if source[place] == token:
            return Alignment(place + 1, again(rate, True), run + 1)
        # Something was put in: what was expected may come yet. Or one token was replaced, which shows when the one
        # behind it comes.
        rate = again(rate, False)
        if source[place + 1] == token and place + 2 < len(source):
            place += 2
        return Alignment(place if rate >= _LEAST else NOWHERE, rate)

    def moved(self, matched: int, match: int) -> Alignment:
        """Where a match leads it: the longest suffix that stood in the source, of `matched` tokens; `match` is the
        index behind its latest place there."""
        if matched >= LONG and self.run < matched and self.place != match:
            return Alignment(match, new_rate(matched), matched)
        return self
