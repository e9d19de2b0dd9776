"""One block of the transcript: what the user said, an answer, or a note; its text, and its rows at one width."""

from __future__ import annotations

from typing import Literal

from localspec.text import printable
from localspec.tui.wrap import Wrapper

Kind = Literal["user", "answer", "note", "error"]
NO_TOKEN = -1
"""The `ref` of text that is no token of the model's."""


class Block:
    """Pieces of text, each with the index of its token, wrapped."""

    def __init__(self, kind: Kind, width: int) -> None:
        self.kind = kind
        self.writing = False
        """Whether more is expected: a caret stands at the end."""
        self._pieces: list[tuple[str, int]] = []
        self._wrapper = Wrapper(width)

    def __len__(self) -> int:
        return len(self._wrapper)

    @property
    def rows(self) -> Wrapper:
        return self._wrapper

    @property
    def text(self) -> str:
        """All of it, as shown but for the wrapping."""
        return "".join(text for text, _ in self._pieces)

    def feed(self, text: str, ref: int = NO_TOKEN) -> int:
        """Append; returns the index of the first row that may have changed."""
        text = printable(text)
        self._pieces.append((text, ref))
        return self._wrapper.feed(text, ref)

    def rewrap(self, width: int) -> None:
        """Lay the text out again for another width."""
        self._wrapper = Wrapper(width)
        for text, ref in self._pieces:
            self._wrapper.feed(text, ref)
