"""The text that a reader gets: stop strings, each token's own piece, and text that is safe to show on a terminal.

Knows nothing about models or about how ids become text; that is localspec/detokenizer.py.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from localspec.detokenizer import Detokenizer, DetokenizerFactory

__all__ = ["Detokenizer", "DetokenizerFactory", "StopStrings", "TextStream", "printable"]

Payload = TypeVar("Payload")


class StopStrings:
    """Cuts a text that comes in pieces at its first stop string.

    The stop that starts first wins, even where one that starts inside it is complete earlier: so after "ab", with stops
    "abc" and "b", one more character decides. Stops are not empty. Nothing depends on how the text is cut into pieces.
    """

    def __init__(self, stops: tuple[str, ...] = ()) -> None:
        self.stopped = False
        """Whether a stop string was found; the text is over."""
        self._searches = [_Search(stop) for stop in stops]
        self._seen = 0
        self._found: int | None = None  # where the earliest complete stop starts
        self._held = ""
        self._released = 0

    def add(self, piece: str) -> str:
        """Take the next piece; returns the text that no stop can start in any more."""
        if self.stopped:
            return ""
        if not self._searches:
            return piece
        self._held += piece
        for character in piece:
            self._seen += 1
            for search in self._searches:
                if search.advance(character):
                    start = self._seen - len(search.stop)
                    self._found = start if self._found is None else min(self._found, start)
            if self._found is not None and self._found <= self._earliest():
                self.stopped = True
                break
        return self._release(self._earliest())

    def finish(self) -> str:
        """The text held back, there being no more: up to a stop that an earlier, unfinished one had kept waiting."""
        if self.stopped:
            return ""
        self.stopped = self._found is not None
        return self._release(self._released + len(self._held))

    def _earliest(self) -> int:
        """Where the earliest stop starts that is not ruled out; the end of the text if there is none."""
        return self._seen - max(search.matched for search in self._searches)

    def _release(self, end: int) -> str:
        count = (end if self._found is None else min(end, self._found)) - self._released
        self._released += count
        text, self._held = self._held[:count], self._held[count:]
        return text


class _Search:
    """Knuth, Morris and Pratt's search for one string: constant amortised time per character, however pieces fall."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        """Length of the longest beginning of the stop that the text ends with."""
        self._fallback = [0] * (len(stop) + 1)  # per matched length: the next shorter beginning to try
        length = 0
        for end in range(1, len(stop)):
            while length and stop[end] != stop[length]:
                length = self._fallback[length]
            length += stop[end] == stop[length]
            self._fallback[end + 1] = length

    def advance(self, character: str) -> bool:
        """Take one character; returns whether it completes the stop."""
        if self.matched == len(self.stop):
            self.matched = 0  # an overlapping one starts later than the one found, so it could not win
        while self.matched and self.stop[self.matched] != character:
            self.matched = self._fallback[self.matched]
        self.matched += self.stop[self.matched] == character
        return self.matched == len(self.stop)


class TextStream(Generic[Payload]):
    """Gives each token its own piece of the text, as soon as no stop string can cut into that piece.

    A token's piece is what the detokenizer gave out when the token was added: empty for one that leaves a character
    unfinished, all of it for the one that finishes it. The pieces, joined, are `decode` of the shown tokens' ids, up to
    the first stop string. What `push` and `finish` return is each payload once, in order, with its piece.
    """

    def __init__(self, detokenizer: Detokenizer, stops: tuple[str, ...] = ()) -> None:
        self._returned: list[str] = []
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops)
        self._waiting: deque[tuple[Payload, str]] = deque()
        self._last_shown = -1  # index in `_waiting` of the latest token that is shown; negative once it was returned
        self._certain = 0  # characters of `_waiting`'s pieces that no stop can cut

    @property
    def text(self) -> str:
        """All pieces returned so far."""
        self._returned = ["".join(self._returned)]
        return self._returned[0]

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete. Then nothing more may be pushed, and `finish` returns what is waiting.

        May become true in `finish` too, when the stop ends in text that only the end made certain.
        """
        return self._stops.stopped

    def push(self, token_id: int, payload: Payload, *, hidden: bool = False) -> list[tuple[Payload, str]]:
        """Take one token; returns those that are certain now. A hidden one (an end token) is left out of the text."""
        if self.stopped:
            raise RuntimeError("a stop string has ended this text")
        piece = "" if hidden else self._detokenizer.add(token_id)
        if not hidden:
            self._last_shown = len(self._waiting)
        self._waiting.append((payload, piece))
        self._certain += len(self._stops.add(piece))
        return [] if self.stopped else self._take()

    def finish(self) -> list[tuple[Payload, str]]:
        """The rest: an unfinished character goes to the last shown token; from a stop string on, pieces are cut."""
        rest = "" if self.stopped else self._detokenizer.finish()
        if rest:  # then that token is waiting: it is not returned while text is pending
            payload, piece = self._waiting[self._last_shown]
            self._waiting[self._last_shown] = (payload, piece + rest)
            self._certain += len(self._stops.add(rest))
        self._certain += len(self._stops.finish())
        out: list[tuple[Payload, str]] = []
        while self._waiting:
            payload, piece = self._waiting.popleft()
            piece = piece[: self._certain]
            self._certain -= len(piece)
            out.append((payload, piece))
        self._last_shown = -1
        self._returned += [piece for _, piece in out]
        return out

    def peek(self, token_id: int) -> str:
        """The text that `token_id` would add from here, to show a token that was not kept; changes nothing."""
        return self._detokenizer.peek(token_id)

    def _take(self) -> list[tuple[Payload, str]]:
        end = self._last_shown if self._detokenizer.pending else len(self._waiting)
        out: list[tuple[Payload, str]] = []
        while len(out) < end and len(self._waiting[0][1]) <= self._certain:
            out.append(self._waiting.popleft())
            self._certain -= len(out[-1][1])
        self._last_shown -= len(out)
        self._returned += [piece for _, piece in out]
        return out


_LINE_BREAKS = (0x85, 0x2028, 0x2029)  # NEL, line and paragraph separator
_REMOVED = (
    *(code for code in range(0x20) if chr(code) not in "\n\t"),
    *range(0x7F, 0xA0),
    *range(0x202A, 0x202F),  # bidirectional embeddings and overrides: they reorder what stands around them
    *range(0x2066, 0x2070),  # bidirectional isolates, and the deprecated format characters
)
_PRINTABLE: dict[int, str | None] = (
    dict.fromkeys(_REMOVED) | dict.fromkeys(range(0xD800, 0xE000), "\ufffd") | dict.fromkeys(_LINE_BREAKS, "\n")
)


def printable(text: str) -> str:
    """`text` with nothing in it that a terminal would obey: no escape sequence, no control but newline and tab.

    Decides each character by itself, so a sequence split over pieces is as harmless as a whole one. That is also why
    only the control characters of a sequence go and its visible rest ("[31m") stays: dropping the rest would need to
    know where it ends, and a sequence that never ends would swallow the answer. Unpaired surrogates, which no terminal
    encoding has, become U+FFFD.
    """
    return text.translate(_PRINTABLE)
