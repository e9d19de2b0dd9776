"""The folder with the n-grams of all tokenizers, and whether anything is learned at all.

Knows nothing of what the files hold.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from localspec.errors import LocalspecError
from localspec.ngrams.file import ASIDE, MOST_BYTES, PATIENCE, Info, NgramFile, info_of, leftovers, lock_of
from localspec.ngrams.format import DamagedFileError, NewerFileError, read
from localspec.ngrams.lock import locked
from localspec.paths import atomic_write_text, cache_dir

Kept = Literal["learned", "seed"]
"""learned: what was written in earlier sessions; seed: what the user's own texts taught."""
BOTH: tuple[Kept, ...] = get_args(Kept)
BOUND = "LOCALSPEC_NGRAM_MB"
"""Environment variable: bound of each file, in MB of 2^20 bytes."""
MOST_MB = 4096

_NAME = re.compile(r"(learned|seed)-([0-9a-z]+)\.ngrams(\.damaged)?")
_BELONGS = re.compile(r"\.?((?:learned|seed)-[0-9a-z]+\.ngrams)(?:\..+)?")
"""A file, its lock, what was set aside, and what a killed process left."""
_OFF = "off"


class Entry(NamedTuple):
    """A file of the folder."""

    level: Kept
    fingerprint: str
    info: Info


class Shelf:
    """The files of all tokenizers, one per level; the folder is made when something is written."""

    def __init__(self, folder: Path | None = None, say: Callable[[str], None] = lambda line: None) -> None:
        """folder: `ngrams` in localspec's own by default. say: told in one line what is wrong with a file."""
        self.folder = cache_dir() / "ngrams" if folder is None else folder
        self._say = say
        self._bound_said = False

    @property
    def enabled(self) -> bool:
        """Whether anything is to be learned, and used."""
        return not os.path.lexists(self.folder / _OFF)

    def turn(self, on: bool) -> None:
        """Turn learning on or off, for every process that starts from here on. Raises LocalspecError."""
        try:
            if on:
                (self.folder / _OFF).unlink(missing_ok=True)
            else:
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                atomic_write_text(self.folder / _OFF, "")
        except OSError as error:
            raise LocalspecError(
                f"learning cannot be turned {'on' if on else 'off'} ({error.strerror or error}): make {self.folder} "
                "yours, and writable"
            ) from None

    def file(self, level: Kept, fingerprint: str, label: str = "") -> NgramFile:
        """The file of one tokenizer, there or not.

        fingerprint: lower-case letters and digits; else ValueError. label: the model's name.
        """
        path = self.folder / f"{level}-{fingerprint}.ngrams"
        if not _NAME.fullmatch(path.name):
            raise ValueError(f"no level and fingerprint: {path.name!r}")
        return NgramFile(path, fingerprint, label=label, most_bytes=self.most_bytes(), say=self._say)

    def most_bytes(self) -> int:
        """The bound of a file; a value of the environment that is none is said in one line."""
        given = os.environ.get(BOUND, "").strip()
        if not given:
            return MOST_BYTES
        if re.fullmatch("[0-9]{1,6}", given) and 1 <= int(given) <= MOST_MB:
            return int(given) << 20
        if not self._bound_said:
            self._bound_said = True
            self._say(f"{BOUND}={given!r} is not a whole number from 1 to {MOST_MB}: {MOST_BYTES >> 20} is used")
        return MOST_BYTES

    def entries(self) -> list[Entry]:
        """Every file there is, those that cannot be used and those set aside included: `info.problem` says why.

        Raises LocalspecError where the folder cannot be read.
        """
        return [entry for _, entry in self._entries()]

    def clear(self, levels: Collection[Kept] = BOTH, fingerprint: str | None = None) -> list[Entry]:
        """Remove the files of these levels, of one tokenizer or of all, and all that belongs to them or did.

        Returns what was removed. Raises LocalspecError at the first that cannot be.
        """
        entries = self._entries()
        removed: list[Entry] = []
        for name in sorted({parts[1] for parts in map(_BELONGS.fullmatch, self._names()) if parts}):
            parts = _NAME.fullmatch(name)
            if parts is None or parts[1] not in levels or fingerprint not in (None, parts[2]):
                continue
            path = self.folder / name
            try:
                self._remove(path)
            except TimeoutError:
                raise LocalspecError(f"{path} is in use by another localspec: try again") from None
            except OSError as error:
                raise LocalspecError(f"{path} cannot be removed ({error.strerror or error})") from None
            removed += [entry for file, entry in entries if file.name in (name, f"{name}{ASIDE}")]
        return removed

    def _entries(self) -> list[tuple[Path, Entry]]:
        found = []
        for parts in filter(None, map(_NAME.fullmatch, self._names())):
            level: Kept = "seed" if parts[1] == "seed" else "learned"
            path = self.folder / parts[0]
            found.append((path, Entry(level, parts[2], _info(path, parts[2], aside=bool(parts[3])))))
        return found

    def _names(self) -> list[str]:
        try:
            return sorted(os.listdir(self.folder))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise LocalspecError(
                f"{self.folder} cannot be read ({error.strerror or error}): make it yours, and readable"
            ) from None

    def _remove(self, path: Path) -> None:
        """Remove a file with all that belongs to it, the lock last, which is held meanwhile."""
        lock = lock_of(path)
        with locked(lock, PATIENCE):
            for one in (path, path.with_name(f"{path.name}{ASIDE}"), *leftovers(path), lock):
                one.unlink(missing_ok=True)


def _info(path: Path, fingerprint: str, *, aside: bool) -> Info:
    try:
        size = path.lstat().st_size
    except OSError:
        size = 0
    if aside:
        return Info(bytes=size, problem="set aside")
    try:
        content, stamp = read(path, fingerprint)
    except DamagedFileError:
        return Info(bytes=size, problem="damaged")
    except NewerFileError:
        return Info(bytes=size, problem="newer")
    except OSError as error:
        return Info(bytes=size, problem=f"unreadable ({error.strerror or error})")
    return info_of(content, stamp[1])
