"""Streaming forms of the `tokenizers` library's decoders.

Each takes the tokens one at a time where the library takes them all at once, and holds back only what a later token
could change. After a decoder that joins all tokens ("fused"), a stage is fed the one long token in parts.
"""

from __future__ import annotations

import codecs
import re
from abc import ABC, abstractmethod
from collections.abc import Callable

MARK = "\ufffd"


class Stage(ABC):
    """One step from tokens to text. `copy.copy` gives an independent stage in the same state."""

    @abstractmethod
    def feed(self, token: str) -> list[str]:
        """Take one token; returns the tokens that are certain now."""

    def end(self) -> list[str]:
        """What was held back, there being no more tokens."""
        return []

    @property
    def pending(self) -> bool:
        """Whether `end` could return something."""
        return False


class Local(Stage):
    """Each token by itself."""

    def __init__(self, change: Callable[[str], str]) -> None:
        self._change = change

    def feed(self, token: str) -> list[str]:
        return [self._change(token)]


class Indexed(Stage):
    """Each token by itself, the first of all in its own way."""

    def __init__(self, first: Callable[[str], str], later: Callable[[str], str]) -> None:
        self._change = first
        self._later = later

    def feed(self, token: str) -> list[str]:
        text = self._change(token)
        self._change = self._later
        return [text]


class ByteLevel(Stage):
    """Characters that stand for bytes. All tokens' bytes form one UTF-8 text, so a character may span tokens.

    A token with any character outside the alphabet (an added token with a space, say) is literal text, but its bytes
    still join the others'.
    """

    def __init__(self) -> None:
        self._bytes_of = _byte_alphabet()
        self._tail = b""

    def feed(self, token: str) -> list[str]:
        try:
            data = bytes([self._bytes_of[character] for character in token])
        except KeyError:
            data = token.encode()
        data = self._tail + data
        # Malformed bytes get as many marks as the library gives: both follow Unicode's "maximal subpart" practice.
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._tail = data[used:]
        return [text]

    def end(self) -> list[str]:
        text = self._tail.decode("utf-8", "replace")
        self._tail = b""
        return [text]

    @property
    def pending(self) -> bool:
        return bool(self._tail)


class ByteFallback(Stage):
    """Tokens such as `<0xE4>` are bytes. A run of them is text only if the whole run is valid: one bad byte turns every
    byte of its run into a mark. So nothing of a run is certain before the token that ends it."""

    _byte = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")  # "+5": the library's number parser takes a sign

    def __init__(self) -> None:
        self._run: list[int] = []

    def __copy__(self) -> ByteFallback:
        twin = ByteFallback()
        twin._run = self._run.copy()
        return twin

    def feed(self, token: str) -> list[str]:
        if match := self._byte.fullmatch(token):
            self._run.append(int(match[1], 16))
            return []
        return [*self.end(), token]

    def end(self) -> list[str]:
        run, self._run = bytes(self._run), []
        try:
            return [run.decode("utf-8")] if run else []
        except UnicodeDecodeError:
            return [MARK] * len(run)

    @property
    def pending(self) -> bool:
        return bool(self._run)


class EndOfWord(Stage):
    """A suffix that becomes a space, except in the last token of all, where it becomes nothing."""

    def __init__(self, suffix: str) -> None:
        self._suffix = suffix
        self._last: str | None = None

    def feed(self, token: str) -> list[str]:
        before, self._last = self._last, token
        return [] if before is None else [before.replace(self._suffix, " ")]

    def end(self) -> list[str]:
        last, self._last = self._last, None
        return [] if last is None else [last.replace(self._suffix, "")]

    @property
    def pending(self) -> bool:
        return bool(self._last)


class FusedReplace(Stage):
    """Replaces a string, not empty, anywhere in the whole text."""

    def __init__(self, pattern: str, content: str) -> None:
        self._pattern = pattern
        self._content = content
        self._tail = ""

    def feed(self, token: str) -> list[str]:
        *done, rest = (self._tail + token).split(self._pattern)
        held = min(len(self._pattern) - 1, len(rest))
        while not rest.endswith(self._pattern[:held]):
            held -= 1
        cut = len(rest) - held
        self._tail = rest[cut:]
        return [self._content.join([*done, rest[:cut]])]

    def end(self) -> list[str]:
        tail, self._tail = self._tail, ""
        return [tail]

    @property
    def pending(self) -> bool:
        return bool(self._tail)


class LeadingStrip(Stage):
    """Drops up to `count` of a character at the start of the whole text, and nowhere else."""

    def __init__(self, content: str, count: int) -> None:
        self._content = content
        self._left = count

    def feed(self, token: str) -> list[str]:
        while self._left and token:
            if token[0] != self._content:
                self._left = 0
                break
            token = token[1:]
            self._left -= 1
        return [token]


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's characters: printable Latin-1 stands for itself, the other bytes for U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
