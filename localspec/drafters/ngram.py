"""Drafts copied from what stood before: find where the last tokens stood, propose what followed them there.

Prompt lookup (Saxena 2023) with the choices of suffix decoding (Oliaro et al. 2024): the longest suffix that stood
before is found exactly, what followed it is weighed against what followed the shorter ones, against the place that
the text is being copied from, and against what followed the same tokens in earlier sessions; each draft carries the
chance that it is accepted when those before it were. docs/ngram.md has the rule and what it reaches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count
from math import prod

from localspec.drafters.continuations import At, Continuations, Levels, Step
from localspec.drafters.evidence import Features
from localspec.drafters.protocol import Drafter, Draw, Proposal
from localspec.tokens import Level, Source

LEAST = 0.02
"""A draft whose whole path is less likely than this pays on no machine."""
_FOLLOWERS = 8
"""Followers of one suffix that are looked at for several candidates."""

_Branch = tuple[float, int, Proposal, int, Step]
"""For a heap: minus the path's chance, a number that tells equals apart, the proposal parted from, the tokens kept of
it, and the other token."""


class NgramDrafter(Drafter):
    """Proposes the likeliest continuation by what stood in the context before, and in earlier sessions."""

    name: Source = "ngram"
    free = True

    def __init__(self, levels: Levels = ()) -> None:
        """levels: what earlier sessions left, asked under coupled acceptance only: elsewhere ids depend on drafts, and
        the same seed would give others from day to day."""
        super().__init__()
        self._levels = tuple(levels)
        self._next = Continuations(levels)
        self._alone: Continuations | None = None if levels else self._next
        """The same without levels, once it was needed."""

    def fresh(self) -> NgramDrafter:
        return NgramDrafter(self._levels)

    def commit(self, tokens: Sequence[int]) -> None:
        both = self._both()
        for token in tokens:
            for following in both:
                following.append(token)
            self.context.append(token)

    def rewind(self, length: int) -> None:
        steps = len(self.context) - length
        if steps > 0 and all(following.shorten(steps) for following in self._both()):
            del self.context[length:]
        elif steps > 0:
            super().rewind(length)

    def reset(self) -> None:
        super().reset()
        self._next = Continuations(self._levels)
        self._alone = None if self._levels else self._next

    def _both(self) -> list[Continuations]:
        return [self._next] if self._alone in (None, self._next) else [self._next, self._alone]

    def _of(self, draw: Draw) -> Continuations:
        if draw.settings.accept == "coupled":
            return self._next
        if self._alone is None:
            self._alone = Continuations()
            for token in self.context:
                self._alone.append(token)
        return self._alone

    def candidates(self) -> list[tuple[int, Features]]:
        """Each token that might be drafted next, with what is known of it: for fitting."""
        return [(token, seen) for _, token, seen in self._next.candidates()]

    def propose(self, length: int, draw: Draw) -> Proposal | None:
        following = self._of(draw)
        proposal = Proposal([], self.name, confidence=[], levels=[])
        self._extend(following, proposal, following.now(), length)
        return _with_length(proposal, following) if proposal.tokens else None

    def propose_many(self, length: int, width: int, draw: Draw) -> list[Proposal]:
        """At most `width` different continuations of at most `length` tokens each, for a verifier that takes several.

        The first is what `propose` gives. Each further one parts from an earlier one where something else followed
        too, the likeliest path up to and with the other token first. Empty where nothing is known.
        """
        following = self._of(draw)
        found = [Proposal([], self.name, confidence=[], levels=[])]
        waiting: list[_Branch] = []
        number = count()
        self._branch(following, waiting, number, found[0], following.now(), length)
        while waiting and len(found) < width:
            _, _, parent, kept, step = heappop(waiting)
            chance, token, level, behind = step
            tokens, chances, levels = _columns(parent)
            proposal = replace(
                parent,
                tokens=[*tokens[:kept], token],
                confidence=[*chances[:kept], chance],
                levels=[*levels[:kept], level],
            )
            self._branch(following, waiting, number, proposal, behind, length)
            found.append(proposal)
        return [_with_length(one, following) for one in found] if found[0].tokens and width > 0 else []

    def _branch(
        self,
        following: Continuations,
        waiting: list[_Branch],
        number: Iterator[int],
        proposal: Proposal,
        at: At,
        length: int,
    ) -> None:
        """Extend a proposal, and queue what else could have followed on the way."""
        tokens, chances, _ = _columns(proposal)
        first = len(tokens)
        path = self._extend(following, proposal, at, length)
        chance = prod(chances[:first])
        for i, point in enumerate(path, first):
            for step in following.steps(point, _FOLLOWERS):
                if step[1] != tokens[i]:
                    heappush(waiting, (-chance * step[0], next(number), proposal, i, step))
            chance *= chances[i]

    def _extend(self, following: Continuations, proposal: Proposal, at: At, length: int) -> list[At]:
        """Append the likeliest tokens up to `length`; returns the point before each of them."""
        path: list[At] = []
        tokens, chances, levels = _columns(proposal)
        chance = prod(chances)
        while len(tokens) < length:
            steps = following.steps(at)
            if not steps:
                break
            likeliest, token, level, behind = steps[0] if len(steps) == 1 else max(steps)
            chance *= likeliest
            if chance < LEAST:
                break
            path.append(at)
            tokens.append(token)
            chances.append(likeliest)
            levels.append(level)
            # Past the end of the context this goes on from the draft itself: a repeated pattern repeats.
            at = behind
        return path


def _with_length(proposal: Proposal, following: Continuations) -> Proposal:
    level = _columns(proposal)[2][0]
    return replace(proposal, match_length=following.matched(level))


def _columns(proposal: Proposal) -> tuple[list[int], list[float], list[Level]]:
    assert proposal.confidence is not None
    assert proposal.levels is not None
    return proposal.tokens, proposal.confidence, proposal.levels
