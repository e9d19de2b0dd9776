"""The user's own texts: which of the files in a folder are texts, and what is in them, piece by piece.

Knows nothing of tokens or n-grams.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from localspec.errors import LocalspecError

PIECE = 1 << 16
"""Characters of a piece, up to the end of its last line."""
_LONGEST_REST = 1 << 12
"""Characters by which a piece may be longer; a line that goes on is cut."""
_CHUNK = 1 << 20

HIDDEN = "hidden"
LINK = "symbolic links"
SPECIAL = "neither files nor folders"
UNREADABLE = "not readable"
BINARY = "binary"
NOT_UTF8 = "not UTF-8"
EMPTY = "empty"


class NotText(Exception):
    """A file that is none; `reason` is one of the words above."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def named(text: str) -> Path:
    """A path as a user writes it. Raises LocalspecError for an empty one, as an unset variable gives, which would mean
    the current folder, and for the home of nobody."""
    if not text.strip():
        raise LocalspecError("a path is empty: name a file or a folder (. is the current one)")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise LocalspecError(f"{text}: no such user") from None


def find(paths: Iterable[Path]) -> tuple[list[Path], Counter[str]]:
    """The files at `paths` and in the folders there, sorted in each, and how many were left out for what reason.

    In folders nothing hidden is read, and no symbolic link is followed: it could lead out of the folder. Raises
    LocalspecError where one of `paths` itself is missing, not readable, or of another kind.
    """
    files: list[Path] = []
    skipped: Counter[str] = Counter()
    for path in paths:
        try:
            mode = path.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            raise LocalspecError(f"{path}: no such file or folder") from None
        except OSError as error:
            raise LocalspecError(f"{path}: {error.strerror or error}") from None
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise LocalspecError(f"{path} is neither a file nor a folder; give texts that are on disk")
        folder = stat.S_ISDIR(mode)
        if not os.access(path, os.R_OK | os.X_OK if folder else os.R_OK):
            raise LocalspecError(f"{path}: no permission to read it")
        if folder:
            files += _walk(path, skipped)
        else:
            files.append(path)
    return files, skipped


def _walk(folder: Path, skipped: Counter[str]) -> Iterator[Path]:
    def unreadable(error: OSError) -> None:
        skipped[UNREADABLE] += 1

    for here, folders, names in os.walk(folder, onerror=unreadable):
        for name in [name for name in folders if name.startswith(".") or os.path.islink(os.path.join(here, name))]:
            folders.remove(name)
            skipped[HIDDEN if name.startswith(".") else LINK] += 1
        folders.sort()
        for name in sorted(names):
            path = Path(here, name)
            if name.startswith("."):
                skipped[HIDDEN] += 1
            elif path.is_symlink():
                skipped[LINK] += 1
            elif not path.is_file():
                skipped[SPECIAL] += 1
            else:
                yield path


def digest(path: Path) -> str:
    """Hex SHA-256 of a text file's content. Raises NotText for anything else, OSError where it cannot be read."""
    found, decoder, blank = hashlib.sha256(), codecs.getincrementaldecoder("utf-8-sig")(), True
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            if b"\0" in chunk:
                raise NotText(BINARY)
            found.update(chunk)
            blank &= not _decode(decoder, chunk, False).strip()
        _decode(decoder, b"", True)
    if blank:
        raise NotText(EMPTY)
    return found.hexdigest()


def _decode(decoder: codecs.IncrementalDecoder, chunk: bytes, final: bool) -> str:
    try:
        return decoder.decode(chunk, final)
    except UnicodeDecodeError:
        raise NotText(NOT_UTF8) from None


def pieces(path: Path) -> Iterator[str]:
    """A text in pieces that end with a line, but for very long lines; line ends become newlines.

    Raises NotText where the file is none any more, OSError where it cannot be read.
    """
    try:
        with path.open(encoding="utf-8-sig") as file:
            while piece := file.read(PIECE):
                yield piece if piece.endswith("\n") else piece + file.readline(_LONGEST_REST)
    except UnicodeDecodeError:
        raise NotText(NOT_UTF8) from None
