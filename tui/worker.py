"""The one thread that loads the model and decodes: MLX streams belong to the thread that made them.

The app hands it requests and takes its events from a queue whenever it draws; neither side ever waits for the other.
The thread is a daemon: a load or a pass that hangs cannot keep the process alive.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from localspec.errors import LocalspecError
from localspec.tokens import Token
from localspec.tui.protocols import ConversationLike, GenerationLike


@dataclass(frozen=True, slots=True)
class Loaded:
    """The conversation is open."""

    conversation: ConversationLike


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The conversation cannot be opened; the worker has ended."""

    error: LocalspecError


@dataclass(frozen=True, slots=True)
class Began:
    """An answer is on its way. Its `stats` and `seed` may be read while it runs, nothing else may be called."""

    generation: GenerationLike


@dataclass(frozen=True, slots=True)
class Reading:
    """So many tokens of the prompt have been processed."""

    done: int
    of: int


@dataclass(frozen=True, slots=True)
class Finished:
    """An answer is complete or was stopped."""

    reason: str | None
    stopped: bool


@dataclass(frozen=True, slots=True)
class Failed:
    """A request was refused, or an answer broke off."""

    error: LocalspecError


@dataclass(frozen=True, slots=True)
class Cleared:
    """The conversation is empty again."""


@dataclass(frozen=True, slots=True)
class Died:
    """A fault of the program ended the worker."""

    error: BaseException


Event = Loaded | LoadFailed | Began | Reading | Token | Finished | Failed | Cleared | Died


@dataclass(frozen=True, slots=True)
class _Send:
    text: str
    settings: dict[str, Any]
    cancel: threading.Event


class _Clear:
    pass


class _Quit:
    pass


class _PromptStopped(Exception):
    """Thrown through the engine where there is no token yet at which to stop."""


class DecodingWorker:
    """Owns the conversation; its methods are for the app's thread, and return at once (`join` excepted)."""

    def __init__(self, open_conversation: Callable[[], ConversationLike]) -> None:
        self._open = open_conversation
        self._requests: queue.Queue[_Send | _Clear | _Quit] = queue.Queue()
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._cancel = threading.Event()
        self._generation: GenerationLike | None = None
        self._quit = threading.Event()
        self.answering = False
        """Whether it is at an answer, and what is done at an answer's end included."""
        self._thread = threading.Thread(target=self._run, name="localspec-decoder", daemon=True)

    def start(self) -> None:
        """Begin to load."""
        self._thread.start()

    def send(self, text: str, settings: dict[str, Any]) -> None:
        """Ask for an answer."""
        # A flag of its own for each request: stopping one answer can never stop the next.
        self._cancel = threading.Event()
        self._generation = None
        self._requests.put(_Send(text, dict(settings), self._cancel))

    def stop(self) -> None:
        """Stop the latest answer, begun or not; what was yielded of it stays."""
        self._cancel.set()
        generation = self._generation
        if generation is not None:
            generation.stop()  # it may be long before it yields a token and the flag is looked at

    def clear(self) -> None:
        """Start the conversation over, once the current answer has ended."""
        self._requests.put(_Clear())

    def quit(self) -> None:
        """Stop and end the thread as soon as it looks up from its work."""
        self._quit.set()
        self._cancel.set()
        self._requests.put(_Quit())

    def join(self, timeout: float) -> bool:
        """Wait for the thread's end at most `timeout` seconds; whether it has ended."""
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def drain(self) -> list[Event]:
        """All events since the last call, in order."""
        events: list[Event] = []
        while True:
            try:
                events.append(self._events.get_nowait())
            except queue.Empty:
                return events

    def _run(self) -> None:
        with ExitStack() as stack:
            stack.push(self._report)
            self._serve()

    def _report(self, kind: object, error: BaseException | None, trace: object) -> bool:
        """Hand a fault to the app's thread, which has the terminal to show it on."""
        if error is not None:
            self._events.put(Died(error))
        return True

    def _serve(self) -> None:
        try:
            conversation = self._open()
        except LocalspecError as error:
            self._events.put(LoadFailed(error))
            return
        self._events.put(Loaded(conversation))
        while not self._quit.is_set():
            request = self._requests.get()
            if isinstance(request, _Send):
                self.answering = True
                self._answer(conversation, request)
                self.answering = False
            elif isinstance(request, _Clear):
                conversation.reset()
                self._events.put(Cleared())

    def _answer(self, conversation: ConversationLike, request: _Send) -> None:
        cancel = request.cancel
        if cancel.is_set():
            self._events.put(Finished(None, stopped=True))
            return

        def on_prefill(done: int, of: int) -> None:
            self._events.put(Reading(done, of))
            if cancel.is_set():
                raise _PromptStopped

        try:
            generation = conversation.send(request.text, on_prefill=on_prefill, **request.settings)
            self._generation = generation
            self._events.put(Began(generation))
            for token in generation:
                # A token that was yielded is part of the conversation: it is shown even if the stop came first.
                self._events.put(token)
                if cancel.is_set():
                    generation.close()
                    break
        except _PromptStopped:
            self._events.put(Finished(None, stopped=True))
            return
        except LocalspecError as error:
            self._events.put(Failed(error))
            return
        self._events.put(Finished(generation.finish_reason, stopped=cancel.is_set()))
