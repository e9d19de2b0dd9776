"""A conversation that says what it is told to: recorded tokens instead of a model, with the engine's attributes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from localspec.errors import LocalspecError
from localspec.settings import Settings
from localspec.stats import Stats
from localspec.tokens import Round, Source, Token


def record(*pieces: str | tuple[str, Source]) -> list[Token]:
    """Tokens from texts, or from (text, source); every token not accepted from a draft ends its round."""
    tokens: list[Token] = []
    index = drafts = 0
    for position, piece in enumerate(pieces):
        text, source = (piece, "plain") if isinstance(piece, str) else piece
        drafted = source in ("ngram", "mtp", "draft", "skip", "text", "grammar")
        tokens.append(
            Token(
                id=1000 + position,
                text=text,
                source=source,
                position=10 + position,
                round=index,
                p=0.9,
                q=1.0 if drafted else None,
                logprob=-0.1,
                draft_index=drafts if drafted else None,
            )
        )
        drafts = drafts + 1 if drafted else 0
        index += not drafted
    return tokens


class ScriptedGeneration:
    """Yields the script; with a gate, one token per release of it."""

    def __init__(
        self, tokens: Sequence[Token], settings: Settings, gate: threading.Semaphore | None, finish_reason: str
    ) -> None:
        self.settings = settings
        self.seed = 4127 if settings.seed is None else settings.seed
        self.stats = Stats(prompt_tokens=12)
        self.rounds: list[Round] = []
        self.tokens: list[Token] = []
        self.finish_reason: str | None = None
        self.closed_in: str | None = None
        self.stops = 0
        self._script = tokens
        self._gate = gate
        self._reason = finish_reason
        self._closed = False

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)

    def __iter__(self) -> Iterator[Token]:
        drafted: list[int] = []
        for token in self._script:
            if self._gate is not None:
                self._gate.acquire()
            if self._closed:
                return
            self.tokens.append(token)
            drafted += [token.id] if token.draft_index is not None else []
            if token.draft_index is None:
                self._book(token, drafted)
                drafted = []
            self.stats.ttft_s = 0.25
            self.stats.total_s = 0.25 + (len(self.tokens) - 1) / 61.0
            yield token
        self.finish_reason = self._reason

    def _book(self, token: Token, drafted: list[int]) -> None:
        kept = len(drafted)
        if token.source == "resampled":
            drafted = [*drafted, 0]
        drafter = "ngram" if drafted else None
        self.rounds.append(Round(token.round, drafter, tuple(drafted), kept, kept + 1, token.position - kept))
        self.stats.book_round(self.rounds[-1])

    def stop(self) -> None:
        self.stops += 1

    def close(self) -> None:
        self._closed = True
        self.closed_in = threading.current_thread().name


@dataclass
class ScriptedEngine:
    name: str = "smollm2"
    context_length: int | None = 8192


@dataclass
class ScriptedConversation:
    """Answers each message with the next script; an error in a script is raised where it stands."""

    scripts: list[list[Token] | LocalspecError]
    gate: threading.Semaphore | None = None
    finish_reason: str = "stop"
    prompt_chunks: int = 0
    engine: ScriptedEngine = field(default_factory=ScriptedEngine)
    messages: list[dict[str, str]] = field(default_factory=list)
    generations: list[ScriptedGeneration] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)
    sent_settings: list[dict[str, Any]] = field(default_factory=list)

    @property
    def context_used(self) -> int:
        return 12 * len(self.messages)

    def send(
        self, text: str, *, on_prefill: Callable[[int, int], None] | None = None, **settings: Any
    ) -> ScriptedGeneration:
        self.threads.add(threading.current_thread().name)
        self.messages.append({"role": "user", "content": text})
        self.sent_settings.append(settings)
        script = self.scripts[(len(self.messages) - 1) % len(self.scripts)]
        if isinstance(script, LocalspecError):
            raise script
        if on_prefill is not None:
            for done in range(0, 12 * self.prompt_chunks, 12):
                if self.gate is not None:
                    self.gate.acquire()
                on_prefill(done + 12, 12 * self.prompt_chunks)
        generation = ScriptedGeneration(script, Settings.from_keywords(**settings), self.gate, self.finish_reason)
        self.generations.append(generation)
        return generation

    def reset(self) -> None:
        self.threads.add(threading.current_thread().name)
        self.messages.clear()


def wait_forever() -> ScriptedConversation:
    """A load that never ends."""
    while True:
        time.sleep(0.05)
