"""Functions of libraries wrapped while a thread asks for it, so that models call ours by the library's own name.

The wrappers stand where all threads see them; whether one does anything in a thread is for it to know. Calls that it
does not want go to `original`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

Place = tuple[Any, str, Callable[..., Any]]
"""Module, attribute, and the wrapper that goes there."""


class Wrappers:
    """Wrappers that belong together. The first thread to enter puts them in place, the last to leave removes them."""

    def __init__(self, places: Callable[[], Iterable[Place]]) -> None:
        """`places` is called when a thread enters: what it names may be costly to import."""
        self._places = places
        self._lock = threading.Lock()
        self._inside: set[int] = set()
        """An interrupt may leave a thread here: the next time that it enters and leaves puts that right."""
        self._originals: dict[str, tuple[Any, Callable[..., Any]]] = {}

    def enter(self) -> None:
        """Have them in place from here on. Not to be entered twice by a thread: leaving once is leaving."""
        with self._lock:
            self._inside.add(threading.get_ident())
            for module, name, wrapper in self._places():
                current = getattr(module, name)
                if current is not wrapper:
                    self._originals[name] = (module, current)
                    setattr(module, name, wrapper)

    def leave(self) -> None:
        """Undo `enter`, or what of it was done before an interrupt."""
        with self._lock:
            self._inside.discard(threading.get_ident())
            if not self._inside:
                for name, (module, original) in self._originals.items():
                    setattr(module, name, original)

    def original(self, name: str) -> Callable[..., Any]:
        """What stood there before the wrapper of that attribute."""
        return self._originals[name][1]
