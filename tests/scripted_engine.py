"""Stands in for an engine where the command line is tested and no model needs to run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from click.testing import CliRunner, Result

from localspec.commands.root import cli
from localspec.settings import Settings
from localspec.stats import Stats
from localspec.tokens import Token

ESCAPE = "\x1b"


class ScriptedGeneration:
    """Yields the given pieces; an exception among them is raised."""

    def __init__(self, pieces: list[Any], settings: dict[str, Any]) -> None:
        self._pieces = iter(pieces)
        self.settings = Settings.from_keywords(**settings)
        self.seed = self.settings.seed if self.settings.seed is not None else 77
        self.stats = Stats()
        self.rounds: list[Any] = []
        self.tokens: list[Token] = []
        self.finish_reason: str | None = None
        self.exactness: str | None = None
        self.closed = False

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)

    def __iter__(self) -> Iterator[Token]:
        return self

    def __next__(self) -> Token:
        try:
            piece = next(self._pieces)
        except StopIteration:
            self.finish_reason = "stop"
            raise
        if isinstance(piece, BaseException):
            raise piece
        place, top = len(self.tokens), ((5, -0.5), (6, -math.inf))
        token = Token(5, piece, "plain", place, place, p=1.0, q=None, logprob=-math.inf, top_logprobs=top)
        self.tokens.append(token)
        return token

    def close(self) -> None:
        self.closed = True


class Scripted:
    """Stands for `localspec.load`, and remembers what it was asked."""

    def __init__(self) -> None:
        self.pieces: list[Any] = ["Red", ", ", "green", ".", ""]
        self.loads: list[tuple[str, dict[str, Any]]] = []
        self.sent: list[str] = []
        self.system: str | None = None
        self.settings: dict[str, Any] = {}
        self.generation: ScriptedGeneration | None = None

    def load(self, name: str, **keywords: Any) -> Any:
        self.loads.append((name, keywords))
        return SimpleNamespace(conversation=self.conversation)

    def conversation(self, system: str | None) -> Any:
        self.system = system
        return SimpleNamespace(send=self.send, engine=SimpleNamespace())

    def send(self, text: str, **settings: Any) -> ScriptedGeneration:
        self.sent.append(text)
        self.settings = settings
        self.generation = ScriptedGeneration(self.pieces, settings)
        return self.generation


def run(*arguments: str, stdin: str | bytes | None = None, **keywords: Any) -> Result:
    outcome = CliRunner().invoke(cli, arguments, input=stdin, **keywords)
    assert outcome.exception is None or isinstance(outcome.exception, SystemExit), outcome.exc_info
    return outcome
