"""What an engine remembers of its answers: n-grams on disk that draft in later sessions.

Nothing here may disturb an answer: what goes wrong is told in one line, and decoding goes on without. Knows nothing of
how the files are kept (`localspec.ngrams`) or of drafting.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from localspec.errors import LearningWarning, SettingsError
from localspec.ngrams import Shelf
from localspec.tokens import Level

if TYPE_CHECKING:
    from localspec.ngrams import NgramFile, NgramStore

SWITCH = "LOCALSPEC_NGRAMS"
"""The environment variable that turns learning off for a process."""
CONTEXT = 6
"""Tokens of the prompt that an answer's first n-grams reach back to: the longest order."""
_WORDS = {"": True, "on": True, "1": True, "off": False, "0": False}


def allowed(shelf: Shelf) -> bool:
    """Whether the user lets anything be learned: neither `localspec cache off` nor $LOCALSPEC_NGRAMS says no.

    Raises SettingsError where the variable says something else.
    """
    return shelf.enabled and not switched_off()


def switched_off() -> bool:
    """Whether $LOCALSPEC_NGRAMS says off. Raises SettingsError where it says neither on nor off."""
    word = os.environ.get(SWITCH, "")
    if word.lower() not in _WORDS:
        raise SettingsError(f"{SWITCH} is on or off, not {word!r}: correct it, or unset it")
    return not _WORDS[word.lower()]


class Learning:
    """The files of one tokenizer, shared by all sessions of an engine. Nothing is written before `take`."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        label: str = "",
        shelf: Shelf | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """label: the model's name, for `localspec cache show`. say: told in one line what goes wrong; None warns.

        Raises SettingsError for a $LOCALSPEC_NGRAMS that is neither on nor off.
        """
        self._tell = _harmless(say if say is not None else _warn)
        self._shelf = shelf if shelf is not None else Shelf(say=self._tell)
        self._files: dict[Level, NgramFile] = {}
        if not allowed(self._shelf):
            return
        from localspec.vocabulary import fingerprint

        key = fingerprint(tokenizer)
        self._files = {"learned": self._shelf.file("learned", key, label), "seed": self._shelf.file("seed", key)}
        for name, file in list(self._files.items()):
            try:
                file.store  # noqa: B018 - read now: at the first draft it would pass for the cost of drafting
            except Exception as error:  # noqa: BLE001 - whatever it is, answers can do without
                del self._files[name]
                self._tell(f"{file.path} is not used: {_one_line(error)}")

    @property
    def levels(self) -> tuple[tuple[Level, Callable[[], NgramStore]], ...]:
        """(name, what gives its n-grams now) of each level to draft from; none where learning is off."""
        return tuple((name, _StoreOf(file)) for name, file in self._files.items())

    def take(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Learn what was written after `prompt`, ids both. Does nothing where learning was turned off meanwhile."""
        # An answer that is abandoned at the interpreter's end comes too late: there are no imports any more, nor files.
        if not answer or "learned" not in self._files or sys.is_finalizing():
            return
        try:
            if allowed(self._shelf):
                from localspec.ngrams.lessons import lessons

                self._files["learned"].learn(lessons(prompt[-CONTEXT:], answer))
        except Exception as error:  # noqa: BLE001 - whatever it is: the answer is written, and stays as it is
            if self._files.pop("learned", None) is not None:  # of several sessions that fail, one says so
                self._tell(f"this session learns nothing: {_one_line(error)}")


class _StoreOf:
    """Gives a file's n-grams as they are now."""

    def __init__(self, file: NgramFile) -> None:
        self._file = file

    def __call__(self) -> NgramStore:
        return self._file.store


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _harmless(say: Callable[[str], None]) -> Callable[[str], None]:
    """The same, but nothing comes of it where it fails, as a warning does that was made an error."""

    def tell(line: str) -> None:
        with suppress(Exception):
            say(line)

    return tell


def _warn(line: str) -> None:
    warnings.warn(line, LearningWarning, stacklevel=3)
