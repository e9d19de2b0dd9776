"""Detokenizing with nothing known but the tokenizer's `decode`: re-decode a short window of the latest ids.

A window is moved only where the shorter one was seen to decode the newer half alike, so a leading space that `decode`
strips, or a byte run cut in two, does not change the text. Where no such place is found the window grows and is decoded
ever more rarely, which bounds the cost per token at the price of late text.
"""

from __future__ import annotations

from collections.abc import Callable

from localspec.detokenizer_stages import MARK

KEEP = 16
"""Ids kept as context when the window moves; it moves at twice as many."""


class Window:
    """The text of one sequence by `decode(ids) -> str`; ids from `size` up name no token and are left out.

    Exact for every tokenizer whose text only grows as ids are added, marks of unfinished characters aside. Where one
    changes text that was given out, that text stays, and what follows it is given out from the same length on.
    """

    def __init__(self, decode: Callable[[list[int]], str], size: int) -> None:
        self._decode = decode
        self._size = size
        self._ids: list[int] = []
        self._sent = ""  # how this window's text begins: given out, or before the window's move
        self._next = 1  # length of the window at which to decode again
        self.pending = False
        """Whether `finish` could still return text."""

    def __copy__(self) -> Window:
        twin = Window(self._decode, self._size)
        twin._ids, twin._sent, twin._next = self._ids.copy(), self._sent, self._next
        twin.pending = self.pending
        return twin

    def add(self, token_id: int) -> str:
        """Take one more id; returns the text that is certain now."""
        if not 0 <= token_id < self._size:
            return ""
        self._ids.append(token_id)
        length = len(self._ids)
        if length < self._next:
            self.pending = True
            return ""
        text = self._decode(self._ids)
        certain = text.rstrip(MARK)
        new = certain[len(self._sent) :]
        if len(certain) >= len(self._sent):
            self._sent = certain
        self.pending = text != self._sent
        self._next = length + 1
        if length >= 2 * KEEP and not self._move(text) and length >= 4 * KEEP:
            self._next = length + length // 8
        return new

    def finish(self) -> str:
        """The rest. Nothing may be added after."""
        self.pending = False
        return self._decode(self._ids)[len(self._sent) :] if self._ids else ""

    def _move(self, text: str) -> bool:
        """Drop all but the latest ids, if those decode by themselves as they do in `text`, all of it given out."""
        if self.pending:
            return False
        recent = self._ids[-KEEP:]
        alone = self._decode(recent)
        older = self._decode(self._ids[: -KEEP // 2])
        older_alone = self._decode(recent[: KEEP // 2])
        alike = text.startswith(older) and alone.startswith(older_alone)
        if not alike or not older_alone or text[len(older) :] != alone[len(older_alone) :]:
            return False
        self._ids, self._sent, self._next = recent, alone, KEEP + 1
        return True
