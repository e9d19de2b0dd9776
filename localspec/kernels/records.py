"""What self-tests and races found on this machine, kept in one file, so that they run once and decide alike for ever.

Knows nothing of who decides what by it.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from localspec.kernels.place import Place
from localspec.kernels.race import Lap, Race
from localspec.paths import atomic_write_text, cache_dir

FILE = "kernels.json"
VERSION = 1
MOST = 100
"""Records kept, the newest ones: every version of anything leaves some behind."""

Outcome = Literal["agreed", "disagreed", "failed"]
"""Of a self-test. failed: the kernel could not be built, or an exception ended its self-test or race."""


@dataclass(frozen=True, slots=True)
class Record:
    """What is known of one kernel in one place."""

    kernel: str
    place: Place
    outcome: Outcome
    detail: str
    """The first difference, or the fault, in one line; empty where it agreed."""
    race: Race | None
    """None where none was run: after a self-test that did not agree, or for a kernel that was forced on."""
    recorded: str
    """When: ISO 8601, UTC."""


class Records:
    """The file. Reading needs no lock, as it is replaced whole; what reads and then writes holds one."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        """notify: told in one line when the file cannot be used."""
        self.path = cache_dir() / FILE
        self._notify = notify

    def find(self, kernel: str, place: Place) -> Record | None:
        """What is known of a kernel in that place."""
        known = self._read()
        if known is None:
            known = self._set_aside()
        return next((record for record in known if (record.kernel, record.place) == (kernel, place)), None)

    def keep(self, new: Record, *, replace: bool = False) -> Record:
        """Write a record, and return the one that holds.

        That is the one that another process wrote meanwhile, so that all decide alike, unless `replace`; but a kernel
        that has ever failed to agree is not to be trusted.
        """
        try:
            with self._lock():
                known = self._read()
                if known is None:
                    known = self._move_aside()
                old = next((r for r in known if (r.kernel, r.place) == (new.kernel, new.place)), None)
                if old is not None and not replace and _stands(old, new):
                    return old
                kept = [record for record in known if record is not old][-(MOST - 1) :]
                atomic_write_text(self.path, _dump([*kept, new]))
        except OSError as error:
            self._notify(f"what the kernels' tests found cannot be kept in {self.path}: {error.strerror or error}")
        return new

    def _read(self) -> list[Record] | None:
        """All records; none where there is no file, None where it does not hold any."""
        try:
            return _parse(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return []
        except PermissionError as error:  # it may be whole
            self._notify(f"{self.path} cannot be read ({error.strerror}): make it yours again, or remove it")
            return []
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            return None

    def _set_aside(self) -> list[Record]:
        try:
            with self._lock():
                known = self._read()  # another process may have mended it
                return self._move_aside() if known is None else known
        except OSError as error:
            self._notify(f"{self.path} cannot be used ({error.strerror or error}): remove it")
            return []

    def _move_aside(self) -> list[Record]:
        broken = self.path.with_name(f"{FILE}.broken")
        self.path.replace(broken)
        self._notify(f"{self.path} is damaged or not localspec's: moved to {broken.name}, the kernels' tests run again")
        return []

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """For this process alone; the system lets go of it when the process ends, however it does."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with (self.path.parent / f".{FILE}.lock").open("w") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            yield


def _stands(old: Record, new: Record) -> bool:
    return new.outcome == "agreed" and (old.outcome != "agreed" or old.race is not None)


def _dump(records: list[Record]) -> str:
    return json.dumps({"version": VERSION, "records": [as_dict(record) for record in records]}, indent=1) + "\n"


def as_dict(record: Record) -> dict[str, Any]:
    """For JSON. What follows from the rest (the race's ratio, whether it was won) is there to be read by people."""
    document = asdict(record)
    if record.race is not None:
        document["race"] |= {"ratio": record.race.ratio, "won": record.race.won}
    return document


def _parse(text: str) -> list[Record]:
    document = json.loads(text)
    if document["version"] != VERSION:
        raise ValueError("written by another version")
    return [_record(item) for item in document["records"]]


def _record(item: dict[str, Any]) -> Record:
    if item["outcome"] not in get_args(Outcome):
        raise ValueError("no such outcome")
    race = None if item["race"] is None else Race(tuple(_lap(lap) for lap in item["race"]["laps"]))
    if race is not None and not race.laps:
        raise ValueError("a race without a heat")
    place = Place(**{name: _text(value) for name, value in item["place"].items()})
    kernel, detail, recorded = (_text(item[name]) for name in ("kernel", "detail", "recorded"))
    return Record(kernel, place, item["outcome"], detail, race, recorded)


def _lap(item: dict[str, Any]) -> Lap:
    ratio, least, ours_ms, theirs_ms = (float(item[name]) for name in ("ratio", "least", "ours_ms", "theirs_ms"))
    return Lap(_text(item["name"]), ratio, least, ours_ms, theirs_ms, int(item["pairs"]))


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("not a text")
    return value
