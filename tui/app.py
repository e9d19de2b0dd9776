"""The chat on a terminal: a transcript, an input, and numbers, around one thread that decodes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, ClassVar

from textual import constants, events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType

from localspec.errors import LocalspecError
from localspec.text import printable
from localspec.tokens import Token
from localspec.tui import commands, status
from localspec.tui.legend import Legend
from localspec.tui.prompt import PromptInput
from localspec.tui.protocols import ConversationLike, GenerationLike
from localspec.tui.provenance import PROVENANCE, REMEMBERED
from localspec.tui.status import StatusLine
from localspec.tui.terminal import end_without_a_terminal
from localspec.tui.themes import DARK, THEMES
from localspec.tui.title import TitleBar, sampling
from localspec.tui.transcript import Transcript
from localspec.tui.worker import (
    Began,
    Cleared,
    DecodingWorker,
    Died,
    Event,
    Failed,
    Finished,
    Loaded,
    LoadFailed,
    Reading,
)

FRAMES_PER_SECOND = 30
TERMINAL_CHECK_S = 2.0
PATIENCE_S = 1.0
"""How long to wait at the end for the decoding thread."""
LEARNING_S = 5.0
"""How much longer, where an answer is learned from: another process may hold the file for 2 s, and a save takes 1."""


class ChatApp(App[None]):
    """`localspec chat`. After the run, `failure` is what ended the conversation, or kept it from beginning."""

    CSS_PATH = "app.tcss"
    TITLE = "localspec"
    AUTO_FOCUS = "#prompt"
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (60, "-normal"), (100, "-wide")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-short"), (18, "-tall")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "stop", "Stop"),
        Binding("ctrl+c", "interrupt", "Stop or quit", priority=True, show=False),
        Binding("ctrl+q", "quit", "Quit", priority=True),
        Binding("ctrl+d", "quit", "Quit", show=False),
    ]

    def __init__(
        self, open_conversation: Callable[[], ConversationLike], *, title: str, settings: dict[str, Any]
    ) -> None:
        super().__init__()
        self.worker = DecodingWorker(open_conversation)
        self.settings = dict(settings)
        self.conversation_title = title
        self.conversation: ConversationLike | None = None
        self.generation: GenerationLike | None = None
        """The latest answer; the worker's while `busy`, to be read only."""
        self.busy = False
        """Whether an answer was asked for and has not ended."""
        self.failure: BaseException | None = None
        self._stopping = False
        self._clearing = False
        for theme in THEMES:
            self.register_theme(theme)
        if constants.DEFAULT_THEME == "textual-dark":
            self.theme = DARK.name

    def compose(self) -> ComposeResult:
        yield TitleBar(f"localspec · {self.conversation_title}", id="title")
        yield Transcript(id="transcript")
        yield StatusLine(id="status")
        yield PromptInput(id="prompt", placeholder="Ask something, or /help")
        yield Legend(id="legend")

    def on_mount(self) -> None:
        self.transcript = self.query_one(Transcript)
        self.prompt = self.query_one(PromptInput)
        self.status = self.query_one(StatusLine)
        self.legend = self.query_one(Legend)
        self._show_settings()
        self.status.state = f"loading {printable(self.conversation_title)}…"
        self.worker.start()
        self.set_interval(1 / FRAMES_PER_SECOND, self._drain)
        if not self.is_headless:
            self.set_interval(TERMINAL_CHECK_S, end_without_a_terminal)

    # -- from the worker --------------------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Take what the worker has said since the last frame; neighbouring tokens go to the transcript together."""
        tokens: list[Token] = []
        for event in self.worker.drain():
            if isinstance(event, Token):
                tokens.append(event)
                continue
            self._show_tokens(tokens)
            tokens = []
            self._handle(event)
        self._show_tokens(tokens)
        if self.busy and self.generation is not None and self.generation.stats.emitted:
            self._show_numbers()
            self._show_context()

    def _show_tokens(self, tokens: list[Token]) -> None:
        if tokens:
            self.legend.seen |= {token.source for token in tokens}
            self.legend.remembered |= any(token.level in ("learned", "seed") for token in tokens)
            self.transcript.feed(tokens)
            self.status.state = "stopping…" if self._stopping else ""

    def _handle(self, event: Event) -> None:
        match event:
            case Loaded(conversation):
                self.conversation = conversation
                if not self.busy:
                    self.status.state = "ready"
                self._show_context()
                self._welcome(conversation)
            case LoadFailed(error):
                self._load_failed(error)
            case Began(generation):
                self.generation = generation
                self.status.parts = ()
                if not self._stopping:
                    self.status.state = "reading the prompt…"
            case Reading(done, of):
                if not self._stopping:
                    self.status.state = f"reading the prompt… {done} / {of}"
            case Finished(reason, stopped):
                begun = self.generation is not None and bool(self.generation.stats.emitted)
                self._answer_ended()
                if stopped and not begun:
                    self.transcript.add("note", "stopped before the answer began; the message is not part of the chat")
                elif stopped:
                    self.transcript.add("note", "stopped")
                elif reason == "length":
                    self.transcript.add("note", "length limit reached; /max sets it")
            case Failed(error):
                self._answer_ended()
                self.transcript.add("error", one_line(error))
            case Cleared():
                self.transcript.clear()
                self.busy = self._clearing = False
                self.generation = None
                self.status.state = "ready"
                self.status.parts = ()
                self._show_context()
            case Died(error):
                self.failure = error
                self.exit()

    def _welcome(self, conversation: ConversationLike) -> None:
        self.transcript.add("note", "The look of each token shows where it came from; /help explains.")

    def _answer_ended(self) -> None:
        self.transcript.end_answer()
        self.busy = self._clearing
        self._stopping = False
        self.status.state = "" if self.generation is not None and self.generation.stats.emitted else "ready"
        if not self.status.state:
            self._show_numbers()
        self._show_context()

    def _load_failed(self, error: LocalspecError) -> None:
        self.failure = error
        if self.busy:
            self.transcript.end_answer()
        self.busy = False
        self.transcript.add("error", one_line(error))
        self.status.state = "no model; Ctrl+Q leaves"
        self.prompt.disabled = True
        self.transcript.focus()

    # -- from the user ----------------------------------------------------------------------------------------------

    def on_prompt_input_submitted(self, message: PromptInput.Submitted) -> None:
        try:
            command = commands.parse(message.text)
            if command is not None:
                self._obey(*command)
                self.prompt.take(message.text)
                return
        except LocalspecError as error:
            self.legend.say(one_line(error), 5)
            return
        if self.busy:
            self.legend.say("still answering; Esc stops")
            return
        self.busy = True
        self.generation = None
        self.prompt.take(message.text)
        text = message.text.strip()
        self.transcript.add("user", text)
        self.transcript.begin_answer()
        self.status.parts = ()
        if self.conversation is not None:
            self.status.state = "reading the prompt…"
        self.worker.send(text, self.settings)

    def _obey(self, command: commands.Command, argument: str) -> None:
        match command.name:
            case "quit":
                self.call_later(self.action_quit)
            case "clear" if self.conversation is None:
                raise commands.CommandError("/clear when the model is loaded")
            case "clear":
                self.action_stop()
                self.busy = self._clearing = True
                self.worker.clear()
            case "help":
                self._help()
            case _ if argument:
                self.settings = commands.change(self.settings, command, argument)
                self._show_settings()
                self.legend.say(commands.describe(self.settings, command))
            case _:
                self.legend.say(commands.describe(self.settings, command), 5)

    def _help(self) -> None:
        if self.busy:
            raise commands.CommandError("/help when the answer has ended; Esc stops it")
        rows = [(f"/{c.name} {c.argument}".rstrip(), c.help) for c in commands.COMMANDS.values()]
        keys = [
            ("Enter", "send"),
            ("Ctrl+J", "new line; Shift+Enter too where the terminal tells them apart"),
            ("Esc", "stop and keep what is written"),
            ("Ctrl+C", "stop; when nothing runs, copy what is selected, else quit"),
            ("Up, Down", "earlier inputs, at the edges of the input"),
            ("PgUp, PgDn", "scroll the conversation"),
            ("Ctrl+P", "palette: themes and more"),
        ]
        sources = [(p.label, p.meaning) for p in PROVENANCE.values()]
        sources.insert(2, REMEMBERED)
        size = max(len(name) for name, _ in (*rows, *keys, *sources)) + 2
        wide = self.size.width >= 80
        lines = (
            [f"{name:{size}}{words}" if wide else f"{name}: {words}" for name, words in table]
            for table in (rows, keys, sources)
        )
        self.transcript.show(self.transcript.add("note", "\n\n".join("\n".join(table) for table in lines)))

    def on_key(self, event: events.Key) -> None:
        """Typing belongs in the input, wherever the focus is."""
        if event.is_printable and event.character and self.focused is self.transcript and not self.prompt.disabled:
            self.prompt.focus()
            self.prompt.insert(event.character)
            event.stop()

    def on_prompt_input_scrolled(self, message: PromptInput.Scrolled) -> None:
        page = self.transcript.size.height - 1
        self.transcript.scroll_relative(y=message.pages * page, animate=False)

    def action_stop(self) -> None:
        """Stop the answer and keep what there is of it."""
        if self.busy:
            self._stopping = True
            self.status.state = "stopping…"
            self.worker.stop()
        else:
            self.screen.clear_selection()

    def action_interrupt(self) -> None:
        """Ctrl+C: stop what runs; else copy what is selected; else empty the input; else leave."""
        if self.busy and not self._stopping:
            self.action_stop()
        elif not self.busy and (selected := self.prompt.selected_text or self.screen.get_selected_text()):
            self.copy_to_clipboard(selected)
            self.screen.clear_selection()
            self.prompt.move_cursor(self.prompt.cursor_location)
            self.legend.say("copied")
        elif not self.busy and self.prompt.text:
            self.prompt.clear()
            self.legend.say("cleared; once more to quit")
        else:
            self.call_later(self.action_quit)

    async def action_quit(self) -> None:
        """Leave at once; `run_chat` waits for the worker."""
        self.worker.quit()
        self.exit()

    # -- numbers ----------------------------------------------------------------------------------------------------

    def _show_settings(self) -> None:
        self.query_one(TitleBar).sampling = sampling(self.settings)

    def _show_numbers(self) -> None:
        if self.generation is None or self.conversation is None:
            return
        self.status.parts = status.measured(
            self.generation.stats,
            self.generation.seed,
            speculate=bool(self.settings.get("speculate", True)),
        )

    def _show_context(self) -> None:
        if self.conversation is not None:
            self.status.context = status.context_use(
                self.conversation.context_used, self.conversation.engine.context_length
            )


def one_line(error: LocalspecError) -> str:
    """An error's message without line breaks."""
    return " ".join(printable(str(error)).split())


def run_chat(
    open_conversation: Callable[[], ConversationLike],
    *,
    title: str,
    settings: dict[str, Any],
    learns: bool = False,
    at_end: Callable[[], None] = lambda: None,
) -> None:
    """Chat until the user leaves. Raises what `open_conversation` raised, once the user has seen it.

    `open_conversation` runs in the decoding thread, and so does everything it returns. When that thread is still in the
    middle of something after a while, the process ends here, with status 0. learns: an answer's end saves something,
    which is waited for longer. at_end: called when the terminal is the caller's again, whatever comes then.
    """
    app = ChatApp(open_conversation, title=title, settings=settings)
    try:
        app.run()
    finally:
        app.worker.quit()
        ended = app.worker.join(PATIENCE_S)
        if not ended and learns and app.worker.answering:
            ended = app.worker.join(LEARNING_S)
        at_end()
    if app.failure is not None:
        raise app.failure
    if not ended:
        # A daemon thread inside native code can abort the interpreter's own way out: leave without it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
