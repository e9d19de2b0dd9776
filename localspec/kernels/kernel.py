"""What a kernel is to those who decide about it: a name, a self-test, and a race to be won.

Knows nothing of what any kernel computes, nor of when it may be used (`selection.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import mlx.core as mx

LEAST = 0.95
"""What a kernel may lose in one heat and still win its race."""


@dataclass(frozen=True, slots=True)
class Heat:
    """One piece of work of a race: the kernel's way and MLX's own way of doing the same."""

    name: str
    ours: Callable[[], Sequence[mx.array]]
    theirs: Callable[[], Sequence[mx.array]]
    """Both build their lazy results on inputs that exist already; the race evaluates and times them."""
    least: float = LEAST
    """The race is lost where theirs / ours is below this in this heat: 0.98 lets ours take 2 % longer."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel, or several that are only of use together."""

    name: str
    purpose: str
    """What it is for, in a few words for people."""
    self_test: Callable[[], str | None]
    """Runs it against its reference on this device: None when they agree, else one line about the first difference."""
    heats: Callable[[], Sequence[Heat]]
    """The work of its race, at the sizes at which it is to be used."""


@cache
def source(name: str) -> str:
    """The text of a Metal file of this package. ASCII, as MLX wants it."""
    return (files("localspec.kernels") / "metal" / f"{name}.metal").read_text("ascii")
