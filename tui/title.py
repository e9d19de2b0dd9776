"""The first line: what runs on the left, how it samples on the right."""

from __future__ import annotations

from typing import Any

from rich.cells import cell_len, set_cell_size
from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget

from localspec.settings import Settings
from localspec.text import printable


class TitleBar(Widget):
    """One line at the top."""

    sampling: reactive[str] = reactive("")

    def __init__(self, title: str, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.title = printable(title).replace("\n", " ")

    def render(self) -> Content:
        width = self.content_size.width
        gap = width - cell_len(self.title) - cell_len(self.sampling)
        if gap < 2:
            title = self.title if cell_len(self.title) <= width else set_cell_size(self.title, max(width - 1, 0)) + "…"
            return Content(title)
        return Content(self.title + " " * gap + self.sampling)


def sampling(settings: dict[str, Any]) -> str:
    """How tokens are chosen, in a few words."""
    current = Settings.from_keywords(**settings)
    words = [f"temp {current.temperature:g}"]
    if current.seed is not None:
        words.append(f"seed {current.seed}")
    if not current.speculate:
        words.append("speculation off")
    return " · ".join(words)
