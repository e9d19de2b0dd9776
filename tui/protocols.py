"""What the app asks of a conversation: the part of the engine's surface that it uses, and that a replay offers too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from localspec.stats import Stats
from localspec.tokens import Round, Token


class EngineLike(Protocol):
    """What is said of the model."""

    @property
    def name(self) -> str: ...
    @property
    def context_length(self) -> int | None: ...


class GenerationLike(Protocol):
    """One answer being written."""

    @property
    def seed(self) -> int: ...
    @property
    def stats(self) -> Stats: ...
    @property
    def rounds(self) -> Sequence[Round]: ...
    @property
    def finish_reason(self) -> str | None: ...
    def __iter__(self) -> Iterator[Token]: ...
    def close(self) -> None: ...
    def stop(self) -> None: ...


class ConversationLike(Protocol):
    """A chat over one cache."""

    @property
    def engine(self) -> EngineLike: ...
    @property
    def context_used(self) -> int: ...
    def send(
        self, text: str, *, on_prefill: Callable[[int, int], None] | None = None, **settings: Any
    ) -> GenerationLike: ...
    def reset(self) -> None: ...
