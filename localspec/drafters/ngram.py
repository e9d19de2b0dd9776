"""Drafts copied from the context: find where the last tokens stood before, propose what followed there.

Prompt lookup (Saxena 2023) with the choices of suffix decoding (Oliaro et al. 2024): the longest suffix that stood
before is found exactly, what followed it is weighed against what followed the shorter ones, and each draft carries the
chance that it is accepted when those before it were. docs/ngram.md has the rule and what it reaches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import islice
from math import prod
from typing import NamedTuple

from localspec.drafters.automaton import ROOT, UNDOABLE, SuffixAutomaton
from localspec.drafters.evidence import Evidence, Features, Weights, blend, features
from localspec.drafters.protocol import Drafter, Draw, Proposal
from localspec.tokens import Source

SHORTEST = 1
"""Tokens that must match for a proposal."""
_SUFFIXES = 2
"""Suffixes that are asked for what followed them, the longest first; only those that differ in their places count."""
_FOLLOWERS = 8
"""Followers of one suffix that are looked at for several candidates."""


class _Step(NamedTuple):
    """A token that may come next."""

    blended: float
    token: int
    seen: Features
    state: int
    """The longest suffix behind the token that stood before,"""
    matched: int
    """and its length."""


class NgramDrafter(Drafter):
    """Proposes the likeliest continuation by what followed the suffixes of the context before."""

    name: Source = "ngram"
    free = True

    def __init__(self, shortest: int = SHORTEST) -> None:
        super().__init__()
        self._shortest = shortest
        self._automaton = SuffixAutomaton()
        self._evidence = Evidence()
        self._undo: deque[Weights] = deque(maxlen=UNDOABLE)
        """The weights before each of the latest tokens."""

    def fresh(self) -> NgramDrafter:
        return NgramDrafter(self._shortest)

    def commit(self, tokens: Sequence[int]) -> None:
        automaton, evidence = self._automaton, self._evidence
        for token in tokens:
            self._undo.append(evidence.weights)
            step = self._likeliest(*self._match())
            if step is not None:
                evidence.observe(step.seen, step.token == token)
            automaton.append(token)
            self.context.append(token)

    def rewind(self, length: int) -> None:
        steps = len(self.context) - length
        if steps > 0 and self._automaton.shorten(steps):
            del self.context[length:]
            for _ in range(steps):
                self._evidence.weights = self._undo.pop()
        elif steps > 0:
            super().rewind(length)

    def reset(self) -> None:
        super().reset()
        self._automaton = SuffixAutomaton()
        self._evidence = Evidence()
        self._undo.clear()

    def propose(self, length: int, draw: Draw) -> Proposal | None:
        state, matched = self._match()
        if matched < self._shortest:
            return None
        proposal = self._proposal(matched)
        self._extend(proposal, state, matched, length)
        return proposal

    def propose_many(self, length: int, width: int) -> list[Proposal]:
        """At most `width` different continuations of at most `length` tokens each, for a verifier that takes several.

        The first is what `propose` gives. Each further one parts from an earlier one where something else followed
        too, the likeliest path up to and with the other token first. Empty where nothing matched.
        """
        start, depth = self._match()
        if depth < self._shortest or width < 1:
            return []
        found = [self._proposal(depth)]
        waiting: list[tuple[float, int, Proposal, int, _Step]] = []
        self._branch(waiting, found[0], 0, start, depth, length)
        while waiting and len(found) < width:
            _, _, parent, kept, step = heappop(waiting)
            proposal = self._proposal(depth)
            proposal.tokens.extend([*parent.tokens[:kept], step.token])
            _confidence(proposal).extend([*_confidence(parent)[:kept], self._evidence.chance(step.seen)])
            self._branch(waiting, proposal, kept + 1, step.state, step.matched, length)
            found.append(proposal)
        return found

    def _branch(
        self,
        waiting: list[tuple[float, int, Proposal, int, _Step]],
        proposal: Proposal,
        first: int,
        state: int,
        matched: int,
        length: int,
    ) -> None:
        """Extend a proposal of `first` tokens, and queue what else could have followed on the way."""
        path = self._extend(proposal, state, matched, length)
        chance = prod(_confidence(proposal)[:first])
        for i, (at, depth) in enumerate(path, first):
            for step in self._steps(at, depth, _FOLLOWERS):
                if step.token != proposal.tokens[i]:
                    worth = -chance * self._evidence.chance(step.seen)
                    heappush(waiting, (worth, len(waiting), proposal, i, step))
            chance *= _confidence(proposal)[i]

    def _proposal(self, matched: int) -> Proposal:
        return Proposal([], self.name, match_length=matched, confidence=[])

    def _extend(self, proposal: Proposal, state: int, matched: int, length: int) -> list[tuple[int, int]]:
        """Append the likeliest tokens up to `length`; returns the match before each of them."""
        tokens, chances, path = proposal.tokens, _confidence(proposal), []
        while len(tokens) < length:
            step = self._likeliest(state, matched)
            if step is None:
                break
            path.append((state, matched))
            tokens.append(step.token)
            chances.append(self._evidence.chance(step.seen))
            # Past the end of the context this goes on from the draft itself: a repeated pattern repeats.
            state, matched = step.state, step.matched
        return path

    def _match(self) -> tuple[int, int]:
        """State and length of the longest suffix of the context that stood before; (0, 0) without one."""
        automaton = self._automaton
        state = automaton.link[automaton.whole]
        return (state, automaton.length[state]) if state > ROOT else (ROOT, 0)

    def _likeliest(self, state: int, matched: int) -> _Step | None:
        """What is likeliest to follow a match; None where nothing ever did."""
        steps = self._steps(state, matched)
        return max(steps) if steps else None

    def _steps(self, state: int, matched: int, further: int = 0) -> list[_Step]:
        """What may follow a match: the favourites of its suffixes, and some further followers of the longest one."""
        automaton = self._automaton
        link, favourite = automaton.link, automaton.favourite
        suffixes: list[int] = []
        while state > ROOT and len(suffixes) < _SUFFIXES:
            if favourite[state] >= 0:
                suffixes.append(state)
            state = link[state]
        if not suffixes:
            return []
        tokens = {favourite[suffix]: None for suffix in suffixes}
        if further:
            tokens |= {token: None for token, _ in islice(automaton.followers(suffixes[0]), further)}
        return [self._judged(token, suffixes, matched) for token in tokens]

    def _judged(self, token: int, suffixes: list[int], matched: int) -> _Step:
        automaton = self._automaton
        count, last, size = automaton.count, automaton.last, automaton.size
        state, longest, counts = ROOT, ROOT, []
        for suffix in reversed(suffixes):
            behind = automaton.step(suffix, token)
            # The place at the end of the context has no follower yet.
            seen = count[suffix] - (last[suffix] == size)
            if behind >= 0:
                state, longest = behind, suffix
                counts.append((count[behind], seen))
            else:
                counts.append((0, seen))
        blended = blend(counts)
        if longest != suffixes[0]:
            matched = automaton.length[longest]
        found = features(blended, matched, counts[-1][1], not automaton.branches(suffixes[0]))
        return _Step(blended, token, found, state, matched + 1)


def _confidence(proposal: Proposal) -> list[float]:
    assert proposal.confidence is not None
    return proposal.confidence
