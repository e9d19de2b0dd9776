"""Modules of a model that answer to somebody else for a while: their calls pass through a wrapper.

Python looks `__call__` up on the class, so a module is lent another class, of which its own is the base, and given its
own back afterwards. Lent twice, it goes back in the reverse order. Knows nothing of what wrappers do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.nn as nn

Wrapper = Callable[[nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""`wrapper(module, call, args, kwargs)` answers in the place of `call(*args, **kwargs)`, the module's own."""


@contextmanager
def around(modules: Sequence[nn.Module], wrapper: Wrapper, classes: dict[type, type] | None = None) -> Iterator[None]:
    """Have `wrapper` answer calls of the modules. An interrupt at the very end can leave some lent: see `release`.

    classes: those that were made for this very wrapper before, and will be; making one takes longer than a call.
    """
    lent: list[tuple[nn.Module, type]] = []
    classes = {} if classes is None else classes
    try:
        for module in modules:
            kind = type(module)
            if kind not in classes:
                classes[kind] = _listening(kind, wrapper)
            lent.append((module, kind))
            module.__class__ = classes[kind]
        yield
    finally:
        for module, kind in reversed(lent):
            module.__class__ = kind


def release(modules: Sequence[nn.Module]) -> None:
    """Give all of the modules their own classes back, where an interrupt kept that from being done."""
    for module in modules:
        while "lent_by" in vars(type(module)):
            module.__class__ = type(module).lent_by


def _listening(kind: type, wrapper: Wrapper) -> type:
    """The class that a module of this one is lent."""
    original = kind.__call__

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return wrapper(self, lambda *a, **k: original(self, *a, **k), args, kwargs)

    return type(kind.__name__, (kind,), {"__call__": call, "lent_by": kind})
