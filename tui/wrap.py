"""Word wrap for a stream: pieces of text come one by one, and only the last row is ever wrapped again.

Knows nothing of Textual, of tokens or of colour: each piece carries a number, `ref`, and so does every run of the rows.
The rows do not depend on how the text was cut into pieces. Widths are terminal cells.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from rich.cells import cell_len, split_graphemes

TAB = 4

_NEVER_FIRST = frozenset("、。，．・：；？！）］｝〕〉》」』】〙〗ー々…”’%）ぁぃぅぇぉっゃゅょァィゥェォッャュョ")
"""Characters that no row of Chinese or Japanese text begins with."""


class Run(NamedTuple):
    """Neighbouring text of one piece on one row."""

    text: str
    ref: int


@dataclass(slots=True)
class Row:
    """One row of the screen."""

    runs: list[Run]
    end: str
    """What stood between this row and the next in the text: a newline, a space that the wrap swallowed, or nothing."""

    @property
    def text(self) -> str:
        return "".join(run.text for run in self.runs)


class _Cell(NamedTuple):
    """One grapheme: a character with whatever combines with it."""

    text: str
    width: int
    ref: int

    @property
    def blank(self) -> bool:
        """A space or a tab; a no-break space is not."""
        return self.text[0] == " "


class Wrapper:
    """Greedy word wrap, fed piece by piece."""

    def __init__(self, width: int) -> None:
        self.width = max(width, 1)
        self._done: list[Row] = []
        self._tail: list[_Cell] = []
        self._column = 0
        self._hanging = False
        """A space did not fit at the end of the row: what comes next starts a new one."""

    def __len__(self) -> int:
        return len(self._done) + 1

    def __getitem__(self, index: int) -> Row:
        if index < len(self._done):
            return self._done[index]
        if index == len(self._done):
            return Row(_runs(self._tail), "")
        raise IndexError(index)

    @property
    def tail_width(self) -> int:
        """Cells in use on the last row."""
        return self._column

    def feed(self, text: str, ref: int) -> int:
        """Append a piece; returns the index of the first row that may have changed."""
        first = len(self._done)
        for character in text:
            if character == "\n":
                self._break(len(self._tail), "\n")
            elif character == " ":
                self._space(_Cell(" ", 1, ref))
            elif character == "\t":
                size = TAB - self._column % TAB
                self._space(_Cell(" " * size, size, ref))
            elif character.isascii() or not self._join(character):
                self._place(_Cell(character, cell_len(character), ref))
        return first

    def _join(self, character: str) -> bool:
        """Add a combining mark, a joiner or what a joiner joins to the grapheme before it."""
        if not self._tail or self._hanging:
            return False
        before = self._tail[-1]
        joined = before.text + character
        spans, width = split_graphemes(joined)
        if before.blank or len(spans) != 1:
            return False
        self._tail.pop()
        self._column -= before.width
        self._place(_Cell(joined, width, before.ref))
        return True

    def _space(self, cell: _Cell) -> None:
        if self._hanging or self._column + cell.width > self.width:
            self._hanging = True
        else:
            self._append(cell)

    def _place(self, cell: _Cell) -> None:
        if self._hanging:
            self._break(len(self._tail), " ")
        while self._tail and self._column + cell.width > self.width:
            self._break(self._opportunity(cell), "")
        self._append(cell)

    def _append(self, cell: _Cell) -> None:
        self._tail.append(cell)
        self._column += cell.width

    def _opportunity(self, cell: _Cell) -> int:
        """Where to cut the full row: the last place between words, else right here."""
        tail = self._tail
        after = cell
        for index in range(len(tail), 0, -1):
            before = tail[index - 1]
            if _may_break(before, after):
                # Cutting behind mere indentation would leave a row that looks empty.
                return index if not all(c.blank for c in tail[:index]) else len(tail)
            after = before
        return len(tail)

    def _break(self, index: int, end: str) -> None:
        self._done.append(Row(_runs(self._tail[:index]), end))
        self._tail = self._tail[index:]
        self._column = sum(cell.width for cell in self._tail)
        self._hanging = False


def _may_break(before: _Cell, after: _Cell) -> bool:
    if before.blank:
        return not after.blank
    if after.blank or after.text[0] in _NEVER_FIRST:
        return False
    return before.width > 1 or after.width > 1 or before.text in "-—"


def _runs(cells: list[_Cell]) -> list[Run]:
    runs: list[Run] = []
    parts: list[str] = []
    ref = 0
    for cell in cells:
        if parts and cell.ref != ref:
            runs.append(Run("".join(parts), ref))
            parts = []
        ref = cell.ref
        parts.append(cell.text)
    if parts:
        runs.append(Run("".join(parts), ref))
    return runs
