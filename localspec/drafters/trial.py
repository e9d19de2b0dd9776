"""Whether a drafter's guesses are any good at all: one that is built in wrongly drafts nonsense and says nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from localspec.errors import DrafterWarning

ROUNDS = 50
"""Rounds after which it is decided."""
LEAST = 0.05
"""Share of the judged drafts that must have been accepted by then."""


class Trial:
    """The first rounds of one drafter, over all conversations of an engine. Knows nothing of what drafts."""

    def __init__(self, name: str, say: Callable[[str], None] | None = None) -> None:
        """`say` is told in one line when the drafter fails; None warns."""
        self.name = name
        self._say = _warn if say is None else say
        self.rounds = self.judged = self.accepted = 0
        self.failed = False

    def book(self, judged: int, accepted: int) -> None:
        """Count a round: drafts that the target looked at, and those that it accepted. Says so once, when it fails."""
        if self.rounds >= ROUNDS or not judged:
            return
        self.rounds += 1
        self.judged += judged
        self.accepted += accepted
        if self.rounds == ROUNDS and self.accepted < LEAST * self.judged:
            self.failed = True
            self._say(
                f"{self.name} is switched off: {self.accepted} of its first {self.judged} drafts were accepted; likely "
                "causes: norm weights shifted by 1 twice, or not at all; another hidden state than it was trained on "
                "(before-norm or after-norm); embedding and hidden state joined in the wrong order; a missing scale of "
                "the embedding; a head of another model"
            )


def _warn(line: str) -> None:
    warnings.warn(line, DrafterWarning, stacklevel=4)
