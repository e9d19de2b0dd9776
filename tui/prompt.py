"""The input: a text area in which Enter sends, that grows with its text and remembers what was sent."""

from __future__ import annotations

from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widgets import TextArea

from localspec.text import printable

NEW_LINE = ("shift+enter", "ctrl+j", "alt+enter")


class PromptInput(TextArea):
    """Multi-line input with history at its upper and lower edge."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+d", "delete_or_quit", "Quit", show=False),
    ]

    class Submitted(Message):
        """The user pressed Enter on some text."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    class Scrolled(Message):
        """The user pressed Page Up (-1) or Page Down (+1): meant for the transcript."""

        def __init__(self, pages: int) -> None:
            super().__init__()
            self.pages = pages

    def __init__(self, *, placeholder: str, id: str | None = None) -> None:
        super().__init__(
            id=id, soft_wrap=True, show_line_numbers=False, highlight_cursor_line=False, placeholder=placeholder
        )
        self.sent: list[str] = []
        self._recalled: int | None = None
        """Index into the history of what is shown; None when it is a new text."""
        self._draft = ""
        """The new text, while an old one is shown."""

    def take(self, text: str) -> None:
        """Remove what was submitted, and remember it; what was typed since stays."""
        if text.strip() and self.sent[-1:] != [text]:
            self.sent.append(text)
        self._recalled = None
        self._draft = ""
        self.text = self.text.removeprefix(text)
        self.move_cursor(self.document.end)

    def on_key(self, event: events.Key) -> None:
        """Enter and its kin, in their turn among the other keys: a binding with priority would overtake the text."""
        if event.key == "enter":
            event.prevent_default()
            event.stop()
            self.submit()
        elif event.key in NEW_LINE:
            event.prevent_default()
            event.stop()
            self._insert("\n")

    def submit(self) -> None:
        """Hand the text to the app, which takes it when it can."""
        if self.text.strip():
            self.post_message(self.Submitted(self.text))

    def action_delete_or_quit(self) -> None:
        """Ctrl+D as in a shell: quits on an empty line."""
        if self.text:
            self.action_delete_right()
        else:
            self.app.run_worker(self.app.run_action("quit"))

    def action_cursor_up(self, select: bool = False) -> None:
        if not select and self.navigator.is_first_wrapped_line(self.cursor_location):
            self._recall(-1)
        else:
            super().action_cursor_up(select)

    def action_cursor_down(self, select: bool = False) -> None:
        if not select and self.navigator.is_last_wrapped_line(self.cursor_location):
            self._recall(1)
        else:
            super().action_cursor_down(select)

    def action_cursor_page_up(self) -> None:
        self.post_message(self.Scrolled(-1))

    def action_cursor_page_down(self) -> None:
        self.post_message(self.Scrolled(1))

    def on_paste(self, event: events.Paste) -> None:
        """Take the whole paste, but for control codes, which the terminal would obey."""
        event.prevent_default()
        event.stop()
        self._insert(printable(event.text.replace("\r\n", "\n").replace("\r", "\n")))

    def _insert(self, text: str) -> None:
        result = self.replace(text, *self.selection)
        self.move_cursor(result.end_location)
        self.scroll_cursor_visible()

    def _recall(self, step: int) -> None:
        """Walk the history; beyond its newest entry lies the text that was being written."""
        newest = len(self.sent)
        at = newest if self._recalled is None else self._recalled
        to = at + step
        if not 0 <= to <= newest:
            return
        if at == newest:
            self._draft = self.text
        self._recalled = None if to == newest else to
        self.text = self._draft if to == newest else self.sent[to]
        self.move_cursor(self.document.end)
