"""The last line: the keys on the left, and on the right what the looks of the tokens mean."""

from __future__ import annotations

from typing import ClassVar

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.reactive import reactive
from textual.strip import Strip
from textual.widget import Widget

from localspec.tokens import Source
from localspec.tui.provenance import COMPONENTS, PROVENANCE, RARE, REMEMBERED, component

MARKER = "▪"
KEYS = (
    "Enter send · Ctrl+J new line · Esc stop · Ctrl+P palette · /help",
    "Ctrl+J new line · Esc stop · /help",
    "^J newline · Esc stop · /help",
    "Esc stop · /help",
    "/help",
)
"""The same hints, shorter and shorter."""


class Legend(Widget):
    """Keys and legend; a notice takes the place of the keys."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {*COMPONENTS, "legend--notice"}
    notice: reactive[str] = reactive("")
    seen: reactive[frozenset[Source]] = reactive(frozenset())
    """The sources of this chat's tokens: those that few chats have are explained once there are any."""
    remembered: reactive[bool] = reactive(False)
    """Whether to explain tokens that were guessed from outside this chat."""

    def say(self, notice: str, seconds: float = 2.5) -> None:
        """Show a word to the user for a while."""
        self.notice = notice
        self.set_timer(seconds, lambda: self._unsay(notice))

    def _unsay(self, notice: str) -> None:
        if self.notice == notice:
            self.notice = ""

    def render_line(self, y: int) -> Strip:
        base = self.rich_style
        width = self.size.width
        if y:
            return Strip.blank(width, base)
        if self.notice and cell_len(self.notice) + 1 + _width(self._entries(" ", False)) > width:
            return Strip([Segment(self.notice, self._style("legend--notice"))]).adjust_cell_length(width, base)
        # Airy where there is room for it, then with markers, then bare.
        entries = self._entries(" ", False)
        for separator, keys in (("  ", KEYS[1]), (" ", KEYS[-2])):
            marked = self._entries(separator, True)
            if _width(marked) + cell_len(self.notice or keys) + 2 <= width:
                entries = marked
                break
        while _width(entries) > width:
            del entries[-2:]  # the last one and what separates it
        room = width - _width(entries) - 2
        left = self.notice or next((keys for keys in KEYS if cell_len(keys) <= room), "")
        style = self._style("legend--notice") if self.notice else base
        gap = max(width - cell_len(left) - _width(entries), 0)
        return Strip([Segment(left, style), Segment(" " * gap, base), *entries]).adjust_cell_length(width, base)

    def _entries(self, separator: str, marked: bool) -> list[Segment]:
        shown = [(p.label, component(s)) for s, p in PROVENANCE.items() if s not in RARE or s in self.seen]
        if self.remembered:
            ngram = next(i for i, (_, name) in enumerate(shown) if name == component("ngram"))
            shown.insert(ngram + 1, (REMEMBERED.label, component("ngram", "learned")))
        segments: list[Segment] = []
        for label, name in shown:
            style = self._style(name)
            if segments:
                segments.append(Segment(separator, self.rich_style))
            if marked:
                segments.append(Segment(MARKER, Style(color=style.color, bgcolor=style.bgcolor)))
            segments.append(Segment(label, style))
        return segments

    def _style(self, name: str) -> Style:
        return self.get_component_rich_style(name)


def _width(segments: list[Segment]) -> int:
    return sum(segment.cell_length for segment in segments)
