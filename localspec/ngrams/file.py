"""One store of n-grams on disk, which several processes read and add to.

Whatever is wrong with the disk is said in one line, once, and counts go on in memory: an answer is never held up.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from localspec.ngrams.answers import MOST_TOKENS, Answers, joined
from localspec.ngrams.format import (
    Content,
    DamagedFileError,
    NewerFileError,
    Stamp,
    empty,
    encode,
    most_rows,
    read,
    stamp_of,
)
from localspec.ngrams.lessons import Lesson
from localspec.ngrams.lock import locked
from localspec.ngrams.store import LONGEST, Keys, NgramStore, Tokens, contexts
from localspec.paths import atomic_write_bytes

MOST_BYTES = 64 << 20
PATIENCE = 2.0
"""Seconds to wait for another process that is writing."""
ASIDE = ".damaged"
"""Behind the name of a file that was set aside."""
PAGE = 4096
"""Tokens of a text within which a pair counts once, as it does within an answer."""
MOST_LABELS, MOST_DIGESTS, MOST_WAITING = 32, 4096, 64
"""The latest are kept: model names, texts that were taught, answers that could not be saved yet."""
_SHARE = 16
"""Bytes of the bound for each token of the answers kept whole: these take a quarter of a small file at most."""
_BULK = 1 << 20
"""Pairs merged at once, so that memory is bounded whatever is taught."""


class Info(NamedTuple):
    """What is to be said about a file."""

    rows: int = 0
    bytes: int = 0
    """On disk."""
    texts: int = 0
    tokens: int = 0
    """That were learned from, whether or not their counts have been evicted since."""
    created: int = 0
    """Seconds since 1970; 0 where nothing was learned yet,"""
    updated: int = 0
    labels: tuple[str, ...] = ()
    """Names of the models whose tokenizer it is, as far as they taught it."""
    problem: str = ""
    """Why it cannot be used, in a few words."""


def info_of(content: Content, size: int) -> Info:
    """Of a file of `size` bytes that could be read."""
    rows = content.columns.keys.size
    return Info(rows, size, content.texts, content.tokens, content.created, content.updated, content.labels)


def lock_of(path: Path) -> Path:
    """What to hold while `path` is written, set aside or removed."""
    return path.with_name(f"{path.name}.lock")


def leftovers(path: Path) -> list[Path]:
    """What processes that were killed while they wrote `path` left beside it. The lock is held, so that none writes."""
    return [other for other in path.parent.iterdir() if other.name.startswith(f".{path.name}.")]


class Text(NamedTuple):
    """An answer, or a text that is known by a digest."""

    lessons: Sequence[Lesson]
    digest: str | None = None


class NgramFile:
    """The store in `path`; a damaged or foreign file there is set aside and begun anew."""

    def __init__(
        self,
        path: Path,
        fingerprint: str,
        *,
        label: str = "",
        most_bytes: int = MOST_BYTES,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """fingerprint: of the tokenizer. label: the model's name, kept with what it teaches.

        most_bytes: bound of the file; beyond it the least useful counts are evicted. say: told in one line what is
        wrong with the file.
        """
        self.path = path
        self.fingerprint = fingerprint
        self.label = label
        self.most_bytes = most_bytes
        self._say = say
        self._complained = False
        self._alone = threading.RLock()
        self._opened = False
        self._newer = False
        """Whether the file is of a later version, and to be left alone."""
        self._store = NgramStore()
        self._saved = empty(fingerprint)
        """What the disk holds, as far as known; the store has what waits, too."""
        self._stamp: Stamp | None = None
        self._waiting: list[Text] = []

    @property
    def store(self) -> NgramStore:
        """Its counts, read at first use; the same object from then on, which learning changes."""
        if not self._opened:
            with self._alone:
                self._open()
        return self._store

    def knows(self, digest: str) -> bool:
        """Whether it was taught a text of that digest."""
        with self._alone:
            self._open()
            return digest in self._saved.digests

    def info(self) -> Info:
        """What it holds on disk."""
        with self._alone:
            self._open()
            info = info_of(self._saved, self._stamp[1] if self._stamp else 0)
            return info._replace(problem="newer") if self._newer else info

    def learn(self, lessons: Sequence[Lesson], *, digest: str | None = None) -> bool:
        """Count what one answer wrote, together with what other processes wrote, and save.

        Each lesson is (tokens, start): tokens[start:] was written, tokens[:start] its context. A token counts once
        after a context, however often the answer repeats it. With a `digest` the lessons are a text of any length: a
        token counts once in every PAGE tokens, and a text whose digest is known not at all.

        Returns whether the file holds it now. Where it could not be saved it counts in this process, and saving is
        tried again by the next call, `learn([])` included. Raises ValueError for what are no token ids.
        """
        return self.teach([Text(lessons, digest)] if lessons or digest is not None else [])

    def teach(self, texts: Sequence[Text]) -> bool:
        """`learn` for several answers and texts, which are saved together."""
        checked = [Text([_checked(lesson) for lesson in text.lessons], text.digest) for text in texts]
        with self._alone:
            self._open()
            if checked:
                self._waiting = [*self._waiting, *checked][-max(MOST_WAITING, len(checked)) :]
            if self._newer or not self._waiting:
                return not self._newer
            try:
                self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                with locked(lock_of(self.path), PATIENCE):
                    self._refresh()
                    return self._save()
            except OSError as error:
                self._complain(error, "cannot be saved", "what was learned is not kept yet")
            self._adopt(self._taught())
            return False

    def _open(self) -> None:
        """Read the file, at first use."""
        if self._opened:
            return
        try:
            self._load()
        except DamagedFileError:
            try:
                with locked(lock_of(self.path), PATIENCE):
                    self._refresh()  # another process may have mended it
            except OSError as error:
                self._complain(error, "is damaged and cannot be set aside")
        except OSError as error:
            self._complain(error, "cannot be read")
        self._adopt(self._saved)
        self._opened = True

    def _adopt(self, content: Content) -> None:
        """Draft from this."""
        self._store.adopt(content.columns)
        if self._store.answers.tokens is not content.answers:
            self._store.answers = Answers(content.answers)

    def _load(self) -> None:
        try:
            self._saved, self._stamp = read(self.path, self.fingerprint)
        except FileNotFoundError:
            self._saved, self._stamp = empty(self.fingerprint), None
        except NewerFileError:
            self._newer = True
            self._say(f"{self.path} was written by a newer localspec: left as it is, and nothing is learned")

    def _refresh(self) -> None:
        """Read the file again if it is not the one that was read; the lock is held."""
        try:
            stamp = stamp_of(os.stat(self.path, follow_symlinks=False))
        except FileNotFoundError:
            stamp = None
        if stamp is None or stamp != self._stamp:
            try:
                self._load()
            except DamagedFileError as error:
                aside = self.path.with_name(f"{self.path.name}{ASIDE}")
                os.replace(self.path, aside)
                self._say(f"{self.path} cannot be used, {error}: moved to {aside.name}, and begun anew")
                self._saved, self._stamp = empty(self.fingerprint), None

    def _save(self) -> bool:
        """Write what was learned behind what the file holds; the lock is held."""
        if self._newer:
            self._waiting.clear()
            return False
        for left in leftovers(self.path):
            left.unlink(missing_ok=True)
        content = self._taught()
        self._adopt(content)
        atomic_write_bytes(self.path, encode(content))
        # In this order an interrupt in between has the file read again, and nothing lost.
        self._saved, self._waiting = content, []
        self._complained = False
        self._stamp = stamp_of(os.stat(self.path, follow_symlinks=False))
        return True

    def _taught(self) -> Content:
        """What the file held, and what waits to be saved."""
        saved, now = self._saved, int(time.time())
        known = set(saved.digests)
        texts = [text for text in self._waiting if text.digest is None or _new(text.digest, known)]
        labels = [*(label for label in saved.labels if label != self.label), self.label] if self.label else saved.labels
        answers = [tokens for text in texts if text.digest is None for tokens, _ in text.lessons]
        content = saved._replace(
            answers=joined(saved.answers, answers, min(MOST_TOKENS, self.most_bytes // _SHARE)),
            texts=saved.texts + len(texts),
            tokens=saved.tokens + sum(len(tokens) - start for text in texts for tokens, start in text.lessons),
            created=saved.created or now,
            updated=now,
            labels=tuple(labels)[-MOST_LABELS:],
            digests=(*saved.digests, *(text.digest for text in texts if text.digest is not None))[-MOST_DIGESTS:],
        )
        store, bound = NgramStore.from_arrays(saved.columns), most_rows(content, self.most_bytes)
        for keys, followers in _in_bulk(texts):
            store.merge(keys, followers, day=now // 86_400)
            store.shrink(bound)
        store.shrink(bound)  # the bound may be another one than last time
        return content._replace(columns=store.to_arrays())

    def _complain(self, error: OSError, what: str, state: str = "") -> None:
        """Say what the disk does not do; once until it does, as the next answer would have the same to say."""
        if not self._complained:
            self._complained = True
            self._say(f"{self.path} {what} ({error.strerror or error}): {_remedy(error)}{state and f'; {state}'}")


def _remedy(error: OSError) -> str:
    """What to do about it."""
    if isinstance(error, TimeoutError):
        return "the next answer tries again"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "make it and its folder yours, and writable"
    return "move away what is there, or see to the disk"


def _in_bulk(texts: Sequence[Text]) -> Iterator[tuple[Keys, Tokens]]:
    """What texts have to be counted, in portions that are merged at once."""
    keys: list[Keys] = []
    followers: list[Tokens] = []
    size = 0
    for text in texts:
        for found in sightings(text):
            keys.append(found[0])
            followers.append(found[1])
            size += found[0].size
            if size >= _BULK:
                yield np.concatenate(keys), np.concatenate(followers)
                keys, followers, size = [], [], 0
    if size:
        yield np.concatenate(keys), np.concatenate(followers)


def _checked(lesson: Lesson) -> Lesson:
    tokens, start = lesson
    contexts(tokens, len(tokens))  # raises for what are no ids
    return tokens, min(max(start, 0), len(tokens))


def sightings(text: Text) -> Iterator[tuple[Keys, Tokens]]:
    """Keys and followers of a text, each pair once in an answer or page, where it stood last."""
    if text.digest is None:
        found = [contexts(tokens, start) for tokens, start in text.lessons]
        if found:
            yield _once(np.concatenate([keys for keys, _ in found]), np.concatenate([tokens for _, tokens in found]))
        return
    for tokens, start in text.lessons:
        for first in range(max(start, 0), len(tokens), PAGE):
            before = max(first - LONGEST, 0)
            yield _once(*contexts(tokens[before : first + PAGE], first - before))


def _once(keys: Keys, followers: Tokens) -> tuple[Keys, Tokens]:
    """Of equal pairs the last one, in the order that they had."""
    order = np.lexsort((followers, keys))
    last = np.ones(order.size, np.bool_)
    last[:-1] = (keys[order[1:]] != keys[order[:-1]]) | (followers[order[1:]] != followers[order[:-1]])
    kept = np.sort(order[last])
    return keys[kept], followers[kept]


def _new(digest: str, known: set[str]) -> bool:
    """Whether a digest is not among the known ones; from here on it is."""
    size = len(known)
    known.add(digest)
    return len(known) > size
