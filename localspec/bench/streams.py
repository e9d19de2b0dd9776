"""Recorded token streams: a prompt's ids and the ids of one answer to it, by kind of text.

Enough to replay any drafting rule without a model, as long as what a rule drafts cannot change the answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from localspec.errors import LocalspecError

RECORDED = "streams.json"
"""The package's own recording, and the name that a recording has in any folder."""
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Stream:
    """One prompt and its answer, as ids."""

    kind: str
    name: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


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


def read_recording(folder: Path | None = None) -> Recording:
    """The recording in `folder`, or the package's own. LocalspecError when there is none or it cannot be read."""
    place = files("localspec.bench") / RECORDED if folder is None else folder / RECORDED
    try:
        found = json.loads(place.read_text(encoding="utf-8"))
        if found["version"] != _VERSION:
            raise LocalspecError(f"{place} has version {found['version']}, not {_VERSION}: record again")
        return Recording(found["model"], found["how"], tuple(_stream(entry) for entry in found["streams"]))
    except FileNotFoundError:
        raise LocalspecError(f"no recording at {place}; `python -m localspec.bench.record` makes one") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LocalspecError(f"{place} is not a recording: {error!r}") from error


def write_recording(recording: Recording, folder: Path) -> Path:
    """Write a recording into a folder, one stream a line; returns the file."""
    lines: Iterable[str] = (
        json.dumps({"kind": s.kind, "name": s.name, "prompt": s.prompt, "answer": s.answer}, separators=(",", ":"))
        for s in recording.streams
    )
    head = json.dumps({"version": _VERSION, "model": recording.model, "how": recording.how})[:-1]
    place = folder / RECORDED
    place.write_text(f'{head}, "streams": [\n' + ",\n".join(lines) + "\n]}\n", encoding="utf-8")
    return place


def _stream(entry: Mapping[str, object]) -> Stream:
    kind, name, prompt, answer = entry["kind"], entry["name"], entry["prompt"], entry["answer"]
    if not (isinstance(kind, str) and isinstance(name, str)):
        raise TypeError("kind and name must be texts")
    return Stream(kind, name, _ids(prompt), _ids(answer))


def _ids(found: object) -> tuple[int, ...]:
    if not isinstance(found, list) or not all(isinstance(token, int) and token >= 0 for token in found):
        raise TypeError("ids must be a list of numbers from 0 on")
    return tuple(found)
