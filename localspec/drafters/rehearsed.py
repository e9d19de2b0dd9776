"""Drafts from a known text, with mistakes at chance places: what checks of the engine have it verify.

With drafts that are mostly right, passes of every size occur, and every number of kept drafts before a rejection; real
drafters leave most of these combinations out.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from localspec.drafters.protocol import Drafter, Draw, Proposal
from localspec.tokens import Source

_WRONG = 0.25
"""Share of wrong drafts behind the first mistake."""


class Rehearsed(Drafter):
    """Drafts what `script` (prompt included) says next, in numbers and with mistakes that chance decides."""

    name: Source = "draft"

    def __init__(self, script: Sequence[int] = (), *, mistakes: bool = True, seed: int = 1) -> None:
        """mistakes: False drafts as many tokens as are asked for, all of them right."""
        super().__init__()
        self.script = list(script)
        self._mistakes, self._seed = mistakes, seed
        self._random = random.Random(seed)

    def fresh(self) -> Rehearsed:
        return Rehearsed(self.script, mistakes=self._mistakes, seed=self._seed)

    def commit(self, tokens: Sequence[int]) -> None:
        self.context.extend(tokens)

    def propose(self, length: int, draw: Draw) -> Proposal | None:
        start, chance = len(self.context), self._random
        drafts = self.script[start : start + (chance.randint(0, length) if self._mistakes else length)]
        if not drafts:
            return None
        if self._mistakes:
            # Any number of drafts before the first mistake is as likely as any other, none and all included.
            first, size = chance.randint(0, len(drafts)), draw.vocabulary_size
            for i in range(first, len(drafts)):
                if i == first or chance.random() < _WRONG:
                    drafts[i] = (drafts[i] + 1) % size
        return Proposal(drafts, self.name)
