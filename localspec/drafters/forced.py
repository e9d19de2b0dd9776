"""Drafts that need no guess: tokens that are the only ones which a grammar allows."""

from __future__ import annotations

from collections.abc import Sequence

from localspec.drafters.protocol import Drafter, Draw, Proposal
from localspec.matcher import Matcher
from localspec.tokens import Source


class ForcedDrafter(Drafter):
    """Proposes what its generation's matcher leaves no choice about. Such a draft is always accepted."""

    name: Source = "grammar"
    free = True

    def __init__(self, matcher: Matcher) -> None:
        super().__init__()
        self._matcher = matcher

    def fresh(self) -> ForcedDrafter:
        return ForcedDrafter(self._matcher)

    def commit(self, tokens: Sequence[int]) -> None:
        """Nothing to do: the matcher is moved by the decoder, with or without drafts."""

    def propose(self, length: int, draw: Draw) -> Proposal | None:
        tokens = self._matcher.forced(length)
        return Proposal(tokens, self.name, confidence=[1.0] * len(tokens)) if tokens else None
