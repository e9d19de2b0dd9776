"""Recorded token streams: a prompt's ids and the ids of one answer to it, by kind of text.

Enough to replay any drafting rule without a model, as long as what a rule drafts cannot change the answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from localspec.errors import LocalspecError
from localspec.paths import atomic_write_text

RECORDED, WEEK = "streams.json", "week.json"
"""The package's own recordings, of all kinds and of one user's week, and the names that they have in any folder."""
Half = Literal["fit", "test"]
HALVES: tuple[Half, Half] = ("fit", "test")
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Stream:
    """One prompt and its answer, as ids."""

    kind: str
    name: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    day: int = 0
    """Of a week of use, from 1 on; 0 outside one."""


@dataclass(frozen=True, slots=True)
class Recording:
    """Streams of one model."""

    model: str
    how: str
    """Precision, temperature and length, in words."""
    streams: tuple[Stream, ...]

    def by_kind(self) -> dict[str, list[Stream]]:
        """The streams of each kind, in the recording's order."""
        kinds: dict[str, list[Stream]] = {}
        for stream in self.streams:
            kinds.setdefault(stream.kind, []).append(stream)
        return kinds

    def by_day(self) -> dict[int, list[Stream]]:
        """The streams of each day, days in ascending order."""
        days: dict[int, list[Stream]] = {day: [] for day in sorted({stream.day for stream in self.streams})}
        for stream in self.streams:
            days[stream.day].append(stream)
        return days

    def only(self, half: Half) -> Recording:
        """The same recording with one half of its streams: weights are fitted on one and judged on the other.

        By turns within each kind, the first to "fit", so that the halves hold as much of every kind; a stream that is
        added behind the others of its kind moves none of them.
        """
        turns: dict[str, int] = {}
        kept = []
        for stream in self.streams:
            turns[stream.kind] = turn = turns.get(stream.kind, -1) + 1
            if HALVES[turn % len(HALVES)] == half:
                kept.append(stream)
        return replace(self, streams=tuple(kept))


def read_recording(folder: Path | None = None, name: str = RECORDED) -> Recording:
    """The recording in `folder`, or the package's own. LocalspecError when there is none or it cannot be read."""
    place = files("localspec.bench") / name if folder is None else folder / name
    try:
        found = json.loads(place.read_text(encoding="utf-8"))
        if found["version"] != _VERSION:
            raise LocalspecError(f"{place} has version {found['version']}, not {_VERSION}: record again")
        return Recording(found["model"], found["how"], tuple(_stream(entry) for entry in found["streams"]))
    except FileNotFoundError:
        raise LocalspecError(f"no recording at {place}; `python -m localspec.bench.record` makes one") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LocalspecError(f"{place} is not a recording: {error!r}") from error


def write_recording(recording: Recording, folder: Path, name: str = RECORDED) -> Path:
    """Replace the recording in a folder, whole or not at all, one stream a line; returns the file."""
    lines: Iterable[str] = (json.dumps(_entry(stream), separators=(",", ":")) for stream in recording.streams)
    head = json.dumps({"version": _VERSION, "model": recording.model, "how": recording.how})[:-1]
    place = folder / name
    atomic_write_text(place, f'{head}, "streams": [\n' + ",\n".join(lines) + "\n]}\n", mode=0o644)
    return place


def _entry(stream: Stream) -> dict[str, Any]:
    day = {"day": stream.day} if stream.day else {}
    return {"kind": stream.kind, "name": stream.name, **day, "prompt": stream.prompt, "answer": stream.answer}


def _stream(entry: Mapping[str, object]) -> Stream:
    kind, name, day = entry["kind"], entry["name"], entry.get("day", 0)
    if not (isinstance(kind, str) and isinstance(name, str)):
        raise TypeError("kind and name must be texts")
    if not isinstance(day, int) or isinstance(day, bool) or day < 0:
        raise TypeError("day must be a number from 0 on")
    return Stream(kind, name, _ids(entry["prompt"]), _ids(entry["answer"]), day)


def _ids(found: object) -> tuple[int, ...]:
    if not isinstance(found, list) or not all(isinstance(token, int) and token >= 0 for token in found):
        raise TypeError("ids must be a list of numbers from 0 on")
    return tuple(found)
