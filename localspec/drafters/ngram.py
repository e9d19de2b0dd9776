"""Drafts copied from the context: find an earlier place where the last tokens stood, propose what followed there.

Known as prompt lookup (Saxena 2023). The index grows with the context, at a cost per token that does not depend on
how long it already is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from localspec.drafters.protocol import Drafter, Draw, Proposal
from localspec.tokens import Source

SHORTEST, LONGEST = 1, 4
"""n-grams that are indexed. Longer matches are found by comparing backwards from the place that an n-gram gives."""
_COMPARED = 32
"""How far back a match is measured."""
_PLACES = 8
"""Most recent places remembered per n-gram."""
_DOUBT = 2.0
"""Observations that a shorter context's estimate is worth against a longer one's."""
_UNSEEN = 0.02
"""Chance of a draft that nothing speaks for."""
_LONG = (6, 8, 12, 16, 24, 32)
"""Match lengths beyond the indexed n-grams, each of which speaks for the draft as one more observation."""

_UNDOABLE = 64


class NgramDrafter(Drafter):
    """Proposes the continuation of the longest suffix of the context that stood there before, the latest on a tie."""

    name: Source = "ngram"
    free = True

    def __init__(self, shortest: int = SHORTEST) -> None:
        super().__init__()
        self._shortest = shortest
        self._places: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._undo: deque[list[tuple[tuple[int, ...], tuple[int, ...]]]] = deque(maxlen=_UNDOABLE)
        """What each of the latest tokens changed, so that an answer stopped mid-block is not indexed all over again."""

    def fresh(self) -> NgramDrafter:
        return NgramDrafter(self._shortest)

    def commit(self, tokens: Sequence[int]) -> None:
        context, places = self.context, self._places
        for token in tokens:
            # The n-grams that end before this token are indexed now that something follows them.
            end = len(context)
            before: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
            for n in range(self._shortest, min(LONGEST, end) + 1):
                gram = tuple(context[end - n : end])
                known = places.get(gram, ())
                before.append((gram, known))
                places[gram] = (*known[-(_PLACES - 1) :], end)
            self._undo.append(before)
            context.append(token)

    def rewind(self, length: int) -> None:
        steps = len(self.context) - length
        if steps > len(self._undo):
            super().rewind(length)
            return
        for _ in range(steps):
            for gram, known in self._undo.pop():
                if known:
                    self._places[gram] = known
                else:
                    del self._places[gram]
            self.context.pop()

    def reset(self) -> None:
        super().reset()
        self._places = {}
        self._undo.clear()

    def propose(self, length: int, draw: Draw) -> Proposal | None:
        match = self._longest_match()
        if match is None:
            return None
        place, matched = match
        context, end = self.context, len(self.context)
        drafts: list[int] = []
        confidence: list[float] = []
        tail = context[-LONGEST:]
        for i in range(length):
            # Past the end of the context the copy goes on from the draft itself: a repeated pattern repeats.
            draft = context[place + i] if place + i < end else drafts[place + i - end]
            confidence.append(self._confidence(tail, matched + i, draft))
            drafts.append(draft)
            tail = [*tail[1 - LONGEST :], draft]
        return Proposal(drafts, self.name, match_length=matched, confidence=confidence)

    def _confidence(self, tail: list[int], matched: int, draft: int) -> float:
        """Chance of `draft` behind `tail`, which ends a match of `matched` tokens, by what followed such n-grams.

        Each n-gram's counts are smoothed with the estimate of the next shorter one (Dirichlet prior; MacKay and
        Bauman Peto 1995).
        """
        context, chance = self.context, _UNSEEN
        for n in range(self._shortest, min(LONGEST, len(tail)) + 1):
            places = self._places.get(tuple(tail[-n:]))
            if not places:
                break
            hits = sum(context[place] == draft for place in places)
            chance = (hits + _DOUBT * chance) / (len(places) + _DOUBT)
        for length in _LONG:
            if matched < length:
                break
            chance = (1 + _DOUBT * chance) / (1 + _DOUBT)
        return chance

    def _longest_match(self) -> tuple[int, int] | None:
        """(index of the token that followed, length of the match); None without a match."""
        context, end = self.context, len(self.context)
        for n in range(min(LONGEST, end), self._shortest - 1, -1):
            places = self._places.get(tuple(context[end - n :]))
            if not places:
                continue
            best = (0, 0)
            for place in reversed(places):
                matched = n
                limit = min(_COMPARED, place)
                while matched < limit and context[place - matched - 1] == context[end - matched - 1]:
                    matched += 1
                if matched > best[1]:
                    best = (place, matched)
            return best
        return None
