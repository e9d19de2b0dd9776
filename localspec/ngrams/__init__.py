"""N-grams that outlive a session: what was written before, and what was taught, per tokenizer.

`store` counts, `answers` keeps the latest whole, `file` has both on disk in the layout of `format`, `shelf` is the
folder of all files, `lessons` says what an answer teaches. The classes load numpy only when they are asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from localspec.ngrams.file import Info, NgramFile
    from localspec.ngrams.shelf import Entry, Shelf
    from localspec.ngrams.store import Found, NgramStore

__all__ = ["Entry", "Found", "Info", "NgramFile", "NgramStore", "Shelf"]

_HOMES = {
    "Entry": "shelf",
    "Found": "store",
    "Info": "file",
    "NgramFile": "file",
    "NgramStore": "store",
    "Shelf": "shelf",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
