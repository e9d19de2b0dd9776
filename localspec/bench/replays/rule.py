"""What a replayed drafting rule is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence


class Rule(ABC):
    """Follows one text and proposes what comes next. Made for clarity: nothing here is fast."""

    name: str

    def __init__(self) -> None:
        self.text: list[int] = []

    def commit(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        self.text.extend(tokens)

    @abstractmethod
    def propose(self, limit: int) -> list[int]:
        """At most `limit` tokens to follow the text."""


def places(text: Sequence[int], n: int) -> list[int]:
    """Where the last `n` tokens of the text stood before: the indices behind those places, earliest first."""
    tail = list(text[-n:])
    return [end for end in range(n, len(text)) if list(text[end - n : end]) == tail]
