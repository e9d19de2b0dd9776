"""The transcript: blocks of text, drawn line by line, with each token in the look of its source.

Built on Textual's Line API: a streamed token wraps and redraws the last row only, so a long answer costs no more per
token than a short one. Text of the model and of the user is drawn as it is, never read as markup.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.selection import Selection
from textual.strip import Strip

from localspec.tokens import Token
from localspec.tui.block import NO_TOKEN, Block, Kind
from localspec.tui.provenance import COMPONENTS, component
from localspec.tui.wrap import Row

CARET = "▍"
MOST_CELLS = 110
"""Longer lines are hard to read, however wide the terminal."""
_GUTTERS: dict[Kind, str] = {"user": "❯ ", "answer": "  ", "note": "  ", "error": "✗ "}
GUTTER = 2


class Transcript(ScrollView, can_focus=True):
    """The conversation so far."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {
        *COMPONENTS,
        "transcript--user",
        "transcript--mark",
        "transcript--note",
        "transcript--error",
        "transcript--caret",
    }

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.tokens: list[Token] = []
        """Every token shown; a segment's `style.meta["token"]` is an index into this list."""
        self.blocks: list[Block] = []
        self._tops: list[int] = []
        """The line each block begins on. A blank line follows every block."""
        self._strips: dict[int, Strip] = {}
        self._wrapped_at = 0
        self._following = True
        """Whether the view sticks to the end: so until the user scrolls up, and again from when they are back."""

    # -- what the app says ------------------------------------------------------------------------------------------

    def add(self, kind: Kind, text: str = "") -> Block:
        """Append a block; above the answer and its question, while one is being written."""
        block = Block(kind, self._text_width)
        if text:
            block.feed(text)
        index = len(self.blocks)
        if self.blocks and self.blocks[-1].writing:
            index -= 2 if [b.kind for b in self.blocks[-2:]] == ["user", "answer"] else 1
        self.blocks.insert(index, block)
        self._changed(self._stack(index))
        return block

    def begin_answer(self) -> None:
        """Append an empty answer, for `feed`."""
        self.add("answer").writing = True
        self.follow()

    def feed(self, tokens: Iterable[Token]) -> None:
        """Append tokens to the answer that is being written, which must be the last block."""
        block = self.blocks[-1]
        first = len(block) - 1
        for token in tokens:
            self.tokens.append(token)
            block.feed(token.text, len(self.tokens) - 1)
        self._changed(self._tops[-1] + first)

    def end_answer(self) -> None:
        """The answer being written is complete; one without any text leaves no block."""
        block = self.blocks[-1]
        block.writing = False
        if not block.text:
            self.blocks.pop()
            self._changed(self._tops.pop())
        else:
            self._changed(self._tops[-1] + len(block) - 1)

    def clear(self) -> None:
        """Remove everything."""
        self.tokens.clear()
        self.blocks.clear()
        self._tops.clear()
        self._following = True
        self._changed(0)

    def follow(self) -> None:
        """Go to the end and stay there."""
        self._following = True
        self._scroll_to_line(self.max_scroll_y)

    def show(self, block: Block) -> None:
        """Go to a block's beginning."""
        self._scroll_to_line(self._tops[self.blocks.index(block)])

    # -- layout -----------------------------------------------------------------------------------------------------

    @property
    def _text_width(self) -> int:
        # One column stays free, so that no text leans on the scroll bar.
        return max(min(self.scrollable_content_region.width, MOST_CELLS) - GUTTER - 1, 1)

    @property
    def _height(self) -> int:
        return self._tops[-1] + len(self.blocks[-1]) + 1 if self.blocks else 0

    def _stack(self, index: int) -> int:
        """Put the blocks from `index` on below the one before it; returns the line where they begin."""
        del self._tops[index:]
        first = line = self._tops[-1] + len(self.blocks[index - 1]) + 1 if index else 0
        for block in self.blocks[index:]:
            self._tops.append(line)
            line += len(block) + 1
        return first

    def _changed(self, first: int) -> None:
        """Lines from `first` on are new or different."""
        old_height, height = self.virtual_size.height, self._height
        for line in range(first, max(old_height, height)):
            self._strips.pop(line, None)
        if height != old_height:
            self.virtual_size = Size(self.scrollable_content_region.width, height)
        self.refresh_lines(first, max(old_height, height, first + 1) - first)
        if self._following:
            self.follow()

    def on_resize(self) -> None:
        """Wrap everything again, and keep the reader where they were."""
        width = self._text_width
        if width != self._wrapped_at:
            place = self._place()
            self._wrapped_at = width
            for block in self.blocks:
                block.rewrap(width)
            self._stack(0)
            self._strips.clear()
            self.virtual_size = Size(self.scrollable_content_region.width, self._height)
            self.refresh()
            if place is not None and not self._following:
                self._scroll_to_line(self._line_of(*place))
        if self._following:
            self.follow()

    def _place(self) -> tuple[int, int] | None:
        """The block at the top of the view, and how many of its characters lie above."""
        if not self.blocks:
            return None
        line = self.scroll_offset.y
        index = self._block_at(line)
        rows = self.blocks[index].rows
        above = min(line - self._tops[index], len(rows))
        return index, sum(len(rows[i].text) + len(rows[i].end) for i in range(above))

    def _line_of(self, index: int, characters: int) -> int:
        rows = self.blocks[index].rows
        for row in range(len(rows)):
            characters -= len(rows[row].text) + len(rows[row].end)
            if characters < 0:
                return self._tops[index] + row
        return self._tops[index] + len(rows) - 1

    def _scroll_to_line(self, line: float) -> None:
        # By force: the scroll bar that would allow it is not there yet when the text has just outgrown the view. Nor is
        # it told then where the view is, and would begin at the top.
        self.scroll_to(y=line, animate=False, immediate=True, force=True)
        if self.max_scroll_y:
            self.vertical_scrollbar.position = self.scroll_y

    def _block_at(self, line: int) -> int:
        return bisect_right(self._tops, line) - 1

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        self._following = new_value >= self.max_scroll_y

    # -- drawing ----------------------------------------------------------------------------------------------------

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._strips.clear()

    def render_line(self, y: int) -> Strip:
        line = y + self.scroll_offset.y
        width = self.size.width
        if line >= self._height:
            return Strip.blank(width, self.rich_style)
        strip = self._strips.get(line)
        if strip is None or strip.cell_length != width:
            strip = self._strips[line] = self._draw(line, width)
        return strip

    def _draw(self, line: int, width: int) -> Strip:
        index = self._block_at(line)
        block = self.blocks[index]
        at = line - self._tops[index]
        if at >= len(block):
            return Strip.blank(width, self.rich_style)
        row = block.rows[at]
        base = self._base(block.kind)
        span = self._selected(line, row)
        segments: list[Segment] = []
        column = 0
        for run in row.runs:
            style = base if run.ref == NO_TOKEN else self._token_style(run.ref)
            segments += self._pieces(run.text, style, column, span)
            column += len(run.text)
        content = Strip(segments).apply_offsets(0, line)
        mark = _GUTTERS[block.kind] if at == 0 else " " * GUTTER
        mark_style = base if block.kind == "error" else base + self._style("transcript--mark", partial=True)
        parts = [Strip([Segment(mark, mark_style)]), content]
        if block.writing and at == len(block) - 1 and content.cell_length + GUTTER < width:
            parts.append(Strip([Segment(CARET, self._style("transcript--caret"))]))
        return Strip.join(parts).adjust_cell_length(width, base)

    def _base(self, kind: Kind) -> Style:
        return self.rich_style if kind == "answer" else self._style(f"transcript--{kind}")

    def _token_style(self, index: int) -> Style:
        token = self.tokens[index]
        style = self._style(component(token.source, token.level))
        return style + Style.from_meta({"token": index})

    def _style(self, name: str, partial: bool = False) -> Style:
        return self.get_component_rich_style(name, partial=partial)

    def _pieces(self, text: str, style: Style, column: int, span: tuple[int, int] | None) -> list[Segment]:
        """A run's segments: an underlined space would join words into a bar, and the selection has its own look."""
        plain = style + Style(underline=False) if style.underline else style
        chosen = self.screen.get_component_rich_style("screen--selection") if span else None
        segments: list[Segment] = []
        begin = 0
        looks = [
            (plain if c == " " else style, bool(span and span[0] <= column + i < span[1])) for i, c in enumerate(text)
        ]
        for i in range(1, len(text) + 1):
            if i == len(text) or looks[i] != looks[begin]:
                look, selected = looks[begin]
                segments.append(Segment(text[begin:i], look + chosen if selected and chosen else look))
                begin = i
        return segments

    # -- selection --------------------------------------------------------------------------------------------------

    def selection_updated(self, selection: Selection | None) -> None:
        """Draw everything again in the new selection's light."""
        self._strips.clear()
        self.refresh()

    def _selected(self, line: int, row: Row) -> tuple[int, int] | None:
        selection = self.text_selection
        span = selection.get_span(line) if selection is not None else None
        if span is None:
            return None
        start, end = span
        return start, len(row.text) if end == -1 else end

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        """The selected text as it was before it was wrapped."""
        parts: list[str] = []
        for top, block in zip(self._tops, self.blocks, strict=True):
            for at in range(len(block)):
                row = block.rows[at]
                span = selection.get_span(top + at)
                if span is None:
                    continue
                start, end = span
                parts.append(row.text[start:] if end == -1 else row.text[start:end])
                if end == -1:
                    parts.append(row.end if at < len(block) - 1 else "\n\n")
        text = "".join(parts).strip("\n")
        return (text, "\n") if text else None
